"""By how much a version's counts grew in the last 1, 5 and 60 minutes, and since it was registered. Pure.

A sample keeps the counts as they stood. The figures of a window are the counts now, less those of the sample at the
window's begin. Samples are kept every 5 s for a minute, every 30 s for five minutes, and every 5 minutes for an hour:
at most `MOST_KEPT`, some 1 to 3 KiB each, as of the fine counts of times it has those that are not 0.
A sample without a change only prolongs the one before, so a version without requests keeps one sample without numbers.
Times are seconds on the monotonic clock.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

from marserve.telemetry.metrics.histogram import FINE_BOUNDS, Histogram, SecondsHistogram

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
_TIMES: Final = ("queue_seconds", "handler_seconds", "total_seconds")
_SIZES: Final = len(_PLAIN) + len(_TIMES)
_HISTOGRAMS: Final = (*_TIMES, "batch_sizes")
_BY_WORD: Final = ("answers", "errors", "refused", "worker_deaths")
_mark = attrgetter(*_PLAIN, *[f"{name}.sum" for name in _HISTOGRAMS])
_plain = attrgetter(*_PLAIN)
_times = attrgetter(*_TIMES)
_by_word = attrgetter(*_BY_WORD)

Words = Mapping[Any, int]
_FOUR_BYTES: Final = 2**32
_NOTHING: Final = (0,) * (len(FINE_BOUNDS) + 1)


class Fine(NamedTuple):
    """Of one histogram: at which places its fine counts are not 0, and what they are there."""

    places: array[int]
    counts: array[int]


# A protocol: `VersionMetrics` has windows.
class Counted(Protocol):
    """What is read of a version's counts."""

    queue_seconds: SecondsHistogram
    handler_seconds: SecondsHistogram
    total_seconds: SecondsHistogram
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
    """The counts as they stood from `at` to `until`. `numbers` is None, others empty, for counts of zero."""

    __slots__ = ("at", "fine", "numbers", "until", "words")

    def __init__(
        self, at: float, numbers: array[float] | None, fine: tuple[Fine, ...], words: tuple[Words, ...]
    ) -> None:
        self.at = self.until = at
        self.numbers = numbers
        self.fine = fine
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
            last = self._samples[-1] if self._samples else _Sample(now, None, (), ())
            self._samples.append(_Sample(now, _numbers_of(of), _fine_of(of, last.fine), _words_of(of, last.words)))
        else:
            self._samples.append(_Sample(now, None, (), ()))
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
            return _figures(now - self._began if self._began is not None else 0.0, of, None, (), ())
        if (found := self._first(now, within_s)) is None:
            return None
        first, seconds = found
        return _figures(seconds, of, first.numbers, first.fine, first.words)

    def busy_workers(self, now: float, busy_s: float) -> float | None:
        """`Figures.busy_workers` of the last minute alone, for each scrape; None before the first sample."""
        if (found := self._first(now, MINUTE_S)) is None:
            return None
        first, seconds = found
        return max(0.0, busy_s - (first.numbers[_BUSY] if first.numbers is not None else 0.0)) / seconds

    def batches(self, now: float, sizes: Histogram) -> tuple[float, float, float] | None:
        """Batches of the last minute, their requests, and its seconds, for each scrape; None before the first sample.

        `sizes` are the version's `batch_sizes`.
        """
        if (found := self._first(now, MINUTE_S)) is None:
            return None
        first, seconds = found
        before = first.numbers[_SIZES:] if first.numbers is not None else (0.0,)
        return sum(sizes.buckets) - sum(before[:-1]), sizes.sum - before[-1], seconds

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
    sums = list(accumulate(counts))
    wanted = part * sums[-1]
    if not wanted:
        return None
    place = bisect_left(sums, wanted)
    if place >= len(bounds):
        return bounds[-1]
    low = bounds[place - 1] if place else 0.0
    below = sums[place - 1] if place else 0
    return low + (bounds[place] - low) * (wanted - below) / counts[place]


def _mark_of(of: Counted) -> tuple[Any, ...]:
    """What changes with any of the counts: this is looked at for each version, whether it has requests or not."""
    return (*_mark(of), *[sum(words.values()) for words in _by_word(of)])


def _numbers_of(of: Counted) -> array[float]:
    """Plain counts, the sums of times, then the buckets and the sum of the sizes of batches."""
    numbers = array("d", _plain(of))
    numbers.extend([histogram.sum for histogram in _times(of)])
    numbers.extend(of.batch_sizes.buckets)
    numbers.append(of.batch_sizes.sum)
    return numbers


def _fine_of(of: Counted, before: tuple[Fine, ...]) -> tuple[Fine, ...]:
    """The fine counts of times: most are 0, as the times of one model are much alike. Places as `before` are shared."""
    kept = []
    for number, histogram in enumerate(_times(of)):
        places = array("H", [place for place, count in enumerate(histogram.fine) if count])
        if before and before[number].places == places:
            places = before[number].places
        counts = [histogram.fine[place] for place in places]
        kept.append(Fine(places, array("I" if max(counts, default=0) < _FOUR_BYTES else "Q", counts)))
    return tuple(kept)


def _words_of(of: Counted, before: tuple[Words, ...]) -> tuple[Words, ...]:
    """Counts by words; one that is as `before` is not kept twice."""
    words = _by_word(of)
    if not before:
        return tuple([dict(each) for each in words])
    return tuple([old if old == each else dict(each) for each, old in zip(words, before, strict=True)])


def _figures(
    seconds: float, of: Counted, numbers: array[float] | None, fine: tuple[Fine, ...], words: tuple[Words, ...]
) -> Figures:
    now = _numbers_of(of)
    grown = iter(now if numbers is None else [after - before for after, before in zip(now, numbers, strict=True)])
    plain = [next(grown) for _ in _PLAIN]
    before = fine or (None,) * len(_TIMES)
    times = [_fine_growth(each, old, next(grown)) for each, old in zip(_times(of), before, strict=True)]
    return Figures._make(
        (
            seconds,
            *map(int, plain[:-1]),
            plain[-1],
            *times,
            _growth(of.batch_sizes.bounds, grown),
            *[_grown(each, before) for each, before in zip(_by_word(of), words or ({},) * len(_BY_WORD), strict=True)],
        )
    )


def _fine_growth(of: SecondsHistogram, before: Fine | None, grown_sum: float) -> Growth:
    if not of.fine:
        return Growth(FINE_BOUNDS, _NOTHING, grown_sum)
    counts = of.fine.copy()
    if before is not None:
        for place, count in zip(*before, strict=True):
            counts[place] -= count
    return Growth(FINE_BOUNDS, counts, grown_sum)


def _growth(bounds: Sequence[float], grown: Iterator[float]) -> Growth:
    counts = [int(next(grown)) for _ in range(len(bounds) + 1)]
    return Growth(bounds, counts, next(grown))


def _grown(words: Words, before: Words) -> dict[Any, int]:
    """Those that grew."""
    grown = {word: count - before.get(word, 0) for word, count in words.items()}
    return {word: count for word, count in grown.items() if count > 0}
