"""The life of every job of one model version, from `submit` to its one end. Pure: time is passed in, I/O is asked for.

It holds the queue, the batcher and what each worker has in flight; it admits, dispatches, hands answers out, splits a
batch that raised until the guilty item stands alone, runs the items of a dead worker once more elsewhere, refuses for
a while what killed twice, and ends what was cancelled or is past its deadline. The supervisor carries out what it asks
for through `Actions` and tells it what happened. The simulation in the tests drives it by the thousand.

Invariant: a job's receiver is told exactly one end (an answer, a last piece, an error), or nothing once it was
cancelled; and only the flight that holds the job may end it.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from marserve.errors import (
    BadFrame,
    DeadlinePassed,
    Draining,
    FingerprintRefused,
    HandlerFailed,
    MarserveError,
    NoTicket,
    NoWorker,
    OutOfMemory,
    QueueFull,
    Unavailable,
)
from marserve.messages import Answer, Raised, Receiver, Request, Result
from marserve.pool.batcher import (
    AHEAD_BELOW_S,
    MANY_AHEAD_BELOW_S,
    MAX_IN_FLIGHT,
    MAX_JOBS_IN_FLIGHT,
    Batcher,
    Flight,
    WorkerLane,
)
from marserve.pool.options import PoolOptions
from marserve.pool.queue import Job, JobQueue, JobState
from marserve.telemetry.metrics import VersionMetrics

# How long the body of a request that killed two workers is refused (RELIABILITY C3).
REFUSE_FINGERPRINT_S = 60.0
MAX_REFUSED_FINGERPRINTS = 1000
MAX_DEATHS = 2
MIN_DEADLINES_BOUND = 256


class Actions(Protocol):
    """What the dispatcher asks of the outside world. None of these may call back into the dispatcher."""

    def send(self, key: str, flight: Flight) -> None:
        """Send the flight's jobs to worker `key`."""

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Tell worker `key` that item `index` of batch `number` is no longer wanted."""

    def lane_emptied(self, key: str) -> None:
        """A closed lane has nothing in flight any more: the worker may go."""

    def all_ended(self) -> None:
        """A client that left took the last job with it: nothing waits and nothing runs."""


class Dispatcher:
    """The pure heart of a pool. All calls come from one thread; `now` is the monotonic clock in seconds."""

    def __init__(self, options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> None:
        self.options = options
        self.metrics = metrics
        self.queue = JobQueue()
        self.is_draining = False
        self.living_slots = 0
        self._actions = actions
        self._batcher = Batcher(
            self.queue,
            max_batch_size=options.batch_size,
            max_delay_s=options.max_batch_delay_s,
            policy=options.batch_policy,
        )
        self._lanes: dict[str, WorkerLane] = {}
        self._idle: list[WorkerLane] = []
        self._deadlines: list[tuple[float, int, Job]] = []
        self._deadlines_bound = MIN_DEADLINES_BOUND
        self._tiebreak = count()
        self._refused: dict[bytes, float] = {}
        self._ahead = 0

    # ------------------------------------------------------------------------------------------- admission

    def submit(self, request: Request, receiver: Receiver, now: float) -> Job:
        """Take a request, or refuse it at once.

        Raises Draining, NoWorker (no slot lives), FingerprintRefused, NoTicket or QueueFull.
        """
        try:
            return self._admit(request, receiver, now)
        except Unavailable as error:
            self.metrics.refused[error.cause or "unknown"] += 1
            raise

    def _admit(self, request: Request, receiver: Receiver, now: float) -> Job:
        if self.is_draining:
            raise Draining
        options = self.options
        if self.living_slots <= 0:
            raise NoWorker(options.model)
        if self._refused:
            self._refuse_deadly(request, now)
        waiting = len(self.queue)
        if options.use_job_ticket and len(self._idle) <= waiting + len(self._batcher.groups):
            raise NoTicket(options.model, retry_after_s=self.retry_after_s())
        bound = options.queue_size
        if not self._idle:
            bound -= self._ahead
        elif options.batch_policy == "fixed":
            bound += options.batch_size  # what an idle worker collects has left TorchServe's queue
        if waiting >= bound:
            raise QueueFull(options.model, retry_after_s=self.retry_after_s())
        deadline = request.deadline
        if options.client_timeout_s is not None:
            latest = now + options.client_timeout_s
            deadline = latest if deadline is None or latest < deadline else deadline
        job = Job(request, receiver, now, deadline, self)
        if deadline is not None:
            self._watch_deadline(deadline, job)
        self.queue.enqueue(job)
        self.metrics.requests += 1
        if request.names_version:
            self.metrics.named_requests += 1
        # While every worker is busy, a job that does not fill a batch changes nothing before its delay is up.
        if self._idle or waiting + 1 >= options.batch_size:
            self.pump(now)
        return job

    def retry_after_s(self) -> float:
        """How long the present queue may take, in whole seconds from 1 to 60: for `Retry-After`."""
        runs = [lane.mean_run_s for lane in self._lanes.values()]
        if not runs:
            return 1.0
        batches = math.ceil((len(self.queue) + 1) / self.options.batch_size)
        return float(min(60, max(1, math.ceil(batches * sum(runs) / len(runs) / len(runs)))))

    def _refuse_deadly(self, request: Request, now: float) -> None:
        for fingerprint in [key for key, until in self._refused.items() if until <= now]:
            del self._refused[fingerprint]
        if not self._refused:
            return  # the common case again: bodies need no digest
        until = self._refused.get(fingerprint_of(request))
        if until is not None:
            raise FingerprintRefused(self.options.model, retry_after_s=float(math.ceil(until - now)))

    def _watch_deadline(self, deadline: float, job: Job) -> None:
        """Remember when to end `job`. Jobs that ended before are forgotten when they have become the most."""
        if len(self._deadlines) >= self._deadlines_bound:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not JobState.DONE]
            heapq.heapify(self._deadlines)
            self._deadlines_bound = max(MIN_DEADLINES_BOUND, 2 * len(self._deadlines))
        heapq.heappush(self._deadlines, (deadline, next(self._tiebreak), job))

    # ------------------------------------------------------------------------------------------- workers

    def open_lane(self, key: str, now: float) -> None:
        """Worker `key` has loaded the model and is idle."""
        lane = WorkerLane(key)
        self._lanes[key] = lane
        self._idle.append(lane)
        self.pump(now)

    def close_lane(self, key: str) -> bool:
        """Give worker `key` nothing more. Returns whether it has nothing in flight; else `lane_emptied` will tell."""
        lane = self._lanes.get(key)
        if lane is None:
            return True
        lane.is_open = False
        if not lane.flights:
            self._idle.remove(lane)
            del self._lanes[key]
            return True
        return False

    @property
    def waiting(self) -> int:
        """Jobs that wait: for the first time, or to be run again."""
        grouped = sum(job.state is JobState.GROUPED for group in self._batcher.groups for job in group)
        return len(self.queue) + grouped

    @property
    def running(self) -> int:
        """Jobs that are with workers."""
        return sum(len(flight.jobs) for lane in self._lanes.values() for flight in lane.flights)

    @property
    def is_empty(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._batcher.has_work and not any(lane.flights for lane in self._lanes.values())

    def flights(self, key: str) -> Sequence[Flight]:
        """What worker `key` has in flight, oldest first."""
        lane = self._lanes.get(key)
        return tuple(lane.flights) if lane is not None else ()

    # ------------------------------------------------------------------------------------------- dispatch

    def pump(self, now: float) -> None:
        """Send whatever should leave now."""
        if self._deadlines and self._deadlines[0][0] <= now:
            self._expire(now)
        batcher = self._batcher
        while batcher.has_work:
            if self._idle:
                lane = self._idle[-1]
                chosen = batcher.next_batch(now, idle=True, ahead=False)
            else:
                ahead = self._lane_for_batch_ahead(now)
                if ahead is None:
                    return
                lane = ahead
                chosen = batcher.next_batch(now, idle=False, ahead=True)
            if chosen is None:
                return
            self._dispatch(lane, *chosen, now)
        batcher.rest()

    def next_wake(self) -> float | None:
        """When to call `pump` again though nothing happened: a batch's delay or a job's deadline is up."""
        wake = self._batcher.next_wake(idle=bool(self._idle), ahead=self._may_send_ahead())
        while self._deadlines and self._deadlines[0][2].state is JobState.DONE:
            heapq.heappop(self._deadlines)
        if self._deadlines and (wake is None or self._deadlines[0][0] < wake):
            return self._deadlines[0][0]
        return wake

    def _lane_for_batch_ahead(self, now: float) -> WorkerLane | None:
        """The least busy of the busy workers that may be sent another batch; None if it would not pay."""
        if not self._batcher.pays_ahead(now):
            return None
        best: WorkerLane | None = None
        for lane in self._lanes.values():
            if _takes_another(lane) and (best is None or _busyness(lane) < _busyness(best)):
                best = lane
        return best if self.options.batch_policy == "idle" else None

    def _may_send_ahead(self) -> bool:
        return self.options.batch_policy == "idle" and any(_takes_another(lane) for lane in self._lanes.values())

    def _dispatch(self, lane: WorkerLane, jobs: list[Job], is_group: bool, now: float) -> None:
        if lane.flights:
            self._ahead += len(jobs)
        else:
            self._idle.pop()
        lane.last_number += 1
        flight = Flight(lane.last_number, jobs, is_group, now)
        lane.flights.append(flight)
        observe = self.metrics.queue_seconds.observe
        for job in jobs:
            job.state = JobState.RUNNING
            job.flight = flight
            waited_s = now - job.arrived
            observe(waited_s)
            if job.request.names_version:
                self.metrics.named_queue_s += waited_s
        self.metrics.batch_sizes.observe(len(jobs))
        self._actions.send(lane.key, flight)

    # ------------------------------------------------------------------------------------------- answers

    def finished(
        self,
        key: str,
        number: int,
        handler_s: float,
        results: Sequence[Result],
        bodies: Sequence[bytes],
        now: float,
    ) -> None:
        """Worker `key` has ended batch `number`: one result and one body a job, in order.

        Raises BadFrame when that is not what it was running; the worker must then be ended.
        """
        flight = self._flight(key, number)
        if not len(results) == len(bodies) == len(flight.jobs):
            raise BadFrame(f"batch {number} has {len(flight.jobs)} items, its answer {len(results)}")
        self._land(key, flight, handler_s, now)
        self.pump(now)
        for job, result, body in zip(flight.jobs, results, bodies, strict=True):
            if job.state is JobState.DONE or job.flight is not flight:
                continue
            if result.error is None:
                self._answer(job, Answer(body, result.status, result.reason, result.headers), now)
            else:
                self._fail_as_told(job, result, now)

    def piece(self, key: str, number: int, results: Sequence[Result], bodies: Sequence[bytes], now: float) -> None:
        """One piece of a stream for each job of running batch `number`. Raises BadFrame as `finished`.

        A job whose piece is an error (too large, past its deadline when the batch began) ends here, and alone.
        """
        flight = self._flight(key, number)
        if not len(results) == len(bodies) == len(flight.jobs):
            raise BadFrame(f"batch {number} has {len(flight.jobs)} items, a piece of it {len(results)}")
        for index, (job, result, body) in enumerate(zip(flight.jobs, results, bodies, strict=True)):
            if job.state is JobState.DONE:
                continue
            if result.error is None:
                job.has_sent_pieces = True
                job.receiver.on_piece(Answer(body, result.status, result.reason, result.headers), False)
                continue
            self._actions.mark_cancelled(key, number, index)
            self._fail_as_told(job, result, now)

    def raised(self, key: str, raised: Raised, now: float) -> list[Job]:
        """Batch `raised.number` of worker `key` raised as a whole. It is split in halves while it has mates to save.

        Returns the jobs that failed with it for good.
        """
        flight = self._flight(key, raised.number)
        self._land(key, flight, raised.handler_s, now)
        live = [job for job in flight.jobs if job.state is not JobState.DONE]
        # Counted by who was in the batch, not by who still waits: one who has left may have been the guilty one.
        has_mates = len(flight.jobs) > 1
        if has_mates and self.options.batch_isolation and not any(job.has_sent_pieces for job in live):
            middle = len(live) // 2
            self.metrics.isolated += 1
            for half in (live[middle:], live[:middle]):
                if half:
                    self._group(half)
            live = []
        self.pump(now)
        self.fail_stranded(now)
        for job in live:
            self._fail(job, _error_of(raised.kind, raised.message, raised.code, raised.traceback), now)
        return live

    def died(self, key: str, begun: int, error: MarserveError, *, may_retry: bool, now: float) -> None:
        """Worker `key` is gone; it had begun batches up to number `begun`.

        What it had not begun goes back to the head of the queue. What it had is run once more, each item by itself,
        where `may_retry`, the model's options and the item's history allow; else it fails with `error`. Without
        `may_retry` the batch that was its turn counts as begun: it is what the worker was ended for.
        """
        lane = self._lanes.pop(key, None)
        if lane is None:
            return
        if not lane.flights:
            self._idle.remove(lane)
        elif not may_retry:
            begun = max(begun, lane.flights[0].number)
        self._ahead -= sum(len(flight.jobs) for flight in list(lane.flights)[1:])
        failed: list[Job] = []
        again: list[Job] = []
        for flight in reversed(lane.flights):
            live = [job for job in flight.jobs if job.state is not JobState.DONE]
            if flight.number > begun:
                self._put_back(live, flight.is_group)
                continue
            for job in live:
                job.deaths += 1
                if (
                    may_retry
                    and self.options.retry_on_worker_death
                    and job.deaths < MAX_DEATHS
                    and not job.has_sent_pieces
                ):
                    again.append(job)
                else:
                    failed.append(job)
                    if job.deaths >= MAX_DEATHS:
                        self._refuse(job.request, now)
        for job in reversed(again):
            self.metrics.retried += 1
            self._group([job])
        self.pump(now)
        self.fail_stranded(now)
        for job in failed:
            self._fail(job, error, now)

    def _flight(self, key: str, number: int) -> Flight:
        lane = self._lanes.get(key)
        if lane is None or not lane.flights or lane.flights[0].number != number:
            raise BadFrame(f"worker {key} speaks of batch {number}, which it was not running")
        return lane.flights[0]

    def _land(self, key: str, flight: Flight, handler_s: float, now: float) -> None:
        """Book the end of a lane's first flight. Raises BadFrame for a time that is none."""
        if not 0 <= handler_s < math.inf:
            raise BadFrame(f"batch {flight.number} is said to have taken {handler_s} s")
        lane = self._lanes[key]
        lane.flights.popleft()
        lane.mean_run_s = handler_s if not lane.mean_run_s else 0.8 * lane.mean_run_s + 0.2 * handler_s
        self.metrics.handler_seconds.observe(handler_s, len(flight.jobs))
        if lane.flights:
            self._ahead -= len(lane.flights[0].jobs)
        elif lane.is_open:
            self._idle.append(lane)
        else:
            del self._lanes[key]
            self._actions.lane_emptied(key)

    def _group(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.state = JobState.GROUPED
            job.flight = None
        self._batcher.groups.appendleft(jobs)

    def _put_back(self, jobs: list[Job], is_group: bool) -> None:
        if not jobs:
            return
        if is_group:
            self._group(jobs)
            return
        for job in jobs:
            job.state = JobState.WAITING
            job.flight = None
        self.queue.put_back(jobs)

    def _refuse(self, request: Request, now: float) -> None:
        """Refuse this body for a while. The table is bounded: the entry that ends soonest makes room."""
        fingerprint = fingerprint_of(request)
        self._refused.pop(fingerprint, None)
        if len(self._refused) >= MAX_REFUSED_FINGERPRINTS:
            del self._refused[next(iter(self._refused))]
        self._refused[fingerprint] = now + REFUSE_FINGERPRINT_S

    # ------------------------------------------------------------------------------------------- ends

    def cancel(self, job: Job) -> None:
        """The client of `job` has gone: drop it where it waits, tell the worker where it runs."""
        if self._take_out(job):
            self.metrics.cancelled += 1
            if self.is_empty:
                self._actions.all_ended()

    def fail_stranded(self, now: float) -> int:
        """End everything that waits if no worker is left, or on its way, that could ever take it; returns how many."""
        if self.living_slots > 0 or not self._batcher.has_work:
            return 0
        return self.fail_waiting(Draining() if self.is_draining else NoWorker(self.options.model), now)

    def fail_waiting(self, error: MarserveError, now: float) -> int:
        """End everything that waits with `error`; returns how many. What runs goes on."""
        jobs = self.queue.clear()
        for group in self._batcher.groups:
            jobs.extend(job for job in group if job.state is JobState.GROUPED)
        self._batcher.groups.clear()
        self._batcher.rest()
        for job in jobs:
            job.state = JobState.GROUPED  # in no queue any more: whoever is told may cancel others of them
        for job in jobs:
            self._fail(job, error, now)
        return len(jobs)

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            job = heapq.heappop(deadlines)[2]
            where = "worker" if job.state is JobState.RUNNING else "queue"
            if self._take_out(job):
                self.metrics.expired += 1
                self._tell_error(job, DeadlinePassed(where), now)

    def _take_out(self, job: Job) -> bool:
        """End `job` without a word to its receiver; False if it had ended already."""
        state = job.state
        if state is JobState.DONE:
            return False
        job.state = JobState.DONE
        if state is JobState.WAITING:
            self.queue.leave(job)
            if not len(self.queue):
                self._batcher.rest()
        elif state is JobState.GROUPED:
            self._batcher.forget_ended_groups()
        elif state is JobState.RUNNING and job.flight is not None:
            for key, lane in self._lanes.items():
                if job.flight in lane.flights:
                    self._actions.mark_cancelled(key, job.flight.number, job.flight.jobs.index(job))
                    break
        return True

    def _answer(self, job: Job, answer: Answer, now: float) -> None:
        job.state = JobState.DONE
        metrics = self.metrics
        total_s = now - job.arrived
        metrics.total_seconds.observe(total_s)
        if job.request.names_version:
            metrics.named_total_s += total_s
        metrics.answers[answer.status] += 1
        if job.has_sent_pieces:
            job.receiver.on_piece(answer, True)
        else:
            job.receiver.on_answer(answer)

    def _fail_as_told(self, job: Job, result: Result, now: float) -> None:
        """End a job with the error that its worker reported for it alone."""
        if result.error == "expired":
            self.metrics.expired += 1
            self._fail(job, DeadlinePassed("worker"), now)
        else:
            self._fail(job, _error_of(result.error or "", result.reason, result.status), now)

    def _fail(self, job: Job, error: MarserveError, now: float) -> None:
        """End a job with an error, unless it has ended: by its deadline, or because whoever was told before left."""
        if job.state is JobState.DONE:
            return
        job.state = JobState.DONE
        self._tell_error(job, error, now)

    def _tell_error(self, job: Job, error: MarserveError, now: float) -> None:
        metrics = self.metrics
        total_s = now - job.arrived
        metrics.errors[error.cause or "unknown"] += 1
        metrics.total_seconds.observe(total_s)
        if job.request.names_version:
            metrics.named_total_s += total_s
        job.receiver.on_error(error)


def fingerprint_of(request: Request) -> bytes:
    """What tells a deadly request again: a digest of its inputs, names and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in request.parts:
        name = part.name.encode()
        digest.update(b"%d:%d:" % (len(name), len(part.body)))
        digest.update(name)
        digest.update(part.body)
    return digest.digest()


def _takes_another(lane: WorkerLane) -> bool:
    """Whether a lane may be sent a batch ahead: open, busy with no suspect, known to be quick, and with room."""
    flights = lane.flights
    if not flights or not lane.is_open or flights[0].is_group or not 0 < lane.mean_run_s < AHEAD_BELOW_S:
        return False
    return len(flights) < MAX_IN_FLIGHT or (
        lane.mean_run_s < MANY_AHEAD_BELOW_S and len(flights) * len(flights[-1].jobs) < MAX_JOBS_IN_FLIGHT
    )


def _busyness(lane: WorkerLane) -> tuple[int, float]:
    """What orders busy lanes: fewer batches in flight first, then whose oldest was sent first."""
    return len(lane.flights), lane.flights[0].sent_at


def _error_of(kind: str, message: str, code: int, traceback: str = "") -> MarserveError:
    """The typed error behind a kind that the worker reported."""
    if kind == "memory":
        return OutOfMemory(message)
    return HandlerFailed(message, code, traceback)
