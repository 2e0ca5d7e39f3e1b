"""Workers of one model version on the nodes of a Ray cluster: `launcher: ray` in the model's configuration.

Ray finds the place and accounts for resources. The worker is an ordinary one, started by an agent (`node/agent.py`);
all its messages come over the server's own connection (`remote.py`). A place outlives its worker for a moment, so that
a worker that died is replaced there at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from marserve.agent_link import Start
from marserve.machine.devices import View
from marserve.messages import Load
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.forked import StartFailed
from marserve.pool.launchers.launched import Launched
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.launchers.remote.cluster import Cluster, Place, Wish
from marserve.pool.launchers.remote.remote import RemoteWorker
from marserve.pool.options import PoolOptions, RayOptions
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.pool.worker_end.client import WorkerClient
from marserve.pool.worker_end.output import WorkerOutput

log = logging.getLogger("marserve.pool.launchers")

# How long the place of a worker that died is kept for the next one.
KEEP_PLACE_S = 5.0
# Variables of the server's environment that handlers read; all others are the node's own.
TOLD_PREFIXES = ("TS_", "ORT_")


class RayLauncher:
    """Starts the workers of one model version on the cluster; the methods are `Launcher`'s."""

    is_remote = True

    def __init__(
        self,
        cluster: Cluster | None,
        environment: dict[str, str],
        load: Load,
        options: PoolOptions,
        ray: RayOptions,
    ) -> None:
        self._cluster = cluster
        self._environment = {name: value for name, value in environment.items() if name.startswith(TOLD_PREFIXES)}
        self._load = load
        self._options, self._ray = options, ray
        self._places: dict[str, Place] = {}
        self._keeping: dict[str, asyncio.TimerHandle] = {}
        self.warnings: list[str] = []

    @property
    def threads(self) -> int:
        """How many threads a worker may use: the number of its CPUs."""
        return max(1, int(self._ray.cpus))

    @property
    def template_pids(self) -> list[int]:
        """Empty: it has no template on this machine."""
        return []

    def waits_for(self, worker_id: str) -> str:
        """What a worker's start waits for; empty if it does not wait."""
        place = self._places.get(worker_id)
        return place.waits_for if place is not None else ""

    async def reserve(self, worker_id: str) -> None:
        """Wait until there is a place for this worker, as long as that takes. Raises StartFailed."""
        self._do_not_drop(worker_id)
        place = self._places.get(worker_id)
        if place is not None and place.is_open:
            return
        if place is not None:
            place.give_up()
        self._places[worker_id] = place = await self._ask(worker_id)
        try:
            await place.ready()
        except BaseException:
            self._drop(worker_id)
            raise

    async def _ask(self, worker_id: str) -> Place:
        ray = self._ray
        if self._cluster is None:
            raise StartFailed(Death(Cause.LOAD_FAILED, "launcher: ray is not to be had where this pool runs"))
        if self._options.python or self._load.packages:
            raise StartFailed(
                Death(
                    Cause.LOAD_FAILED,
                    "launcher is ray, and what the archive requires was installed on the server, not on the nodes. Set "
                    "install_py_dep_per_model=false, and install it on the nodes.",
                )
            )
        if ray.archive is None:
            raise StartFailed(
                Death(
                    Cause.LOAD_FAILED,
                    "launcher is ray, and the model is a folder of the store, which has no digest that nodes could "
                    "fetch it by. Pack it with `marserve archive`.",
                )
            )
        wish = Wish(
            f"{self._load.model}/{self._load.version}",
            ray.cpus,
            ray.gpus,
            ray.memory_bytes,
            ray.resources,
            ray.placement,
        )
        return await self._cluster.place(wish)

    async def launch(
        self,
        worker_id: str,
        ends: WorkerEnds,
        threads: int,
        output: WorkerOutput,
        devices: Sequence[int] = (),
        gpu_id: int | None = None,
        client: WorkerClient | None = None,
    ) -> Launched:
        """Start one worker in its place; `client` speaks with it. Raises StartFailed."""
        place = self._places.get(worker_id)
        if place is None or place.link is None or not place.is_open:
            raise StartFailed(Death(Cause.NODE_LOST, "its place was lost before it was started"))
        assert client is not None
        assert self._ray.archive is not None
        worker = RemoteWorker(place.link, ends.page, output, client)
        worker.exited.add_done_callback(lambda exited: self._worker_ended(worker_id, place, exited))
        order = Start(
            worker_id,
            self._load_order(),
            self._options.worker_start,
            threads,
            self._ray.archive,
            self._environment,
            devices=int(self._ray.gpus + 0.999),
            metrics=await self._metrics(),
        )
        try:
            started = await place.link.start(order, worker)
        except StartFailed as failure:
            worker.abandon()
            if failure.death.cause is Cause.NODE_UNFIT:
                self._drop(worker_id, is_node_unfit=True)
            else:
                self._keep_a_while(worker_id, place)
            raise
        except BaseException:  # given up: the agent still starts this worker, so the next one cannot use it
            worker.abandon()
            self._drop(worker_id)
            raise
        self.warnings = list(started.warnings)
        how = f"{started.how}, on node {place.node}"
        view = View({}, 0 if self._ray.gpus else None)
        return Launched(worker, needs_load=started.needs_load, how=how, load_s=started.load_s, view=view)

    def _load_order(self) -> Load:
        gpu_id = 0 if self._ray.gpus else None
        return msgspec.structs.replace(self._load, gpu_id=gpu_id, threads=self.threads)

    async def _metrics(self) -> str | None:
        path = self._load.metrics_file
        return await asyncio.to_thread(Path(path).read_text, "utf-8") if path is not None else None

    def _worker_ended(self, worker_id: str, place: Place, exited: asyncio.Future[int | None]) -> None:
        """Keep the place for the next worker for a while; give it back at once after an orderly end."""
        if self._places.get(worker_id) is not place:
            return
        if exited.result() == 0 or not place.is_open:
            self._drop(worker_id)
        else:
            self._keep_a_while(worker_id, place)

    def _keep_a_while(self, worker_id: str, place: Place) -> None:
        self._do_not_drop(worker_id)
        if self._places.get(worker_id) is place:
            loop = asyncio.get_running_loop()
            self._keeping[worker_id] = loop.call_later(KEEP_PLACE_S, self._drop, worker_id)

    def _do_not_drop(self, worker_id: str) -> None:
        timer = self._keeping.pop(worker_id, None)
        if timer is not None:
            timer.cancel()

    def _drop(self, worker_id: str, *, is_node_unfit: bool = False) -> None:
        self._do_not_drop(worker_id)
        place = self._places.pop(worker_id, None)
        if place is not None:
            place.give_up(is_node_unfit=is_node_unfit)

    # ------------------------------------------------------------------------------------------- as `Launcher`

    async def end_leftovers(self, process: WorkerProcess, page_inode: int) -> None:
        """Does nothing: the agent ends leftovers."""

    def kill_loading(self) -> None:
        """Does nothing: there is no template."""

    async def give_up_loading(self) -> None:
        """Does nothing: there is no template, and the slot ends the loading worker."""

    async def drop_template(self) -> None:
        """Does nothing: there is no template."""

    async def close(self) -> None:
        """Give all places back."""
        for worker_id in list(self._places):
            with contextlib.suppress(KeyError):
                self._drop(worker_id)
