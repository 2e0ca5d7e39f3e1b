"""Asks a worker from time to time whether it is well (`healthInterval`), by the handler's own `health`.

An idle worker is lent for it, so that no request waits behind the call. A busy one is asked after what it has been
sent, and batches may come behind the call. Then the response limit of the call is kept here.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from marserve.errors import BadFrame
from marserve.messages import Health
from marserve.pool.checks.health import WorkerHealth
from marserve.pool.dispatch.jobs import Flight

# The shortest pause between two checks.
LEAST_INTERVAL_S = 0.1


class HealthWatch:
    """The checks of one worker. `ask` asks it, and returns the number of the loan, 0 without one.

    The first check comes after half an interval to a whole one: workers that started together are not asked together.
    """

    def __init__(
        self, interval_s: float, ask: Callable[[], int], vain: int, *, draw: Callable[[], float] = random.random
    ) -> None:
        self.health = WorkerHealth(vain)
        self._interval_s = max(LEAST_INTERVAL_S, interval_s)
        self._ask, self._draw = ask, draw
        self._timer: asyncio.TimerHandle | None = None
        self._number: int | None = None  # of the loan; None while it is not asked
        self._asked_at = 0.0
        self._behind = 0

    def start(self) -> None:
        """Begin to ask."""
        self._wait(self._interval_s * (0.5 + self._draw() / 2))

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._time_has_come)

    def _time_has_come(self) -> None:
        self._asked_at = time.monotonic()
        self._number = self._ask()

    def note_behind(self, flights: Sequence[Flight]) -> None:
        """It is asked after these flights."""
        self._behind = flights[-1].number if flights else 0

    def take(self, message: Health) -> bool:
        """Take an answer. Returns whether the worker is to be replaced. Raises BadFrame if it was not asked."""
        if self._number != message.number:
            raise BadFrame(f"it answers the question {message.number} about its health, which it was not asked")
        self._number = None
        if self._timer is not None:  # None once it is stopped
            self._wait(self._interval_s)
        if not message.failure:
            self.health.passed(time.time())
            return False
        return self.health.failed(time.time(), message.failure)

    def runs_since(self, flights: Sequence[Flight], heard_at: float, *, in_any_order: bool) -> float | None:
        """Since when the call runs that was asked for behind batches; None if none runs now, by what is known.

        `heard_at` is when the worker last sent something: the end of what was before the call, unless `in_any_order`.
        """
        if self._number != 0:
            return None
        if in_any_order:
            return self._asked_at
        if flights and flights[0].number <= self._behind:
            return None
        return max(self._asked_at, heard_at)
