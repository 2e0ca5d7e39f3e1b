"""Real HTTP clients, unmodified: curl, requests with urllib3, httpx-sse, node's fetch, and a browser's EventSource."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.environments import Client
from support.command_line import marserve
from support.server import Server, make_archive

pytestmark = pytest.mark.clients

DECLARED = """
from collections.abc import Iterator
from dataclasses import dataclass

from marserve_handlers import Event, model


@dataclass
class Numbers:
    x: list[float]


@model
def total(item: Numbers) -> dict:
    return {"total": sum(item.x)}


@model
def size(item: bytes) -> dict:
    return {"bytes": len(item)}


@model
def words(prompt: str) -> Iterator[Event]:
    for number, word in enumerate(prompt.split()):
        if word == "fail":
            raise RuntimeError("it was asked to fail")
        yield Event(word, event="token", id=str(number))
"""

PARTS = """
def handle(data, context):
    return None if data is None else [{name: bytes(part).hex() for name, part in row.items()} for row in data]
"""

BREAKS = """
runs = 0


def handle(data, context):
    global runs
    if data is None:
        return None
    if bytes(data[0]["body"]) == b"count":
        return [{"runs": runs}]
    runs += 1
    raise RuntimeError("it was asked to break")
"""

MADE_OF = {"total": "Numbers", "size": "bytes", "words": "str"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of `marserve start` with the models that clients ask."""
    folder = tmp_path_factory.mktemp("http")
    store = folder / "store"
    store.mkdir()
    (folder / "declared.py").write_text(DECLARED)
    for name in MADE_OF:
        ran = marserve("archive", name, "--handler", f"{folder / 'declared.py'}:{name}", "--export-path", store)
        assert ran.status == 0, ran.err
    make_archive(store / "parts.mar", PARTS)
    make_archive(store / "breaks.mar", BREAKS)
    with Server(folder, entry="marserve", store=store) as server:
        for name in (*MADE_OF, "parts", "breaks"):
            answer = server.register(f"{name}.mar")
            assert answer.status_code == 200, answer.text
        yield server


def curl(*words: object) -> tuple[int, dict[str, str], bytes]:
    """Run curl; the status, the headers by their names in lower case, and the body of the last answer."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    told = [program, "-sS", "-N", "--max-time", "60", "-D", "/dev/stderr", *map(str, words)]
    ran = subprocess.run(told, capture_output=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    last = ran.stderr.decode().strip().split("\r\n\r\n")[-1].split("\r\n")
    headers = dict(line.split(": ", 1) for line in last[1:] if ": " in line)
    return int(last[0].split()[1]), {name.lower(): value for name, value in headers.items()}, ran.stdout


def test_curl_reads_server_sent_events(server: Server) -> None:
    """One that is whole, and one whose handler breaks after its first word."""
    url, wants = f"{server.inference}/predictions/words", ("-H", "Accept: text/event-stream", "-H", "Content-Type:")

    status, headers, body = curl(*wants, "-d", "one two", url)
    _, _, broken = curl(*wants, "-d", "one fail two", url)

    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [block.split("\n") for block in body.decode().strip().split("\n\n")]
    assert ["event: token" in event for event in events] == [True, True, False]
    assert {"data: one", "id: 0"} <= set(events[0])
    assert "event: end" in events[-1]
    assert "event: error" in broken.decode().split("\n\n")[1]
    assert b"two" not in broken


def test_curls_own_request_id_comes_back_and_finds_the_request(server: Server) -> None:
    """One that is not allowed is replaced."""
    url = f"{server.inference}/predictions/total"
    body = ("-H", "Content-Type: application/json", "-d", '{"x": [1]}')

    _, kept, _ = curl("-H", "X-Request-Id: curl-1.a", *body, url)
    _, replaced, _ = curl("-H", "X-Request-Id: a b", *body, url)
    found = marserve("logs", "--request", "curl-1.a", "--management", server.management)

    assert kept["x-request-id"] == "curl-1.a"
    assert replaced["x-request-id"] not in ("a b", "")
    assert found.status == 0
    assert "/predictions/total" in found.out


def test_curl_uploads_an_archive_with_its_digest(server: Server, tmp_path: Path) -> None:
    """Large enough that curl waits for `100 Continue`; one with a wrong digest leaves nothing."""
    file = make_archive(tmp_path / "sent.mar", PARTS, weights=bytes(range(256)) * 8192)
    digest = base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
    wrong = base64.b64encode(bytes(32)).decode()
    url = f"{server.management}/archives"

    refused, _, why = curl("-T", file, "-H", f"Digest: sha-256={wrong}", f"{url}/wrong.mar")
    status, _, body = curl("-T", file, "-H", f"Digest: sha-256={digest}", f"{url}/sent.mar")
    chunked, _, _ = curl("-T", file, "-H", "Transfer-Encoding: chunked", f"{url}/chunked.mar")

    assert (refused, status, chunked) == (400, 201, 201), why
    told = json.loads(body)
    assert (told["archive"], told["bytes"]) == ("sent.mar", file.stat().st_size)
    assert not (server.store / "wrong.mar").exists()
    assert (server.store / "chunked.mar").read_bytes() == file.read_bytes()


def test_requests_gets_answers_and_errors_as_its_users_expect(server: Server) -> None:
    """A handler's exception is not tried again by urllib3's retries, and connections are kept."""
    found = Client.of("requests").run(server.inference)

    assert found["json"] == [200, {"total": 6.5}, "mine-1", "application/json"]
    assert found["chunked"] == [200, {"total": 3.0}]
    assert found["bytes"] == [200, {"bytes": 3_000_000}]
    assert found["multipart"] == [200, {"data": "0001", "more": b"two".hex()}]
    status, body = found["bad_input"]
    assert (status, set(body)) == (400, {"code", "type", "message"})
    assert body["message"].startswith("x")
    assert found["bad_json"][0] == 400
    assert "column" in found["bad_json"][1]
    assert found["exception"] == [500, "broken-1"]
    assert found["runs"] == {"runs": 1}
    assert found["unknown"][0] == 404
    assert "total" in found["unknown"][1]
    assert found["lines"] == ["a", "b", "c"]
    assert found["connections"] == [1]


def test_httpx_sse_reads_each_event(server: Server) -> None:
    """Whole, failed after the first, and left by its client."""
    found = Client.of("httpx-sse").run(server.inference)

    assert found["whole"][:2] == [["token", "one", "0"], ["token", "two", "1"]]
    assert found["whole"][-1][0] == "end"
    first, last = found["failed"]
    assert first == ["token", "one", "0"]
    assert (last[0], set(json.loads(last[1]))) == ("error", {"code", "message"})
    assert found["left"] == ["token", "word", "0"]


def test_node_fetches_and_a_browsers_event_source_follows(server: Server) -> None:
    """JSON, bytes, forms and streams; the logs of one request."""
    found: dict[str, Any] = Client.of("node").run(server.inference, server.management)

    assert found["json"] == [200, {"total": 6.5}, "from-node"]
    assert found["bytes"] == [200, {"bytes": 3_000_000}]
    assert found["multipart"] == [200, {"data": "0001", "more": b"two".hex()}]
    assert found["stream"][0].startswith("text/event-stream")
    assert found["stream"][1].count("event: token") == 3
    assert found["followed"] == "from-node"
