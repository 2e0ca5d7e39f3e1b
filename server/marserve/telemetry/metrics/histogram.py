"""Counts values between bounds. It knows no names and no page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values between bounds. `buckets` has one more entry than there are bounds, for larger values.

    A value equal to a bound counts under it, as Prometheus' `le` says. `last` is the newest value.
    """

    __slots__ = ("bounds", "buckets", "last", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.last = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.buckets[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.last = value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of these values; those of one batch mostly fall between the same two bounds."""
        if len(values) < 2:
            for value in values:
                self.observe(value)
            return
        bounds = self.bounds
        first = bisect_left(bounds, min(values))
        if first == bisect_left(bounds, max(values)):
            self.buckets[first] += len(values)
        else:
            for value in values:
                self.buckets[bisect_left(bounds, value)] += 1
        self.sum += sum(values)
        self.last = values[-1]

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.buckets)
