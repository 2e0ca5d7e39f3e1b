"""Tests for the end of a process whose orderly end hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.never_comes import NAME, build, needs_compiler
from support.processes import descendants, until_blocking

PROGRAM = """
import os, signal, sys, threading
from marserve.app.last_resort import LastResort
limit_s, hurried_s, what = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
last_resort = LastResort(limit_s, hurried_s=hurried_s)
def hear(*_):
    last_resort.on_signal()
    os.write(1, b"heard\\n")
signal.signal(signal.SIGTERM, hear)
if what == "ends":
    os.kill(os.getpid(), signal.SIGTERM)
    last_resort.close()
    threading.Event().wait(0.5)
    sys.exit(0)
print("up", flush=True)
os.open(what, os.O_RDONLY)
"""


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """A process that hangs, or not."""
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(("limits", "signals"), [(("0.2", "60"), 1), (("60", "0.2"), 2)])
def test_a_process_that_hangs_in_a_system_call_ends_in_its_time(
    tmp_path: Path, limits: tuple[str, str], signals: int
) -> None:
    """The main thread waits for a named pipe and runs no event loop; a second signal asks for haste."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with start(*limits, str(pipe)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "heard\n"  # two that wait together would be one

        _, said = process.communicate(timeout=30)

    assert process.returncode == 1
    assert "marserve ends now: its orderly end was to take 0.2 s at most" in said


@needs_compiler
def test_a_process_whose_main_thread_hears_no_signal_ends_in_its_time(tmp_path: Path) -> None:
    """It is in a call that the system does not interrupt: the signal waits for it, and that is seen."""
    with start("0.2", "60", str(tmp_path / NAME), **build(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        until_blocking(lambda: descendants(process.pid), "it is in the call, which waits for a child")
        process.send_signal(signal.SIGTERM)
        heard, said = process.communicate(timeout=60)

    assert (process.returncode, heard) == (1, "")
    assert "marserve ends now" in said


def test_a_process_that_has_ended_what_it_had_to_is_left_alone() -> None:
    """It may go on with other things."""
    with start("0.1", "0.1", "ends") as process:
        _, said = process.communicate(timeout=30)

    assert process.returncode == 0
    assert said == ""
