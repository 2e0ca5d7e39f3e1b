"""Whether a build is slower than its baseline beyond chance, from turns of the two right after each other. Pure.

A turn is some requests to one of the two; a pair is a turn of each. Machines are shared and clocks change, so that only
the ratio within a pair counts. A turn's time is the mean of its requests' times without the slowest twentieth: it shows
a fault of some requests, and not the machine's hiccups. How many of n ratios lie above their true median is a toss of n
coins: the interval leaves out so many at each end that a bound is wrong in at most one run of five hundred.

An equal build may still be a little faster or slower, by where its memory lies. So what counts as slower is an interval
that lies wholly above 1 by more than what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from marserve.registry.observing.proportions import highest_rate, lowest_rate

LEAST_PAIRS: Final = 9
DOUBT: Final = 1 / 500
ALLOWED: Final = 0.05
_LEFT_OUT: Final = 0.05


@dataclass(frozen=True, slots=True)
class Times:
    """How many times as long one build takes as another: the median of the pairs, and its interval."""

    middle: float
    low: float
    high: float
    pairs: int

    def is_slower(self, allowed: float = ALLOWED) -> bool:
        """Whether it is slower, beyond chance and beyond what is allowed."""
        return self.low > 1.0 + allowed

    def is_faster(self, allowed: float = ALLOWED) -> bool:
        """Whether it is faster, in the same sense."""
        return self.high < 1.0 / (1.0 + allowed)

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f} to {self.high:.3f}]"


def turn_s(seconds: Sequence[float]) -> float:
    """The time of a turn: the mean without the slowest twentieth. Raises ValueError for no times."""
    if not seconds:
        raise ValueError("a turn without an answer has no time")
    kept = sorted(seconds)[: max(1, len(seconds) - math.ceil(_LEFT_OUT * len(seconds)))]
    return fmean(kept)


def compare(pairs: Sequence[tuple[float, float]]) -> Times:
    """How many times as long the second of each pair takes. Raises ValueError for fewer than nine pairs."""
    if len(pairs) < LEAST_PAIRS:
        raise ValueError(f"{len(pairs)} pairs show nothing; it takes {LEAST_PAIRS}")
    if any(not seconds > 0 for pair in pairs for seconds in pair):
        raise ValueError("a turn took no time")
    ratios = sorted(other / first for first, other in pairs)
    left_out = left_out_of(len(ratios))
    return Times(median(ratios), ratios[left_out], ratios[-1 - left_out], len(ratios))


def left_out_of(pairs: int) -> int:
    """How many ratios each end of the interval leaves out."""
    left_out, tail = 0, 1.0
    while tail + math.comb(pairs, left_out + 1) <= DOUBT * 2**pairs:
        left_out += 1
        tail += math.comb(pairs, left_out)
    return left_out


def fails_more(failed: int, requests: int, failed_before: int, requests_before: int) -> bool:
    """Whether a build fails more often than its baseline, beyond chance."""
    return lowest_rate(failed, requests, DOUBT) > highest_rate(failed_before, requests_before, DOUBT)
