"""The deadlines of jobs: when a job that is not answered is ended. `dispatcher.py` refuses and ends it. Pure: time is
passed in.
"""

from __future__ import annotations

import heapq
import math
from itertools import count

from marserve.pool.dispatch.jobs import Job, JobState

MIN_BOUND = 256


class Deadlines:
    """The deadlines of jobs, soonest first. `first` is never later than the soonest of them; infinite without one.

    The entry of a job that ends early stays until its deadline has come, or a full table drops ended jobs.
    """

    __slots__ = ("_bound", "_entries", "_tiebreak", "first")

    def __init__(self) -> None:
        self.first = math.inf
        self._entries: list[tuple[float, int, Job]] = []
        self._bound = MIN_BOUND
        self._tiebreak = count()

    def watch(self, deadline: float, job: Job) -> None:
        """Remember when to end `job`."""
        entries = self._entries
        if len(entries) >= self._bound:
            entries[:] = [entry for entry in entries if entry[2].state is not JobState.DONE]
            heapq.heapify(entries)
            self._bound = max(MIN_BOUND, 2 * len(entries))
        heapq.heappush(entries, (deadline, next(self._tiebreak), job))
        self.first = entries[0][0]

    def take_due(self, now: float) -> Job | None:
        """Take out the next job whose deadline has come, soonest first; None if there is no further one."""
        return heapq.heappop(self._entries)[2] if self.soonest() <= now else None

    def soonest(self) -> float:
        """The soonest deadline of a job that has not ended; infinite without one."""
        entries = self._entries
        while entries and entries[0][2].state is JobState.DONE:
            heapq.heappop(entries)
        self.first = entries[0][0] if entries else math.inf
        return self.first

    def __len__(self) -> int:
        return len(self._entries)
