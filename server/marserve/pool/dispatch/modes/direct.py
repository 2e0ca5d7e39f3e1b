"""What dispatchers have in common that say themselves which worker gets which jobs, and send nothing ahead. Pure."""

from __future__ import annotations

from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Job, WorkerLane


class DirectDispatcher(Dispatcher):
    """A dispatcher without batches ahead; who extends it has a `pump` of its own."""

    def _send(self, lane: WorkerLane, jobs: list[Job], mates: int, is_group: bool, now: float) -> None:
        """Send a flight; the first `mates` of its jobs were in the one before."""
        self._actions.send(lane.key, self.lanes.begin(lane, jobs, is_group, now, mates=mates))
