"""`marserve tune --goal` and a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import marserve
from support.server import Server, make_archive

# Batches of eight cost little more than one request alone.
HANDLER = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.010 + 0.0005 * len(data))
    return ["ok"] * len(data)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A model that is given one request at a time."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "m.mar", HANDLER, name="m", config="batchSize: 1\nmaxBatchDelay: 0\n")
    (tmp_path / "input.txt").write_text("hello")
    with Server(tmp_path, store=store) as running:
        assert running.register("m.mar").status_code == 200
        yield running


def _names(server: Server) -> list[str]:
    models = server.client.get(f"{server.management}/models").json()["models"]
    return [model["modelName"] for model in models]


def _words(server: Server, *more: str) -> list[str]:
    words = ["tune", "m", "--goal", "rate", "--inputs", str(server.folder / "input.txt"), "--workers", "1", *more]
    return [*words, "--management", server.management, "--inference", server.inference]


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_model_with_dear_batches_gets_larger_ones_and_the_copy_is_gone(server: Server) -> None:
    """Applied to the version that serves; a second search stays with it."""
    ran = marserve(*_words(server, "--for", "60s", "--apply", "--json"))

    assert ran.status == 0, ran.err
    chosen = ran.document["chosen"]
    assert chosen["batchSize"] >= 8
    described = server.client.get(f"{server.management}/models/m").json()[0]
    assert (described["batchSize"], described["maxBatchDelay"]) == (chosen["batchSize"], chosen["maxBatchDelay"])
    assert _names(server) == ["m"]


@pytest.mark.system
@pytest.mark.timeout(120)
def test_ctrl_c_removes_the_copy(server: Server) -> None:
    """While it is loaded with requests."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "marserve.cli", *_words(server, "--for", "60s")],
        cwd=server.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    name, deadline = f"m-tuning-{process.pid}", time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = server.client.get(f"{server.management}/models/{name}")
        if answer.status_code == 200 and answer.json()[0].get("lastMinute", {}).get("requestsPerSecond", 0) > 0:
            break
        assert process.poll() is None
        time.sleep(0.05)

    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)

    assert process.returncode == 130, said
    assert b"The copy is removed, and nothing changed." in said
    assert _names(server) == ["m"]
