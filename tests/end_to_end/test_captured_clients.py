"""What real clients sent once, byte for byte, is answered as it was (`tests/clients/capture.py` keeps it anew)."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest
from hpack.hpack import Decoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame

from clients.capture import FOLDER, make_store, register
from clients.environments import ENVIRONMENTS
from support.server import Server

FILES = sorted(file.stem for file in FOLDER.glob("*.json"))
SUMS = struct.pack("<2f", 3, 7)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that was asked when the bytes were kept."""
    folder = tmp_path_factory.mktemp("captured")
    make_store(folder)
    with Server(folder, entry="marserve", store=folder / "store") as server:
        register(server)
        yield server


def kept(name: str) -> dict[str, Any]:
    """A file, with its bytes."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    connections = [[base64.b64decode(turn) for turn in turns] for turns in found["connections"]]
    return {**found, "connections": connections}


def test_captured_are_the_versions_that_are_run() -> None:
    """A newer client is captured anew."""
    packages = {each.packages for each in ENVIRONMENTS}

    assert len(FILES) >= 7
    assert {kept(name)["packages"] for name in FILES} <= packages


def answers_of_http(address: str, turns: list[bytes]) -> Iterator[tuple[int, bytes, int]]:
    """Status, body and the length of its JSON, of each request of a connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        for turn in turns:
            sock.sendall(turn)
            came = HTTPResponse(sock)
            came.begin()
            body = came.read()
            yield came.status, body, int(came.headers.get("Inference-Header-Content-Length", len(body)))


@pytest.mark.parametrize("name", [name for name in FILES if kept(name)["protocol"] == "http"])
def test_what_clients_sent_over_rest_is_answered_as_it_was(server: Server, name: str) -> None:
    """Sums as JSON or bytes, documents, and what did not fit."""
    statuses: dict[int, int] = defaultdict(int)
    sums = 0
    for turns in kept(name)["connections"]:
        for status, body, length in answers_of_http(server.inference.removeprefix("http://"), turns):
            statuses[status] += 1
            said = json.loads(body[:length])
            if status == 400:
                assert "pair" in said["error"]
                continue
            if "predictions" in said:
                assert said["predictions"] == [{"sum": 3.0}, {"sum": 7.0}]
                sums += 1
            for output in said.get("outputs", ()) if "model_name" in said else ():
                if said["model_name"] == "shout":
                    values = "".join(output.get("data", ())) or body[length:].decode("latin-1")
                    assert values == values.upper()
                else:
                    assert body[length:] == SUMS if "data" not in output else output["data"] == [3.0, 7.0]
                sums += 1

    assert sums >= 1
    assert set(statuses) <= {200, 400}


@pytest.mark.parametrize("name", [name for name in FILES if kept(name)["protocol"] == "grpc"])
def test_what_clients_sent_over_grpc_is_answered_as_it_was(server: Server, name: str) -> None:
    """The client's own HTTP/2, its settings, windows and pings among it."""
    host, _, port = server.grpc_inference.rpartition(":")
    for turns in kept(name)["connections"]:
        headers: dict[int, dict[str, str]] = defaultdict(dict)
        data: dict[int, bytes] = defaultdict(bytes)
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            for turn in turns:
                sock.sendall(turn)
            begun = {frame.stream_id for frame in frames(b"".join(turns)[24:]) if isinstance(frame, HeadersFrame)}
            decoder, came, at = Decoder(), b"", 0
            while not all("grpc-status" in headers[number] for number in begun):
                came += sock.recv(65_536) or pytest.fail("the connection was closed")
                for frame in frames(came[at:]):
                    at += 9 + frame.body_len
                    if isinstance(frame, HeadersFrame):
                        headers[frame.stream_id] |= dict(decoder.decode(frame.data))
                    elif isinstance(frame, DataFrame):
                        data[frame.stream_id] += frame.data
        statuses = [headers[number]["grpc-status"] for number in sorted(begun)]
        good = [number for number in sorted(begun) if headers[number]["grpc-status"] == "0"]
        made = [gzip.decompress(data[at][5:]) if data[at][:1] == b"\1" else data[at][5:] for at in good]

        assert set(statuses) <= {"0", "3"}
        assert any(SUMS in message for message in made)


def frames(data: bytes) -> Iterator[Frame]:
    """The whole frames at the beginning of these bytes."""
    while len(data) >= 9:
        frame, length = Frame.parse_frame_header(memoryview(data[:9]))
        if len(data) < 9 + length:
            return
        with contextlib.suppress(Exception):
            frame.parse_body(memoryview(data[9 : 9 + length]))
        frame.body_len = length
        yield frame
        data = data[9 + length :]
