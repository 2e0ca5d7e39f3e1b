"""The dispatcher of versions whose workers run many requests at once (`asyncCommunication`). Pure.

A worker is sent every batch as soon as there is one, without waiting for the one before, up to `most_concurrent`
requests; it ends them in any order. Batches are formed as the policy says, for a worker that always has time, and go to
the one that has the fewest requests.

When a worker dies, everything that it had begun was with it: each of these requests is run once more, unless a piece
of its answer has gone out. Whether one was the cause is known only where it was alone: only then its body is refused.
Where the worker named the batch that brought its end on (a lost device), that decides the order alone, since an error
of a device may show in another's batch: all requests that were with the worker are run alone, each by an empty worker
that is sent nothing else, those of the named batch first. The one that ends its worker again was the cause; the others
run side by side from then on. So one body costs two workers, whichever batch was named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from marserve.messages import Receiver, Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.dispatcher import Loss
from marserve.pool.dispatch.fingerprints import MAX_DEATHS
from marserve.pool.dispatch.jobs import Flight, Job, JobState, WorkerLane
from marserve.pool.dispatch.least_loaded import Fewest
from marserve.pool.dispatch.modes.direct import DirectDispatcher
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics


class ConcurrentDispatcher(DirectDispatcher):
    """As `Dispatcher`, for workers that have any number of flights and end them in any order."""

    def __init__(self, options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> None:
        super().__init__(options, metrics, actions)
        self._heard: dict[Flight, float] = {}  # when the last piece of a flight came
        self._fewest = Fewest()

    def _admit(self, request: Request, receiver: Receiver, now: float) -> Job:
        job = super()._admit(request, receiver, now)
        if job.state is JobState.WAITING:  # a busy worker takes it as well as an idle one
            self.pump(now)
        return job

    def _tickets(self) -> int:
        most = self.options.most_concurrent
        return sum(max(0, most - _count(lane)) for lane in self.lanes.by_key.values() if _has_part(lane))

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """0 while a worker has room, else None: nobody knows when one will."""
        return 0.0 if self._freest() is not None else None

    # ------------------------------------------------------------------------------------------- dispatch

    def pump(self, now: float) -> None:
        """Send whatever should leave now."""
        if self.deadlines.first <= now:
            self._expire(now)
        batcher = self._batcher
        while batcher.has_work:
            lane = self._freest()
            if lane is not None and lane.flights and self._runs_alone_next():
                return
            chosen = batcher.next_batch(now, idle=True, ahead=False) if lane is not None else None
            if lane is None or chosen is None:
                return
            if not lane.flights:
                self.lanes.idle.remove(lane)
            self._send(lane, chosen[0], 0, chosen[1], now)
            if chosen[0][0].suspicion is not None:
                self._fewest.forget(lane)
        batcher.rest()

    def _next_moment(self) -> float | None:
        """When a batch's delay is up."""
        return self._batcher.next_wake(idle=self._freest() is not None, ahead=False)

    def _runs_alone_next(self) -> bool:
        """Whether what leaves next is to be run by a worker that has nothing else."""
        group = next((group for group in self._batcher.groups if _live(group)), None)
        return group is not None and _live(group)[0].suspicion is not None

    def _freest(self) -> WorkerLane | None:
        """The open worker with the fewest requests, if one has room for a batch."""
        first = self._fewest.first()
        if first is None:
            return None
        lane, count = first
        return lane if not count or count + self.options.batch_size <= self.options.most_concurrent else None

    def _send(self, lane: WorkerLane, jobs: list[Job], mates: int, is_group: bool, now: float) -> None:
        super()._send(lane, jobs, mates, is_group, now)
        self._fewest.add(lane, len(jobs))

    # ------------------------------------------------------------------------------------------- workers

    def _close(self, lane: WorkerLane) -> bool:
        self._fewest.forget(lane)
        return super()._close(lane)

    def _rest(self, lane: WorkerLane, now: float) -> None:
        super()._rest(lane, now)
        if lane.flights:  # lent to the server itself
            self._fewest.forget(lane)
        elif lane.is_open:
            self._fewest.put(lane, 0)

    # ------------------------------------------------------------------------------------------- answers

    def piece(
        self, key: str, number: int, results: Sequence[Result], bodies: Sequence[bytes | bytearray], now: float
    ) -> None:
        """As `Dispatcher.piece`."""
        self._heard[self.lanes.flight(key, number)] = now
        super().piece(key, number, results, bodies, now)

    def quiet_since(self, key: str) -> float | None:
        """Since when worker `key` has said nothing of the batch of which it has said nothing for longest."""
        flights = self.flights(key)
        if not flights or flights[0].is_check:
            return None
        return min(self._heard.get(flight, flight.sent_at) for flight in flights)

    def hold(self, job: Job) -> None:
        """Nobody else waits for a slow client: its connection's own bound ends it."""

    def _land(self, flight: Flight, handler_s: float, now: float) -> None:
        self._fewest.add(self.lanes.by_key[flight.key], -len(flight.jobs))
        self._heard.pop(flight, None)
        super()._land(flight, handler_s, now)

    # ------------------------------------------------------------------------------------------- deaths

    def _lost(self, lane: WorkerLane, loss: Loss, now: float) -> None:
        """As `Dispatcher.died`; without `may_retry` it was ended for those past the response limit: these fail."""
        begun, error, may_retry, is_suspect, accused = loss
        self._fewest.forget(lane)
        oldest = self._oldest_overdue(lane, now) if not may_retry else -math.inf
        failed: list[Job] = []
        again: list[Job] = []
        accused_jobs: list[Job] = []
        running = sum(len(flight.jobs) for flight in lane.flights if flight.number <= begun)
        suspicion = object() if any(flight.number == accused for flight in lane.flights) else None
        for flight in reversed(lane.flights):
            is_overdue = self._heard.pop(flight, flight.sent_at) <= oldest
            live = [job for job in flight.jobs if job.state is not JobState.DONE]
            if flight.number > begun and not is_overdue:
                self._put_back(live, flight.is_group)
                continue
            for job in live:
                is_guilty = job.suspicion is not None and running == 1 and is_suspect
                job.lost_worker(is_suspect=is_suspect and suspicion is None)
                if is_guilty:
                    job.deaths = MAX_DEATHS
                    self._clear(job.suspicion)
                elif suspicion is not None:
                    job.suspicion = suspicion
                if (
                    not is_overdue
                    and self.options.retry_on_worker_death
                    and job.deaths < MAX_DEATHS
                    and not job.has_sent_pieces
                ):
                    (accused_jobs if flight.number == accused else again).append(job)
                else:
                    failed.append(job)
                    if job.deaths >= MAX_DEATHS and running <= 1:
                        self.fingerprints.refuse(job.request, now)
        for job in (*again, *accused_jobs):  # each goes before the last one
            self.metrics.retried += 1
            self._group([job])
        self.pump(now)
        self.fail_stranded(now)
        for job in failed:
            self._fail(job, error, now)

    def _clear(self, suspicion: object) -> None:
        """What waits under this suspicion is innocent: the guilty one is found."""
        for group in self._batcher.groups:
            for job in group:
                if job.suspicion is suspicion:
                    job.suspicion = None

    def _oldest_overdue(self, lane: WorkerLane, now: float) -> float:
        """Batches that have been quiet since then, or longer, are past the response limit: at least one is."""
        heard = [self._heard.get(flight, flight.sent_at) for flight in lane.flights]
        return max(now - self.options.response_timeout_s, min(heard, default=-math.inf))


def _count(lane: WorkerLane) -> int:
    """How many requests a worker has."""
    return sum(len(flight.jobs) for flight in lane.flights)


def _live(jobs: Sequence[Job]) -> list[Job]:
    """Those that wait."""
    return [job for job in jobs if job.state is JobState.GROUPED]


def _has_part(lane: WorkerLane) -> bool:
    """Whether a worker takes requests at all: it is open, and not lent to the server itself."""
    return lane.is_open and not (lane.flights and lane.flights[0].is_check)
