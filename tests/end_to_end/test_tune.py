"""`marserve tune --goal` and a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.command_line import marserve
from support.server import Server, make_archive, poll

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


def _begin(server: Server, *more: str) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TS_", "MARSERVE_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "marserve.cli", *_words(server, "--for", "60s", *more)],
        cwd=server.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _wait(process: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    for _ in poll(60, "the search is under way"):
        assert process.poll() is None
        if is_so():
            return


def _described(server: Server, name: str) -> dict[str, Any]:
    answer = server.client.get(f"{server.management}/models/{name}")
    return answer.json()[0] if answer.status_code == 200 else {}


def _end(process: subprocess.Popen[bytes], numbers: Sequence[signal.Signals]) -> bytes:
    """Send these signals, and give what is said then on standard error."""
    for number in numbers:
        process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert b"Traceback" not in said
    assert process.returncode in [128 + number for number in numbers], said
    return said


SIGNALS = pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM]]
)


@pytest.mark.usefixtures("hangs_up")
@SIGNALS
@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_signal_removes_the_copy(server: Server, numbers: list[signal.Signals]) -> None:
    """While it is loaded with requests; what comes while it is removed does not end that."""
    process = _begin(server)
    name = f"m-tuning-{process.pid}"
    _wait(process, lambda: _described(server, name).get("lastMinute", {}).get("requestsPerSecond", 0) > 0)

    said = _end(process, numbers)

    assert b"The copy is removed, and nothing changed." in said
    assert _names(server) == ["m"]


@pytest.mark.usefixtures("hangs_up")
@SIGNALS
@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_signal_gives_the_version_that_serves_its_options_back(server: Server, numbers: list[signal.Signals]) -> None:
    """With `--on-live`."""
    before = _described(server, "m")
    process = _begin(server, "--on-live")
    _wait(process, lambda: _described(server, "m")["batchSize"] != before["batchSize"])

    said = _end(process, numbers)

    assert b"The version has its options back." in said
    after = _described(server, "m")
    assert {key: after[key] for key in OPTIONS} == {key: before[key] for key in OPTIONS}


OPTIONS = ("batchSize", "maxBatchDelay", "minWorkers", "maxWorkers")
