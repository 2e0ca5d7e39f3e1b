"""`marserve migrate --compare` between two servers that run: requests of a recording and of a folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import marserve
from support.server import Server, make_archive

RECORDING = Path(__file__).parents[1] / "contract" / "recorded" / "inference_basics.json"
ECHO = "def handle(data, context):\n    return [bytes(row.get('body') or b'') for row in data or []]\n"
LENGTH = "def handle(data, context):\n    return [{'length': len(row.get('body') or b'')} for row in data or []]\n"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two servers; the same `echo` on both, and a `changed` that answers otherwise on the second."""
    with contextlib.ExitStack() as stack:
        servers = []
        for name, changed in (("old", ECHO), ("new", LENGTH)):
            folder = tmp_path / name
            (folder / "store").mkdir(parents=True)
            make_archive(folder / "store" / "echo.mar", ECHO)
            make_archive(folder / "store" / "changed.mar", changed)
            server = stack.enter_context(Server(folder))
            for url in ("echo.mar", "changed.mar"):
                assert server.register(url).status_code == 200
            servers.append(server)
        yield servers[0], servers[1]


@pytest.mark.system
def test_requests_of_a_folder_and_of_a_recording_are_asked_of_both(two: tuple[Server, Server], tmp_path: Path) -> None:
    """What differs is named by request and place; a recording is taken as it is, with what is no request left out."""
    old, new = two
    requests = tmp_path / "requests"
    for name in ("echo/words.txt", "echo/picture.png", "changed/words.txt"):
        (requests / name).parent.mkdir(parents=True, exist_ok=True)
        (requests / name).write_bytes(b"hello")
    recorded = [case["id"] for case in json.loads(RECORDING.read_text())["cases"] if case.get("to") == "inference"]

    of_folder = marserve(
        *("migrate", "--compare", old.inference, "--requests", requests, "--inference", new.inference, "--json")
    )
    of_recording = marserve(
        *("migrate", "--compare", old.inference, "--requests", RECORDING, "--inference", new.inference, "--json")
    )

    assert of_folder.status == 1
    assert of_folder.document["cases"] == 3
    assert {each["case"] for each in of_folder.document["differences"]} == {"changed/words.txt"}
    assert (of_recording.status, of_recording.document["differences"]) == (0, [])
    assert 60 < of_recording.document["cases"] <= len(recorded)
