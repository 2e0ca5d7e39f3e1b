"""Percentiles of measured times, and between which times each lies for sure. Pure.

The bounds are order statistics: how many of n times lie below the true percentile is binomial, whatever the times'
distribution. Each bound holds with a certainty of 95 %. The p99 of fewer than 300 times has no upper bound: even the
largest of them may lie below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from marserve.registry.observing.proportions import at_least, at_most

DOUBT: Final = 0.05
SHARES: Final = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Percentile:
    """The time that a `share` of the requests was answered within, in seconds.

    `low` and `high` are the bounds of the true one. All three are None where too few requests were measured: it takes
    `needed` of them.
    """

    share: float
    needed: int
    seconds: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def name(self) -> str:
        """p50, p99.9."""
        return f"p{self.share * 100:g}"


def needed_for(share: float) -> int:
    """How many times have an upper bound for this percentile: three above it on average."""
    return math.ceil(round(3 / (1 - share), 6))


def percentile_of(ordered: Sequence[float], share: float) -> Percentile:
    """A percentile of times in rising order."""
    count, needed = len(ordered), needed_for(share)
    if count < needed:
        return Percentile(share, needed)
    place = min(count - 1, int(share * count))
    return Percentile(
        share, needed, ordered[place], ordered[_below(count, share)], ordered[min(count - 1, _above(count, share))]
    )


def percentiles_of(seconds: Sequence[float]) -> list[Percentile]:
    """All percentiles that are shown, of times in any order."""
    ordered = sorted(seconds)
    return [percentile_of(ordered, share) for share in SHARES]


def _below(count: int, share: float) -> int:
    """The largest place whose time is at most the percentile: that many times or more lie below it, for sure."""
    low, high = 0, count  # `low` + 1 of the times lie below the percentile, surely enough; `high` + 1 do not
    while high - low > 1:
        middle = (low + high) // 2
        if at_least(middle + 1, count, share) >= 1 - DOUBT:
            low = middle
        else:
            high = middle
    return low


def _above(count: int, share: float) -> int:
    """The smallest place whose time is at least the percentile: at most so many times lie below it, for sure."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        if at_most(middle, count, share) >= 1 - DOUBT:
            high = middle
        else:
            low = middle
    return high
