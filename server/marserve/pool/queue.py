"""The requests of one model version that wait for a worker: bounded, first come first served.

Pure: no clock, no sockets. A cancelled job leaves at once as far as bound and length are concerned; its place in the
line is cleared when the line is next walked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from marserve.messages import Receiver, Request

if TYPE_CHECKING:
    from marserve.pool.batcher import Flight


class JobState(Enum):
    """Where a job is: in the queue, in a group that is to be run again, with a worker, or ended (once and for all)."""

    WAITING = auto()
    GROUPED = auto()
    RUNNING = auto()
    DONE = auto()


class JobOwner(Protocol):
    """Who is told that a job's client has gone."""

    def cancel(self, job: Job) -> None:
        """The client of `job` has gone."""


class Job:
    """One accepted request on its way through the pool. `cancel()` is for the surface; the rest is the pool's.

    `arrived` and `deadline` are seconds on the monotonic clock. `deaths` counts workers that died with it,
    `has_sent_pieces` tells that bytes of an answer have gone out, so that it must not be run again.
    """

    __slots__ = (
        "arrived",
        "deadline",
        "deaths",
        "flight",
        "has_sent_pieces",
        "owner",
        "receiver",
        "request",
        "state",
    )

    def __init__(
        self, request: Request, receiver: Receiver, arrived: float, deadline: float | None, owner: JobOwner
    ) -> None:
        self.request = request
        self.receiver = receiver
        self.arrived = arrived
        self.deadline = deadline
        self.owner = owner
        self.deaths = 0
        self.has_sent_pieces = False
        self.state = JobState.WAITING
        self.flight: Flight | None = None

    def cancel(self) -> None:
        """The client has gone: the receiver is never called again. May be called at any time, any number of times."""
        if self.state is not JobState.DONE:
            self.owner.cancel(self)


class JobQueue:
    """Waiting jobs, oldest first. The bound is the dispatcher's to hold: it alone knows what was sent ahead."""

    def __init__(self) -> None:
        self._line: deque[Job] = deque()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def enqueue(self, job: Job) -> None:
        """Put a new job at the end."""
        self._line.append(job)
        self._length += 1

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Put jobs that a worker gave back unrun at the head, in their old order."""
        jobs = list(jobs)
        self._line.extendleft(reversed(jobs))
        self._length += len(jobs)

    def oldest(self) -> Job | None:
        """The job that has waited longest, or None."""
        line = self._line
        while line and line[0].state is JobState.DONE:
            line.popleft()
        return line[0] if line else None

    def take(self, most: int) -> list[Job]:
        """Take up to `most` jobs, oldest first.

        A describe job always comes alone; explanations and predictions do not mix, since a handler looks at the
        first row only to tell which it is asked for.
        """
        taken: list[Job] = []
        line = self._line
        while line and len(taken) < most:
            job = line.popleft()
            if job.state is JobState.DONE:
                continue
            request = job.request
            if taken and (request.is_describe or request.is_explain != taken[0].request.is_explain):
                line.appendleft(job)
                break
            taken.append(job)
            if request.is_describe:
                break
        self._length -= len(taken)
        return taken

    def leave(self, job: Job) -> None:
        """A waiting job was ended (cancelled, past its deadline); the caller has set its state to DONE."""
        self._length -= 1
        if len(self._line) > 2 * self._length + 64:  # clients that come and go must not lengthen the line for ever
            self._line = deque(job for job in self._line if job.state is not JobState.DONE)

    def clear(self) -> list[Job]:
        """Take everything out, oldest first."""
        jobs = [job for job in self._line if job.state is not JobState.DONE]
        self._line.clear()
        self._length = 0
        return jobs
