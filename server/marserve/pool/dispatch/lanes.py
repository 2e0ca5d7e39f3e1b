"""The workers of one version as the dispatcher knows them: what each runs, which are idle, lent or held. Pure.

The cost for a request does not grow with the number of workers: sums are kept, and the orders that the mode needs
(`send_ahead.py`, `lengths/expected_wait.py`) are updated with each change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from marserve.errors import BadFrame
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.jobs import Flight, Job, JobState, WorkerLane
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.timeline import BatchTimes
from marserve.telemetry.trace_context import Trace


# A protocol: the orders have no code in common.
class Order(Protocol):
    """Workers in an order of theirs."""

    def note(self, lane: WorkerLane) -> None:
        """The flights of `lane`, how long its batches take, or whether it is open have changed."""

    def forget(self, lane: WorkerLane) -> None:
        """`lane` is gone."""


class Lanes:
    """The lanes by their keys, and the `idle` ones among them, the latest to become idle last.

    `jobs_ahead` counts jobs that were sent to busy workers and not begun; `mean_runs_s` is the sum over all workers of
    how long their batches take. With `in_any_order` workers end their flights in any order, else oldest first.
    """

    def __init__(self, metrics: VersionMetrics, actions: Actions, *, in_any_order: bool = False) -> None:
        self.by_key: dict[str, WorkerLane] = {}
        self.idle: list[WorkerLane] = []
        self.jobs_ahead = 0
        self.mean_runs_s = 0.0
        self.lend_to: Callable[[str, Flight], None] | None = None
        """Takes the next lane without work for a check; None while no check asks for one."""
        self._metrics = metrics
        self._actions = actions
        self._in_any_order = in_any_order
        self._orders: list[Order] = []
        self._under_way = 0  # batches with workers
        self._holders: dict[str, int] = {}  # by worker: how many jobs hold it, so that it is not read

    # ------------------------------------------------------------------------------------------- coming and going

    def add(self, key: str, *, overlaps: bool = False) -> WorkerLane:
        """Add a worker, which has no work; `rest` must follow."""
        lane = self.by_key[key] = WorkerLane(key, overlaps=overlaps)
        return lane

    def close(self, lane: WorkerLane) -> bool:
        """Give a worker nothing more. Returns whether it was removed at once; else `rest` removes it."""
        lane.is_open = False
        if lane.flights:
            self._changed(lane)
            return False
        self.remove(lane)
        return True

    def rest(self, lane: WorkerLane, now: float) -> None:
        """A worker has nothing in flight: it becomes idle, or is lent if a check wants one; a closed one is removed."""
        if not lane.is_open:
            self.remove(lane)
            self._actions.lane_emptied(lane.key)
        elif self.lend_to is not None:
            lend_to, self.lend_to = self.lend_to, None
            lane.last_number += 1
            flight = Flight(lane.last_number, [], True, now, is_check=True, heard_at=now)
            lane.flights.append(flight)
            self._changed(lane)
            lend_to(lane.key, flight)
        else:
            self.idle.append(lane)

    def lost(self, key: str) -> WorkerLane | None:
        """Remove worker `key`, which has ended; returns its lane with its flights. None if it was removed before."""
        self._holders.pop(key, None)  # not in `remove`: a retired worker is read until its last answers are passed on
        lane = self.by_key.get(key)
        if lane is not None:
            self.remove(lane)
        return lane

    def remove(self, lane: WorkerLane) -> None:
        """Forget a worker, which has ended or is about to."""
        del self.by_key[lane.key]
        if lane in self.idle:
            self.idle.remove(lane)
        for order in self._orders:
            order.forget(lane)
        self._under_way -= sum(not flight.is_check for flight in lane.flights)
        self.jobs_ahead -= sum(len(flight.jobs) for flight in islice(lane.flights, 1, None) if flight.is_ahead)
        self.mean_runs_s = self.mean_runs_s - lane.mean_run_s if self.by_key else 0.0

    def keep(self, order: Order) -> None:
        """Keep an order of the workers up to date from now on."""
        self._orders.append(order)
        for lane in self.by_key.values():
            order.note(lane)

    def _changed(self, lane: WorkerLane) -> None:
        """The flights of a worker have changed, or it was closed."""
        for order in self._orders:
            order.note(lane)

    # ------------------------------------------------------------------------------------------- flights

    def begin(
        self, lane: WorkerLane, jobs: list[Job], is_group: bool, now: float, mates: int = 0, is_ahead: bool = False
    ) -> Flight:
        """Book a flight, which the caller sends; the first `mates` of its jobs were in the flight before."""
        lane.last_number += 1
        number, size = lane.last_number, len(jobs)
        times = BatchTimes(lane.key, size, now, number == 1, of=self._metrics.stages)
        flight = Flight(number, jobs, is_group, now, False, is_ahead, lane.key, now, times)
        lane.flights.append(flight)
        self._under_way += 1
        if is_ahead:
            self.jobs_ahead += size
        for order in self._orders:
            order.note(lane)
        if mates:
            for job in jobs[:mates]:
                job.flight = flight
                if job.request.timeline is not None:
                    job.request.timeline.left_in(times)
        running = JobState.RUNNING
        waits_s: list[float] = []
        named_s: list[float] = []
        traces: list[Trace] | None = None
        for job in jobs[mates:] if mates else jobs:
            job.state = running
            job.flight = flight
            job.times = times
            wait_s = now - job.arrived
            waits_s.append(wait_s)
            request = job.request
            if request.names_version:
                named_s.append(wait_s)
            timeline = request.timeline
            if timeline is not None:
                timeline.left_in(times)
                if timeline.trace is not None:
                    if traces is None:
                        traces = []
                    traces.append(timeline.trace)
        if traces is not None:
            times.note(traces)
        metrics = self._metrics
        metrics.queue_seconds.observe_all(waits_s)
        metrics.batch_sizes.observe(size)
        if metrics.queue_seconds.examples is not None and waits_s:
            last = jobs[-1].request
            metrics.queue_seconds.exemplify(waits_s[-1], last.id, last.kept_trace_id)
            metrics.batch_sizes.exemplify(size, last.id, last.kept_trace_id)
        if named_s:
            metrics.named_queue_s += sum(named_s)
        if metrics.tap is not None:
            metrics.tap.queued(waits_s, named_s)
        return flight

    def flight(self, key: str, number: int) -> Flight:
        """The batch of this number that worker `key` runs. Raises BadFrame if it runs no such batch."""
        lane = self.by_key.get(key)
        for flight in lane.flights if lane is not None else ():
            if flight.number == number and not flight.is_check:
                return flight
            if not self._in_any_order:
                break
        raise BadFrame(f"worker {key} speaks of batch {number}, which it was not running")

    def land(self, flight: Flight, handler_s: float, now: float) -> WorkerLane:
        """Book the end of a flight, and return its lane: `rest` must follow if it has no other.

        Raises BadFrame for an impossible time, or if the question before the flight is still open.
        """
        if not 0 <= handler_s < math.inf:
            raise BadFrame(f"batch {flight.number} is said to have taken {handler_s} s")
        lane = self.by_key[flight.key]
        if lane.question is not None and lane.question.number == flight.number:
            raise BadFrame(f"batch {flight.number} was answered before the lengths that were asked for before it")
        flights, before = lane.flights, lane.mean_run_s
        flights.remove(flight)
        if flights and flights[0].is_ahead:
            self.jobs_ahead -= len(flights[0].jobs)
            if flights[0].times is not None:
                flights[0].times.free_at = now
        self._under_way -= 1
        lane.mean_run_s = handler_s if not before else 0.8 * before + 0.2 * handler_s
        self.mean_runs_s += lane.mean_run_s - before
        for order in self._orders:
            order.note(lane)
        metrics = self._metrics
        metrics.busy_seconds += handler_s
        size = len(flight.jobs)
        metrics.handler_seconds.observe(handler_s, size)
        runs, seconds = metrics.runs_by_size.get(size, (0, 0.0))
        metrics.runs_by_size[size] = (runs + 1, seconds + handler_s)
        if metrics.handler_seconds.examples is not None and flight.jobs:
            last = flight.jobs[-1].request
            metrics.handler_seconds.exemplify(handler_s, last.id, last.kept_trace_id)
        if metrics.tap is not None:
            server_s = 0.0 if flight.is_ahead else now - flight.sent_at - handler_s
            metrics.tap.ran([job.request.id for job in flight.jobs], handler_s, server_s)
        return lane

    def end_loan(self, key: str, number: int) -> WorkerLane:
        """Take back a lent worker; `rest` must follow. Raises BadFrame if it was not lent."""
        lane = self.by_key.get(key)
        if lane is None or not lane.flights or lane.flights[0].number != number or not lane.flights[0].is_check:
            raise BadFrame(f"worker {key} speaks of check {number}, which it was not running")
        lane.flights.popleft()
        self._changed(lane)
        return lane

    # ------------------------------------------------------------------------------------------- figures

    @property
    def is_at_rest(self) -> bool:
        """Whether no worker has a batch; a loan does not count."""
        return not self._under_way

    @property
    def running(self) -> int:
        """Jobs that are with workers."""
        return sum(len(flight.jobs) for lane in self.by_key.values() for flight in lane.flights)

    @property
    def busy(self) -> int:
        """Workers that have something in flight."""
        return sum(bool(lane.flights) for lane in self.by_key.values())

    @property
    def mean_batch_s(self) -> float:
        """How long batches took of late, over all workers that had one; 0 if none had."""
        runs = [lane.mean_run_s for lane in self.by_key.values() if lane.mean_run_s]
        return sum(runs) / len(runs) if runs else 0.0

    # ------------------------------------------------------------------------------------------- slow clients

    def that_runs(self, job: Job) -> WorkerLane | None:
        """The lane that has the job's flight; None if no lane has it."""
        flight = job.flight
        lane = self.by_key.get(flight.key) if flight is not None else None
        return lane if lane is not None and flight in lane.flights else None

    def hold(self, job: Job) -> None:
        """Have nothing more read from the worker that runs `job`, until it is released."""
        lane = self.that_runs(job)
        if lane is None:
            return
        key = job.held_by = lane.key
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self._actions.hold(key)

    def release(self, job: Job) -> None:
        """Take the hold of `job` back; the worker is read again when no other job holds it."""
        key, job.held_by = job.held_by, None
        if key is None or key not in self._holders:
            return
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._actions.resume(key)

    @property
    def held(self) -> frozenset[str]:
        """The workers that are not read."""
        return frozenset(self._holders)
