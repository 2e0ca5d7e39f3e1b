"""A model of the start that cannot be loaded: reported, or with `strict_start` the end of the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from support.prepared import Prepared
from support.processes import left_of
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc")

ECHO = "def handle(rows, context):\n    return [row['body'] for row in rows] if rows else None\n"
BROKEN = "def handle(rows, context):\n    raise RuntimeError('no weights')\n"


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_a_missing_model_is_reported_and_the_others_serve(tmp_path: Path, entry: str) -> None:
    """By default; the readiness page names it."""
    make_archive(store_of(tmp_path) / "good.mar", ECHO)

    settings = {"load_models": "good.mar,missing.mar", "default_workers_per_model": "1"}
    with Server(tmp_path, entry=entry, settings=settings) as server:
        for _ in poll(20, "the good one serves"):
            answer = server.predict("good", "hello")
            if answer.status_code == 200:
                break
        ready = httpx.get(f"{server.inference}/readyz")
        output = server.output()

    assert answer.text == "hello"
    assert "missing.mar" in ready.text
    assert "Failed to load model: missing.mar" in output


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_with_strict_start_a_missing_model_is_the_end(tmp_path: Path, entry: str) -> None:
    """Exit status 1, one sentence, and nothing of what was begun is left."""
    make_archive(store_of(tmp_path) / "good.mar", ECHO)
    settings = {"load_models": "good.mar,missing.mar", "default_workers_per_model": "1", "strict_start": "true"}
    server = Server(tmp_path, entry=entry, settings=settings)

    process = started(server)
    family = wait_for_end(process, server)

    assert process.returncode == 1
    told = [line for line in server.output().splitlines() if line.startswith("marserve did not start:")]
    assert len(told) == 1
    assert "missing.mar was not loaded" in told[0]
    assert "strict_start=true" in told[0]
    assert not left_of(family, 5)
    assert not list(server.temporary.iterdir())


def test_with_strict_start_a_model_that_does_not_load_is_the_end(tmp_path: Path) -> None:
    """Its archive was there, and its workers could not load it."""
    make_archive(store_of(tmp_path) / "good.mar", ECHO)
    make_archive(store_of(tmp_path) / "broken.mar", BROKEN)
    settings = {"load_models": "all", "default_workers_per_model": "1", "strict_start": "true"}
    server = Server(tmp_path, entry="marserve", settings=settings)

    process = started(server)
    family = wait_for_end(process, server)

    assert process.returncode == 1
    told = [line for line in server.output().splitlines() if line.startswith("marserve ends:")]
    assert len(told) == 1
    assert "broken" in told[0]
    assert "no weights" in told[0]
    assert not left_of(family, 5)
    assert not list(server.temporary.iterdir())


def test_with_strict_start_a_server_whose_models_are_all_there_serves(tmp_path: Path) -> None:
    """It accepts connections only when all of them are registered."""
    make_archive(store_of(tmp_path) / "good.mar", ECHO)
    settings = {"load_models": "all", "default_workers_per_model": "1", "strict_start": "true"}

    with Server(tmp_path, entry="marserve", settings=settings) as server:
        listed = server.client.get(f"{server.management}/models").json()["models"]
        for _ in poll(20, "it serves"):
            if server.predict("good", "x").status_code == 200:
                break

    assert [model["modelName"] for model in listed] == ["good"]


def store_of(folder: Path) -> Path:
    """The store of the server under test."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    return store


def started(server: Server) -> subprocess.Popen[bytes]:
    """The server's process, which may end at any time."""
    with (server.folder / "console.log").open("ab") as output:
        return Prepared(
            server.command(),
            cwd=server.folder,
            env={**os.environ, "TMPDIR": str(server.temporary), "TEMP": str(server.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_end(process: subprocess.Popen[bytes], server: Server) -> list[psutil.Process]:
    """Wait until it ends; all processes that were seen below it on the way."""
    seen: dict[int, psutil.Process] = {}
    for _ in poll(30, "the server ends"):
        seen |= {each.pid: each for each in server.family(process.pid)}
        if process.poll() is not None:
            break
    return [each for pid, each in seen.items() if pid != process.pid]
