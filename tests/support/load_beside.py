"""Requests that leave at a steady rate from a thread of their own, while a test does something else to the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from support.open_loop import OpenLoop, Outcome, Shot, evenly, post

PATIENCE_S = 120.0


class LoadBeside:
    """As a context: fires `rate` requests a second for `seconds`; leaving it waits for the last answer.

    `outcomes` are there then, in order of their due times; `started_at` is on the monotonic clock. `headers` gives
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
        due = evenly(rate, seconds)
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
        """Whether all are answered."""
        return not self._thread.is_alive()

    def __enter__(self) -> LoadBeside:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join()

    def _run(self) -> None:
        async def fire() -> list[Outcome]:
            firing = asyncio.create_task(self._client.fire(self._shots))
            await asyncio.sleep(0)
            self._has_begun.set()
            return await firing

        self.outcomes = asyncio.run(fire())
