"""What dispatchers have in common that say themselves which worker gets which jobs, and send nothing ahead. Pure."""

from __future__ import annotations

from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job, JobState, WorkerLane


class DirectDispatcher(Dispatcher):
    """A dispatcher without batches ahead; who extends it has a `pump` of its own."""

    def _send(self, lane: WorkerLane, jobs: list[Job], mates: int, is_group: bool, now: float) -> None:
        """Send a flight; the first `mates` of its jobs were in the one before."""
        lane.last_number += 1
        flight = Flight(lane.last_number, jobs, is_group, now, key=lane.key)
        lane.flights.append(flight)
        self._under_way += 1
        metrics = self.metrics
        for job in jobs:
            job.state = JobState.RUNNING
            job.flight = flight
        joined = jobs[mates:]
        waits_s = [now - job.arrived for job in joined]
        named_s = [now - job.arrived for job in joined if job.request.names_version]
        metrics.named_queue_s += sum(named_s)
        metrics.queue_seconds.observe_all(waits_s)
        if metrics.tap is not None:
            metrics.tap.queued(waits_s, named_s)
        metrics.batch_sizes.observe(len(jobs))
        self._actions.send(lane.key, flight)
