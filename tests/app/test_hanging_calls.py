"""Tests for calls that hang when the server is to end: what waits for them goes on without."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from marserve.app import hanging_calls
from marserve.app.draining import Stop
from marserve.app.hanging_calls import give_up_hanging
from marserve.errors import CallHangs, Unavailable
from marserve.machine.threads import DaemonThreads


def hang(path: Path) -> None:
    """Wait for the other end of a named pipe."""
    os.close(os.open(path, os.O_RDONLY))


@pytest.mark.anyio
@pytest.mark.parametrize("is_up", [True, False])
async def test_a_call_that_hangs_at_the_end_is_given_up_by_name_and_one_begun_after_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_up: bool
) -> None:
    """It holds up a start for a shorter time. What comes of the call later is dropped."""
    monkeypatch.setattr(hanging_calls, "STILL_S", 0.2 if is_up else 60.0)
    monkeypatch.setattr(hanging_calls, "STILL_AT_START_S", 60.0 if is_up else 0.2)
    monkeypatch.setattr(hanging_calls, "LOOK_EVERY_S", 0.02)
    pipes = [tmp_path / "before", tmp_path / "after"]
    for pipe in pipes:
        os.mkfifo(pipe)
    threads, stop, up = DaemonThreads(3, "blocking"), Stop(), asyncio.Event()
    if is_up:
        up.set()
    watching = asyncio.ensure_future(give_up_hanging(threads, stop, up))
    before = asyncio.wrap_future(threads.submit(hang, pipes[0]))
    while not threads.calls():
        await asyncio.sleep(0)

    stop.asked.set()
    await asyncio.sleep(0)
    after = asyncio.wrap_future(threads.submit(hang, pipes[1]))
    with pytest.raises(CallHangs) as told:
        await asyncio.wait_for(before, 10)
    is_left = not after.done()
    for pipe in pipes:
        os.close(await asyncio.to_thread(os.open, pipe, os.O_WRONLY))
    await after
    watching.cancel()
    await asyncio.wait([watching])
    threads.shutdown()

    assert is_left
    assert isinstance(told.value, Unavailable)
    assert str(pipes[0]) in str(told.value)
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "Thread blocking_0 hangs" in record.getMessage()
    assert str(pipes[0]) in record.getMessage()
    assert threads.hanging == 0
