"""Requests that leave at a steady rate from a thread of their own, while a test does something else to the server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType

from support.open_loop import OpenLoop, Outcome, Shot, evenly, post

PATIENCE_S = 120.0
# How much longer a block may take than was thought, and how long the load goes on after what it did last.
LONGER_S = 60.0
TAIL_S = 0.5


class LoadBeside:
    """As a context: fires `rate` requests a second for `seconds`, and past the block's end where that is later.

    However slow the machine is, what is done in the block is so done under load. Leaving it waits for the last answer:
    `outcomes` are there then, in order of their due times. `started_at` is on the monotonic clock; `headers` gives
    those of a request by its number.
    """

    def __init__(
        self,
        port: int,
        model: str,
        rate: float,
        seconds: float,
        headers: Callable[[int], dict[str, str | int]] = lambda number: {},
    ) -> None:
        due = evenly(rate, seconds + LONGER_S)
        self._seconds = seconds
        self._shots = [Shot(at, str(number), post(model, b"x", **headers(number))) for number, at in enumerate(due)]
        self._client = OpenLoop(port, patience_s=PATIENCE_S)
        self._thread = threading.Thread(target=self._run)
        self._has_begun = threading.Event()
        self.outcomes: list[Outcome] = []

    @property
    def started_at(self) -> float:
        """When time 0 of the outcomes was."""
        return self._client.started_at

    @property
    def is_over(self) -> bool:
        """Whether `seconds` are over."""
        return time.monotonic() >= self.started_at + self._seconds

    def __enter__(self) -> LoadBeside:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.ends_s = max(self._seconds, time.monotonic() - self.started_at + TAIL_S)
        self._thread.join()

    def _run(self) -> None:
        async def fire() -> list[Outcome]:
            firing = asyncio.create_task(self._client.fire(self._shots))
            await asyncio.sleep(0)
            self._has_begun.set()
            return await firing

        self.outcomes = asyncio.run(fire())
