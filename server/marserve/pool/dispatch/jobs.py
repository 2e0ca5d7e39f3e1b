"""What the dispatcher and its parts pass among themselves: jobs, batches under way, workers. Plain data and states."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from marserve.messages import Receiver, Request, Result
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import BatchTimes

DEFAULT_PRIORITY = 5


class JobState(Enum):
    """Where a job is: in the queue, in a group that is to be run again, with a worker, or ended (once and for all)."""

    WAITING = auto()
    GROUPED = auto()
    RUNNING = auto()
    DONE = auto()


# A protocol: dispatchers are built upon jobs.
class JobOwner(Protocol):
    """What a job calls when its client leaves, or is slow."""

    def cancel(self, job: Job) -> None:
        """The client of `job` has gone."""

    def hold(self, job: Job) -> None:
        """The client of `job` does not keep up with its stream."""

    def resume(self, job: Job) -> None:
        """The client of `job` has caught up."""

    def keeps_the_only_worker(self, job: Job) -> bool:
        """Whether the version's only worker still runs `job`, which was cancelled."""


# So many lost machines do not count against a request that ran on them.
MAX_LOSSES = 4


class Job:
    """One accepted request on its way through the pool. `cancel()` is for the surface; the rest is the pool's.

    `arrived` and `deadline` are seconds on the monotonic clock. `deaths` counts workers that died while they ran it,
    `losses` machines that were lost meanwhile. With `has_sent_pieces` bytes of an answer have gone out: it must not be
    run again; with `has_failed` they said that the stream has failed. `held_by` is the worker from which nothing is
    read until this job's client has taken its stream.
    """

    __slots__ = (
        "arrived",
        "deadline",
        "deaths",
        "flight",
        "has_failed",
        "held_by",
        "left_in",
        "length",
        "length_digest",
        "losses",
        "owner",
        "piece_at",
        "priority",
        "receiver",
        "request",
        "state",
        "suspicion",
        "times",
    )

    def __init__(
        self,
        request: Request,
        receiver: Receiver,
        arrived: float,
        deadline: float | None,
        owner: JobOwner,
        priority: int = DEFAULT_PRIORITY,
    ) -> None:
        self.request = request
        self.receiver = receiver
        self.arrived = arrived
        self.deadline = deadline
        self.owner = owner
        self.priority = priority
        self.deaths = 0
        self.losses = 0
        self.length = 0  # of its input, where batches are formed by length
        self.length_digest = b""  # of its input, while `length` is an estimate and the handler may be asked
        self.piece_at: float | None = None
        """When the last piece of its stream went out; None before any did."""
        self.has_failed = False
        self.state = JobState.WAITING
        self.flight: Flight | None = None
        self.held_by: str | None = None
        self.left_in: tuple[str, int] | None = None
        """The worker and the batch that ran it when it was cancelled."""
        self.times: BatchTimes | None = None
        """The last batch in which it went to a worker, for a timeline that is made at its end."""
        self.suspicion: object | None = None
        """Shared by the jobs of a concurrent worker that one of them ended: each of these jobs runs alone."""

    @property
    def has_sent_pieces(self) -> bool:
        """Whether bytes of an answer have gone out."""
        return self.piece_at is not None

    def note_piece(self, stages: StageSeconds, now: float) -> None:
        """A piece of its stream goes out: count how long it took since its arrival, or since the piece before."""
        if self.piece_at is None:
            stages.observe("first_chunk", now - self.arrived)
        else:
            stages.observe("next_chunk", now - self.piece_at)
        self.piece_at = now

    def lost_worker(self, *, is_suspect: bool) -> None:
        """Its worker died. Without `is_suspect` the machine was lost, which is no request's fault."""
        if is_suspect or self.losses >= MAX_LOSSES:
            self.deaths += 1
        else:
            self.losses += 1

    def hold(self) -> None:
        """Have no further pieces made than those under way: the client takes its stream too slowly."""
        if self.held_by is None and self.state is JobState.RUNNING:
            self.owner.hold(self)

    def resume(self) -> None:
        """The client has caught up. May be called at any time."""
        if self.held_by is not None:
            self.owner.resume(self)

    def cancel(self) -> None:
        """The client has gone: end the job without a further call of its receiver. May be called at any time, again."""
        if self.state is not JobState.DONE:
            self.owner.cancel(self)

    @property
    def keeps_the_only_worker(self) -> bool:
        """Whether it was cancelled, and the version's only worker still runs it, so that later requests wait."""
        return self.left_in is not None and self.owner.keeps_the_only_worker(self)


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Jobs whose lengths a worker is asked for, right before batch `number`."""

    number: int
    jobs: Sequence[Job]
    digests: Sequence[bytes]
    limit_s: float


@dataclass(eq=False, slots=True)
class Flight:
    """A batch that was sent to a worker. `number` counts from 1 for each worker; `is_group`: it must run by itself.

    `is_check`: a check of the server's own, without jobs, which occupies the worker. `is_ahead`: the worker was busy
    with another flight when this one was sent. `key` is the worker's, `heard_at` when it last sent something of the
    flight. `times` is what the timelines of its requests refer to; None for a check.
    """

    number: int
    jobs: list[Job]
    is_group: bool
    sent_at: float
    is_check: bool = False
    is_ahead: bool = False
    key: str = ""
    heard_at: float = 0.0
    times: BatchTimes | None = None


@dataclass(eq=False, slots=True)
class WorkerLane:
    """A worker as the dispatcher sees it: its flights, oldest first, and how long its batches take.

    `question`: the lengths that it was asked for before one of these batches, while they are not answered. `row`: its
    place among the workers that may be sent another batch (`pool/dispatch/send_ahead.py`). `overlaps`: it preprocesses
    the batch that was sent ahead beside the one that computes.
    """

    key: str
    flights: deque[Flight] = field(default_factory=deque)
    last_number: int = 0
    mean_run_s: float = 0.0
    is_open: bool = True
    question: Question | None = None
    row: OrderedDict[WorkerLane, int] | None = None
    overlaps: bool = False


class Landed(NamedTuple):
    """A batch that has ended, with one result and one body a job, which the receivers have not got yet."""

    flight: Flight
    results: Sequence[Result]
    bodies: Sequence[bytes | bytearray]


class Loss(NamedTuple):
    """How a worker was lost; the arguments of `Dispatcher.died`."""

    begun: int
    may_retry: bool
    is_suspect: bool
    accused: int
    began_oldest: bool = False


class Lost(NamedTuple):
    """What becomes of the jobs that a dead worker had begun.

    The jobs in `again` are run again, each by itself, before everything that waits, the last one first. With `is_sure`
    a failed job that has lost too many workers is known to be the cause.
    """

    again: Sequence[Job]
    failed: Sequence[Job]
    is_sure: bool = True
