"""What runs beside the server ends with it, and is heard of when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from marserve.app.building.tasks import has_succeeded, keep

pytestmark = pytest.mark.anyio


async def test_what_is_kept_has_ended_when_the_stack_has() -> None:
    """It is cancelled, and what it does on the way out is waited for."""
    done: list[str] = []
    is_running = asyncio.Event()

    async def work() -> None:
        try:
            is_running.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    async with contextlib.AsyncExitStack() as stack:
        task = keep(stack, work())
        await is_running.wait()
        assert not has_succeeded(task)

    assert done == ["cleaned up"]
    assert task.cancelled()
    assert not has_succeeded(task)


async def test_a_failure_is_logged_and_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """The server lives on without that part; the log has the traceback."""

    async def fail() -> None:
        raise ValueError("no such thing")

    with caplog.at_level(logging.ERROR):
        async with contextlib.AsyncExitStack() as stack:
            task = keep(stack, fail())
            await asyncio.wait([task])

    assert [record.message for record in caplog.records] == ["a part of the server failed"]
    assert caplog.records[0].exc_info is not None
    assert isinstance(caplog.records[0].exc_info[1], ValueError)
    assert not has_succeeded(task)


async def test_what_ended_well_has_succeeded(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is said about it."""
    async with contextlib.AsyncExitStack() as stack:
        task = keep(stack, asyncio.sleep(0))
        await task

    assert has_succeeded(task)
    assert not caplog.records
