"""A token bucket: an allowance that fills with time. Pure: callers pass the time, in seconds on the monotonic clock."""

from __future__ import annotations

import math


class Bucket:
    """Fills with `rate` a second up to `burst`, and is full at first."""

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, -math.inf

    def spend(self, now: float, cost: float) -> bool:
        """Take `cost` out; False, with nothing taken, if less is in."""
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
        if self._level < cost:
            return False
        self._level -= cost
        return True
