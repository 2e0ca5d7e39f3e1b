"""Counts values between bounds, and for percentiles between finer ones. It knows no names and no page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

SECONDS_BOUNDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
FINEST_S: Final = 0.0001
_STEP: Final = 1.05


def _fine_bounds() -> tuple[float, ...]:
    """Bounds at most 5 % apart from `FINEST_S` on, with each of `SECONDS_BOUNDS` among them."""
    bounds, bound = set(SECONDS_BOUNDS), FINEST_S
    while bound < SECONDS_BOUNDS[-1]:
        bounds.add(bound)
        bound *= _STEP
    return tuple(sorted(bounds))


FINE_BOUNDS: Final = _fine_bounds()
# Between which two of `SECONDS_BOUNDS` the values between two fine ones are.
_COARSE: Final = (*[bisect_left(SECONDS_BOUNDS, bound) for bound in FINE_BOUNDS], len(SECONDS_BOUNDS))


class Example(NamedTuple):
    """One value of a bucket, and the request it was measured for. `trace_id` is empty without a trace."""

    value: float
    request_id: str
    trace_id: str = ""


class Histogram:
    """Counts values between bounds. `buckets` has one more entry than there are bounds, for larger values.

    A value equal to a bound counts under it, as Prometheus' `le` says. `last` is the newest value. `examples` has the
    newest example of each bucket, and is None until `keep_examples`: ask for that before `exemplify`.
    """

    __slots__ = ("bounds", "buckets", "examples", "last", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.buckets = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.last = 0.0
        self.examples: list[Example | None] | None = None

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

    def keep_examples(self) -> None:
        """Keep the newest example of each bucket from now on."""
        if self.examples is None:
            self.examples = [None] * len(self.buckets)

    def exemplify(self, value: float, request_id: str, trace_id: str = "") -> None:
        """Keep a value that was counted as its bucket's example; without `keep_examples` nothing is kept.

        One without a trace does not take the place of one with a trace: where one request in a hundred has one, no
        page would show it.
        """
        if self.examples is None:
            return
        place = bisect_left(self.bounds, value)
        before = self.examples[place]
        if trace_id or before is None or not before.trace_id:
            self.examples[place] = Example(value, request_id, trace_id)

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.buckets)


class SecondsHistogram(Histogram):
    """Counts seconds between `SECONDS_BOUNDS` for the page, and between `FINE_BOUNDS` for percentiles.

    `fine` has one more entry than there are fine bounds. It is empty before the first value: a server may have
    a thousand models that nobody asks.
    """

    __slots__ = ("fine",)

    def __init__(self) -> None:
        super().__init__(SECONDS_BOUNDS)
        self.fine: list[int] = []

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        if not self.fine:
            self.fine = [0] * len(_COARSE)
        place = bisect_left(FINE_BOUNDS, value)
        self.fine[place] += times
        self.buckets[_COARSE[place]] += times
        self.sum += value * times
        self.last = value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count each of these values."""
        if not values:
            return
        if not self.fine:
            self.fine = [0] * len(_COARSE)
        fine, buckets = self.fine, self.buckets
        for value in values:
            place = bisect_left(FINE_BOUNDS, value)
            fine[place] += 1
            buckets[_COARSE[place]] += 1
        self.sum += sum(values)
        self.last = values[-1]
