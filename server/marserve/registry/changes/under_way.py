"""Changes of the models under way: tasks that the registry owns.

A change runs to its end even when the caller is cancelled: a client that hangs up in the middle of a registration
leaves nothing half done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from marserve.errors import MarserveError

log = logging.getLogger("marserve.registry")

Result = TypeVar("Result")


class Changes:
    """The tasks of one registry."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def follow(self, change: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run a change as a task; `end` waits for it. An unexpected error (no MarserveError) is logged here."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def carry_through(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Await a change that goes on even when the caller is cancelled."""
        return await asyncio.shield(self.follow(change))

    async def end(self, limit_s: float) -> None:
        """Wait until none is under way; changes that have not ended after `limit_s` are cancelled."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while self._tasks and loop.time() < end:
            await asyncio.wait(self._tasks, timeout=end - loop.time())
        for task in self._tasks:
            log.error("A change of the models did not end in %s s and is given up: %s", limit_s, task)
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MarserveError):
            log.error("A change of the models failed", exc_info=error)
