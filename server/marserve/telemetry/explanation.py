"""Why a request took as long as it did: its stages, weighed with what its worker and the server did meanwhile. Pure.

Each second of a request goes to one cause. What is known for certain comes first (a stalled loop, collections, waiting
for a processor, printing, a worker that was loading); the rest of a stage goes to what the stage stands for. The
largest share is the cause, and shares of a tenth and more are named beside it. The server's own work is a stalled loop
only if it took long; else it belongs to the work itself, whose cause is `handler`, and the sentence says that nothing
held it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from statistics import median
from typing import Final, Literal, NamedTuple, get_args

from marserve.telemetry.happenings import Happening
from marserve.telemetry.timeline import STAGES, BatchTimes, Stage, Timeline, parts_of, seconds_by_stage

Cause = Literal[
    "queue",
    "full_batches",
    "slow_mate",
    "cold_worker",
    "loop_stalled",
    "large_body",
    "neighbour",
    "printing",
    "garbage_collection",
    "eviction",
    "rollback",
    "slow_client",
    "handler",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

# The stages in which a request is read, those in which the server's own loop does the work, those of the worker beside
# its author's code, and those in which a body is passed on.
READING: Final[tuple[Stage, ...]] = ("header", "body")
BY_SERVER: Final[tuple[Stage, ...]] = (*READING, "admit", "send", "return", "write")
BY_WORKER: Final[tuple[Stage, ...]] = ("decode", "encode")
WAITING: Final[tuple[Stage, ...]] = ("queue",)
PASSED_ON: Final[tuple[Stage, ...]] = ("admit", "send", "decode")

# A body from this size on may be why its reading and decoding took long.
LARGE_BYTES: Final = 256 * 1024
# A body that comes more slowly than this, in bytes a second, is held up by its client or the network.
SLOW_BYTES_PER_S: Final = 4 << 20
# From so long on a client that sends its request is slow, and the server's loop busy: less is what both always take.
LEAST_HELD_S: Final = 0.005
# A batch that took so many times what batches of its version take is one with a slow request in it.
UNUSUAL: Final = 2.0
# What is usual is known from more than so many batches.
LEAST_BATCHES: Final = 3
# Shares from this part of the whole on are named beside the cause.
NAMED_SHARE: Final = 0.1
# What the stages of the server are if they were short.
OWN_WORK: Final = "the server's own work"
# So many of the requests that a request made are explained with it, the longest ones.
MOST_PARTS_EXPLAINED: Final = 3


class Explanation(NamedTuple):
    """The cause of most of the time, in a sentence, and the other causes that count, the larger first.

    `seconds` is what each cause took; together they are the whole.
    """

    cause: Cause
    why: str
    also: Sequence[str]
    seconds: dict[Cause, float]


class Evidence:
    """What is known of other requests and of the server, put in order once for many explanations."""

    def __init__(self, timelines: Iterable[Timeline], happenings: Iterable[Happening]) -> None:
        self.happenings = list(happenings)
        self._members: dict[int, list[Timeline]] = defaultdict(list)
        batches: dict[tuple[str, str], dict[int, BatchTimes]] = defaultdict(dict)
        for each in _with_parts(timelines):
            if each.last is not None:
                self._members[id(each.last)].append(each)
                batches[each.model, each.version][id(each.last)] = each.last
        self._batches = {
            version: sorted(of_version.values(), key=lambda batch: batch.sent_at)
            for version, of_version in batches.items()
        }
        # Until when all batches up to each one had landed, so that those that ran at some time are found quickly.
        self._landed = {
            version: list(accumulate((batch.landed_at for batch in of_version), max))
            for version, of_version in self._batches.items()
        }
        self._largest = {
            version: max(batch.size for batch in of_version) for version, of_version in self._batches.items()
        }
        self._typical_s: dict[tuple[str, str], float | None] = {}

    def members(self, batch: BatchTimes) -> Sequence[Timeline]:
        """The known requests of a batch."""
        return self._members.get(id(batch), ())

    def batches(self, timeline: Timeline) -> Sequence[BatchTimes]:
        """The known batches of a request's version, in the order in which they were sent."""
        return self._batches.get((timeline.model, timeline.version), ())

    def landed_after(self, timeline: Timeline, begin: float, end: float) -> Sequence[BatchTimes]:
        """Those of them that were sent until `end`, from the first one on that landed after `begin`."""
        batches = self.batches(timeline)
        landed = self._landed.get((timeline.model, timeline.version), ())
        return batches[bisect_right(landed, begin) : bisect_right(batches, end, key=_sent)]

    def largest(self, timeline: Timeline) -> int:
        """The size of the largest of them, 0 without one."""
        return self._largest.get((timeline.model, timeline.version), 0)

    def typical_handle_s(self, timeline: Timeline) -> float | None:
        """What batches of its version usually take in the handler; None if too few are known."""
        version = timeline.model, timeline.version
        if version not in self._typical_s:
            seconds = [batch.handler_s for batch in self.batches(timeline) if batch.landed_at]
            self._typical_s[version] = median(seconds) if len(seconds) > LEAST_BATCHES else None
        return self._typical_s[version]


