"""Versions whose workers run many requests at once (`asyncCommunication`). Pure.

A worker is sent every batch as soon as there is one, without waiting for the one before, up to `most_concurrent`
requests; it ends them in any order. Batches are formed as the policy says for an idle worker, and go to the worker with
the fewest requests.

When a worker dies, each request that it had begun is run once more, unless a piece of its answer has gone out. Only a
request that was alone is known to be the cause, so that its body is refused. A worker may name the batch that caused
its end (a lost device). An error of a device may show in another batch than its cause, so that name decides an order
only: all requests that were with the worker are run alone, each by an empty worker that is sent nothing else, those of
the named batch first. The request that ends its worker again was the cause; the others run side by side from then on.
So one body costs two workers, whichever batch was named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from marserve.messages import Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.batcher import Batcher
from marserve.pool.dispatch.fingerprints import MAX_DEATHS
from marserve.pool.dispatch.jobs import Flight, Job, JobState, Loss, Lost, WorkerLane
from marserve.pool.dispatch.lanes import Lanes
from marserve.pool.dispatch.least_loaded import Fewest
from marserve.pool.options import PoolOptions


class Coroutines:
    """A worker has any number of flights, and ends them in any order."""

    serves_busy = True
    splits = True

    def __init__(self, options: PoolOptions, lanes: Lanes, batcher: Batcher, actions: Actions) -> None:
        self._options = options
        self._lanes = lanes
        self._batcher = batcher
        self._actions = actions
        self._fewest = Fewest()

    def tickets(self, request: Request) -> int:
        """The room that the workers which take requests have left."""
        most = self._options.most_concurrent
        return sum(max(0, most - _count(lane)) for lane in self._lanes.by_key.values() if _has_part(lane))

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """0 while a worker has room, else None: it is unknown when one will."""
        return 0.0 if self._freest() is not None else None

    # ------------------------------------------------------------------------------------------- dispatch

    def dispatch(self, now: float) -> None:
        """Send what should leave now."""
        batcher = self._batcher
        while batcher.has_work:
            lane = self._freest()
            if lane is None or (lane.flights and self._runs_alone_next()):
                return
            chosen = batcher.next_batch(now)
            if chosen is None:
                return
            jobs, is_group = chosen
            if not lane.flights:
                self._lanes.idle.remove(lane)
            self._actions.send(lane.key, self._lanes.begin(lane, jobs, is_group, now))
            if jobs[0].suspicion is None:
                self._fewest.add(lane, len(jobs))
            else:
                self._fewest.forget(lane)

    def next_moment(self) -> float | None:
        """When a batch's delay is up."""
        return self._batcher.next_wake(idle=self._freest() is not None, ahead=False)

    def _runs_alone_next(self) -> bool:
        """Whether the next group must be run by a worker that has nothing else."""
        groups = self._batcher.groups
        return bool(groups) and groups[0][0].suspicion is not None

    def _freest(self) -> WorkerLane | None:
        """The open worker with the fewest requests, if one has room for a batch."""
        first = self._fewest.first()
        if first is None:
            return None
        lane, count = first
        has_room = not count or count + self._batcher.max_batch_size <= self._options.most_concurrent
        return lane if has_room else None

    # ------------------------------------------------------------------------------------------- ends

    def rest(self, lane: WorkerLane, now: float) -> None:
        """A worker has nothing in flight."""
        self._lanes.rest(lane, now)
        if lane.flights:  # lent for a check
            self._fewest.forget(lane)
        elif lane.is_open:
            self._fewest.put(lane, 0)

    def close(self, lane: WorkerLane) -> bool:
        """Give a worker nothing more."""
        self._fewest.forget(lane)
        return self._lanes.close(lane)

    def land(self, flight: Flight, handler_s: float, results: Sequence[Result], now: float) -> None:
        """Book the end of a flight."""
        lane = self._lanes.land(flight, handler_s, now)
        self._fewest.add(lane, -len(flight.jobs))
        if not lane.flights:
            self.rest(lane, now)

    def lost(self, lane: WorkerLane, loss: Loss, now: float) -> Lost:
        """As `Dispatcher.died`; without `may_retry` the batches past the response limit fail: they caused the end."""
        self._fewest.forget(lane)
        accused, flights, retries = loss.accused, lane.flights, self._options.retry_on_worker_death
        oldest = -math.inf if loss.may_retry else self._oldest_overdue(lane, now)
        failed: list[Job] = []
        again: list[Job] = []
        accused_jobs: list[Job] = []
        running = sum(len(flight.jobs) for flight in flights if flight.number <= loss.begun)
        suspicion = object() if any(flight.number == accused for flight in flights) else None
        for flight in reversed(flights):
            is_overdue = flight.heard_at <= oldest
            live = [job for job in flight.jobs if job.state is not JobState.DONE]
            if flight.number > loss.begun and not is_overdue:
                self._batcher.put_back(live, is_group=flight.is_group)
                continue
            for job in live:
                is_guilty = job.suspicion is not None and running == 1 and loss.is_suspect
                job.lost_worker(is_suspect=loss.is_suspect and suspicion is None)
                if is_guilty:
                    job.deaths = MAX_DEATHS
                    self._clear(job.suspicion)
                elif suspicion is not None:
                    job.suspicion = suspicion
                if is_overdue or not retries or job.deaths >= MAX_DEATHS or job.has_sent_pieces:
                    failed.append(job)
                else:
                    (accused_jobs if flight.number == accused else again).append(job)
        return Lost([*again, *accused_jobs], failed, is_sure=running <= 1)

    def _clear(self, suspicion: object) -> None:
        """Clear the waiting jobs of this suspicion: the guilty one is found."""
        for group in self._batcher.groups:
            for job in group:
                if job.suspicion is suspicion:
                    job.suspicion = None

    def _oldest_overdue(self, lane: WorkerLane, now: float) -> float:
        """Batches not heard of since this moment are past the response limit; at least one of them is."""
        heard = [flight.heard_at for flight in lane.flights]
        return max(now - self._options.response_timeout_s, min(heard, default=-math.inf))


def _count(lane: WorkerLane) -> int:
    """How many requests a worker has."""
    return sum(len(flight.jobs) for flight in lane.flights)


def _has_part(lane: WorkerLane) -> bool:
    """Whether a worker takes requests: it is open, and not lent for a check."""
    return lane.is_open and not (lane.flights and lane.flights[0].is_check)
