"""How a worker process begins, what it says, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.messages import Hello, Loaded, NotLoaded, Stop
from support.model_folders import write_model
from support.worker_process import WorkerUnderTest


@pytest.fixture
def worker() -> Iterator[WorkerUnderTest]:
    """A fresh worker, told nothing yet."""
    with WorkerUnderTest() as worker:
        yield worker


SERVES = """
import sys
def handle(data, context):
    if data is None:
        return None
    words = [bytes(row["body"]).decode() for row in data]
    if words[0].startswith("exit"):
        sys.exit(int(words[0][4:]))
    return words
"""


def test_a_worker_says_hello_loads_and_serves(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """The whole talk, from the first word to the last."""
    hello, _ = worker.hear()
    worker.tell(write_model(tmp_path, SERVES))
    loaded, _ = worker.hear()
    worker.batch(1, b"a", b"b")
    results, bodies = worker.hear()
    worker.tell(Stop())

    assert hello == Hello(worker.process.pid, sys.version.split()[0])
    assert type(loaded) is Loaded
    assert loaded.seconds > 0
    assert results.number == 1
    assert bodies == [b"a", b"b"]
    assert worker.end() == (0, "", "")
    assert worker.page.finished == 1


def test_batches_that_arrive_together_are_answered_in_order(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """And the stop behind them waits for both."""
    worker.tell(write_model(tmp_path, SERVES))
    worker.batch(1, b"first")
    worker.batch(2, b"second")
    worker.tell(Stop())

    heard = [worker.hear() for _ in range(4)]

    assert [bodies for _, bodies in heard[2:]] == [[b"first"], [b"second"]]
    assert worker.end()[0] == 0


def test_the_end_of_the_connection_is_the_end_of_the_worker(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """A server that died can say nothing more."""
    worker.tell(write_model(tmp_path, SERVES))
    worker.hear()
    worker.hear()

    worker.connection.close()

    assert worker.end()[0] == 0


def test_a_handlers_exit_ends_the_worker_with_its_status(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """Without an answer: the page says what it was at."""
    worker.tell(write_model(tmp_path, SERVES))
    worker.hear()
    worker.hear()

    worker.batch(1, b"exit 7")

    with pytest.raises(EOFError):
        worker.hear()
    assert worker.end()[0] == 7
    assert worker.page.running[0] == 1


def test_a_failed_load_is_told_before_the_worker_ends(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """With its traceback."""
    worker.hear()

    worker.tell(write_model(tmp_path, "raise RuntimeError('broken')"))

    told, _ = worker.hear()
    assert type(told) is NotLoaded
    assert (told.kind, told.message) == ("load_failed", "RuntimeError: broken")
    assert "handler.py" in told.traceback
    assert worker.end()[0] == 1


def test_bytes_that_are_no_order_end_the_worker(worker: WorkerUnderTest) -> None:
    """With a word on its error output; it does not go on guessing."""
    worker.hear()

    worker.connection.sendall(b"not a frame at all, but long enough")

    status, _, err = worker.end()
    assert status == 1
    assert "BadFrame" in err


def test_a_worker_without_its_parent_does_not_begin() -> None:
    """The server died between starting it and its first step."""
    with WorkerUnderTest(parent=1) as worker:
        assert worker.end() == (0, "", "")


def test_ctrl_c_is_the_servers_to_handle(worker: WorkerUnderTest, tmp_path: Path) -> None:
    """A terminal sends it to everybody; the worker goes on with what it has."""
    worker.hear()

    os.kill(worker.process.pid, signal.SIGINT)
    worker.tell(write_model(tmp_path, SERVES))

    assert type(worker.hear()[0]) is Loaded


def test_a_person_who_starts_a_worker_is_told_what_to_type() -> None:
    """It is not for people."""
    import subprocess

    done = subprocess.run([sys.executable, "-m", "marserve.worker"], capture_output=True, text=True, timeout=20)

    assert done.returncode == 1
    assert "marserve start" in done.stderr
