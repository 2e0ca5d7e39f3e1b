"""By how much a version's counts grew in the last 1, 5 and 60 minutes, and since it was registered. Pure.

A sample keeps the counts as they stood. The figures of a window are the counts now, less those of the sample at the
window's begin. Samples are kept every 5 s for a minute, every 30 s for five minutes, and every 5 minutes for an hour:
at most `MOST_KEPT`, some 1 KiB each. A sample without a change only prolongs the one before, so a version without
requests keeps one sample without numbers. Times are seconds on the monotonic clock.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from marserve.telemetry.metrics.histogram import Histogram

SAMPLE_EVERY_S: Final = 5.0
MINUTE_S: Final = 60.0
HOUR_S: Final = 3600.0
SINCE_START: Final = math.inf
# Samples older than the first number are kept at distances of the second. A window's begin has closer ones behind it.
_SPACING: Final = ((340.0, 300.0), (70.0, 30.0))
_THIN_EVERY_S: Final = 30.0
MOST_KEPT: Final = 64

_PLAIN: Final = (
    *("requests", "retried", "isolated", "out_of_memory", "expired", "cancelled", "loads_on_demand", "evictions"),
    *("worker_starts", "worker_restarts", "busy_seconds"),
)
_BUSY: Final = len(_PLAIN) - 1
_HISTOGRAMS: Final = ("queue_seconds", "handler_seconds", "total_seconds", "batch_sizes")
_BY_WORD: Final = ("answers", "errors", "refused", "worker_deaths")
_mark = attrgetter(*_PLAIN, *[f"{name}.sum" for name in _HISTOGRAMS])
_plain = attrgetter(*_PLAIN)
_histograms = attrgetter(*_HISTOGRAMS)
_by_word = attrgetter(*_BY_WORD)

Words = Mapping[Any, int]


# A protocol: `VersionMetrics` has windows.
class Counted(Protocol):
    """What is read of a version's counts."""

    queue_seconds: Histogram
    handler_seconds: Histogram
    total_seconds: Histogram
    batch_sizes: Histogram


@dataclass(frozen=True, slots=True)
class Growth:
    """What a histogram grew by: `counts` has one more entry than `bounds`, for larger values."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean; None without a value."""
        count = self.count
        return self.sum / count if count else None

    def quantile(self, part: float) -> float | None:
        """As the function of this name."""
        return quantile(part, self.bounds, self.counts)


class Figures(NamedTuple):
    """What a version's counts grew by within `seconds`. The members are those of `VersionMetrics`."""

    seconds: float
    requests: int
    retried: int
    isolated: int
    out_of_memory: int
    expired: int
    cancelled: int
    loads_on_demand: int
    evictions: int
    worker_starts: int
    worker_restarts: int
    busy_seconds: float
    queue_seconds: Growth
    handler_seconds: Growth
    total_seconds: Growth
    batch_sizes: Growth
    answers: Mapping[int, int]
    errors: Mapping[str, int]
    refused: Mapping[str, int]
    worker_deaths: Mapping[str, int]

    @property
    def busy_workers(self) -> float:
        """How many workers ran batches at once, on average."""
        return self.per_second(self.busy_seconds)

    def per_second(self, count: float) -> float:
        """A count as a rate; 0 where no time has passed."""
        return count / self.seconds if self.seconds > 0 else 0.0


class _Sample:
    """The counts as they stood from `at` to `until`. `numbers` is None, and `words` empty, for counts of zero."""

    __slots__ = ("at", "numbers", "until", "words")

    def __init__(self, at: float, numbers: array[float] | None, words: tuple[Words, ...]) -> None:
        self.at = self.until = at
        self.numbers = numbers
        self.words = words


