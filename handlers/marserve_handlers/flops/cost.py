"""What a batch of any size takes, from counts of some sizes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class NotCounted(Exception):
    """The operations cannot be counted: the message says why, for describe."""


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs: `per_batch`, and `per_row` more for each row of it. A multiplication and an addition count as two."""

    per_batch: float
    per_row: float

    def of(self, rows: int) -> float:
        """FLOPs of one batch of so many rows."""
        return self.per_batch + self.per_row * rows


def fit(count: Callable[[int], int], rows: int) -> Cost:
    """What `count` says of batches of one, two and more rows, as a line; of `rows` alone where it is none.

    A model that takes no other size, and one whose FLOPs do not grow evenly, has what a row takes in a batch of `rows`.
    Raises what `count(rows)` raises.
    """
    seen = count(rows)
    larger = max(4, rows)
    try:
        one, two, many = count(1), count(2), count(larger)
    except Exception:  # a size that the model does not take: its own code says so in its own way
        return Cost(0.0, seen / max(1, rows))
    line = Cost(float(one - (two - one)), float(two - one))
    if line.per_batch >= 0 and line.of(larger) == many and line.of(rows) == seen:
        return line
    return Cost(0.0, seen / max(1, rows))
