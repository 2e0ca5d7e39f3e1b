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
NOISY = 4.0
"""An interval whose ends are further apart than this, as a ratio of the two, says nothing."""
TOO_NOISY = "too noisy to say"


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

    @property
    def is_noisy(self) -> bool:
        """Whether the interval is so wide that its middle says nothing."""
        return self.high > NOISY * self.low

    @property
    def in_words(self) -> str:
        """How many times as fast, in words."""
        return str(self) if self.is_noisy else f"{self} times as fast"

    def __str__(self) -> str:
        if self.is_noisy:
            return f"{TOO_NOISY} ({_shown(self.low)} to {_shown(self.high)})"
        return f"{_shown(self.middle)} [{_shown(self.low)} to {_shown(self.high)}]"


def _shown(ratio: float) -> str:
    """Three digits or so: other work on the machine may make a ratio as large as it likes."""
    return (
        f"{ratio:.2f}"
        if ratio < 10
        else f"{ratio:.1f}"
        if ratio < 100
        else f"{ratio:.0f}"
        if ratio < 1000
        else "≥ 1000"
    )


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
