"""Runs coroutines in a process that has no event loop of its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

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
        return loop.run_until_complete(coroutine)

    def __del__(self) -> None:
        if self._loop is not None and not self._loop.is_running():
            self._loop.close()
