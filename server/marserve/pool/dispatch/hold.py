"""How long a request waits for a worker after failed starts. Pure: time is passed in.

A slot whose worker ended is filled again at once, and its requests wait for the new worker. Once the model has failed
to load twice in a row the next start may fail, too. A request then waits only within a bound: its own deadline, or
`HOLD_S` without one. A request that cannot wait until the next start is refused with the time of that start.
"""

from __future__ import annotations

import math

# How long a request without a deadline waits for a worker that may not come.
HOLD_S = 5.0


class Hold:
    """The next start of a version none of whose slots counts as living. Times are monotonic seconds.

    `next_start` is None if no worker is started by itself, and not in the future during a start. `look_at` is when the
    wait of some request may be over; infinite while no request waits.
    """

    __slots__ = ("_may_wait", "_since", "look_at", "next_start")

    def __init__(self) -> None:
        self.next_start: float | None = None
        self.look_at = math.inf
        self._since: float | None = None
        self._may_wait = True

    def note(self, next_start: float | None, now: float, *, may_wait: bool = True) -> None:
        """No slot lives; the next worker is started at `next_start`. Requests wait for it if `may_wait`."""
        self.next_start, self._may_wait = next_start, may_wait
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """A slot lives again."""
        self.next_start = self._since = None
        self.look_at = math.inf

    def until(self, arrived: float, deadline: float | None) -> float:
        """Until when a request waits: its deadline, else `HOLD_S` after its arrival or the loss, whichever is later."""
        if deadline is not None:
            return deadline
        return max(arrived, arrived if self._since is None else self._since) + HOLD_S

    def keeps(self, arrived: float, deadline: float | None, now: float) -> bool:
        """Whether a request may wait: the next start comes before its wait is over."""
        until = self.until(arrived, deadline)
        return self._may_wait and self.next_start is not None and now < until and self.next_start <= until

    def watch(self, arrived: float, deadline: float | None) -> None:
        """Count a request that waits: `look_at` is not later than the end of its wait."""
        self.look_at = min(self.look_at, self.until(arrived, deadline))

    def left_s(self, now: float) -> float | None:
        """Seconds until the next start, 0 during one; None if no start comes."""
        return None if self.next_start is None else max(0.0, self.next_start - now)
