"""One request from its first byte to its last: moments that are written where it passes anyway. Pure.

A surface makes a `Timeline` with the request, the dispatcher adds the batches that it left in, and the surface the end.
Stage histograms, the recorder, explanations and traces only read it. Requests of one batch share its `BatchTimes`.

All moments are seconds on the server's monotonic clock, 0 for those that have not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, Protocol, cast, get_args

import msgspec

from marserve.messages import Request, Work
from marserve.telemetry.trace_context import Trace, part_of

Stage = Literal["header", "body", "admit", "queue", "send", "decode", "handle", "encode", "return", "write"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The parts of a request's time, in order; `seconds_by_stage` says where each begins and ends."""


# A protocol: the histograms of a version are built upon timelines.
class TimedVersion(Protocol):
    """What a timeline keeps of the version that took a request: its names, and where its stages are counted.

    `slow_above_s` is from how long on one of its requests is unusual, as the recorder has learned.
    """

    slow_above_s: float

    @property
    def model(self) -> str:
        """The model's name."""

    @property
    def version(self) -> str:
        """The version's."""

    def observe_ended(self, ended: Sequence[Timeline]) -> None:
        """Count the stages that each of these requests has by itself."""


class _NoVersion:
    model = version = ""

    def __init__(self) -> None:
        self.slow_above_s = 0.0

    def observe_ended(self, ended: Sequence[Timeline]) -> None:
        """Requests that no version took are in no histogram."""


NO_VERSION: Final[TimedVersion] = _NoVersion()


CLIENT_GONE: Final = 499
"""The status of a request whose client has gone, as nginx has it. No client reads it."""


# How many requests of a batch are linked to its span, as OpenTelemetry bounds links.
MOST_TRACES: Final = 128
# How many requests that one makes are followed.
MOST_PARTS: Final = 256


class BatchTimes(msgspec.Struct, gc=False):
    """A batch that was sent to a worker: whose, when, how large, and what the worker says of its work.

    `worker` is its key in the pool. `free_at` is when the worker had ended what it ran before, if the batch was sent
    ahead of that. `is_first`: the worker's first batch. `handler_s` is the time inside the author's code. `work` is
    None until the worker has answered, and where it says nothing of it. `of` is its version, a `TimedVersion`. `traces`
    are those of its requests, and `trace` its own, once a span of it is sent.
    """

    worker: str
    size: int
    sent_at: float
    is_first: bool = False
    free_at: float = 0.0
    landed_at: float = 0.0
    handler_s: float = 0.0
    work: Work | None = None
    of: Any = None
    traces: list[Trace] | None = None
    trace: Trace | None = None

    @property
    def begins_at(self) -> float:
        """When it had left the queue and its worker was free for it."""
        return max(self.free_at, self.sent_at)

    def note(self, traces: list[Trace]) -> None:
        """Requests of these traces are in it."""
        known = self.traces
        self.traces = traces[:MOST_TRACES] if known is None else [*known, *traces][:MOST_TRACES]

    def land(self, now: float, handler_s: float, work: Work | None) -> None:
        """The worker's answer is here."""
        self.landed_at = now
        self.handler_s = handler_s
        self.work = work


# A protocol: jobs are the pool's, which the API does not know.
class Timed(Protocol):
    """An accepted request of which it is known when it came and in which batch it ran."""

    request: Request
    arrived: float
    times: BatchTimes | None


def times_of(accepted: object) -> BatchTimes | None:
    """The last batch in which an accepted request ran; None before, and for those that are made of others."""
    job = timed(accepted)
    return None if job is None else job.times


def timed(accepted: object) -> Timed | None:
    """An accepted request if it is `Timed`; those that are made of others are not.

    By one attribute: `isinstance` with a protocol takes ten microseconds.
    """
    return cast("Timed", accepted) if hasattr(accepted, "times") else None


