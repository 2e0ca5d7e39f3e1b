"""What the dispatcher and its parts pass among themselves: jobs, batches under way, workers. Plain data and states."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from marserve.messages import Receiver, Request, Result

DEFAULT_PRIORITY = 5


class JobState(Enum):
    """Where a job is: in the queue, in a group that is to be run again, with a worker, or ended (once and for all)."""

    WAITING = auto()
    GROUPED = auto()
    RUNNING = auto()
    DONE = auto()


# A protocol: dispatchers are built upon jobs.
class JobOwner(Protocol):
    """Who is told that a job's client has gone."""

    def cancel(self, job: Job) -> None:
        """The client of `job` has gone."""

    def hold(self, job: Job) -> None:
        """The client of `job` does not keep up with its stream."""

    def resume(self, job: Job) -> None:
        """The client of `job` has caught up."""

    def keeps_the_only_worker(self, job: Job) -> bool:
        """Whether the only worker still runs `job`, which was cancelled there."""


# So often the loss of a machine speaks against no request that ran on it.
MAX_LOSSES = 4


class Job:
    """One accepted request on its way through the pool. `cancel()` is for the surface; the rest is the pool's.

    `arrived` and `deadline` are seconds on the monotonic clock. `deaths` counts workers that died with it,
    `losses` machines that were lost under it, `has_sent_pieces` tells that bytes of an answer have gone out, so that it
    must not be run again. `held_by` is the worker from which nothing is read until this job's client has taken what was
    streamed to it.
    """

    __slots__ = (
        "arrived",
        "deadline",
        "deaths",
        "flight",
        "has_sent_pieces",
        "held_by",
        "left_in",
        "length",
        "length_digest",
        "losses",
        "owner",
        "priority",
        "receiver",
        "request",
        "state",
        "suspicion",
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
        self.length_digest = b""  # of its input, while that length is a guess that may be asked for
        self.has_sent_pieces = False
        self.state = JobState.WAITING
        self.flight: Flight | None = None
        self.held_by: str | None = None
        self.left_in: tuple[str, int] | None = None
        """The worker and the batch in which it was cancelled."""
        self.suspicion: object | None = None
        """What it has in common with others of which one ended a worker that ran many at once: each runs alone."""

    def lost_worker(self, *, is_suspect: bool) -> None:
        """Its worker died with it; without `is_suspect` because the machine was lost, which is no request's doing."""
        if is_suspect or self.losses >= MAX_LOSSES:
            self.deaths += 1
        else:
            self.losses += 1

    def hold(self) -> None:
        """The client takes its stream more slowly than it is made: no more pieces than are under way, please."""
        if self.held_by is None and self.state is JobState.RUNNING:
            self.owner.hold(self)

    def resume(self) -> None:
        """The client has caught up. May be called at any time."""
        if self.held_by is not None:
            self.owner.resume(self)

    def cancel(self) -> None:
        """The client has gone: the receiver is never called again. May be called at any time, any number of times."""
        if self.state is not JobState.DONE:
            self.owner.cancel(self)

    @property
    def keeps_the_only_worker(self) -> bool:
        """Whether it was cancelled, and the version's only worker still runs it: what comes after it waits."""
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
    """A batch that left for a worker. `number` counts up from 1 for each worker; `is_group` must not be mixed.

    `is_check`: no jobs, but something of the server's own that occupies the worker for a while. `is_ahead`: the worker
    was busy with another when this one left. `key` is the worker's, `heard_at` when it last said something of the
    flight.
    """

    number: int
    jobs: list[Job]
    is_group: bool
    sent_at: float
    is_check: bool = False
    is_ahead: bool = False
    key: str = ""
    heard_at: float = 0.0


@dataclass(eq=False, slots=True)
class WorkerLane:
    """What the pure side knows of one worker: what it has in flight, oldest first, and how long its batches take.

    `question`: lengths it was asked for before one of these batches, and has not said yet. `row`: where it stands among
    those that may be sent another (`pool/dispatch/send_ahead.py`).
    """

    key: str
    flights: deque[Flight] = field(default_factory=deque)
    last_number: int = 0
    mean_run_s: float = 0.0
    is_open: bool = True
    question: Question | None = None
    row: OrderedDict[WorkerLane, int] | None = None


class Landed(NamedTuple):
    """A batch that has ended, with one result and one body a job, of which its jobs have not been told."""

    flight: Flight
    results: Sequence[Result]
    bodies: Sequence[bytes | bytearray]


class Loss(NamedTuple):
    """How a worker was lost, as `Dispatcher.died` is told it."""

    begun: int
    may_retry: bool
    is_suspect: bool
    accused: int


class Lost(NamedTuple):
    """What becomes of the jobs that a dead worker had begun.

    Those in `again` are run again, each by itself, in order before everything that waits: the last one is first. With
    `is_sure` those of the `failed` that have died too often are known to be the cause.
    """

    again: Sequence[Job]
    failed: Sequence[Job]
    is_sure: bool = True
