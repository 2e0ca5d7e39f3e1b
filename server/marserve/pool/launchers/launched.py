"""A worker that a launcher has started, and its order to load."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from marserve.machine.devices import View
from marserve.messages import Load
from marserve.pool.launchers.process import WorkerProcess


class Launched:
    """A worker process that was started. `needs_load`: it waits on the wire for its order to load.

    `load_s` is how long its template took to load the model, 0 without one; `how` is a phrase for describe. `view` is
    its view of its devices, None if the order has that already; `cpus` are the processors to which it keeps.
    """

    def __init__(
        self,
        process: WorkerProcess,
        *,
        needs_load: bool,
        how: str,
        load_s: float = 0.0,
        view: View | None = None,
        cpus: Sequence[int] = (),
    ) -> None:
        self.process, self.needs_load, self.how, self.load_s = process, needs_load, how, load_s
        self._view, self._cpus = view, list(cpus)

    def order(self, load: Load) -> Load:
        """The order to load, with its view and its processors."""
        adapted = self.process.load(load)
        adapted = msgspec.structs.replace(adapted, cpus=self._cpus)
        if self._view is None:
            return adapted
        environment = {**adapted.environment, **self._view.environment}
        return msgspec.structs.replace(adapted, environment=environment, gpu_id=self._view.gpu_id)
