"""A thread that watches the event loop: real loops that are held, and a real process that is stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from marserve.telemetry.happenings import Happenings
from marserve.telemetry.logs.line_ids import TRACEBACK
from marserve.telemetry.loop_lag import BEAT_S, LoopLag
from marserve.telemetry.loop_watch import STATUS, LoopWatch

THRESHOLD_S = 0.2


def hold_the_loop(seconds: float) -> None:
    """A call that waits, as of a file system that is slow."""
    time.sleep(seconds)


def compute_on_the_loop(seconds: float) -> None:
    """Python code that never waits."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("hold", [hold_the_loop, compute_on_the_loop])
def test_what_holds_the_loop_is_logged_once_with_its_place(
    hold: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One record with the stack, and one that says how long it was."""
    caplog.set_level(logging.INFO, "marserve.loop")
    threads = threading.active_count()

    async def serve() -> LoopLag:
        happenings = Happenings()
        lag = LoopLag(time.monotonic(), THRESHOLD_S, happenings)
        watch = LoopWatch(lag)
        watch.start()
        try:
            await asyncio.sleep(2 * BEAT_S)
            began = time.monotonic()
            hold(0.8)
            ended = time.monotonic()
            await until(lambda: lag.stalls == 1)
            assert sum(each.overlap_s(began, ended) for each in happenings) == pytest.approx(0.8, abs=3 * BEAT_S)
            return lag
        finally:
            watch.stop()

    lag = asyncio.run(serve())

    held, released = caplog.records
    assert held.getMessage().startswith("The event loop stands still, for 0.")
    stack = getattr(held, TRACEBACK)
    assert hold.__name__ in stack
    assert stack.count("\n") < 60
    assert released.getMessage().startswith("The event loop runs again, after 0.")
    assert lag.longest_s == pytest.approx(0.8, abs=3 * BEAT_S)
    assert threading.active_count() == threads


def test_a_loop_that_runs_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    """Many short waits are no stall."""

    async def serve() -> LoopLag:
        lag = LoopLag(time.monotonic(), 5.0)
        watch = LoopWatch(lag)
        watch.start()
        await until(lambda: lag.lag_seconds.count >= 5)
        watch.stop()
        return lag

    lag = asyncio.run(serve())

    assert caplog.records == []
    assert lag.stalls == 0


PROGRAM = """
import asyncio, logging, os, sys, time
from marserve.telemetry.loop_lag import LoopLag
from marserve.telemetry.loop_watch import LoopWatch

logging.basicConfig(format="%(message)s", stream=sys.stdout)
what, stuck_after_s = sys.argv[1], float(sys.argv[2])

async def serve():
    lag = LoopLag(time.monotonic(), 0.3)
    watch = LoopWatch(lag, stuck_after_s=stuck_after_s, flush=lambda: print("flushed", flush=True))
    watch.start()
    print("up", flush=True)
    if what == "hang":
        time.sleep(60)
    while not (lag.stalls or lag.pauses):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    print(lag.stalls, lag.pauses, flush=True)
    watch.stop()

asyncio.run(serve())
"""


def start(*words: str) -> subprocess.Popen[str]:
    """A process with a watched loop."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_process_that_was_stopped_is_not_blamed() -> None:
    """It says that it did not run, names no place, and is not ended for it."""
    with start("wait", "0.5") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)  # what its start took of a processor is not in the watchdog's last look any more
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(1.5)  # the claim is about time that passes
        process.send_signal(signal.SIGCONT)
        said, errors = process.communicate(timeout=30)

    assert process.returncode == 0, errors
    told = re.match(r"This process did not run for ([0-9.]+) s", said)
    assert told, said
    assert float(told[1]) > 1.0  # it may have looked a moment before
    assert said.splitlines()[-1].startswith("0 ")
    assert "stands still" not in said


def test_a_process_whose_loop_is_stuck_is_ended_if_that_is_asked_for() -> None:
    """The log has the place, is flushed, and standard error says why."""
    with start("hang", "0.6") as process:
        said, errors = process.communicate(timeout=30)

    assert process.returncode == STATUS
    assert "The event loop stands still" in said
    assert said.endswith("flushed\n")
    assert f"marserve ends now, with exit status {STATUS}" in errors
