"""Has a dispatcher look again when its next moment comes: a batch's delay is up, a deadline passes, a hold ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from marserve.pool.dispatch.dispatcher import Dispatcher

MIN_WAKE_S = 0.001


class WakeTimer:
    """One timer for one dispatcher. `at` is when it is due, monotonic seconds; infinite while it does not run."""

    def __init__(self, dispatcher: Dispatcher, woken: Callable[[], None]) -> None:
        """`woken` is called after each look."""
        self.at = math.inf
        self._dispatcher = dispatcher
        self._woken = woken
        self._handle: asyncio.TimerHandle | None = None

    def set(self) -> None:
        """Look again at the dispatcher's next moment."""
        when = self._dispatcher.next_wake()
        if when is None:
            return
        if self._handle is not None:
            if self.at <= when:
                return
            self._handle.cancel()
        # uvloop counts whole milliseconds; with less than one the loop would turn without a pause.
        delay_s = max(MIN_WAKE_S, when - time.monotonic())
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._wake)
        self.at = when

    def cancel(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.at = None, math.inf

    def _wake(self) -> None:
        self._handle, self.at = None, math.inf
        self._dispatcher.wake(time.monotonic())
        self.set()
        self._woken()