def explain(timeline: Timeline, evidence: Evidence) -> Explanation:
    """Explain one request, which may be among the evidence."""
    return _Case(timeline, evidence).explain()


class _Case:
    def __init__(self, timeline: Timeline, evidence: Evidence) -> None:
        self.of = timeline
        self.evidence = evidence
        self.stages = dict(zip(STAGES, seconds_by_stage(timeline), strict=True))
        self.shares: dict[Cause, float] = defaultdict(float)
        self.words: dict[Cause, str] = {}
        self.begin, self.end = timeline.began, timeline.written_at
        self.happenings = [each for each in evidence.happenings if each.began <= self.end]
        self.queued = (timeline.admitted_at or self.end, (timeline.admitted_at or self.end) + self.stages["queue"])

    def explain(self) -> Explanation:
        self._weigh_stalls()
        self._weigh_worker()
        self._weigh_client()
        self._weigh_queue()
        self._weigh_parts()
        self._weigh_handler()
        own_s = self._weigh_rest()
        shares = {cause: share for cause, share in self.shares.items() if share > 0.0}
        handler_s = shares.get("handler", 0.0)
        least_s = NAMED_SHARE * (sum(shares.values()) + own_s)
        ranked = sorted(shares, key=lambda cause: -shares[cause])
        shares["handler"] = handler_s + own_s
        if not ranked or own_s > self.shares[ranked[0]]:
            also = [self._sentence(cause) for cause in ranked if cause != "handler" and shares[cause] >= least_s]
            return Explanation("handler", _of_the_work(handler_s, own_s, is_held=bool(also)), also, shares)
        also = [self._sentence(cause) for cause in ranked[1:] if self.shares[cause] >= least_s]
        if own_s and own_s >= least_s:
            also.append(f"{_ms(own_s)}: {OWN_WORK}")
        return Explanation(ranked[0], self._sentence(ranked[0]), also, shares)

    def _sentence(self, cause: Cause) -> str:
        return f"{_ms(self.shares[cause])}: {self.words.get(cause, cause)}"

    def _give(self, cause: Cause, stage: Stage, seconds: float, words: str) -> None:
        """Let a cause have so much of a stage's time, at most all that is left of it."""
        given = min(max(0.0, seconds), self.stages[stage])
        if given <= 0.0:
            return
        self.stages[stage] -= given
        self.shares[cause] += given
        self.words.setdefault(cause, words)

    # --------------------------------------------------------------------------------------------- by evidence

    def _weigh_stalls(self) -> None:
        """The server's loop stood still, or collected garbage, while the request needed it."""
        at = self.begin
        spans: dict[Stage, tuple[float, float]] = {}
        for stage in STAGES:
            spans[stage] = (at, at + self.stages[stage])
            at += self.stages[stage]
        for each in self.happenings:
            if each.kind not in ("stall", "collection"):
                continue
            cause: Cause = "loop_stalled" if each.kind == "stall" else "garbage_collection"
            for stage in (*BY_SERVER, *WAITING):
                overlap_s = each.overlap_s(*spans[stage])
                if overlap_s:
                    self._give(cause, stage, overlap_s, each.text)

    def _weigh_worker(self) -> None:
        """What its worker says held it up."""
        last = self.of.last
        work = None if last is None else last.work
        if work is None:
            return
        self._give(
            "garbage_collection", "handle", work.collected_s, "the worker collected garbage while it ran the batch"
        )
        self._give("printing", "handle", work.printed_s, "the worker waited while it printed")
        self._give("neighbour", "handle", work.waited_s, "the worker was ready, but other processes had the processor")

    def _weigh_client(self) -> None:
        of, stages = self.of, self.stages
        words = f"the client took its stream so slowly that the worker had to wait, {_bytes(of.bytes_out)} in all"
        self._give("slow_client", "handle", of.held_s, words)
        read_s = sum(stages[stage] for stage in READING)
        if read_s >= LEAST_HELD_S or of.bytes_in >= LARGE_BYTES:
            is_slow = of.bytes_in < LARGE_BYTES or of.bytes_in / read_s < SLOW_BYTES_PER_S
            cause: Cause = "slow_client" if is_slow else "large_body"
            words = (
                f"the client took so long to send {_bytes(of.bytes_in)}"
                if is_slow
                else f"reading a body of {_bytes(of.bytes_in)}"
            )
            for stage in READING:
                self._give(cause, stage, stages[stage], words)
        if of.bytes_in >= LARGE_BYTES:
            for stage in PASSED_ON:
                self._give("large_body", stage, stages[stage], f"passing on and decoding {_bytes(of.bytes_in)}")
        if of.bytes_out >= LARGE_BYTES or of.first_piece_at:
            self._give(
                "slow_client", "write", stages["write"], f"the client took so long to take {_bytes(of.bytes_out)}"
            )

    def _weigh_queue(self) -> None:
        of, stages = self.of, self.stages
        if not stages["queue"]:
            return
        begin, end = self.queued
        mine = [each for each in self.happenings if each.model == of.model]
        rolled = [each for each in mine if each.kind == "rollback" and each.went_on(begin, end)]
        if of.moved_from and rolled:
            self._give(
                "rollback",
                "queue",
                stages["queue"],
                f"it waited for version {of.moved_from}, which was taken back meanwhile ({rolled[-1].text})",
            )
        load_s = max((each.overlap_s(begin, end) for each in mine if each.kind == "load"), default=0.0)
        if load_s > 0.0:
            evicted = [each for each in mine if each.kind == "eviction" and each.began <= end]
            if evicted:
                self._give(
                    "eviction", "queue", load_s, "the model had been put to sleep for another one and was loaded again"
                )
            else:
                self._give("cold_worker", "queue", load_s, "it waited for a worker that loaded the model")
        full, most = self._full_batches(begin, end)
        if full:
            self._give(
                "full_batches",
                "queue",
                stages["queue"],
                f"{full} full {'batch' if full == 1 else 'batches'} of {most} left before it",
            )
        self._give("queue", "queue", stages["queue"], self._what_ran(begin, end))

    def _what_ran(self, begin: float, end: float) -> str:
        """A sentence about the batch that kept a worker the longest while it waited."""
        longest_s, longest = 0.0, None
        for batch in self.evidence.landed_after(self.of, begin, end):
            if batch is self.of.first or not batch.landed_at:
                continue
            overlap_s = min(end, batch.landed_at) - max(begin, batch.begins_at)
            if overlap_s > longest_s:
                longest_s, longest = overlap_s, batch
        if longest is None:
            return "it waited for a worker, or for others to fill its batch"
        ran = next(iter(self.evidence.members(longest)), None)
        named = "" if ran is None else f", request {ran.id} among them" if longest.size > 1 else f", request {ran.id}"
        return (
            f"it waited for a worker; one ran a batch of {longest.size}{named}, for {_ms(longest.handler_s)} meanwhile"
        )

    def _full_batches(self, begin: float, end: float) -> tuple[int, int]:
        """How many full batches of its version left while it waited, and what a full one holds."""
        batches = self.evidence.batches(self.of)
        most = self.evidence.largest(self.of)
        if most < 2:
            return 0, most
        left = batches[bisect_right(batches, begin, key=_sent) : bisect_right(batches, end, key=_sent)]
        return sum(batch.size == most for batch in left if batch is not self.of.first), most

    def _weigh_parts(self) -> None:
        """Nodes of a workflow, or models that the handler called: what took the longest of them time."""
        parts = [part for part in list(self.of.parts or ()) if part.written_at and part.wall_s]
        for part in sorted(parts, key=lambda part: -part.wall_s)[:MOST_PARTS_EXPLAINED]:
            inner = explain(part, self.evidence)
            words = inner.why.partition(": ")[2]
            self._give(inner.cause, "handle", part.wall_s, f"{part.what} took {_ms(part.wall_s)}; {words}")

    def _weigh_handler(self) -> None:
        of, stages = self.of, self.stages
        handle_s, last = stages["handle"], of.last
        if not handle_s:
            return
        typical_s = self.evidence.typical_handle_s(of)
        is_unusual = typical_s is not None and handle_s > UNUSUAL * typical_s
        if last is not None and last.is_first and (typical_s is None or is_unusual):
            self._give("cold_worker", "handle", handle_s - (typical_s or 0.0), "it was its worker's first batch")
        elif last is not None and last.size > 1 and is_unusual:
            assert typical_s is not None
            mates = [each for each in self.evidence.members(last) if each is not of]
            largest = max(mates, key=lambda each: each.bytes_in, default=None)
            if largest is None or largest.bytes_in >= of.bytes_in:
                named = "one of them"
                if largest is not None and largest.bytes_in > 2 * of.bytes_in:
                    named = f"request {largest.id}, of {_bytes(largest.bytes_in)},"
                self._give(
                    "slow_mate",
                    "handle",
                    handle_s - typical_s,
                    f"its batch of {last.size} took {_ms(handle_s)}, where {_ms(typical_s)} are usual: {named} is slow",
                )
        if last is not None and not last.worker:
            words = "its nodes took so long"
        elif of.runs > 1:
            words = f"the handler ran {of.runs} batches with it"
        elif last is not None and last.size > 1:
            words = f"the handler ran its batch of {last.size}"
        else:
            words = "the handler ran it"
        self._give("handler", "handle", stages["handle"], words)

    def _weigh_rest(self) -> float:
        """What is left: decode and encode, and the server's own work, which takes long only if its loop is busy.

        Returns how long that took, if it was not long.
        """
        stages = self.stages
        for stage in BY_WORKER:
            self._give("handler", stage, stages[stage], "the worker read the input and wrote the answer")
        reading_s = sum(stages[stage] for stage in READING)
        own_s = sum(stages[stage] for stage in BY_SERVER)
        if own_s - reading_s < LEAST_HELD_S:
            return own_s
        words = "the server's loop was busy with it or with other requests, or others had the processor"
        for stage in BY_SERVER:
            self._give("loop_stalled", stage, stages[stage], words)
        return 0.0


def _of_the_work(handler_s: float, own_s: float, *, is_held: bool) -> str:
    """A sentence about a request of which the server's own work is the largest share, though it was little."""
    what = "the work on it" if is_held else "nothing held it"
    if not own_s:
        return f"{_ms(0.0)}: {what}"
    if not handler_s:
        return f"{_ms(own_s)}: {what}, and this is {OWN_WORK}"
    return f"{_ms(handler_s + own_s)}: {what}, and {_ms(own_s)} of this is {OWN_WORK}"


def _with_parts(timelines: Iterable[Timeline]) -> Iterator[Timeline]:
    """Requests, and those that they made, whose batches others have waited for, too."""
    for timeline in timelines:
        yield timeline
        if timeline.parts:
            yield from (part for part, _ in parts_of(timeline))


def _sent(batch: BatchTimes) -> float:
    return batch.sent_at


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
