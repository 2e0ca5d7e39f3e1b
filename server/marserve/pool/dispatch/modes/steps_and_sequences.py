"""The dispatcher of versions whose workers know something of requests between calls of the handler. Pure.

Two modes, alone or together:

    sequences            requests of one sequence run one at a time, in order, on the worker that ran the first
                         (`sequences.py`); a batch has at most one request of each of several sequences.
    continuous batching  the handler is called again and again with the same requests until each has ended, and others
                         join between two calls, up to the batch size. Each call is a flight, a *step*: a request whose
                         result says `ts_stream_next: true` goes on to the next one, and its client has a piece more.

What has a state in a worker cannot be run again elsewhere: a batch that raises is not split, and of a dead worker's
requests only those move of which nobody, neither client nor handler, has seen anything yet. In continuous batching one
of these joins at a time, by itself, before all newcomers, so that what it does is not laid to others. A worker that is
to go serves its sequences, and what runs, until they have ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from marserve.errors import MarserveError, NoTicket, SequenceGone
from marserve.messages import Answer, Receiver, Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.dispatcher import Landed, Loss
from marserve.pool.dispatch.fingerprints import MAX_DEATHS
from marserve.pool.dispatch.jobs import Flight, Job, JobState, WorkerLane
from marserve.pool.dispatch.modes.direct import DirectDispatcher
from marserve.pool.dispatch.sequences import SequenceQueue, may_run_together
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

STREAM_HEADER = "ts_stream_next"


class StatefulDispatcher(DirectDispatcher):
    """As `Dispatcher`, for sequences, continuous batching, or both. A worker has one flight at a time."""

    keeps_time = True

    def __init__(self, options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> None:
        options = dataclasses.replace(options, batch_isolation=False, halves_without_memory=False)
        super().__init__(options, metrics, actions)
        self._goes_on = options.continuous_batching
        self.sequences: SequenceQueue | None = None
        if options.sequences is not None:
            self.queue = self._batcher.queue = self.sequences = SequenceQueue(options.sequences, options.model)
        self._carried: dict[str, list[Job]] = {}  # what goes on to a worker's next step, while that is not sent
        self._between: list[WorkerLane] = []  # nothing in flight, but jobs that go on
        self._kept: list[WorkerLane] = []  # closed, nothing in flight, but sequences that live
        self._orphans: list[Job] = []  # waited in sequences that have ended; still to be told

    # ------------------------------------------------------------------------------------------- admission

    def _admit(self, request: Request, receiver: Receiver, now: float) -> Job:
        sequences = self.sequences
        if sequences is None or self._is_stranded(request, now, request.deadline, now):
            return super()._admit(request, receiver, now)
        self._expire_sequences(now)
        request = sequences.admit(request)
        if self.options.use_job_ticket:
            key = sequences.lane_of(request)
            if key is not None and self.flights(key):
                raise NoTicket(self.options.model, retry_after_s=self.appoint_s(now))
        job = super()._admit(request, receiver, now)
        if self._kept:
            self.pump(now)
        return job

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """0 while a worker is idle, else None: it depends on what runs, and for how many steps."""
        return 0.0 if self.lanes.idle else None

    def _expire_sequences(self, now: float) -> None:
        if self.sequences is None:
            return
        self._tell_gone(self._without_line(self.sequences.expire(now)), "sequence_expired", now)
        self._let_go()

    # ------------------------------------------------------------------------------------------- workers

    def _close(self, lane: WorkerLane) -> bool:
        """A worker that has living sequences has them until they have ended."""
        if lane in self._between or lane in self._kept:
            lane.is_open = False
            return False
        if not lane.flights and self.sequences is not None and self.sequences.has_on(lane.key):
            lane.is_open = False
            self.lanes.idle.remove(lane)
            self._kept.append(lane)
            return False
        return super()._close(lane)

    def _rest(self, lane: WorkerLane, now: float) -> None:
        if self._carried.get(lane.key):
            self._between.append(lane)
        elif not lane.is_open and self.sequences is not None and self.sequences.has_on(lane.key):
            self._kept.append(lane)
        else:
            super()._rest(lane, now)

    def _let_go(self) -> None:
        """Closed workers whose last sequence has ended may go."""
        if not self._kept or self.sequences is None:
            return
        for lane in [lane for lane in self._kept if not self.sequences.has_on(lane.key)]:
            self._kept.remove(lane)
            self.lanes.remove(lane)
            self._actions.lane_emptied(lane.key)

    # ------------------------------------------------------------------------------------------- dispatch

    def pump(self, now: float) -> None:
        """Send whatever should leave now."""
        if self.deadlines.first <= now:
            self._expire(now)
        self._expire_sequences(now)
        between, self._between = self._between, []
        for lane in between:
            self._step(lane, now)
        if not self._batcher.has_work:
            return
        sequences = self.sequences
        idle = (
            self.lanes.idle
            if sequences is None
            else sorted(self.lanes.idle, key=lambda lane: sequences.count_on(lane.key))
        )
        for lane in [*idle, *self._kept]:
            if not self._batcher.has_work:
                return
            jobs, is_group = self._joining(lane, [])
            if jobs:
                (self.lanes.idle if lane.is_open else self._kept).remove(lane)
                self._send(lane, jobs, 0, is_group, now)

    def _step(self, lane: WorkerLane, now: float) -> None:
        """Call a worker again with what goes on, and with who joins."""
        mates: list[Job] = []
        for job in self._carried.pop(lane.key, ()):
            if job.state is JobState.RUNNING:
                mates.append(job)
            elif self.sequences is not None:  # its client has left since the last step
                self.sequences.ended(job, now, has_run=True)
        joining, is_group = self._joining(lane, mates)
        if mates or joining:
            self._send(lane, mates + joining, len(mates), is_group, now)
        else:
            self._rest(lane, now)

    def _joining(self, lane: WorkerLane, mates: list[Job]) -> tuple[list[Job], bool]:
        """Who joins those that run on a worker, and whether that is one who is to be run again."""
        room = self.options.batch_size - len(mates)
        if room <= 0:
            return [], False
        mate = mates[0] if mates else None
        groups = self._batcher.groups
        if groups and lane.is_open:
            self._batcher.forget_ended_groups()
            groups = self._batcher.groups
        if groups and lane.is_open:
            if mate is not None and not may_run_together(mate.request, groups[0][0].request):
                return [], False  # its turn comes when these have ended
            return groups.popleft(), True
        if self.sequences is not None:
            return self.sequences.take_for(lane.key, room, mate=mate, may_bind=lane.is_open), False
        first = self.queue.first()
        if first is None or not lane.is_open:
            return [], False
        if mate is not None and not may_run_together(mate.request, first.request):
            return [], False
        return self.queue.take(room), False

    def _send(self, lane: WorkerLane, jobs: list[Job], mates: int, is_group: bool, now: float) -> None:
        if self.sequences is not None:
            for job in jobs[mates:]:
                self.sequences.began(job, lane.key)
        super()._send(lane, jobs, mates, is_group, now)

    def _next_moment(self) -> float | None:
        """When a sequence's time is up."""
        return self.sequences.next_expiry() if self.sequences is not None else None

    # ------------------------------------------------------------------------------------------- answers

    def land(
        self,
        key: str,
        number: int,
        handler_s: float,
        results: Sequence[Result],
        bodies: Sequence[bytes | bytearray],
        now: float,
    ) -> Landed:
        """As `Dispatcher.land`; jobs that go on are carried to the worker's next step."""
        flight = self.lanes.flight(key, number)
        if self._goes_on and len(results) == len(flight.jobs):
            carried = [
                job
                for job, result in zip(flight.jobs, results, strict=True)
                if job.state is JobState.RUNNING and goes_on(result)
            ]
            for job in carried:
                job.has_sent_pieces = True
            if carried:
                self._carried[key] = carried
        if self.options.sequences is not None and self.sequences is not None:
            name = self.options.sequences.end_header
            said = [value for result in results for header, value in result.headers if header == name]
            if said:
                ended = self.sequences.end([word for value in said for word in value.split(";")], key)
                self._orphans += self._without_line(ended)
        return super().land(key, number, handler_s, results, bodies, now)

    def _land(self, flight: Flight, handler_s: float, now: float) -> None:
        if self.sequences is not None:
            carried = self._carried.get(flight.key, ())
            for job in flight.jobs:
                if job not in carried:
                    self.sequences.ended(job, now, has_run=True)
        super()._land(flight, handler_s, now)

    def tell(self, landed: Landed, now: float) -> None:
        """Tell each job of a batch that has landed its answer, or its next piece."""
        if not self._goes_on:
            super().tell(landed, now)
        else:
            flight = landed.flight
            last = Flight(flight.number, [], flight.is_group, flight.sent_at)
            results: list[Result] = []
            bodies: list[bytes | bytearray] = []
            for job, result, body in zip(flight.jobs, landed.results, landed.bodies, strict=True):
                if job.state is JobState.DONE:
                    continue
                if goes_on(result):
                    job.receiver.on_piece(Answer(body, result.status, result.reason, result.headers), False)
                    continue
                job.flight = last
                last.jobs.append(job)
                results.append(_without_stream_header(result))
                bodies.append(body)
            super().tell(Landed(last, results, bodies), now)
        orphans, self._orphans = self._orphans, []
        self._tell_gone(orphans, "sequence_ended", now)
        self._let_go()

    def describe_sequences(self) -> dict[str, int] | None:
        """How many sequences live, and how many are refused because their worker ended."""
        if self.sequences is None or self.options.sequences is None:
            return None
        return {"living": self.sequences.living, "most": self.options.sequences.most, "lost": self.sequences.lost}

    def ended_in(self, landed: Landed) -> int:
        """How many requests of a batch have had their end with it."""
        if not self._goes_on:
            return len(landed.results)
        return sum(not goes_on(result) for result in landed.results)

    # ------------------------------------------------------------------------------------------- deaths

    def _lost(self, lane: WorkerLane, loss: Loss, now: float) -> None:
        """A worker is gone.

        Who has been told or has told it something fails with `error`; the others are run again as `Dispatcher.died`
        says. Its sequences are lost, and who waits in them is told so.
        """
        key = lane.key
        begun, error, may_retry, is_suspect, _ = loss
        for lanes in (self._between, self._kept):
            if lane in lanes:
                lanes.remove(lane)
        failed = [job for job in self._carried.pop(key, ()) if job.state is JobState.RUNNING]
        again: list[Job] = []
        unbegun: list[Job] = []
        for flight in lane.flights:
            has_begun = flight.number <= begun or not may_retry
            for job in flight.jobs:
                if job.state is JobState.DONE or job in failed:
                    continue
                if has_begun:
                    job.lost_worker(is_suspect=is_suspect)
                if not self._may_move(job) or (has_begun and not self._may_run_again(job, may_retry)):
                    failed.append(job)
                    if job.deaths >= MAX_DEATHS:
                        self.fingerprints.refuse(job.request, now)
                else:
                    (again if has_begun else unbegun).append(job)
        orphans: list[Job] = []
        if self.sequences is not None:
            orphans = self._without_line(self.sequences.lane_lost(key, {*again, *unbegun}, now))
            for flight in lane.flights:
                for job in flight.jobs:
                    if job not in again and job not in unbegun:
                        self.sequences.ended(job, now, has_run=False)
        self._put_back(unbegun, False)
        for job in reversed(again):
            self.metrics.retried += 1
            self._group([job])
        self.pump(now)
        self.fail_stranded(now)
        for job in failed:
            self._fail(job, error, now)
        self._tell_gone(orphans, "sequence_lost", now)
        ended, self._orphans = self._orphans, []
        self._tell_gone(ended, "sequence_ended", now)

    def _may_move(self, job: Job) -> bool:
        """Whether neither its client nor a handler has seen anything of what it would lose with its worker."""
        return not job.has_sent_pieces and (self.sequences is None or not self.sequences.has_state(job))

    def _may_run_again(self, job: Job, may_retry: bool) -> bool:
        return may_retry and self.options.retry_on_worker_death and job.deaths < MAX_DEATHS

    # ------------------------------------------------------------------------------------------- ends

    def hold(self, job: Job) -> None:
        """In continuous batching nobody waits for a slow client: its connection's own bound ends it."""
        if not self._goes_on:
            super().hold(job)

    def _fail_waiting(self, error: MarserveError, now: float) -> list[Job]:
        grouped = [job for group in self._batcher.groups for job in group]
        jobs = super()._fail_waiting(error, now)
        if self.sequences is not None:
            for job in grouped:
                self.sequences.ended(job, now, has_run=False)
        return jobs

    def _take_out(self, job: Job) -> bool:
        was_grouped = job.state is JobState.GROUPED
        was_taken_out = super()._take_out(job)
        if was_taken_out and was_grouped and self.sequences is not None:
            self.sequences.ended(job, None, has_run=False)
        return was_taken_out

    def _without_line(self, jobs: list[Job]) -> list[Job]:
        """Jobs that are in no queue any more: until they are told, whoever is told before may cancel them."""
        for job in jobs:
            job.state = JobState.GROUPED
        return jobs

    def _tell_gone(self, jobs: list[Job], cause: str, now: float) -> None:
        for job in jobs:
            self._fail(job, SequenceGone(self.options.model, cause), now)


def goes_on(result: Result) -> bool:
    """Whether more follows on this piece of an answer."""
    return result.error is None and any(name == STREAM_HEADER and value == "true" for name, value in result.headers)


def _without_stream_header(result: Result) -> Result:
    """An answer that has ended says nothing of a stream: alone it is none, and after pieces its headers are lost."""
    headers = [(name, value) for name, value in result.headers if name != STREAM_HEADER]
    return result if result.error is not None else Result(result.status, result.reason, headers)
