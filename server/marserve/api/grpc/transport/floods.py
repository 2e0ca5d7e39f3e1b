"""Tells clients that flood a connection with frames that cost them nothing from those that work. Pure.

Frames that carry a call earn credit, all others (settings, pings, priorities, empty data, unknown ones) spend it. Time
gives some back. A client that has spent all is sent away. Pings are watched beside that: a client that asks whether the
server is there more often than it may, while nothing else goes on, is sent away after `MOST_EARLY_PINGS`, as grpcio's
own server does.

Streams that a client opens and resets at once (CVE-2023-44487) need no count here: a reset stream keeps its place among
the calls of its connection until its work has ended.
"""

from __future__ import annotations

from typing import Final

MOST_CREDIT: Final = 4000.0
EARNED: Final = 20.0
CREDIT_PER_S: Final = 200.0
MOST_EARLY_PINGS: Final = 2


class Floods:
    """The account of one connection. Times are seconds on the monotonic clock."""

    __slots__ = ("_at", "_credit", "_early_pings", "_least_ping_interval_s", "_pinged_at")

    def __init__(self, least_ping_interval_s: float, now: float) -> None:
        self._least_ping_interval_s = least_ping_interval_s
        self._credit = MOST_CREDIT
        self._at = now
        self._pinged_at = -float("inf")
        self._early_pings = 0

    def earn(self) -> None:
        """A frame of a call has come, or something was sent to the client."""
        self._early_pings = 0
        if self._credit < MOST_CREDIT:
            self._credit += EARNED

    def spend(self, now: float) -> bool:
        """A frame that carries no call has come. False: it was one too many."""
        self._credit = min(MOST_CREDIT, self._credit + (now - self._at) * CREDIT_PER_S) - 1
        self._at = now
        return self._credit >= 0

    def ping(self, now: float) -> bool:
        """The client has asked whether the server is there. False: too often."""
        is_early = now - self._pinged_at < self._least_ping_interval_s
        self._pinged_at = now
        self._early_pings += is_early
        return self._early_pings <= MOST_EARLY_PINGS and self.spend(now)
