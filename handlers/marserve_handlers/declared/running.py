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
        result, error = loop.run_until_complete(_caught(coroutine))
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback has this frame
        return cast("Result", result)

    def __del__(self) -> None:
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()


async def _caught(coroutine: Coroutine[Any, Any, Result]) -> tuple[Result | None, Exception | None]:
    """Its result, or its exception. The loop would raise that from a frame that has the task, which keeps it: a cycle.

    That would hold the request's body until it is collected.
    """
    try:
        return await coroutine, None
    except Exception as error:
        return None, error
