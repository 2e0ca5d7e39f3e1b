"""Decides which waiting jobs leave together, for which worker, and when. Pure: the caller passes `now` in seconds.

Three policies:

    idle    (the default) an idle worker takes the waiting jobs at once. A busy worker is sent a second batch ahead only
            while no worker is idle, and only when that batch is full or its oldest job has waited `max_batch_delay_s`:
            the batch is then already there when the first one ends. Slow handlers are sent nothing ahead: it would save
            nothing and bind jobs to one worker.
    fixed   TorchServe's: an idle worker collects for up to `max_batch_delay_s`, counted from its first job, or until
            the batch is full; one worker of a version collects at a time; nothing is sent ahead.
    goal    an idle worker takes at once as many waiting jobs as `lengths/latency_goal.py` says. Where lengths are
            known the jobs are of about one length, and the next one in the queue is always among them. A busy worker is
            sent a batch ahead where the time on the wire counts: batches of a few milliseconds that are full, or whose
            fixed cost is small.

A *group* is a batch that must run as it is, by itself: a half of a batch that raised, an item whose worker died. Groups
go before everything else that waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sized
from typing import Literal

from marserve.pool.dispatch.jobs import Job, JobState
from marserve.pool.dispatch.lengths.asked_lengths import AskedLengths
from marserve.pool.dispatch.lengths.latency_goal import GoalPolicy
from marserve.pool.dispatch.lengths.lengths import LengthOf
from marserve.pool.dispatch.queue import JobQueue

# A batch is sent ahead only to a worker whose batches take less than this: what it hides is the time on the wire.
AHEAD_BELOW_S = 0.05
MAX_IN_FLIGHT = 2
# With a goal less, since a job that was sent ahead cannot go to another worker that is free sooner.
AHEAD_FOR_GOAL_BELOW_S = 0.005
# A job that was sent to a worker cannot be overtaken any more. While requests have priorities of their own nothing is
# sent ahead to handlers that take longer than this: it would save a hundredth of a run, and cost a whole one.
AHEAD_OF_PRIORITIES_BELOW_S = 0.001
PRIORITIES_SEEN_S = 10.0  # for so long after the last request with a priority of its own
# Jobs of a fitting length are looked for among so many times the batch's size.
LENGTHS_AMONG = 4
# Batches that take microseconds cost less than their time on the wire: several small ones are sent ahead, up to this
# many jobs in all (24 % less CPU a request for an echo with batch size 1, `benchmarks/echo.py`).
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
        workers: Sized = range(1),
    ) -> None:
        """`goal` decides for the policy `goal`; `length_of` or `asked_lengths` make its batches of about one length.

        `workers` are those that share the work.
        """
        self.queue = queue
        self.goal = goal
        self.length_of = length_of
        self.asked_lengths = asked_lengths
        self._workers = workers
        self.guessed: list[Job] = []  # jobs whose lengths were only estimated when the last batch was chosen
        self.groups: deque[list[Job]] = deque()
        self.max_batch_size = max_batch_size
        self.max_delay_s = max_delay_s
        self.policy = policy
        self._usually_ahead_below_s = AHEAD_FOR_GOAL_BELOW_S if policy == "goal" else AHEAD_BELOW_S
        self.ahead_below_s = self._usually_ahead_below_s
        self.priorities_until = math.inf  # until when `ahead_below_s` is lowered; infinite while it is not
        self._collecting_since: float | None = None

    @property
    def enough_ahead(self) -> int:
        """How many jobs must wait for a batch to be sent ahead before its delay is up."""
        return self.max_batch_size if self.goal is None else min(self.max_batch_size, MAX_JOBS_IN_FLIGHT)

    @property
    def has_work(self) -> bool:
        """Whether anything waits."""
        return bool(self.groups) or len(self.queue) > 0

    def next_batch(self, now: float, *, ahead: bool = False) -> tuple[list[Job], bool] | None:
        """Take the jobs that should leave now, oldest first, and say whether they are a group; None while waiting pays.

        They are for an idle worker, or with `ahead` for a busy one; then `pays_ahead` has been asked. The caller has
        failed jobs past their deadline already. Returned are 1 to `max_batch_size` live jobs, or a group.
        """
        if not ahead:
            while self.groups:
                group = [job for job in self.groups.popleft() if job.state is JobState.GROUPED]
                if group:
                    return group, True
        if not len(self.queue):
            self.rest()
            return None
        if self.policy == "fixed":
            return self._collect(now)
        if self.goal is not None:
            return self._take_for_goal(self.goal, now), False
        return self.queue.take(self.max_batch_size), False

    def _take_for_goal(self, goal: GoalPolicy, now: float) -> list[Job]:
        """Take the jobs that should leave now by the goal; the queue is not empty."""
        first, oldest = self.queue.first(), self.queue.oldest()
        assert first is not None
        assert oldest is not None
        self.guessed = []
        length = self._length(first)
        size = goal.choose(len(self.queue), max(0.0, now - oldest.arrived), workers=len(self._workers), length=length)
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
        """Take a full batch, or what there is when TorchServe's wait is over. A describe job never waits."""
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
        """Send less ahead for a while: a request has a priority of its own."""
        self.ahead_below_s, self.priorities_until = AHEAD_OF_PRIORITIES_BELOW_S, now + PRIORITIES_SEEN_S

    def forget_priorities(self) -> None:
        """Send as much ahead as before: no request has had a priority of its own for `PRIORITIES_SEEN_S`."""
        self.ahead_below_s, self.priorities_until = self._usually_ahead_below_s, math.inf

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
        """When time alone may change what `next_batch` returns; None if it cannot."""
        if not len(self.queue):
            return None
        if self.policy == "fixed":
            return self._collecting_since + self.max_delay_s if idle and self._collecting_since is not None else None
        if self.policy == "idle" and ahead and not idle:
            oldest = self.queue.oldest()
            return None if oldest is None else oldest.arrived + self.max_delay_s
        return None