class Timeline(msgspec.Struct, gc=False):
    """What is known of one request. No `gc`: nothing here refers back, and thousands of them are kept.

    `began` is its first byte, `head_at` and `body_at` when header and body were complete, 0 if they came with the first
    byte. `admitted_at` is when a version accepted it, `of` which one. `first` and `last` are the first and the last
    batch in which it went to a worker, `runs` how many there were; a request that is cut into several, as KServe's V1
    cuts its instances, has those of all. `first_piece_at` is the first piece of a stream. `written_at` is when the last
    byte of the answer was given to the system, or when the request ended without one. `status` is 0 until then; 499 for
    a client that went. `error` is the class of an error (`x-marserve-cause`), else empty; with the status of an answer
    it is that of a stream that broke off. `client_id` is the client's id where it stands beside the server's.
    `moved_from` is the version that had accepted it, if another one took it over. `held_s` is how long its worker was
    held, because the client took its stream slowly, and `held_since` since when it is. `trace` is its place in a trace,
    None where no traces are kept; `parts` are the requests that it made, for the nodes of a workflow or by its handler,
    and `what` says of such a one what it was. The recorder forgets the parts before the request.
    """

    id: str
    began: float
    bytes_in: int = 0
    client_id: str = ""
    head_at: float = 0.0
    body_at: float = 0.0
    admitted_at: float = 0.0
    of: Any = NO_VERSION  # a `TimedVersion`, which msgspec need not know
    first: BatchTimes | None = None
    last: BatchTimes | None = None
    runs: int = 0
    first_piece_at: float = 0.0
    written_at: float = 0.0
    status: int = 0
    bytes_out: int = 0
    error: str = ""
    moved_from: str = ""
    held_since: float = 0.0
    held_s: float = 0.0
    trace: Trace | None = None
    parts: list[Timeline] | None = None
    what: str = ""

    @property
    def model(self) -> str:
        """The model that took it, empty if none did."""
        return str(self.of.model)

    @property
    def version(self) -> str:
        """The version of that model."""
        return str(self.of.version)

    def came_in_pieces(self, head_since: float, body_since: float) -> None:
        """Header or body came with more than one read: when the first of each was here, 0 if it came whole."""
        complete_at = self.began
        if body_since:
            self.head_at = min(body_since, complete_at)
        if head_since:
            self.head_at = self.head_at or complete_at
            self.began = min(head_since, self.head_at)
        else:
            self.began = self.head_at or complete_at
        self.body_at = complete_at

    def move(self, version: TimedVersion) -> None:
        """Another version has taken it over while it waited."""
        self.moved_from = self.moved_from or self.version
        self.of = version

    def hold(self, now: float) -> None:
        """Its worker makes no further pieces: the client does not keep up."""
        self.held_since = self.held_since or now

    def resume(self, now: float) -> None:
        """The client has caught up, or the stream has ended."""
        if self.held_since:
            self.held_s += now - self.held_since
            self.held_since = 0.0

    def left_in(self, batch: BatchTimes) -> None:
        """It goes to a worker in this batch."""
        if self.first is None:
            self.first = batch
        self.last = batch
        self.runs += 1
        if self.trace is not None:
            batch.note([self.trace])

    def part(self, what: str, now: float, above: str = "") -> Timeline | None:
        """The timeline of a request that this one makes now, below the span `above`, else below its own.

        None if it has ended, or made too many.
        """
        if self.written_at:
            return None
        if self.parts is None:
            self.parts = []
        if len(self.parts) >= MOST_PARTS:
            return None
        trace = None if self.trace is None else part_of(self.trace, what, above)
        part = Timeline(self.id, now, client_id=self.client_id, trace=trace, what=what)
        self.parts.append(part)
        return part

    def end(self, now: float, status: int, bytes_out: int, error: str = "") -> None:
        """Its answer is written, or there will be none."""
        self.written_at = now
        self.status = status
        self.bytes_out = bytes_out
        self.error = error

    @property
    def has_failed(self) -> bool:
        """Whether the server owed it another answer; a client's mistake, or its leaving, does not count."""
        return self.status >= 500 or (self.error != "" and self.status < 400)

    @property
    def wall_s(self) -> float:
        """From its first byte to its last."""
        return max(0.0, self.written_at - self.began)

    @property
    def has_remote_worker(self) -> bool:
        """Whether its worker's clock is another machine's: of `send` and `return` only the sum is known, as `send`."""
        last = self.last
        return last is not None and last.work is not None and not last.work.began


def parts_of(timeline: Timeline) -> Iterator[tuple[Timeline, int]]:
    """The requests that it made, those that these made right behind each, and how deep each is: from 1."""
    for part in list(timeline.parts or ()):
        yield part, 1
        for each, depth in parts_of(part):
            yield each, depth + 1


def seconds_by_stage(timeline: Timeline) -> tuple[float, ...]:
    """How long each of `STAGES` took. Their sum is `wall_s`; none is negative, whatever a worker says.

    A request that was refused, or that ended before its worker answered, has its last moments in the stage in which it
    ended. One that ran more than once has everything between the first and the last call of the handler in `handle`.
    """
    end = timeline.written_at
    head_at = timeline.head_at or timeline.began
    moments = [timeline.began, head_at, timeline.body_at or head_at]
    if timeline.admitted_at:
        moments.append(timeline.admitted_at)
        first, last = timeline.first, timeline.last
        if first is not None and last is not None:
            moments.append(first.begins_at)
            moments += _in_worker(first, last)
    rising = []
    latest = moments[0]
    for moment in moments:
        latest = max(latest, min(moment, end))
        rising.append(latest)
    # The stage in which it ended takes the rest.
    rising += [max(latest, end)] * (len(STAGES) + 1 - len(rising))
    return tuple(after - before for before, after in pairwise(rising))


def _in_worker(first: BatchTimes, last: BatchTimes) -> Sequence[float]:
    """The ends of `send`, `decode`, `handle`, `encode` and `return`; fewer if the worker has not answered."""
    if not last.landed_at:
        # It has begun, for all that is known: a worker that died, or a request that ended while it ran.
        begun = first.begins_at if first.work is None else first.work.began or first.begins_at
        return (begun, begun)
    work, landed_at = last.work, last.landed_at
    if work is None:
        began = max(first.begins_at, landed_at - last.handler_s)
        return (began, began, landed_at, landed_at, landed_at)
    own_s = work.decode_s + last.handler_s + work.encode_s
    began = work.began or max(last.begins_at, landed_at - own_s)
    first_began = began
    first_decoded = began + work.decode_s
    if first is not last:
        said = first.work
        first_began = first.begins_at if said is None else said.began or first.begins_at
        first_decoded = first_began + (0.0 if said is None else said.decode_s)
    handled = began + work.decode_s + last.handler_s
    return (first_began, first_decoded, handled, handled + work.encode_s, landed_at)
