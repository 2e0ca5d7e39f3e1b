"""How many times as fast one build is as another, from pairs that took turns. Pure.

Machines are shared and clocks change: a pair is two measurements right after each other, and only its ratio counts.
The median of nine ratios lies between the second and the eighth of them with a certainty of 96 %, whatever their
distribution (1 - 2 * (1 + 9) / 2**9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PAIRS = 9


@dataclass(frozen=True, slots=True)
class Ratio:
    """`middle` times as fast, between `low` and `high` with a certainty of 96 %."""

    middle: float
    low: float
    high: float

    @property
    def is_faster(self) -> bool:
        """Whether the whole interval says so."""
        return self.low > 1.0

    @property
    def is_slower(self) -> bool:
        """Whether the whole interval says so."""
        return self.high < 1.0

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f} to {self.high:.2f}]"


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio from pairs of seconds for the same work, reference first. Fewer than nine give the whole span.

    Raises ValueError for no pairs, and for seconds that are not positive.
    """
    if not pairs:
        raise ValueError("no pairs were measured")
    if any(not seconds > 0 for pair in pairs for seconds in pair):
        raise ValueError("a measurement took no time: more calls make one")
    ratios = sorted(reference / other for reference, other in pairs)
    left_out = 1 if len(ratios) >= PAIRS else 0
    return Ratio(median(ratios), ratios[left_out], ratios[-1 - left_out])
