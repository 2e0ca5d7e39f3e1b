"""The flight recorder: the timelines of the last requests, always on, in bounded memory. No clock; I/O only
by `recorder_file.py`, if a file is asked for.

Up to two thousand requests a second each have a timeline from their first byte on. Beyond that a sample has, and a
request that turns out to be slow or to fail gets one at its end, of what is known then. The very last ones are all
kept. Older ones stand in a ring: all of them up to a thousand a second, beyond that a sample of the usual ones, and the
unusual ones before all others. Of each model the slowest of the last hour and the latest that failed are kept even
longer, so that the one slow request is still there hours later.

Nothing is computed for a request when it ends: it is appended to a list, which is sorted now and then. Most timelines
are forgotten soon, so that their memory is used again while the processor still has it at hand; keeping all of ten
thousand a second costs more than all other work on them.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from operator import attrgetter, sub
from pathlib import Path
from typing import Final

from marserve.messages import Span, Work
from marserve.telemetry.logs.bucket import Bucket
from marserve.telemetry.recorder_file import FileUnusable, RecordedFile, RecordedIds, RecorderFile, previous_of
from marserve.telemetry.timeline import BatchTimes, TimedVersion, Timeline, parts_of

# What a timeline takes in memory, with its id, and with a batch of its own.
RECORD_BYTES: Final = 1024
# What its place in a trace takes beside that, where traces are on.
TRACE_BYTES: Final = 512
# What a span of an author's takes.
SPAN_BYTES: Final = 256
# As many spans a request takes that another one made.
PART_SPANS: Final = 4
# For each model: how many of the slowest are kept, for how long, and how many of the failed.
SLOWEST_KEPT: Final = 16
SLOWEST_FOR_S: Final = 3600.0
FAILED_KEPT: Final = 32
# So many are sorted at once, and until then all of them are known.
SORTED_TOGETHER: Final = 64
# How many of the last are known in any case.
LATEST: Final = 256
# How many usual requests go on into the ring in a second, and how many may be saved up; as many unusual ones beside.
RING_PER_S, RING_BURST = 1000.0, 2000.0
# A request that took so many times what requests around it took is unusual.
UNUSUAL: Final = 2.0
# Timelines that are begun in each tenth of a second, and those that are made at the end of requests beside them.
BEGUN_TOGETHER, LATE_TOGETHER, EACH_S = 200, 100, 0.1
# The least ring, whatever limit is set.
LEAST_RECORDS: Final = 64

# For thousands of requests a second, without a step of Python for each.
_of, _error, _parts = attrgetter("of"), attrgetter("error"), attrgetter("parts")
_began, _written_at = attrgetter("began"), attrgetter("written_at")


class _Kept:
    """What is kept longer of one model. A request that is both slow and failed stands in both."""

    __slots__ = ("failed", "fresh_until", "slow_above_s", "slowest")

    def __init__(self) -> None:
        self.slowest: list[tuple[float, int, Timeline]] = []  # a heap, the quickest first
        self.failed: list[Timeline] = []  # an empty deque takes twelve times as much, for each model that ever was
        self.slow_above_s = -1.0
        self.fresh_until = 0.0  # when the oldest of the slowest has been kept for its time


class Recorder:
    """Takes the timelines of requests that have ended. `limit_bytes` bounds all that is kept, of `record_bytes` each.

    Three quarters of it are the ring's; the rest is for what is kept longer, and for spans.
    """

    def __init__(self, limit_bytes: int, record_bytes: int = RECORD_BYTES) -> None:
        self.capacity = max(LEAST_RECORDS, limit_bytes * 3 // 4 // record_bytes)
        self._most_kept = max(LEAST_RECORDS, limit_bytes // 8 // record_bytes)
        self._most_spans = max(LEAST_RECORDS, limit_bytes // 8 // SPAN_BYTES)
        self._unsorted: list[Timeline] = []
        self._late: list[Timeline] = []
        self._latest: deque[Timeline] = deque(maxlen=LATEST)
        self._ring: deque[Timeline] = deque(maxlen=self.capacity)
        self._room_for_usual = Bucket(RING_PER_S, RING_BURST)
        self._room_for_unusual = Bucket(RING_PER_S, RING_BURST)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._kept_count = 0
        self._with_spans: deque[tuple[list[Span] | list[Timeline], int]] = deque()
        self._spans = 0
        self._order = count()
        self.left = 0.0
        """How many more timelines are begun until `refill_at`."""
        self.late_left = 0.0
        self.refill_at = -math.inf
        self.slow_above_s = 0.0
        """From how long on a request without a timeline may be worth one at its end; its version says whether it is."""
        self.always_above_s = math.inf
        """From how long on it is worth one whatever its version says."""

    def take(self, timeline: Timeline) -> None:
        """A request that has a timeline has ended. Called on the event loop."""
        unsorted = self._unsorted
        unsorted.append(timeline)
        if len(unsorted) >= SORTED_TOGETHER:
            self.sort()

    def begins(self, now: float) -> bool:
        """Whether a request that begins now has a timeline."""
        if self.left <= 0 and not self.refill(now):
            return False
        self.left -= 1
        return True

    def refill(self, now: float) -> bool:
        """Let timelines be begun again, if it is time for that."""
        if now < self.refill_at:
            return False
        self.left, self.late_left, self.refill_at = BEGUN_TOGETHER, LATE_TOGETHER, now + EACH_S
        return True

    def take_late(self, timeline: Timeline) -> None:
        """A request that had no timeline was slow, or has failed. It is in no histogram: others like it are not."""
        self.late_left -= 1
        self._late.append(timeline)
        if len(self._late) >= SORTED_TOGETHER:
            self.sort()

    def sort(self) -> None:
        """Count the stages of the requests taken last, and choose which of them are kept longer."""
        ended, self._unsorted = self._unsorted, []
        late, self._late = self._late, []
        self._latest.extend(ended)
        self._latest.extend(late)
        if any(map(_parts, ended)) or any(map(_parts, late)):
            for timeline in (*ended, *late):
                if timeline.parts:
                    self._bound(timeline.parts, sum(PART_SPANS for _ in parts_of(timeline)))
        versions = _by_version(ended)
        for version, mine in versions:
            version.observe_ended(mine)
            self._sort_out(version, mine, is_learning=True)
        if versions:
            self.slow_above_s = min(version.slow_above_s for version, _ in versions)
        for version, mine in _by_version(late):
            self._sort_out(version, mine, is_learning=False)

    def _sort_out(self, version: TimedVersion, ended: Sequence[Timeline], *, is_learning: bool) -> None:
        """Choose among requests of one version that ended one after the other, and learn what is usual for it."""
        model, walls_s = version.model, _walls_s(ended)
        slowest_s, now = max(walls_s), ended[-1].written_at
        if is_learning:
            found_s = sum(walls_s) / len(walls_s) * UNUSUAL
            known_s = version.slow_above_s
            # One alone says little where others are known: of a model with few requests among many of others.
            version.slow_above_s = found_s if len(ended) > 1 or not known_s else 0.9 * known_s + 0.1 * found_s
        usual_s = version.slow_above_s
        has_failed = any(map(_error, ended))
        kept = self._kept.get(model)
        if kept is None or has_failed or slowest_s > kept.slow_above_s or now > kept.fresh_until:
            for timeline, wall_s in zip(ended, walls_s, strict=True):
                if kept is None or timeline.error or wall_s > kept.slow_above_s or now > kept.fresh_until:
                    kept = self._keep(model, timeline)
        chosen: Sequence[Timeline]
        if self._room_for_usual.spend(now, len(ended)):
            chosen = ended
        elif slowest_s > usual_s or has_failed:
            is_unusual = [
                wall_s > usual_s or timeline.error != "" for timeline, wall_s in zip(ended, walls_s, strict=True)
            ]
            batches = {id(each.last) for each, is_one in zip(ended, is_unusual, strict=True) if is_one and each.last}
            chosen = [
                each for each, is_one in zip(ended, is_unusual, strict=True) if is_one or id(each.last) in batches
            ]
            if not self._room_for_unusual.spend(now, len(chosen)):
                return
        else:
            return
        self._ring.extend(chosen)
        last: BatchTimes | None = None
        for timeline in chosen:
            if timeline.last is not last:
                last = timeline.last
                if last is not None and last.work is not None and last.work.spans:
                    self._bound_spans(last.work)

    def _keep(self, model: str, timeline: Timeline) -> _Kept:
        """Keep a slow or failed request longer, and give up others for it."""
        kept = self._kept.get(model)
        if kept is None:
            kept = self._kept[model] = _Kept()
        else:
            self._kept.move_to_end(model)
        before = len(kept.slowest) + len(kept.failed)
        if timeline.has_failed:
            kept.failed.append(timeline)
            del kept.failed[:-FAILED_KEPT]
        last = timeline.last
        if last is not None and last.work is not None and last.work.spans:
            self._bound_spans(last.work)
        wall_s, now = timeline.wall_s, timeline.written_at
        slowest = kept.slowest
        if now > kept.fresh_until:
            slowest[:] = [entry for entry in slowest if now - entry[2].written_at <= SLOWEST_FOR_S]
            heapq.heapify(slowest)
            kept.slow_above_s = -1.0
        if wall_s > kept.slow_above_s:
            put = heapq.heapreplace if len(slowest) >= SLOWEST_KEPT else heapq.heappush
            put(slowest, (wall_s, next(self._order), timeline))
            kept.slow_above_s = slowest[0][0] if len(slowest) >= SLOWEST_KEPT else -1.0
            kept.fresh_until = min(entry[2].written_at for entry in slowest) + SLOWEST_FOR_S
        self._kept_count += len(kept.slowest) + len(kept.failed) - before
        while self._kept_count > self._most_kept and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._kept_count -= len(gone.slowest) + len(gone.failed)
        return kept

    def _bound_spans(self, work: Work) -> None:
        """Forget the spans of the oldest batches if there are too many of them."""
        if self._with_spans and self._with_spans[-1][0] is work.spans:
            return  # a mate has them
        self._bound(work.spans, len(work.spans))

    def _bound(self, what: list[Span] | list[Timeline], spans: int) -> None:
        """Count what takes as much as so many spans, and forget the oldest such ones if that is too much."""
        self._with_spans.append((what, spans))
        self._spans += spans
        while self._spans > self._most_spans:
            gone, kept = self._with_spans.popleft()
            self._spans -= kept
            gone.clear()

    def close(self) -> None:
        """Nothing is taken any more."""

    # ------------------------------------------------------------------------------------------- who asks

    def previous(self) -> list[Timeline]:
        """The requests of the server before, the oldest first, where it left a file. Reads it, so it takes a while."""
        return []

    def may_have_previous(self, request_id: str) -> bool:
        """Whether one of those has this id. Reads the file the first time; one thread may ask at a time."""
        return False

    def __iter__(self) -> Iterator[Timeline]:
        """All that are known, each once, the newest first."""
        self.sort()
        known = {id(each): each for each in (*self._ring, *self._latest)}
        for kept in self._kept.values():
            known.update((id(each), each) for each in (*kept.failed, *(entry[2] for entry in kept.slowest)))
        return iter(sorted(known.values(), key=lambda each: -each.written_at))


def _by_version(ended: Sequence[Timeline]) -> list[tuple[TimedVersion, Sequence[Timeline]]]:
    versions: list[TimedVersion] = list(dict.fromkeys(map(_of, ended)))
    if len(versions) == 1:
        return [(versions[0], ended)]
    return [(version, [timeline for timeline in ended if timeline.of is version]) for version in versions]


def _walls_s(ended: Sequence[Timeline]) -> list[float]:
    return list(map(sub, map(_written_at, ended), map(_began, ended)))


def of_id(request_id: str, known: Iterable[Timeline]) -> list[Timeline]:
    """The requests of this id, of the server's, the client's or a trace's, in the order given."""
    return [
        each
        for each in known
        if request_id in (each.id, each.client_id) or (each.trace is not None and each.trace.trace_id == request_id)
    ]


class FiledRecorder(Recorder):
    """A recorder that writes each timeline into a file, too, which outlives the server."""

    def __init__(self, limit_bytes: int, path: Path, record_bytes: int = RECORD_BYTES) -> None:
        """Raises FileUnusable."""
        super().__init__(limit_bytes, record_bytes)
        self._path = path
        self._file = RecorderFile(path, limit_bytes)
        self._previous_ids = RecordedIds(previous_of(path))

    def take(self, timeline: Timeline) -> None:
        """A request has ended."""
        self._file.write(timeline)
        super().take(timeline)

    def take_late(self, timeline: Timeline) -> None:
        """A request that had no timeline was slow, or has failed."""
        self._file.write(timeline)
        super().take_late(timeline)

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def may_have_previous(self, request_id: str) -> bool:
        """Whether one of the server before has this id."""
        return self._previous_ids.has(request_id)

    def previous(self) -> list[Timeline]:
        """The requests of the server before, if its file is there."""
        try:
            return list(RecordedFile.at(previous_of(self._path)))
        except FileUnusable:
            return []
