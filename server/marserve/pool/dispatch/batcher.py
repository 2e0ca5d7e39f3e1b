"""Decides which waiting jobs leave together, for which worker, and when. Pure: the caller passes `now` in seconds.

Three policies:

    idle    (the default) a worker without work takes what is there, at once. A worker that is busy is sent a second
            batch ahead only while none is idle, and only when that batch is full or its oldest job has waited
            `max_batch_delay_s`: then the next batch is already there when this one ends. It is not done for handlers
            that run long, where it would save nothing and bind jobs to one worker.
    fixed   TorchServe's: a worker without work collects for up to `max_batch_delay_s`, counted from when it had its
            first job, or until the batch is full; one worker of a version collects at a time; nothing is sent ahead.
    goal    a worker without work takes as many of those that wait as `lengths/latency_goal.py` says, at once; where
            lengths are known, of about one length, the one whose turn it is always among them. A busy worker is sent a
            batch ahead where the way there counts: batches of a few milliseconds, either full, or that cost little
            however small.

A *group* is a batch that must run as it is, by itself: halves of a batch that raised, items whose worker died. Groups
go before everything that waits.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from marserve.pool.dispatch.jobs import Job, JobState
from marserve.pool.dispatch.lengths.asked_lengths import AskedLengths
from marserve.pool.dispatch.lengths.latency_goal import GoalPolicy
from marserve.pool.dispatch.lengths.lengths import LengthOf
from marserve.pool.dispatch.queue import JobQueue

# A batch is sent ahead only to a worker whose batches take less than this: what it hides is the time on the wire.
AHEAD_BELOW_S = 0.05
MAX_IN_FLIGHT = 2
# With a goal, less: what is sent to one worker cannot leave for another that is free sooner.
AHEAD_FOR_GOAL_BELOW_S = 0.005
# What was sent to a worker cannot be overtaken any more. So while requests have priorities of their own nothing is sent
# ahead to handlers that take longer than this: there it would save a hundredth, and cost a whole run.
AHEAD_OF_PRIORITIES_BELOW_S = 0.001
PRIORITIES_SEEN_S = 10.0  # for so long after a request with a priority of its own
# Among so many times the batch's size of jobs those of a fitting length are looked for.
LENGTHS_AMONG = 4
# Batches that take microseconds cost less than their way there and back: of small ones a few go ahead together, as many
# as make one batch of this many jobs (24 % less CPU a request for an echo with batch size 1, `benchmarks/echo.py`).
MANY_AHEAD_BELOW_S = 0.0002
MAX_JOBS_IN_FLIGHT = 16


class Batcher:
    """Chooses batches from a queue. The dispatcher owns queue and lanes and carries out what is chosen."""

    def __init__(
        self,
        queue: JobQueue,
        *,
        max_batch_size: int,
        max_delay_s: float,
        policy: Literal["idle", "fixed", "goal"],
        goal: GoalPolicy | None = None,
        length_of: LengthOf | None = None,
        asked_lengths: AskedLengths | None = None,
    ) -> None:
        """`goal` is what policy `goal` asks; by `length_of` or `asked_lengths` its batches are of about one length."""
        self.queue = queue
        self.goal = goal
        self.length_of = length_of
        self.asked_lengths = asked_lengths
        self.guessed: list[Job] = []  # whose lengths the last batch's choice would have liked to know
        self.workers = 1  # how many share the work; the dispatcher keeps it up to date for the goal
        self.groups: deque[list[Job]] = deque()
        self.max_batch_size = max_batch_size
        self.max_delay_s = max_delay_s
        self.policy = policy
        self.ahead_below_s = AHEAD_BELOW_S
        self.priorities_until = math.inf  # while that is lowered
        self._collecting_since: float | None = None

    @property
    def enough_ahead(self) -> int:
        """As many jobs as must wait for a batch to be sent ahead before its delay is up."""
        return self.max_batch_size if self.goal is None else min(self.max_batch_size, MAX_JOBS_IN_FLIGHT)

    @property
    def has_work(self) -> bool:
        """Whether anything waits."""
        return bool(self.groups) or len(self.queue) > 0

    def next_batch(self, now: float, *, idle: bool, ahead: bool) -> tuple[list[Job], bool] | None:
        """Take the jobs that should leave now, oldest first, with whether they are a group; None while waiting pays.

        `idle`: a worker has nothing in flight. `ahead`: a busy worker may be sent a second batch. The caller has
        failed jobs past their deadline already; what is returned are 1 to `max_batch_size` live jobs (or a group).
        """
        if idle:
            while self.groups:
                group = [job for job in self.groups.popleft() if job.state is JobState.GROUPED]
                if group:
                    return group, True
        if not len(self.queue):
            self.rest()
            return None
        if self.policy == "fixed":
            return self._collect(now) if idle else None
        if self.goal is not None:
            return (self._take_for_goal(self.goal, now), False) if idle or (ahead and self.pays_ahead(now)) else None
        if idle or (ahead and self.pays_ahead(now)):
            return self.queue.take(self.max_batch_size), False
        return None

    def _take_for_goal(self, goal: GoalPolicy, now: float) -> list[Job]:
        """As many as the goal wants to leave now; the queue is not empty."""
        first, oldest = self.queue.first(), self.queue.oldest()
        assert first is not None
        assert oldest is not None
        self.guessed = []
        length = self._length(first)
        size = goal.choose(len(self.queue), max(0.0, now - oldest.arrived), workers=self.workers, length=length)
        if size == 1 or not self.knows_lengths:
            return self.queue.take(size)
        looked_at = self.queue.take(LENGTHS_AMONG * size)
        taken, left = looked_at[:1], []
        total = longest = length
        for job in looked_at[1:]:
            length = self._length(job)
            if len(taken) < size and goal.may_join(total, len(taken), longest, length):
                taken.append(job)
                total += length
                longest = max(longest, length)
            else:
                left.append(job)
        self.queue.put_back(left)
        if self.asked_lengths is not None:
            self.guessed = [job for job in left if job.length_digest]
            if not self.guessed and not self.asked_lengths.is_sure and len(taken) > 1:
                self.guessed = [job for job in taken if job.length_digest]
        return taken

    @property
    def knows_lengths(self) -> bool:
        """Whether batches are of about one length."""
        return self.length_of is not None or (self.asked_lengths is not None and self.asked_lengths.is_offered)

    def _length(self, job: Job) -> int:
        if self.length_of is None:
            if self.asked_lengths is not None and self.asked_lengths.is_offered:
                return self.asked_lengths.look_up(job)
            return 1
        if not job.length:
            job.length = max(1, self.length_of(job.request))
        return job.length

    def _collect(self, now: float) -> tuple[list[Job], bool] | None:
        """TorchServe's wait. A batch of one never waits, nor does a describe job."""
        if self._collecting_since is None:
            self._collecting_since = now
        first = self.queue.first()
        if (
            len(self.queue) < self.max_batch_size
            and now < self._collecting_since + self.max_delay_s
            and not (first is not None and first.request.is_describe)
        ):
            return None
        self._collecting_since = None
        return self.queue.take(self.max_batch_size), False

    def rest(self) -> None:
        """Nothing waits: the next job begins a new wait."""
        self._collecting_since = None

    def see_priority(self, now: float) -> None:
        """A request has a priority of its own: for a while less is sent ahead."""
        self.ahead_below_s, self.priorities_until = AHEAD_OF_PRIORITIES_BELOW_S, now + PRIORITIES_SEEN_S

    def forget_priorities(self) -> None:
        """None has come for so long: as much is sent ahead as before."""
        self.ahead_below_s, self.priorities_until = AHEAD_BELOW_S, math.inf

    def group(self, jobs: list[Job]) -> None:
        """Have these jobs run again, together and by themselves, before everything that waits."""
        for job in jobs:
            job.state = JobState.GROUPED
            job.flight = None
        self.groups.appendleft(jobs)

    def put_back(self, jobs: list[Job], *, is_group: bool) -> None:
        """Have jobs that no worker had begun wait as before."""
        if not jobs:
            return
        if is_group:
            self.group(jobs)
            return
        for job in jobs:
            job.state = JobState.WAITING
            job.flight = None
        self.queue.put_back(jobs)

    def forget_ended_groups(self) -> None:
        """Drop groups of which no job waits any more."""
        self.groups = deque(group for group in self.groups if any(job.state is JobState.GROUPED for job in group))

    def pays_ahead(self, now: float) -> bool:
        """Whether a busy worker should be sent a second batch, if one may be."""
        waiting = len(self.queue)
        if self.goal is None and waiting >= self.max_batch_size:
            return True
        oldest = self.queue.oldest()
        if self.goal is not None:
            first = self.queue.first()
            if oldest is None or first is None or waiting < self.enough_ahead:
                return False
            return self.goal.allows_ahead(waiting, max(0.0, now - oldest.arrived), length=self._length(first))
        return oldest is not None and now >= oldest.arrived + self.max_delay_s

    def next_wake(self, *, idle: bool, ahead: bool) -> float | None:
        """When `next_batch` may say something else though nothing happened, or None if never."""
        if not len(self.queue):
            return None
        if self.policy == "fixed":
            return self._collecting_since + self.max_delay_s if idle and self._collecting_since is not None else None
        if ahead and not idle:
            oldest = self.queue.oldest()
            return None if oldest is None else oldest.arrived + self.max_delay_s
        return None
