"""Tasks that run as long as the server. They are started, ended and awaited with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

log = logging.getLogger("marserve.app")


def keep(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run `work` as a task. It is cancelled and awaited when `stack` ends; its failure is logged."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    def report(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the server failed", exc_info=error)

    task.add_done_callback(report)
    stack.push_async_callback(end)
    return task


def has_succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended without an error."""
    return task.done() and not task.cancelled() and task.exception() is None


async def wait_for_all(works: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Run them all, and return when all have ended."""
    await asyncio.gather(*works)
