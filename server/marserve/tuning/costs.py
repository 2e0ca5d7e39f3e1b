"""What batches of a layout cost, by their size, and by the length of their longest item if known. Pure."""

from __future__ import annotations

from statistics import fmean

from marserve.pool.dispatch.lengths.latency_goal import BatchCosts


class Costs:
    """Costs of lengths between two powers of two are one, as in the server."""

    def __init__(self) -> None:
        self._by_length: dict[int, BatchCosts] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return not self._by_length

    def learn(self, size: int, seconds: float, length: int = 1) -> None:
        """Learn that a batch, the longest of whose items is `length` long, took so long."""
        self._by_length.setdefault(_bucket(length), BatchCosts()).learn(size, seconds)

    def cost(self, size: int, longest: int | None = None) -> float:
        """How long a batch takes, in seconds; without a length the mean over those that are known."""
        if longest is None:
            return fmean(costs.cost(size) for costs in self._by_length.values())
        bucket = _bucket(longest)
        return self._by_length[min(self._by_length, key=lambda known: abs(known - bucket))].cost(size)

    def known(self) -> dict[int, float]:
        """The costs of the sizes that were seen: size to seconds."""
        sizes = sorted({size for costs in self._by_length.values() for size in costs.sizes})
        return {size: self.cost(size) for size in sizes}


def _bucket(length: int) -> int:
    return max(1, length).bit_length() - 1
