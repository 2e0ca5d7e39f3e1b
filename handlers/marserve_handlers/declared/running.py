"""Runs coroutines in a process that has no event loop of its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")


class Runner:
    """One event loop, made at the first coroutine: a template that forks workers must have none open."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run to its end, and return its result or raise its exception."""
        loop = self._loop
        if loop is None:
            import asyncio  # here for a quicker start: few workers need asyncio

            loop = self._loop = asyncio.new_event_loop()
        ended: list[tuple[Result | None, Exception | None]] = []
        loop.run_until_complete(_end(coroutine, ended))
        # No variable keeps either: tracebacks of exceptions, also of those in a result, have this frame.
        if ended[0][1] is not None:
            raise cast("Exception", ended.pop()[1])
        return cast("Result", ended.pop()[0])

    def __del__(self) -> None:
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()


async def _end(coroutine: Coroutine[Any, Any, Result], ended: list[tuple[Result | None, Exception | None]]) -> None:
    """Await it, and put its result or its exception in the list.

    In the task they would be in a cycle: tracebacks have frames of the loop (from Python 3.12 on all that the coroutine
    was called from), and these have the task. That would hold the request's body until it is collected.
    """
    try:
        ended.append((await coroutine, None))
    except Exception as error:
        ended.append((None, error))
