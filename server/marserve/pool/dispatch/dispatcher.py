"""The life of every job of one model version, from `submit` to its one end. Pure: time is passed in, I/O is asked for.

The dispatcher admits jobs, passes answers on, splits a batch that raised until the guilty item stands alone, runs the
items of a dead worker once more elsewhere, refuses for a while the body that killed two workers, and ends jobs that are
cancelled or past their deadline. Its mode (`modes/`) decides which worker gets which jobs, and when. The queue, the
batcher, `lanes.py` and `deadlines.py` keep what waits, what runs and when it ends. The pool carries out what is asked
for through `Actions`, and reports what happened. The simulation in the tests drives thousands of worlds.

Invariant: a job's receiver gets exactly one end (an answer, a last piece, an error), or nothing once the job was
cancelled; and only the flight that holds the job may end it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from marserve.errors import (
    BadFrame,
    BadInput,
    DeadlinePassed,
    FingerprintRefused,
    HandlerFailed,
    MarserveError,
    NoTicket,
    NoWorker,
    OutOfMemory,
    QueueFull,
    SequenceGone,
    Thrown,
    Unavailable,
    VersionStops,
    WaitTooLong,
)
from marserve.messages import Answer, Raised, Receiver, Request, Result, Work
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.batcher import MAX_JOBS_IN_FLIGHT, Batcher
from marserve.pool.dispatch.deadlines import Deadlines
from marserve.pool.dispatch.fingerprints import MAX_DEATHS, Fingerprints
from marserve.pool.dispatch.hold import Hold
from marserve.pool.dispatch.jobs import Flight, Job, JobState, Landed, Loss
from marserve.pool.dispatch.lanes import Lanes
from marserve.pool.dispatch.lengths.asked_lengths import AskedLengths
from marserve.pool.dispatch.lengths.latency_goal import GoalPolicy
from marserve.pool.dispatch.lengths.lengths import FROM_HANDLER, read_rule
from marserve.pool.dispatch.modes import StepsAndSequences, make_mode
from marserve.pool.dispatch.modes.steps_and_sequences import goes_on, tell_pieces
from marserve.pool.dispatch.queue import GivenUp, JobQueue
from marserve.pool.dispatch.sequences import SequenceQueue
from marserve.pool.options import PoolOptions
from marserve.telemetry.happenings import Bursts
from marserve.telemetry.metrics.counts import VersionMetrics

# The longest `Retry-After`, and how much later than its own moment a refused client may come.
MOST_RETRY_AFTER_S = 60
APPOINTED_SPREAD_S = 1


class Dispatcher:
    """The pure heart of a pool. All calls come from one thread; `now` is the monotonic clock in seconds.

    Its mode decides how jobs are given to workers; only the dispatcher calls the jobs' receivers.
    """

    def __init__(self, options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> None:
        self.options = options
        self.metrics = metrics
        self.sequences: SequenceQueue | None = None
        if options.sequences is not None:
            self.sequences = SequenceQueue(options.sequences, options.model)
        self.queue = JobQueue(options.default_priority) if self.sequences is None else self.sequences
        self.is_draining = False
        self.living_slots = 0
        self.hold_for_start = Hold()  # while no slot lives
        self.awaited_device = ""  # why its workers wait, if all devices that they may use are lost
        self.last_death = ""  # the class of cause of the latest death, for clients whose requests no worker can take
        self._actions = actions
        self.goal: GoalPolicy | None = None
        if options.batch_policy == "goal" and options.latency_goal_s is not None:
            self.goal = GoalPolicy(options.latency_goal_s, options.batch_size, padding_budget=options.padding_budget)
        # Without a rule the handler may say how long inputs are (docs/batching-goal.md).
        has_rule = options.length_from not in (None, FROM_HANDLER)
        self.asked_lengths = AskedLengths(metrics) if self.goal is not None and not has_rule else None
        self.lanes = Lanes(metrics, actions, in_any_order=options.is_concurrent)
        self._batcher = Batcher(
            self.queue,
            max_batch_size=options.batch_size,
            max_delay_s=options.max_batch_delay_s,
            policy=options.batch_policy,
            goal=self.goal,
            length_of=read_rule(options.length_from) if has_rule and options.length_from is not None else None,
            asked_lengths=self.asked_lengths,
            workers=self.lanes.by_key,
        )
        self.deadlines = Deadlines()
        self.fingerprints = Fingerprints()
        self._floods = Bursts(least=1)
        self._appointed_until = 0.0  # up to when workers' time is planned for refused clients
        self._mode = make_mode(options, self.lanes, self._batcher, actions)
        self.expected_wait_s = self._mode.expected_wait_s
        has_sequences = self.sequences is not None
        self._sequence_mode = self._mode if has_sequences and isinstance(self._mode, StepsAndSequences) else None
        # Whether `next_wake` may return a moment though nothing waits and nothing has a deadline.
        self.keeps_time = has_sequences

    # ------------------------------------------------------------------------------------------- admission

    def submit(self, request: Request, receiver: Receiver, now: float) -> Job:
        """Take a request, or refuse it at once.

        Raises VersionStops, NoWorker (no slot lives), FingerprintRefused, NoTicket, QueueFull, WaitTooLong,
        DeadlinePassed.
        """
        try:
            return self._admit(request, receiver, now)
        except (Unavailable, DeadlinePassed) as error:
            self.metrics.refused[error.cause or "unknown"] += 1
            if isinstance(error, QueueFull | NoTicket | WaitTooLong):
                if self.lanes.mean_runs_s:
                    error.retry_spread_s = APPOINTED_SPREAD_S
                if (flood := self._floods.add(now)) is not None:
                    requests = "a request" if flood.amount == 1 else f"{flood.amount} requests"
                    text = f"had more requests than it takes, and refused {requests} ({error.cause})"
                    self.metrics.note("flood", now, text, seconds=now - flood.began)
            raise

    def _admit(self, request: Request, receiver: Receiver, now: float) -> Job:
        if self.is_draining:
            raise self.stops()
        options = self.options
        deadline = request.deadline
        if options.client_timeout_s is not None:
            latest = now + options.client_timeout_s
            deadline = latest if deadline is None or latest < deadline else deadline
        if self.living_slots <= 0 and self._is_stranded(request, now, deadline, now):
            raise self._no_worker(now)
        if self._sequence_mode is not None:
            self._end_sequences(self._sequence_mode, now)
            request = self._sequence_mode.admit(request)
        if self.fingerprints.until and (left_s := self.fingerprints.refused_for_s(request, now)):
            raise FingerprintRefused(options.model, retry_after_s=float(math.ceil(left_s)))
        waiting = len(self.queue)
        if options.use_job_ticket and self._mode.tickets(request) <= waiting + len(self._batcher.groups):
            raise NoTicket(options.model, retry_after_s=self.appoint_s(now))
        bound = options.queue_size
        idle = self.lanes.idle
        if not idle:
            bound -= self.lanes.jobs_ahead
        elif options.batch_policy == "fixed":
            bound += options.batch_size  # TorchServe's queue does not count the jobs that an idle worker collects
        priority = request.priority
        if priority is None:
            priority = options.default_priority
        elif priority != options.default_priority:
            self._batcher.see_priority(now)
        displaced = None
        if waiting >= bound:
            displaced = self.queue.displaceable(priority)
            if displaced is None:
                raise QueueFull(options.model, retry_after_s=self.appoint_s(now))
        job = Job(request, receiver, now, deadline, self, priority)
        if deadline is not None:
            self._refuse_late(deadline, priority, now)
            self.deadlines.watch(deadline, job)
        if displaced is not None:
            self.queue.displace(displaced)
            displaced.state = JobState.GROUPED  # in no queue any more; may still be cancelled until it is failed below
        self.queue.enqueue(job)
        timeline = request.timeline
        if timeline is not None and not timeline.admitted_at:
            timeline.admitted_at = now
            timeline.of = self.metrics.stages
        if self.living_slots <= 0:
            self.hold_for_start.watch(now, deadline)
        self.metrics.requests += 1
        if request.names_version:
            self.metrics.named_requests += 1
        if request.is_inner:
            self.metrics.inner_requests += 1
        # While every worker is busy a job that does not fill a batch changes nothing before its delay is up.
        if (
            idle
            or waiting + 1 >= options.batch_size
            or self._mode.serves_busy
            or (waiting + 1 == MAX_JOBS_IN_FLIGHT and self.goal is not None)
        ):
            self.pump(now)
        if displaced is not None:
            self._fail(displaced, QueueFull(options.model, retry_after_s=self.appoint_s(now)), now)
        return job

    def _is_stranded(self, request: Request, arrived: float, deadline: float | None, now: float) -> bool:
        """Whether no worker will take a request in the time that it may wait. Asked while no slot lives."""
        return request.is_rescued or not self.hold_for_start.keeps(arrived, deadline, now)

    def _refuse_late(self, deadline: float, priority: int, now: float) -> None:
        """Raise if the deadline has passed, or will have before the request is likely to be answered."""
        if deadline <= now:
            raise DeadlinePassed("queue")
        wait_s = self.expected_wait_s(priority, now)
        if wait_s is not None and now + wait_s >= deadline:
            raise WaitTooLong(wait_s, deadline - now, retry_after_s=self.appoint_s(now))

    def retry_after_s(self, now: float) -> float:
        """How long the present queue may take, in whole seconds from 1 to 60: for `Retry-After`.

        While no worker serves, the time until the next start, which may be longer.
        """
        workers = len(self.lanes.by_key)
        if not workers:
            return max(1.0, (self.hold_for_start.left_s(now) or 0.0) if self.living_slots <= 0 else 0.0)
        batches = math.ceil((len(self.queue) + 1) / self.options.batch_size)
        return float(min(MOST_RETRY_AFTER_S, max(1, math.ceil(batches * self.lanes.mean_runs_s / workers / workers))))

    def appoint_s(self, now: float) -> float:
        """As `retry_after_s` for one refused client, after the moments given to clients that were refused before it.

        Clients with the same moment would come together, while the queue has room for a few. So each gets a moment of
        its own, one request's share of the workers' time after the last; beyond a minute this begins anew.
        """
        least_s = self.retry_after_s(now)
        workers = len(self.lanes.by_key)
        if not workers or not self.lanes.mean_runs_s:
            return least_s
        moment = max(now + least_s, self._appointed_until)
        if moment - now > MOST_RETRY_AFTER_S:
            moment = now + least_s
        self._appointed_until = moment + self.lanes.mean_runs_s / workers / workers / self.options.batch_size
        return float(math.ceil(moment - now))

    # ------------------------------------------------------------------------------------------- workers

    def open_lane(self, key: str, now: float, *, overlaps: bool = False) -> None:
        """Worker `key` has loaded the model and is idle. `overlaps` as of the lane."""
        self._mode.rest(self.lanes.add(key, overlaps=overlaps), now)
        self.pump(now)

    def close_lane(self, key: str) -> bool:
        """Give worker `key` nothing more. Returns whether it has nothing in flight; else `lane_emptied` follows."""
        lane = self.lanes.by_key.get(key)
        return lane is None or self._mode.close(lane)

    @property
    def waiting(self) -> int:
        """How many jobs wait, for the first time or to be run again."""
        grouped = sum(job.state is JobState.GROUPED for group in self._batcher.groups for job in group)
        return len(self.queue) + grouped

    @property
    def running(self) -> int:
        """How many jobs are with workers."""
        return self.lanes.running

    @property
    def busy_lanes(self) -> int:
        """How many workers have something in flight."""
        return self.lanes.busy

    @property
    def mean_batch_s(self) -> float:
        """How long batches took of late, over all workers that had one; 0 if none had."""
        return self.lanes.mean_batch_s

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest job in the queue has waited, 0 if none waits."""
        oldest = self.queue.oldest()
        return 0.0 if oldest is None else max(0.0, now - oldest.arrived)

    @property
    def is_empty(self) -> bool:
        """Nothing waits and nothing runs."""
        return self.lanes.is_at_rest and not self._batcher.has_work

    def flights(self, key: str) -> Sequence[Flight]:
        """What worker `key` has in flight, oldest first."""
        lane = self.lanes.by_key.get(key)
        return tuple(lane.flights) if lane is not None else ()

    def quiet_since(self, key: str) -> float | None:
        """Since when a concurrent worker has sent nothing for one of its batches; None if it runs them one by one."""
        flights = self.flights(key) if self.options.is_concurrent else ()
        if not flights or flights[0].is_check:
            return None
        return min(flight.heard_at for flight in flights)

    def describe_sequences(self) -> dict[str, int] | None:
        """What describe says of sequences: how many live, and how many are refused because their worker ended."""
        sequences, options = self.sequences, self.options.sequences
        if sequences is None or options is None:
            return None
        return {"living": sequences.living, "most": options.most, "lost": sequences.lost}

    def ended_in(self, landed: Landed) -> int:
        """How many requests of a batch ended with it."""
        if not self.options.continuous_batching:
            return len(landed.results)
        return sum(not goes_on(result) for result in landed.results)

    def want_lane(self, lent: Callable[[str, Flight], None], now: float) -> None:
        """Have one idle worker lent to the server, before it gets requests.

        `lent` is called with its key and a flight, which has its number and no jobs: at once if a worker is idle, else
        as soon as one is. It must not call back. `end_loan` gives a worker back that still lives.
        """
        self.lanes.lend_to = lent
        if self.lanes.idle:
            self._mode.rest(self.lanes.idle.pop(), now)

    def want_no_lane(self) -> None:
        """Withdraw `want_lane` if no worker was lent yet."""
        self.lanes.lend_to = None

    def borrow(self, key: str, now: float) -> int:
        """Have worker `key` lent to the server if it is idle; `end_loan` gives it back. Returns the loan's number.

        0 if the worker is not idle, or gone.
        """
        lane = self.lanes.by_key.get(key)
        if lane is None or lane not in self.lanes.idle:
            return 0
        # No check waits for a worker while one is idle, so that `lend_to` is free.
        self.lanes.lend_to = lambda key, flight: None
        self.lanes.idle.remove(lane)
        self._mode.rest(lane, now)
        return lane.last_number

    @property
    def has_spare_lane(self) -> bool:
        """Whether a worker is idle and nothing waits for one."""
        return bool(self.lanes.idle) and not self._batcher.has_work

    def end_loan(self, key: str, number: int, now: float) -> None:
        """Worker `key` has ended what it was lent for. Raises BadFrame if it was not lent."""
        self._mode.rest(self.lanes.end_loan(key, number), now)
        self.pump(now)

    def reconfigure(self, *, batch_size: int, max_batch_delay_s: float, now: float) -> None:
        """Form batches by these values from now on. Batches formed before are kept."""
        self.options = dataclasses.replace(self.options, batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)
        self._batcher.max_batch_size = batch_size
        if self.goal is not None:
            self.goal.max_batch_size = batch_size
        self._batcher.max_delay_s = max_batch_delay_s
        self.pump(now)

    # ------------------------------------------------------------------------------------------- dispatch

    def pump(self, now: float) -> None:
        """Send what should leave now."""
        if self.deadlines.first <= now:
            self._expire(now)
        if self._sequence_mode is not None:
            self._end_sequences(self._sequence_mode, now)
        self._mode.dispatch(now)

    def wake(self, now: float) -> None:
        """The moment of `next_wake` has come: send what should leave, and end jobs that have waited long enough."""
        self.pump(now)
        if now >= self.hold_for_start.look_at:
            self.fail_stranded(now)

    def next_wake(self) -> float | None:
        """When to call `wake` though nothing happened; None for never."""
        wake, moment = self.hold_for_start.look_at, self._mode.next_moment()
        if moment is not None and moment < wake:
            wake = moment
        if self.deadlines.first < wake:
            wake = min(wake, self.deadlines.soonest())
        return wake if wake < math.inf else None

    # ------------------------------------------------------------------------------------------- lengths

    def offer_lengths(self) -> None:
        """A worker has loaded a handler that can say how long inputs are."""
        if self.asked_lengths is not None:
            self.asked_lengths.is_offered = True

    def is_asked(self, key: str) -> bool:
        """Whether worker `key` is being asked for lengths now, before its oldest batch."""
        lane = self.lanes.by_key.get(key)
        if lane is None or lane.question is None:
            return False
        return lane.flights[0].number == lane.question.number

    def told_lengths(self, key: str, number: int, seconds: float, lengths: Sequence[int]) -> None:
        """Worker `key` has answered the question before batch `number`. Raises BadFrame without such a question."""
        lane = self.lanes.by_key.get(key)
        question = lane.question if lane is not None else None
        if lane is None or question is None or self.asked_lengths is None or question.number != number:
            raise BadFrame(f"worker {key} speaks of lengths before batch {number}, which it was not asked for")
        if len(lengths) > len(question.jobs) or not 0 <= seconds < math.inf:
            raise BadFrame(f"worker {key} says {len(lengths)} lengths, of {len(question.jobs)}, in {seconds} s")
        lane.question = None
        self.asked_lengths.take(question, lengths, seconds)

    # ------------------------------------------------------------------------------------------- answers

    def finished(
        self,
        key: str,
        number: int,
        handler_s: float,
        results: Sequence[Result],
        bodies: Sequence[bytes | bytearray],
        now: float,
    ) -> None:
        """Worker `key` has ended batch `number`: one result and one body a job, in order.

        That is `land`, `pump` and `tell` in one. Raises BadFrame if the worker did not run such a batch; end it then.
        """
        landed = self.land(key, number, handler_s, results, bodies, now)
        self.pump(now)
        self.tell(landed, now)

    def land(
        self,
        key: str,
        number: int,
        handler_s: float,
        results: Sequence[Result],
        bodies: Sequence[bytes | bytearray],
        now: float,
        work: Work | None = None,
    ) -> Landed:
        """Book that worker `key` has ended batch `number`, so that `pump` may send it the next; `tell` must follow.

        Raises BadFrame as `finished`.
        """
        flight = self.lanes.flight(key, number)
        if not len(results) == len(bodies) == len(flight.jobs):
            raise BadFrame(f"batch {number} has {len(flight.jobs)} items, its answer {len(results)}")
        if self.options.continuous_batching:
            for job, result in zip(flight.jobs, results, strict=True):
                if goes_on(result):
                    job.note_piece(self.metrics.stages, now)
        self._mode.land(flight, handler_s, results, now)
        self._keep_times(flight, handler_s, work, now)
        if self.goal is not None and flight.jobs:
            length, count = 1, len(flight.jobs)
            if self._batcher.knows_lengths:
                lengths = [job.length or 1 for job in flight.jobs]
                length = max(lengths)
                self.metrics.padding.observe(1.0 - sum(lengths) / (length * count))
            self.goal.learn(count, handler_s, length=length)
            if self.asked_lengths is not None:
                self.asked_lengths.earn(handler_s)
        return Landed(flight, results, bodies)

    def _keep_times(self, flight: Flight, handler_s: float, work: Work | None, now: float) -> None:
        """Note when a batch landed and what its worker says of its work, for its requests' timelines."""
        times = flight.times
        if times is None:
            return
        times.land(now, handler_s, work)
        self.metrics.stages.observe_batch(times)

    def tell(self, landed: Landed, now: float) -> None:
        """Pass the answer, or the next piece, of each job of a landed batch to its receiver."""
        metrics, goal = self.metrics, self.goal
        if self.options.continuous_batching:
            landed = tell_pieces(landed)
        flight = landed.flight
        totals_s: list[float] = []
        named_s: list[float] = []
        for job, result, body in zip(flight.jobs, landed.results, landed.bodies, strict=True):
            if job.deadline is not None and job.deadline <= flight.sent_at and result.error is None:
                metrics.expired_run += 1
            if job.flight is not flight:
                continue  # it has ended
            if result.error is not None:
                self._fail_as_told(job, result, now)
                continue
            _close(job)
            if job.held_by is not None:
                self.lanes.release(job)
            total_s = now - job.arrived
            totals_s.append(total_s)
            if goal is not None:
                goal.answered(total_s)
            if job.request.names_version:
                named_s.append(total_s)
            if job.has_failed or result.thrown is not None:  # a stream whose last event says so
                metrics.errors[HandlerFailed.cause] += 1
            else:
                metrics.answers[result.status] += 1
            answer = Answer(body, result.status, result.reason, result.headers, result.thrown)
            if job.piece_at is not None:
                job.note_piece(metrics.stages, now)
                job.receiver.on_piece(answer, True)
            else:
                job.receiver.on_answer(answer)
        metrics.total_seconds.observe_all(totals_s)
        if metrics.total_seconds.examples is not None and len(totals_s) == len(flight.jobs) > 0:
            last = flight.jobs[-1].request
            metrics.total_seconds.exemplify(totals_s[-1], last.id, last.kept_trace_id)
        if named_s:
            metrics.named_total_s += sum(named_s)
        if metrics.tap is not None:
            metrics.tap.answered(totals_s, named_s)
        if self._sequence_mode is not None:
            self._tell_gone(self._sequence_mode, now)

    def piece(
        self, key: str, number: int, results: Sequence[Result], bodies: Sequence[bytes | bytearray], now: float
    ) -> None:
        """One piece of a stream for each job of running batch `number`. Raises BadFrame as `finished`.

        A job whose piece is an error (too large, past its deadline when the batch began) ends by itself.
        """
        flight = self.lanes.flight(key, number)
        if not len(results) == len(bodies) == len(flight.jobs):
            raise BadFrame(f"batch {number} has {len(flight.jobs)} items, a piece of it {len(results)}")
        flight.heard_at = now
        for index, (job, result, body) in enumerate(zip(flight.jobs, results, bodies, strict=True)):
            if job.state is JobState.DONE:
                continue
            if result.error is None:
                job.note_piece(self.metrics.stages, now)
                job.has_failed = job.has_failed or result.thrown is not None
                answer = Answer(body, result.status, result.reason, result.headers, result.thrown)
                job.receiver.on_piece(answer, False)
                continue
            self._actions.mark_cancelled(key, number, index)
            self._fail_as_told(job, result, now)

    def raised(self, key: str, raised: Raised, now: float) -> list[Job]:
        """The handler raised for all of batch `raised.number` of worker `key`: run its halves again if it may be split.

        A batch that ran out of memory is halved once even without `batchIsolation`: half of it may fit.

        Returns the jobs that failed for good.
        """
        flight = self.lanes.flight(key, raised.number)
        self._mode.land(flight, raised.handler_s, (), now)
        self._keep_times(flight, raised.handler_s, raised.work, now)
        live = [job for job in flight.jobs if job.state is not JobState.DONE]
        # All jobs of the batch count, not only those that still wait: one that has left may have been the guilty one.
        has_mates = len(flight.jobs) > 1
        is_memory = raised.kind == "memory"
        self.metrics.out_of_memory += is_memory
        may_split = self._mode.splits and (
            self.options.batch_isolation or (is_memory and self.options.halves_without_memory and not flight.is_group)
        )
        if has_mates and may_split and not any(job.has_sent_pieces for job in live):
            middle = len(live) // 2
            self.metrics.isolated += 1
            for half in (live[middle:], live[:middle]):
                if half:
                    self._batcher.group(half)
            live = []
        self.pump(now)
        self.fail_stranded(now)
        thrown = Thrown(raised.error_type, raised.error_text, raised.traceback)
        for job in live:
            self._fail(job, error_of(raised.kind, raised.message, raised.code, thrown), now)
        return live

    def died(
        self,
        key: str,
        begun: int,
        error: MarserveError,
        *,
        may_retry: bool,
        now: float,
        is_suspect: bool = True,
        accused: int = 0,
        began_oldest: bool = False,
    ) -> None:
        """Worker `key` is gone; it had begun batches up to number `begun`.

        Batches that it had not begun go back to the head of the queue. Items that it had begun are run once more, each
        by itself, if `may_retry`, the model's options and the item's history allow; else they fail with `error`.
        Without `may_retry` the oldest batch counts as begun: the worker was ended because of it. Without `is_suspect`
        its machine was lost, which counts against no request. With `began_oldest` the oldest batch counts as begun: the
        worker may not have told, and would get it again for ever. `accused` is the batch that caused the end according
        to the worker, 0 if it named none.
        """
        lane = self.lanes.lost(key)
        if lane is None:
            return
        lost = self._mode.lost(lane, Loss(begun, may_retry, is_suspect, accused, began_oldest), now)
        for job in lost.failed:
            if lost.is_sure and job.deaths >= MAX_DEATHS:
                self.fingerprints.refuse(job.request, now)
        for job in lost.again:
            self.metrics.retried += 1
            self._batcher.group([job])
        self.pump(now)
        self.fail_stranded(now)
        for job in lost.failed:
            self._fail(job, error, now)
        if self._sequence_mode is not None:
            self._tell_gone(self._sequence_mode, now)

    # ------------------------------------------------------------------------------------------- to another version

    def withdraw(self) -> list[Job]:
        """Take out the jobs that may as well run on another version, oldest first.

        These wait, for the first time or to be run again, have sent no piece of an answer, name no version and are no
        describe requests. Empty for versions with sequences, which belong to a worker.
        """
        if self.options.sequences is not None:
            return []
        leaving = [job for group in self._batcher.groups for job in group if _may_leave(job)]
        for job in leaving:
            job.state = JobState.WAITING
        self._batcher.forget_ended_groups()
        waiting = self.queue.clear()
        self.queue.put_back([job for job in waiting if not _may_leave(job)])
        if not len(self.queue):
            self._batcher.rest()
        return leaving + [job for job in waiting if _may_leave(job)]

    def adopt(self, jobs: Sequence[Job], now: float) -> None:
        """Take jobs that another version's dispatcher has withdrawn, as though they had come here.

        They were accepted before, so the queue's bound does not count. They fail if no worker could ever take them.
        """
        for job in jobs:
            job.owner = self
            job.state = JobState.WAITING
            job.flight = None
            job.length, job.length_digest = 0, b""
            timeline = job.request.timeline
            if timeline is not None:
                timeline.move(self.metrics.stages)
            self.queue.enqueue(job)
            self.metrics.requests += 1
            if job.deadline is not None:
                self.deadlines.watch(job.deadline, job)
        self.pump(now)
        self.fail_stranded(now)

    # ------------------------------------------------------------------------------------------- ends

    def cancel(self, job: Job) -> None:
        """The client of `job` has gone: drop the job if it waits, mark it as cancelled for its worker if it runs."""
        if self._take_out(job):
            self.metrics.cancelled += 1
            if self.is_empty:
                self._actions.all_ended()

    def keeps_the_only_worker(self, job: Job) -> bool:
        """Whether the only worker still runs the batch in which `job` was cancelled; not if it was only sent ahead."""
        if job.left_in is None or self.living_slots > 1:
            return False
        key, number = job.left_in
        lane = self.lanes.by_key.get(key)
        return lane is not None and bool(lane.flights) and lane.flights[0].number == number

    def hold(self, job: Job) -> None:
        """Have nothing more read from the worker that runs `job`, until it is resumed or ends.

        Ignored where workers run jobs side by side that must not wait for one slow client. The bound of that client's
        connection ends it.
        """
        options = self.options
        if not options.continuous_batching and (options.holds_coroutines or not options.is_concurrent):
            self.lanes.hold(job)

    def resume(self, job: Job) -> None:
        """Take the hold of `job` back; the worker is read again when no other job holds it."""
        self.lanes.release(job)

    def stops(self) -> VersionStops:
        """What is said to requests that a version which leaves takes no more."""
        return VersionStops(self.options.model, self.options.version)

    def _no_worker(self, now: float) -> NoWorker:
        left_s = self.hold_for_start.left_s(now)
        return NoWorker(
            self.options.model, death=self.last_death, retry_after_s=left_s, awaited_device=self.awaited_device
        )

    def fail_stranded(self, now: float) -> int:
        """End the jobs that wait for a worker that comes never or too late; returns how many."""
        hold = self.hold_for_start
        if self.living_slots > 0 or not self._batcher.has_work:
            hold.look_at = math.inf
            return 0
        if self.is_draining or hold.next_start is None:
            return self.fail_waiting(self.stops() if self.is_draining else self._no_worker(now), now)
        grouped = [job for group in self._batcher.groups for job in group if job.state is JobState.GROUPED]
        failed = 0
        hold.look_at = math.inf
        for job in (*grouped, *self.queue.jobs()):
            if job.state not in (JobState.WAITING, JobState.GROUPED):
                continue  # a receiver called in this loop has cancelled it, or brought a worker for it
            if self._is_stranded(job.request, job.arrived, job.deadline, now):
                self._take_out(job)
                self._tell_error(job, self._no_worker(now), now)
                failed += 1
            else:
                hold.watch(job.arrived, job.deadline)
        return failed

    def fail_waiting(self, error: MarserveError, now: float) -> int:
        """End all waiting jobs with `error`; returns how many. Running ones go on."""
        return len(self._fail_waiting(error, now))

    def _fail_waiting(self, error: MarserveError, now: float) -> list[Job]:
        grouped = [job for group in self._batcher.groups for job in group]
        jobs = self.queue.clear() + [job for job in grouped if job.state is JobState.GROUPED]
        self._batcher.groups.clear()
        self._batcher.rest()
        for job in jobs:
            job.state = JobState.GROUPED  # in no queue any more: a receiver that is called may cancel others of them
        for job in jobs:
            self._fail(job, error, now)
        if self._sequence_mode is not None:
            for job in grouped:
                self._sequence_mode.left(job, now)
        return jobs

    def refuse_accepted(self, error: MarserveError, now: float) -> list[GivenUp]:
        """End all waiting and running jobs with `error`; returns them, the oldest first.

        Running jobs are marked as cancelled for their workers.
        """
        with_workers = [job for lane in self.lanes.by_key.values() for flight in lane.flights for job in flight.jobs]
        waiting = self._fail_waiting(error, now)  # first, so that no job leaves for a worker any more
        given_up = [GivenUp(job.request.id, "waiting", now - job.arrived) for job in waiting]
        for job in with_workers:
            if self._take_out(job):  # a receiver called before may have cancelled it
                where: Literal["running", "stream"] = "stream" if job.has_sent_pieces else "running"
                given_up.append(GivenUp(job.request.id, where, now - job.arrived))
                self._tell_error(job, error, now)
        return sorted(given_up, key=lambda one: -one.age_s)

    def _expire(self, now: float) -> None:
        while (job := self.deadlines.take_due(now)) is not None:
            where = "worker" if job.state is JobState.RUNNING else "queue"
            if job.owner is self and self._take_out(job):
                self.metrics.expired += 1
                self._tell_error(job, DeadlinePassed(where), now)

    def _take_out(self, job: Job) -> bool:
        """End `job` without calling its receiver; False if it had ended already."""
        state = job.state
        if state is JobState.DONE:
            return False
        job.state = JobState.DONE  # its flight is cleared below
        if job.held_by is not None:
            self.lanes.release(job)
        if state is JobState.WAITING:
            self.queue.leave(job)
            if not len(self.queue):
                self._batcher.rest()
        elif state is JobState.GROUPED:
            self._batcher.forget_ended_groups()
            if self._sequence_mode is not None:
                self._sequence_mode.left(job, None)
        elif state is JobState.RUNNING and job.flight is not None:
            lane = self.lanes.that_runs(job)
            if lane is not None:
                self._actions.mark_cancelled(lane.key, job.flight.number, job.flight.jobs.index(job))
                job.left_in = (lane.key, job.flight.number)
        job.flight = None
        return True

    def _end_sequences(self, mode: StepsAndSequences, now: float) -> None:
        """End the sequences whose time is up, and the jobs that wait in them."""
        for job in mode.expire(now):
            self._fail(job, SequenceGone(self.options.model, "sequence_expired"), now)

    def _tell_gone(self, mode: StepsAndSequences, now: float) -> None:
        """End the jobs that waited in sequences that ended with their worker, or that a handler ended."""
        for job, cause in mode.take_gone():
            self._fail(job, SequenceGone(self.options.model, cause), now)

    def _fail_as_told(self, job: Job, result: Result, now: float) -> None:
        """End a job with the error that its worker reported for it alone."""
        if result.error == "expired":
            self.metrics.expired += 1
            self._fail(job, DeadlinePassed("worker"), now)
        else:
            self._fail(job, error_of(result.error or "", result.reason, result.status, result.thrown), now)

    def _fail(self, job: Job, error: MarserveError, now: float) -> None:
        """End a job with an error, unless it has ended: by its deadline, or cancelled by a receiver called before."""
        if job.state is JobState.DONE:
            return
        _close(job)
        if job.held_by is not None:
            self.lanes.release(job)
        self._tell_error(job, error, now)

    def _tell_error(self, job: Job, error: MarserveError, now: float) -> None:
        metrics = self.metrics
        total_s = now - job.arrived
        metrics.errors[error.cause or "unknown"] += 1
        metrics.total_seconds.observe(total_s)
        if metrics.total_seconds.examples is not None:
            metrics.total_seconds.exemplify(total_s, job.request.id, job.request.kept_trace_id)
        if job.request.names_version:
            metrics.named_total_s += total_s
        if metrics.tap is not None:
            metrics.tap.answered([total_s], [total_s] if job.request.names_version else [])
        job.receiver.on_error(error)


def _may_leave(job: Job) -> bool:
    """Whether a waiting job may as well run on another version."""
    request = job.request
    return not (job.state is JobState.DONE or job.has_sent_pieces or request.names_version or request.is_describe)


def _close(job: Job) -> None:
    """Mark a job as ended, and drop its flight, which refers to the job: no cycle may keep the bodies in memory."""
    job.state = JobState.DONE
    job.flight = None


def error_of(kind: str, message: str, code: int, thrown: Thrown | None) -> MarserveError:
    """The typed error behind a kind that the worker reported. Only `prediction` has a code that the author chose."""
    if kind == "memory":
        return OutOfMemory(message)
    if kind == "bad_input":
        return BadInput(message)
    if kind != "prediction":
        return HandlerFailed(message, None, thrown)
    return HandlerFailed(message, code, thrown if code >= 500 else None)
