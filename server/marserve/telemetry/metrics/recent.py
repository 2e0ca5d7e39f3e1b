"""Figures of the last minute: requests a second, the time that 95 % stayed under, requests a batch. Pure.

A sample keeps the counts of a version as they stood; the figures are the counts since the oldest sample that is kept.
Times are seconds on the monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from marserve.telemetry.metrics.histogram import Histogram

SAMPLE_EVERY_S: Final = 5.0
KEPT: Final = 12


class Figures(NamedTuple):
    """Of the last minute. `p95_s` and `mean_batch` are None without an answer, or a batch."""

    requests_per_s: float
    p95_s: float | None
    mean_batch: float | None


class _Sample(NamedTuple):
    at: float
    answered: tuple[int, ...]
    batches: int
    batched: float
    busy_s: float = 0.0


class Recent:
    """The samples of one version."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT)

    def sample(self, now: float, total_seconds: Histogram, batch_sizes: Histogram, busy_s: float = 0.0) -> None:
        """Keep the counts as they are now. `busy_s` is for how long workers have run batches."""
        self._samples.append(_taken(now, total_seconds, batch_sizes)._replace(busy_s=busy_s))

    def busy_workers(self, now: float, busy_s: float) -> float | None:
        """How many workers ran batches at once, on average, up to now; None before the first sample."""
        if not self._samples or now <= self._samples[0].at:
            return None
        first = self._samples[0]
        return max(0.0, busy_s - first.busy_s) / (now - first.at)

    def figures(self, now: float, total_seconds: Histogram, batch_sizes: Histogram) -> Figures | None:
        """The figures up to now; None before the first sample."""
        if not self._samples or now <= self._samples[0].at:
            return None
        first, last = self._samples[0], _taken(now, total_seconds, batch_sizes)
        answered = [after - before for before, after in zip(first.answered, last.answered, strict=True)]
        batches = last.batches - first.batches
        return Figures(
            sum(answered) / (now - first.at),
            quantile(0.95, total_seconds.bounds, answered),
            (last.batched - first.batched) / batches if batches else None,
        )


def quantile(part: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """The value that this part of the counted values stays under, read off between two bounds; None without a value.

    `counts` has one more entry than `bounds`, for larger values, of which only the last bound is known.
    """
    wanted = part * sum(counts)
    if not wanted:
        return None
    below = 0
    for (low, high), count in zip(pairwise((0.0, *bounds)), counts, strict=False):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]


def _taken(now: float, total_seconds: Histogram, batch_sizes: Histogram) -> _Sample:
    return _Sample(now, tuple(total_seconds.buckets), sum(batch_sizes.buckets), batch_sizes.sum)
