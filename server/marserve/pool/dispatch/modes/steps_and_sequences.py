"""Versions whose workers keep a state of requests between calls of the handler. Pure.

Two modes, alone or together:

    sequences            requests of one sequence run one at a time, in order, on the worker that ran the first
                         (`pool/dispatch/sequences.py`); a batch has at most one request of each sequence.
    continuous batching  the handler is called again and again with the same requests until each has ended, and others
                         join between two calls, up to the batch size. Each call is a flight, a *step*: a request whose
                         result says `ts_stream_next: true` goes on to the next step, and its client gets a piece.

A request with a state in a worker cannot be run again elsewhere. So a batch that raises is not split, and of a dead
worker's requests only those move that have no state and have sent no piece. In continuous batching one of these joins
at a time, by itself, before all new requests: if it kills the worker again, no other request that waited is blamed. A
closed worker serves its sequences and its running requests until they have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from marserve.messages import Answer, Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.batcher import Batcher
from marserve.pool.dispatch.fingerprints import MAX_DEATHS
from marserve.pool.dispatch.jobs import Flight, Job, JobState, Landed, Loss, Lost, WorkerLane
from marserve.pool.dispatch.lanes import Lanes
from marserve.pool.dispatch.sequences import SequenceQueue, may_run_together
from marserve.pool.options import PoolOptions

STREAM_HEADER = "ts_stream_next"


class StepsAndSequences:
    """Sequences, continuous batching, or both. A worker has one flight at a time."""

    splits = False

    def __init__(self, options: PoolOptions, lanes: Lanes, batcher: Batcher, actions: Actions) -> None:
        self._options = options
        self._lanes = lanes
        self._batcher = batcher
        self._actions = actions
        self._sequences = batcher.queue if isinstance(batcher.queue, SequenceQueue) else None
        self._carried: dict[str, list[Job]] = {}  # by worker: the jobs that go on to its next step, until that is sent
        self._between: list[WorkerLane] = []  # nothing in flight, but jobs that go on
        self._kept: list[WorkerLane] = []  # closed, nothing in flight, but living sequences
        self._gone: list[tuple[Job, str]] = []  # jobs that waited in sequences that have ended, and why they did

    # ------------------------------------------------------------------------------------------- admission

    @property
    def serves_busy(self) -> bool:
        """Whether a closed worker, which is not among the idle, serves living sequences."""
        return bool(self._kept)

    def admit(self, request: Request) -> Request:
        """As `SequenceQueue.admit`."""
        assert self._sequences is not None
        return self._sequences.admit(request)

    def tickets(self, request: Request) -> int:
        """One request for each idle worker; none for a sequence whose worker is busy."""
        key = self._sequences.lane_of(request) if self._sequences is not None else None
        lane = self._lanes.by_key.get(key) if key is not None else None
        return 0 if lane is not None and lane.flights else len(self._lanes.idle)

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """0 while a worker is idle, else None: it depends on how many steps the running requests take."""
        return 0.0 if self._lanes.idle else None

    # ------------------------------------------------------------------------------------------- sequences that end

    def expire(self, now: float) -> list[Job]:
        """End the sequences whose time is up. Returns the jobs that waited in them, which the caller must fail."""
        assert self._sequences is not None
        jobs = without_line(self._sequences.expire(now))
        self._let_go()
        return jobs

    def take_gone(self) -> list[tuple[Job, str]]:
        """Jobs to be failed, each with the cause: their sequences were ended by a handler, or lost with a worker."""
        gone, self._gone = self._gone, []
        return gone

    def left(self, job: Job, now: float | None) -> None:
        """A job that was to be run again will not be."""
        assert self._sequences is not None
        self._sequences.ended(job, now, has_run=False)

    def _let_go(self) -> None:
        """Remove closed workers whose last sequence has ended."""
        for lane in [lane for lane in self._kept if not self._has_sequences(lane)]:
            self._kept.remove(lane)
            self._lanes.remove(lane)
            self._actions.lane_emptied(lane.key)

    def _has_sequences(self, lane: WorkerLane) -> bool:
        return self._sequences is not None and self._sequences.has_on(lane.key)

    # ------------------------------------------------------------------------------------------- dispatch

    def dispatch(self, now: float) -> None:
        """Send what should leave now; the caller has ended sequences whose time is up."""
        between, self._between = self._between, []
        for lane in between:
            self._step(lane, now)
        idle, sequences = self._lanes.idle, self._sequences
        if not self._batcher.has_work:
            return
        first = idle if sequences is None else sorted(idle, key=lambda lane: sequences.count_on(lane.key))
        for lane in [*first, *self._kept]:
            if not self._batcher.has_work:
                return
            jobs = self._joining(lane, [])
            if jobs:
                (idle if lane.is_open else self._kept).remove(lane)
                self._send(lane, jobs, 0, now)

    def next_moment(self) -> float | None:
        """When a sequence's time is up."""
        return self._sequences.next_expiry() if self._sequences is not None else None

    def _step(self, lane: WorkerLane, now: float) -> None:
        """Call a worker again with the jobs that go on, and with those that join."""
        mates: list[Job] = []
        for job in self._carried.pop(lane.key, ()):
            if job.state is JobState.RUNNING:
                mates.append(job)
            elif self._sequences is not None:  # its client has left since the last step
                self._sequences.ended(job, now, has_run=True)
        joining = self._joining(lane, mates)
        if mates or joining:
            self._send(lane, mates + joining, len(mates), now)
        else:
            self.rest(lane, now)

    def _joining(self, lane: WorkerLane, mates: list[Job]) -> list[Job]:
        """The jobs that join those running on a worker: one that is run again, else as many as there is room for."""
        batcher = self._batcher
        room = batcher.max_batch_size - len(mates)
        if room <= 0:
            return []
        mate = mates[0] if mates else None
        if self._sequences is not None and not (batcher.groups and lane.is_open):
            return self._sequences.take_for(lane.key, room, mate=mate, may_bind=lane.is_open)
        first = batcher.groups[0][0] if batcher.groups else batcher.queue.first()
        if (
            first is None
            or not lane.is_open
            or (mate is not None and not may_run_together(mate.request, first.request))
        ):
            return []  # it joins when these have ended
        return batcher.groups.popleft() if batcher.groups else batcher.queue.take(room)

    def _send(self, lane: WorkerLane, jobs: list[Job], mates: int, now: float) -> None:
        """Send a flight; the first `mates` of its jobs were in the flight before."""
        if self._sequences is not None:
            for job in jobs:
                self._sequences.began(job, lane.key)
        self._actions.send(lane.key, self._lanes.begin(lane, jobs, False, now, mates=mates))

    # ------------------------------------------------------------------------------------------- ends

    def rest(self, lane: WorkerLane, now: float) -> None:
        """A worker has nothing in flight. It may have jobs that go on, or living sequences though it is closed."""
        if self._carried.get(lane.key):
            self._between.append(lane)
        elif not lane.is_open and self._has_sequences(lane):
            self._kept.append(lane)
        else:
            self._lanes.rest(lane, now)

    def close(self, lane: WorkerLane) -> bool:
        """Give a worker nothing new; it keeps its living sequences until they have ended."""
        if lane not in self._between and lane not in self._kept:
            if lane.flights or not self._has_sequences(lane):
                return self._lanes.close(lane)
            self._lanes.idle.remove(lane)
            self._kept.append(lane)
        lane.is_open = False
        return False

    def land(self, flight: Flight, handler_s: float, results: Sequence[Result], now: float) -> None:
        """Book the end of a flight; jobs that go on are carried to the worker's next step."""
        key, jobs, sequences = flight.key, flight.jobs, self._sequences
        carried: list[Job] = []
        if self._options.continuous_batching:
            carried = [job for job, result in zip(jobs, results, strict=False) if goes_on(result)]
        if carried:
            self._carried[key] = carried
        if sequences is not None:
            self._gone += [(job, "sequence_ended") for job in without_line(sequences.end(results, key))]
            for job in jobs:
                if job not in carried:
                    sequences.ended(job, now, has_run=True)
        lane = self._lanes.land(flight, handler_s, now)
        self.rest(lane, now)

    def lost(self, lane: WorkerLane, loss: Loss, now: float) -> Lost:
        """Jobs that have a state or have sent pieces fail; the others are run again as `Dispatcher.died` says.

        Its sequences with a state are lost; the jobs that wait in these are returned by `take_gone`.
        """
        key, may_retry = lane.key, loss.may_retry
        for lanes in (self._between, self._kept):
            if lane in lanes:
                lanes.remove(lane)
        failed = self._carried.pop(key, [])
        again: list[Job] = []
        unbegun: list[Job] = []
        for flight in lane.flights:
            has_begun = flight.number <= loss.begun or not may_retry
            for job in flight.jobs:
                if job.state is JobState.DONE:
                    continue
                if has_begun:
                    job.lost_worker(is_suspect=loss.is_suspect)
                if not self._may_move(job) or (has_begun and not self._may_run_again(job, may_retry)):
                    failed.append(job)
                else:
                    (again if has_begun else unbegun).append(job)
        if self._sequences is not None:
            orphans = without_line(self._sequences.lane_lost(key, {*again, *unbegun}, now))
            self._gone = [*((job, "sequence_lost") for job in orphans), *self._gone]
            for flight in lane.flights:
                for job in flight.jobs:
                    if job not in again and job not in unbegun:
                        self._sequences.ended(job, now, has_run=False)
        self._batcher.put_back(unbegun, is_group=False)
        return Lost(again[::-1], failed)

    def _may_move(self, job: Job) -> bool:
        """Whether a job can move to another worker: it has sent no piece, and its sequence has no state."""
        return not job.has_sent_pieces and (self._sequences is None or not self._sequences.has_state(job))

    def _may_run_again(self, job: Job, may_retry: bool) -> bool:
        return may_retry and self._options.retry_on_worker_death and job.deaths < MAX_DEATHS


def without_line(jobs: list[Job]) -> list[Job]:
    """Mark jobs as being in no queue any more: until they are failed, a receiver called before may cancel them."""
    for job in jobs:
        job.state = JobState.GROUPED
    return jobs


def goes_on(result: Result) -> bool:
    """Whether this piece of an answer is not its last."""
    return result.error is None and any(name == STREAM_HEADER and value == "true" for name, value in result.headers)


def tell_pieces(landed: Landed) -> Landed:
    """Pass the next piece to the receivers of a step's jobs that go on. Returns the other jobs, which have ended."""
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
    return Landed(last, results, bodies)


def _without_stream_header(result: Result) -> Result:
    """A last answer without the stream's header: alone it is no stream, and after pieces headers are not sent."""
    headers = [(name, value) for name, value in result.headers if name != STREAM_HEADER]
    return result if result.error is not None else Result(result.status, result.reason, headers)
