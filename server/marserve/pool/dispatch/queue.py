"""The requests of one model version that wait for a worker: by priority and age, within a priority as they came.

A priority is 0 (most urgent) to 9. A job is ordered as though it had come `AGEING_S` later for each step. So an urgent
job overtakes only jobs that came less than that before it, and no job waits for ever.

Pure: no clock, no sockets. A cancelled job is taken out of the count at once; its place in the line is cleared when the
line is next walked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from marserve.pool.dispatch.jobs import DEFAULT_PRIORITY, Job, JobState

if TYPE_CHECKING:
    pass


LEAST_URGENT = 9
# How much earlier a job may have come and still be overtaken, in seconds, for each step between two priorities.
AGEING_S = 1.0


class GivenUp(NamedTuple):
    """A request that was refused after it had been accepted: its id, where it was, and how old it was in seconds.

    `stream`: pieces of its answer had been sent.
    """

    request_id: str
    where: Literal["waiting", "running", "stream"]
    age_s: float


class JobQueue:
    """Waiting jobs. The dispatcher holds the bound, since it alone knows what was sent ahead.

    Nearly every job has the model's own priority, `plain`. Its line is kept apart, so that the queue costs no more than
    a deque while there is no other priority.
    """

    def __init__(self, plain: int = DEFAULT_PRIORITY) -> None:
        self._plain = plain
        self._line: deque[Job] = deque()
        self._length = 0  # of all lines
        self._others: dict[int, _Line] = {}  # by priority; empty lines are deleted

    def __len__(self) -> int:
        return self._length

    def enqueue(self, job: Job) -> None:
        """Put a new job at the end of its line."""
        if job.priority == self._plain:
            self._line.append(job)
        else:
            self._other(job.priority).append(job)
        self._length += 1

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Put jobs that a worker gave back unrun at the head of their lines, in their old order."""
        for job in reversed(list(jobs)):
            if job.priority == self._plain:
                self._line.appendleft(job)
            else:
                self._other(job.priority).appendleft(job)
            self._length += 1

    def oldest(self) -> Job | None:
        """The job that has waited longest, or None."""
        line = self._line
        while line and line[0].state is JobState.DONE:
            line.popleft()
        if self._others:
            return min(self._heads(), key=_arrival, default=None)
        return line[0] if line else None

    def first(self) -> Job | None:
        """The next job, or None."""
        return min(self._heads(), key=_rank, default=None) if self._others else self.oldest()

    def before(self, priority: int) -> int:
        """How many waiting jobs go before a new one of this priority, not counting less urgent ones that are old."""
        if not self._others:
            return self._length if priority >= self._plain else 0
        before = sum(line.length for level, line in self._others.items() if level <= priority)
        if priority >= self._plain:
            before += self._plain_length()
        return before

    def displaceable(self, priority: int) -> Job | None:
        """The job that must make room for one of `priority` in a full queue: the newest of the least urgent; or None.

        It is less urgent than the new job. The first job of each line stays, since it has waited longest.
        """
        if not self._others and priority >= self._plain:
            return None
        lengths = {level: line.length for level, line in self._others.items()}
        lengths[self._plain] = self._plain_length()
        for level in sorted(lengths, reverse=True):
            if level <= priority:
                return None
            if lengths[level] > 1:
                line = self._line if level == self._plain else self._others[level].jobs
                while line[-1].state is JobState.DONE:
                    line.pop()
                return line[-1]
        return None

    def displace(self, job: Job) -> None:
        """Take out the job that `displaceable` has just named: it is the last of its line, and not the only one."""
        if job.priority == self._plain:
            self._line.pop()
        else:
            self._others[job.priority].jobs.pop()
            self._shorten(job.priority)
        self._length -= 1

    def take(self, most: int) -> list[Job]:
        """Take up to `most` jobs in order.

        A describe job always comes alone. Explanations and predictions do not mix, since a handler sees only by the
        first row which of them it is asked for.
        """
        if self._others:
            return self._take_by_rank(most)
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
        if job.priority != self._plain:
            self._shorten(job.priority)
        # Clients that come and go must not lengthen a line for ever.
        if len(self._line) > 2 * self._length + 64:
            self._line = deque(job for job in self._line if job.state is not JobState.DONE)

    def jobs(self) -> list[Job]:
        """All waiting jobs, line by line, oldest first."""
        return [job for line in self._lines() for job in line if job.state is not JobState.DONE]

    def clear(self) -> list[Job]:
        """Take everything out, line by line, oldest first."""
        jobs = self.jobs()
        self._line.clear()
        self._others.clear()
        self._length = 0
        return jobs

    # ------------------------------------------------------------------------------------------- several lines

    def _take_by_rank(self, most: int) -> list[Job]:
        taken: list[Job] = []
        while len(taken) < most:
            job = self.first()
            if job is None:
                break
            request = job.request
            if taken and (request.is_describe or request.is_explain != taken[0].request.is_explain):
                break
            taken.append(job)
            self._length -= 1
            if job.priority == self._plain:
                self._line.popleft()
            else:
                self._others[job.priority].jobs.popleft()
                self._shorten(job.priority)
            if request.is_describe:
                break
        return taken

    def _heads(self) -> Iterator[Job]:
        """The first living job of each line."""
        for line in self._lines():
            while line and line[0].state is JobState.DONE:
                line.popleft()
            if line:
                yield line[0]

    def _lines(self) -> list[deque[Job]]:
        return [self._line, *(other.jobs for other in self._others.values())]

    def _plain_length(self) -> int:
        return self._length - sum(line.length for line in self._others.values())

    def _other(self, priority: int) -> deque[Job]:
        """The line of a priority that is not the plain one, after one job was added to its count."""
        line = self._others.get(priority)
        if line is None:
            line = self._others[priority] = _Line()
        line.length += 1
        return line.jobs

    def _shorten(self, priority: int) -> None:
        line = self._others[priority]
        line.length -= 1
        if not line.length:
            del self._others[priority]
        elif len(line.jobs) > 2 * line.length + 64:
            line.jobs = deque(job for job in line.jobs if job.state is not JobState.DONE)


class _Line:
    """Jobs of one priority in the order they came; `length` counts those that have not ended."""

    __slots__ = ("jobs", "length")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.length = 0


def _arrival(job: Job) -> float:
    return job.arrived


def _rank(job: Job) -> float:
    """The order among several priorities: the arrival, plus `AGEING_S` for each step of less urgency."""
    return job.arrived + job.priority * AGEING_S