class Windows:
    """The samples of one version."""

    __slots__ = ("_began", "_last_mark", "_samples", "_thin_at")

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._began: float | None = None
        self._last_mark: tuple[Any, ...] = ()
        self._thin_at = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, now: float, of: Counted) -> None:
        """Keep the counts as they are now."""
        mark = _mark_of(of)
        if not self._samples:
            self._began, self._thin_at = now, now + _THIN_EVERY_S
        elif now <= self._samples[-1].until:
            return
        elif mark == self._last_mark:
            self._samples[-1].until = now
            self._drop_oldest(now)
            return
        self._last_mark = mark
        if any(mark):
            before = self._samples[-1].words if self._samples else ()
            self._samples.append(_Sample(now, _numbers_of(of), _words_of(of, before)))
        else:
            self._samples.append(_Sample(now, None, ()))
        self._drop_oldest(now)
        if now >= self._thin_at:
            self._thin_at = now + _THIN_EVERY_S
            self._thin(now)

    def figures(self, now: float, of: Counted, within_s: float = MINUTE_S) -> Figures | None:
        """The figures of the last `within_s` seconds, or of the time since the first sample if that is shorter.

        They may reach back further, by the distance of samples: `Figures.seconds` says how far. With `SINCE_START` all
        that was ever counted. None for a window before the first sample.
        """
        if within_s == SINCE_START:
            return _figures(now - self._began if self._began is not None else 0.0, of, None, ())
        if (found := self._first(now, within_s)) is None:
            return None
        first, seconds = found
        return _figures(seconds, of, first.numbers, first.words)

    def busy_workers(self, now: float, busy_s: float) -> float | None:
        """`Figures.busy_workers` of the last minute alone, for each scrape; None before the first sample."""
        if (found := self._first(now, MINUTE_S)) is None:
            return None
        first, seconds = found
        return max(0.0, busy_s - (first.numbers[_BUSY] if first.numbers is not None else 0.0)) / seconds

    def _first(self, now: float, within_s: float) -> tuple[_Sample, float] | None:
        """The sample at a window's begin, and how long ago the counts were last as it has them."""
        begin = now - within_s
        for sample in reversed(self._samples):
            if sample.at <= begin:
                return sample, now - min(begin, sample.until)
        if not self._samples or now <= self._samples[0].at:
            return None
        return self._samples[0], now - self._samples[0].at

    def _drop_oldest(self, now: float) -> None:
        samples = self._samples
        while len(samples) > 1 and (samples[1].at <= now - HOUR_S or len(samples) > MOST_KEPT):
            del samples[0]

    def _thin(self, now: float) -> None:
        kept = self._samples[:1]
        for sample, after in pairwise(self._samples[1:]):
            spacing = next((spacing for age, spacing in _SPACING if now - sample.at > age), 0.0)
            if after.at - kept[-1].until > spacing:
                kept.append(sample)
        if len(self._samples) > 1:
            kept.append(self._samples[-1])
        self._samples = kept


def quantile(part: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """The value that this part of the counted values stays under, read off between two bounds; None without a value.

    `counts` has one more entry than `bounds`, for larger values, of which only the last bound is known. The true value
    lies between the same two bounds.
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


def _mark_of(of: Counted) -> tuple[Any, ...]:
    """What changes with any of the counts: this is looked at for each version, whether it has requests or not."""
    return (*_mark(of), *[sum(words.values()) for words in _by_word(of)])


def _numbers_of(of: Counted) -> array[float]:
    """Plain counts, then the buckets and the sum of each histogram."""
    numbers = array("d", _plain(of))
    for histogram in _histograms(of):
        numbers.extend(histogram.buckets)
        numbers.append(histogram.sum)
    return numbers


def _words_of(of: Counted, before: tuple[Words, ...]) -> tuple[Words, ...]:
    """Counts by words; one that is as `before` is not kept twice."""
    words = _by_word(of)
    if not before:
        return tuple([dict(each) for each in words])
    return tuple([old if old == each else dict(each) for each, old in zip(words, before, strict=True)])


def _figures(seconds: float, of: Counted, numbers: array[float] | None, words: tuple[Words, ...]) -> Figures:
    now = _numbers_of(of)
    grown = iter(now if numbers is None else [after - before for after, before in zip(now, numbers, strict=True)])
    plain = [next(grown) for _ in _PLAIN]
    return Figures._make(
        (
            seconds,
            *map(int, plain[:-1]),
            plain[-1],
            *[_growth(histogram.bounds, grown) for histogram in _histograms(of)],
            *[_grown(each, before) for each, before in zip(_by_word(of), words or ({},) * len(_BY_WORD), strict=True)],
        )
    )


def _growth(bounds: Sequence[float], grown: Iterator[float]) -> Growth:
    counts = [int(next(grown)) for _ in range(len(bounds) + 1)]
    return Growth(bounds, counts, next(grown))


def _grown(words: Words, before: Words) -> dict[Any, int]:
    """Those that grew."""
    grown = {word: count - before.get(word, 0) for word, count in words.items()}
    return {word: count for word, count in grown.items() if count > 0}
