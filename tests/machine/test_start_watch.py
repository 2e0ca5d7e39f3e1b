"""Tests for what watches a start: it says what the start waits for, and ends it though it hears no signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from marserve.machine.start_watch import StartWatch
from marserve.machine.threads import DaemonThreads
from support.never_comes import NAME, build, needs_compiler

PROGRAM = """
import asyncio, os, signal, sys
from marserve.machine.start_watch import StartWatch
from marserve.machine.threads import DaemonThreads
def hang(path):
    os.open(path, os.O_RDONLY)
watch = StartWatch(say_after_s=0.3, look_every_s=0.05)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print("up", flush=True)
if sys.argv[2:] == ["thread"]:
    threads = DaemonThreads(2, "blocking", ready=2)
    watch.follow(threads)
    threads.submit(hang, sys.argv[1])
    asyncio.run(asyncio.sleep(60))
hang(sys.argv[1])
"""


@contextlib.contextmanager
def start(path: Path, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A start that opens this file, and what it says on standard error."""
    command = [sys.executable, "-c", PROGRAM, str(path), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "up\n"
            yield process, process.stderr
        finally:
            process.kill()


@pytest.mark.parametrize("words", [(), ("thread",)])
def test_what_a_start_waits_for_is_said_once(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In the main thread and in a pool's; a signal that can be heard is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with start(pipe, *words) as (process, told):
        said = told.readline()
        process.send_signal(signal.SIGTERM)
        more = told.read()
        process.wait(30)

    assert process.returncode == 7
    assert said.startswith("marserve: the start waits: ")
    assert said.endswith(f" of {pipe} has not come back for 0.3 s\n")
    assert more == ""


@needs_compiler
def test_a_start_that_hears_no_signal_is_ended_by_it(tmp_path: Path) -> None:
    """Its main thread is in a call that the system does not interrupt."""
    with start(tmp_path / NAME, **build(tmp_path)) as (process, told):
        assert f"{NAME} has not come back" in told.readline()
        process.send_signal(signal.SIGTERM)
        said = told.read()
        process.wait(30)

    assert process.returncode == 1
    assert said.startswith("marserve: SIGTERM: the start ends, though ")
    assert f"of {tmp_path / NAME} has not come back" in said


def test_a_start_that_is_over_is_not_watched(capfd: pytest.CaptureFixture[str]) -> None:
    """Its thread has ended when `close` returns: none is left to wake while the interpreter ends."""
    before = set(threading.enumerate())
    watch = StartWatch(look_every_s=0.01)
    watch.follow(DaemonThreads(1, "none"))
    (own,) = set(threading.enumerate()) - before

    watch.close()

    assert not own.is_alive()
    assert capfd.readouterr().err == ""


def test_where_the_system_gives_no_thread_a_start_goes_on_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs itself says so in a sentence."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    StartWatch().close()
