"""How long a request waits for a worker where every start has failed of late. Pure: time is passed in.

A slot whose worker ended is filled again at once, and its requests wait for that as long as they may. Once the model
has failed to load twice in a row the next start may fail too, so a request waits for it only within a bound: its own
deadline, or `HOLD_S` where it has none. What cannot wait so long is refused with the time of the next start.
"""

from __future__ import annotations

import math

# How long a request without a deadline waits for a worker that may not come.
HOLD_S = 5.0


class Hold:
    """The next start of a version without a worker that could be counted on. Times are monotonic seconds.

    `next_start` is None where no worker is started by itself, and past while a start is under way. `look_at` is when
    some request may have waited long enough; infinite where none waits.
    """

    __slots__ = ("_may_wait", "_since", "look_at", "next_start")

    def __init__(self) -> None:
        self.next_start: float | None = None
        self.look_at = math.inf
        self._since: float | None = None
        self._may_wait = True

    def note(self, next_start: float | None, now: float, *, may_wait: bool = True) -> None:
        """No worker can be counted on; the next one is started at `next_start`. Requests wait for it if they may."""
        self.next_start, self._may_wait = next_start, may_wait
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """There is a worker again that can be counted on."""
        self.next_start = self._since = None
        self.look_at = math.inf

    def until(self, arrived: float, deadline: float | None) -> float:
        """The last moment to which a request waits: its deadline, else `HOLD_S` after both its arrival and the loss."""
        if deadline is not None:
            return deadline
        return max(arrived, arrived if self._since is None else self._since) + HOLD_S

    def keeps(self, arrived: float, deadline: float | None, now: float) -> bool:
        """Whether a request may wait: the next start comes, and in its time."""
        until = self.until(arrived, deadline)
        return self._may_wait and self.next_start is not None and now < until and self.next_start <= until

    def watch(self, arrived: float, deadline: float | None) -> None:
        """A request waits: `look_at` is not later than its last moment."""
        self.look_at = min(self.look_at, self.until(arrived, deadline))

    def left_s(self, now: float) -> float | None:
        """Seconds until the next start, 0 while one is under way; None where none comes."""
        return None if self.next_start is None else max(0.0, self.next_start - now)
