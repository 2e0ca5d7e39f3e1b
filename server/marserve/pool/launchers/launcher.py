"""How workers are started: in a fresh interpreter, or forked from a template.

`Launchers` is the server's, one for all pools: the environment that workers inherit, and templates that only import,
which several versions share. `Launcher` is one version's, and decides: forked after loading if that is safe, else
forked before loading, and fresh if the model's configuration or the system requires it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from marserve.errors import MarserveError, without_stop
from marserve.lineage import VARIABLE
from marserve.machine.accelerators import Accelerator, DeviceReading, Vendor
from marserve.machine.describe import count_cores
from marserve.machine.devices import Assigner, View, view_of
from marserve.machine.numa import cpus_near
from marserve.messages import HEAVY_MODULES, OPEN_SESSION, Load, Preload
from marserve.pool.interpreter import find_change, link_packages
from marserve.pool.launchers.cgroups import WorkerCgroups
from marserve.pool.launchers.cores import Cores
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.forked import StartFailed, Template
from marserve.pool.launchers.fresh import launch_fresh
from marserve.pool.launchers.group import GroupShape, form_group
from marserve.pool.launchers.launched import Launched
from marserve.pool.launchers.leftovers import Leftovers
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.launchers.remote.cluster import Cluster
from marserve.pool.launchers.remote.ray_launcher import RayLauncher
from marserve.pool.options import PoolOptions
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.pool.worker_end.client import WorkerClient
from marserve.pool.worker_end.memory import watch_oom_kills
from marserve.pool.worker_end.output import WorkerLog, WorkerOutput
from marserve.pool.worker_end.worker_levels import WorkerLevels

__all__ = [
    "AnyLauncher",
    "GroupShape",
    "Launched",
    "Launcher",
    "Launchers",
    "StartFailed",
    "WorkerEnds",
    "WorkerProcess",
    "make_launcher",
]

log = logging.getLogger("marserve.pool.launchers")

LOOK_AT_KILLS_S = 1.0
LEAST_LOADING = 8
# What ranks that divide a model import: the last of them at the first layer that is divided.
DIVIDING_MODULES = ("torch", "torch.distributed.tensor.parallel", "torch._dynamo")
# Describe has at most so many characters of a template's reasons against forking it.
MAX_REASONS = 4000
# How long a shared template may take to import its modules; a worker's own start may give up before.
IMPORT_TIMEOUT_S = 120.0
# After so many templates in a row that did not fork, workers are started without one (`workerStart: auto`).
MOST_GIVEN_UP = 2


class Launchers:
    """What all pools share.

    The environment that workers inherit; their ids (counted from `first_worker_id`, for workers of several processes or
    devices from `first_group_id`); the `accelerators` of the machine's `vendor`, which are given out in turn; how many
    `cores` workers may use together; their control groups (None: none); the connection to a Ray cluster; the kernel's
    kills for memory; and templates that only import.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        log: WorkerLog,
        *,
        first_worker_id: int = 9000,
        first_group_id: int = 29500,
        devices: Assigner | None = None,
        vendor: Vendor | None = None,
        accelerators: Sequence[Accelerator] = (),
        cores: int | None = None,
        cgroups: WorkerCgroups | None = None,
        cluster: Cluster | None = None,
        most_loading: int = 0,
        read_device: Callable[[int], DeviceReading | None] = lambda device: None,
        is_device_lost: Callable[[], bool] = lambda: False,
        restore_folder: Callable[[str], None] = lambda folder: None,
        hurry: asyncio.Event | None = None,
    ) -> None:
        """`most_loading`: how many versions load for the first time at once; 0: twice the cores, at least eight.

        `restore_folder` unpacks files again that were deleted from a model's folder, or raises. `hurry` is set when
        workers that are to end get no more time.
        """
        self.cluster = cluster
        self.leftovers = Leftovers()
        self.environment = {**environment, VARIABLE: self.leftovers.lineage}
        self.log = log
        self.levels = WorkerLevels()
        self.devices = devices or Assigner(0)
        self.cores = cores or count_cores()
        self.own_cores = Cores()
        self.first_loads = asyncio.Semaphore(most_loading or max(LEAST_LOADING, 2 * self.cores))
        self.oom_kills = watch_oom_kills()
        self.cgroups = cgroups
        self._kills_look: asyncio.TimerHandle | None = None
        self._vendor = vendor
        self._accelerators = tuple(accelerators)
        self.read_device = read_device
        self.is_device_lost = is_device_lost
        self.restore_folder = restore_folder
        self.hurry = hurry or asyncio.Event()
        self._next_worker_id = first_worker_id
        self._next_group_id = first_group_id
        self._import_templates: dict[tuple[str, ...], asyncio.Task[Template | None]] = {}
        self._fading: dict[Template, asyncio.Task[None]] = {}

    def next_worker_id(self, level: int = 0) -> str:
        """An id that no worker of this server had before.

        Workers with a parallel `level` have a count of their own, in steps of `level`, as TorchServe's ports of ranks.
        """
        if level:
            self._next_group_id += level
            return str(self._next_group_id - level)
        self._next_worker_id += 1
        return str(self._next_worker_id - 1)

    def view(self, gpu_id: int | None, group: Sequence[int] = ()) -> View:
        """The view that a worker has of its device, or of its group of devices."""
        return view_of(gpu_id, group, self._accelerators, self._vendor, is_one_lost=self.is_device_lost())

    def cpus_near(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The processors near these devices; empty if that gives no restriction. Reads a few files of /sys."""
        if not hasattr(os, "sched_getaffinity"):
            return ()
        bus_ids = [self._accelerators[device].bus_id for device in devices if device < len(self._accelerators)]
        return cpus_near(bus_ids, os.sched_getaffinity(0)) if bus_ids else ()

    def watch_kills(self) -> None:
        """Look once a second whether the kernel has killed for memory, from now until `close`."""
        if self._kills_look is None and self.oom_kills.can_be_seen:
            self._look_at_kills()

    def _look_at_kills(self) -> None:
        self.oom_kills.look(time.monotonic())
        self._kills_look = asyncio.get_running_loop().call_later(LOOK_AT_KILLS_S, self._look_at_kills)

    async def import_template(self, modules: tuple[str, ...]) -> Template | None:
        """A template that has imported these modules and no model; None if even that cannot be forked."""
        task = self._import_templates.get(modules)
        if task is not None and task.done():
            gone = task.cancelled() or task.exception() is not None
            template = None if gone else task.result()
            if gone or (template is not None and not template.is_open):
                task = None
        if task is None:
            task = asyncio.create_task(self._open_import_template(modules))
            self._import_templates[modules] = task
        return await _share(task)

    @property
    def shared_pids(self) -> list[int]:
        """The processes of templates that have only imported."""
        done = [task for task in self._import_templates.values() if task.done() and not task.cancelled()]
        templates = [task.result() for task in done if task.exception() is None]
        return [template.pid for template in templates if template is not None and template.is_open]

    async def _open_import_template(self, modules: tuple[str, ...]) -> Template | None:
        template = Template("-", "-", self.environment, self.log, self.leftovers)
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                ready = await template.open(Preload(list(modules)))
        except TimeoutError:
            reason = f"the template that imports {', '.join(modules) or 'nothing'} for several models did not do so"
            death = Death(Cause.STARTUP_TIMEOUT, f"{reason} within {IMPORT_TIMEOUT_S:g} s and was ended")
            log.warning("%s", death.detail)
            raise StartFailed(death) from None
        if not ready.refusals:
            return template
        log.info("importing %s makes forking unsafe: %s", ", ".join(modules), "; ".join(ready.refusals))
        await template.close()
        return None

    def let_fade(self, template: Template) -> None:
        """End a template that was given up, once the last worker that it forked has ended. May be called again."""
        if template not in self._fading:
            task = self._fading[template] = asyncio.create_task(template.fade())
            task.add_done_callback(lambda _: self._fading.pop(template, None))

    def is_fading(self, template: Template) -> bool:
        """Whether a template was given up and is still there."""
        return template in self._fading

    async def end_fading(self, templates: Iterable[Template]) -> None:
        """End these templates, and the workers forked from them, if they were given up and are still there."""
        tasks = [task for template in templates if (task := self._fading.get(template)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the shared templates, and every other process that was started and is still there."""
        if self._kills_look is not None:
            self._kills_look.cancel()
            self._kills_look = None
        if self.cluster is not None:
            await self.cluster.close()
        tasks, self._import_templates = list(self._import_templates.values()), {}
        for task in tasks:
            if not task.done():
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Template):
                await result.close()
        await self.end_fading(list(self._fading))
        await self.leftovers.end(self.leftovers.lineage)


class Launcher:
    """Starts the workers of one model version on this machine."""

    is_remote = False
    threads = 0
    """How many threads each worker may use; 0: a share of this machine's cores."""

    def __init__(
        self,
        launchers: Launchers,
        load: Load,
        options: PoolOptions,
    ) -> None:
        self._launchers, self._load, self._options = launchers, load, options
        self._why_not_first = ""
        if options.ranks:
            self._why_not_first = "its workers are groups of processes"
        elif options.gpu_ids:
            self._why_not_first = "its workers use devices"
        elif options.interpreter is not None:
            self._why_not_first = f"its workers run under an interpreter of their own, {options.interpreter.shown}"
        elif options.program:
            self._why_not_first = "its workers are a program of their own (workerProgram)"
        elif options.python:
            self._why_not_first = "its workers run in a virtual environment (useVenv)"
        if sys.platform != "linux":
            self._why_not_first = "this system does not show what is safe"
        may_fork = options.worker_start != "fresh"
        self._may_load_first = may_fork and not self._why_not_first
        self._may_fork = (
            may_fork and sys.platform == "linux" and options.may_share_imports and not options.has_own_python
        )
        self._preload: tuple[str, ...] = ("torch",) if options.gpu_ids or options.ranks else ()
        if options.parallel is not None:
            self._preload = DIVIDING_MODULES
        self._template: Template | None = None
        self._loading: Template | None = None
        self._opening: asyncio.Task[Template | None] | None = None
        self._given_up: list[Template] = []  # without shared ones
        self._last_given_up: Template | None = None
        self._given_up_in_a_row = 0
        self._given_up_warning = ""
        self.warnings: list[str] = []

    def waits_for(self, worker_id: str) -> str:
        """What a worker's start waits for: on this machine nothing."""
        return ""

    async def reserve(self, worker_id: str) -> None:
        """Wait until there is a place for this worker: on this machine there always is."""

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
        """Start one worker on these ends. Raises StartFailed; the caller bounds the wait and closes the ends.

        The further ranks of a group print into `output`. With `devices` the worker sees only these; it uses `gpu_id`.
        `client` is for workers on other machines, and not used here.
        """
        if self._options.worker_start == "fork" and self._why_not_first:
            raise _fork_refused(self._why_not_first)
        await self._check_interpreter()
        await self._restore_folder()
        if self._options.ranks:
            return await self._launch_group(worker_id, ends, threads, output, devices)
        template = await self._model_template()
        if template is not None:
            process = await self._fork(template, worker_id, ends, threads)
            return Launched(process, needs_load=False, how="forked, model loaded", load_s=template.load_s)
        view = self._launchers.view(gpu_id, devices)
        cpus = self._cpus_near(devices or ([] if gpu_id is None else [gpu_id]))
        if self._may_fork:
            shared = await self._launchers.import_template(self._preload)
            if shared is not None:
                process = await self._fork(shared, worker_id, ends, threads)
                return Launched(process, needs_load=True, how="forked before loading", view=view, cpus=cpus)
        process = self._launch_fresh(ends, threads)
        return Launched(process, needs_load=True, how="fresh", view=view, cpus=cpus)

    def _launch_fresh(self, ends: WorkerEnds, threads: int, more: Sequence[int] = ()) -> WorkerProcess:
        return launch_fresh(
            ends,
            self._launchers.environment,
            threads,
            more,
            lineage=self._launchers.leftovers.child("fresh"),
            python=self._options.python,
            interpreter=self._options.interpreter,
            program=self._options.program,
        )

    async def _check_interpreter(self) -> None:
        """Raise StartFailed if the interpreter of the workers is not what it was when the version was planned."""
        interpreter = self._options.interpreter
        if interpreter is None:
            return
        if change := await asyncio.to_thread(find_change, interpreter):
            raise StartFailed(Death(Cause.LOAD_FAILED, change))
        # What tidies temporary folders may have taken the links.
        await asyncio.to_thread(link_packages, Path(interpreter.packages))

    async def _restore_folder(self) -> None:
        """Have deleted files of the model's folder unpacked again. Raises StartFailed if the load needs them."""
        try:
            await asyncio.to_thread(self._launchers.restore_folder, self._load.model_dir)
        except (MarserveError, OSError) as error:
            why = (
                error.message if isinstance(error, MarserveError) else f"{self._load.model_dir} is incomplete: {error}"
            )
            if self._template is None or not self._template.is_open:
                raise StartFailed(Death(Cause.LOAD_FAILED, why)) from error
            log.warning("%s %s: %s; its template has loaded it", self._load.model, self._load.version, why)

    async def _fork(
        self,
        template: Template,
        worker_id: str,
        ends: WorkerEnds,
        threads: int,
        *,
        more: Sequence[int] = (),
        seed: int | None = None,
    ) -> WorkerProcess:
        """Fork a worker; note a template that does not answer, so that it is replaced. Raises StartFailed."""
        try:
            process = await template.fork(worker_id, ends, threads, more=more, seed=seed)
        except StartFailed:
            if template.why_given_up and template is not self._last_given_up:
                self._note_given_up(template)
            raise
        self._given_up_in_a_row = 0
        return process

    def _note_given_up(self, template: Template) -> None:
        """Have the next worker forked from another template; after two in a row that did not fork, from none."""
        if self._given_up_warning:
            self.warnings.remove(self._given_up_warning)
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._given_up_warning = (
            f"The template that workers are forked from (process {template.pid}) {template.why_given_up} "
            f"and was replaced ({at})"
        )
        self.warnings.append(self._given_up_warning)
        log.warning("%s %s: %s", self._load.model, self._load.version, self._given_up_warning)
        self._last_given_up = template
        self._launchers.let_fade(template)
        is_own = template is self._template
        if is_own:
            self._template = None
            self._given_up = [*filter(self._launchers.is_fading, self._given_up), template]
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row < MOST_GIVEN_UP or self._options.worker_start == "fork":
            return
        self._given_up_in_a_row = 0
        if is_own:
            self._may_load_first = False
            self.warnings.append("Each worker loads the model for itself: templates that have loaded it do not fork")
        else:
            self._may_fork = False

    async def end_leftovers(self, process: WorkerProcess, page_inode: int) -> None:
        """End the processes that an ended worker left behind outside of its process group."""
        leftovers = self._launchers.leftovers
        await asyncio.gather(*(leftovers.end(lineage, page_inode) for lineage in process.lineages))

    async def _launch_group(
        self,
        worker_id: str,
        ends: WorkerEnds,
        threads: int,
        output: WorkerOutput,
        devices: Sequence[int],
    ) -> Launched:
        """Start the ranks of a group: forked from a template that has imported torch if that is safe, else fresh.

        A group is formed anew whenever one of its ranks dies; without a template each rank would import torch again.
        """
        shared = await self._launchers.import_template(self._preload) if self._may_fork else None

        async def start(rank: int, own: WorkerEnds, more: Sequence[int], seed: int) -> WorkerProcess:
            if shared is None:
                return self._launch_fresh(own, threads, more)
            return await self._fork(shared, f"{worker_id}.{rank}", own, threads, more=more, seed=seed)

        view = self._launchers.view(devices[0] if devices else None, devices)
        cpus = self._cpus_near(devices)
        order = msgspec.structs.replace(self._load, threads=threads, gpu_id=view.gpu_id, cpus=list(cpus))
        device_count = len(devices) if view.environment else 0
        shape = GroupShape(self._options.ranks, self._options.parallel_type != "pp", view.environment, device_count)
        level = self._launchers.levels.of(order.model)
        group = await form_group(shape, order, level, worker_id, ends, output, start)
        how = f"{shape.size} ranks, {'fresh' if shared is None else 'forked before loading'}"
        return Launched(group, needs_load=True, how=how, cpus=cpus)

    def _cpus_near(self, devices: Sequence[int]) -> tuple[int, ...]:
        return self._launchers.cpus_near(devices) if self._options.stays_near else ()

    async def _model_template(self) -> Template | None:
        """The template that has loaded the model, opened once for all starts; None if workers load it themselves."""
        if not self._may_load_first:
            return None
        if self._template is not None and self._template.is_open:
            return self._template
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_template())
            self._opening.add_done_callback(self._opened)
        return await _share(self._opening)

    def _opened(self, task: asyncio.Task[Template | None]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieved here, so that asyncio does not log it

    async def _open_template(self) -> Template | None:
        load = self._load
        launchers = self._launchers
        template = Template(load.model, load.version, launchers.environment, launchers.log, launchers.leftovers)
        self._loading = template
        try:
            ready = await template.open(load, launchers.levels.of(load.model))
        finally:
            self._loading = None
        if not ready.refusals:
            self._template = template
            return template
        await template.close()
        reasons = "; ".join(ready.refusals)[:MAX_REASONS]
        if self._options.worker_start == "fork":
            raise _fork_refused(reasons)
        self._may_load_first = False
        self._preload = tuple(name for name in HEAVY_MODULES if name in ready.preload)
        if not load.build and OPEN_SESSION not in ready.refusals:
            self.warnings.append(f"Each worker loads the model for itself, forking it is not safe: {reasons}")
        log.info("%s %s: forking the loaded model is not safe: %s", load.model, load.version, reasons)
        return None

    @property
    def template_pids(self) -> list[int]:
        """The processes of the version's template, loaded or loading, and of given-up ones that are still there."""
        templates = (self._template, self._loading, *filter(self._launchers.is_fading, self._given_up))
        return [template.pid for template in templates if template is not None and template.pid > 0]

    def kill_loading(self) -> None:
        """End a template that is loading the model, by force."""
        if self._loading is not None:
            self._loading.kill()

    async def give_up_loading(self) -> None:
        """End a template that takes too long to load, if there is one."""
        opening = self._opening
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])

    async def close(self) -> None:
        """End the version's template, and given-up ones. Its workers have ended by now."""
        await self.give_up_loading()
        await self.drop_template()
        await self._launchers.end_fading(self._given_up)

    async def drop_template(self) -> None:
        """End the version's template, if it is open; the next worker opens another."""
        template, self._template = self._template, None
        if template is not None:
            await template.close()


AnyLauncher = Launcher | RayLauncher


def make_launcher(launchers: Launchers, options: PoolOptions, load: Load) -> AnyLauncher:
    """The launcher of a version's workers: on this machine, or on a Ray cluster."""
    if options.ray is not None:
        return RayLauncher(launchers.cluster, launchers.environment, load, options, options.ray)
    return Launcher(launchers, load, options)


def _fork_refused(reasons: str) -> StartFailed:
    return StartFailed(
        Death(
            Cause.FORK_REFUSED,
            f"workerStart is fork, but the loaded model must not be forked: {without_stop(reasons)}. "
            "Set workerStart: auto to have each worker load the model for itself.",
        )
    )


async def _share(opening: asyncio.Task[Template | None]) -> Template | None:
    """Wait for a template that other starts may wait for, too. Raises StartFailed when one of them gave it up."""
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if waiting is not None and waiting.cancelling():
            raise
        death = Death(Cause.STARTUP_TIMEOUT, "the template took too long to load and was ended")
        raise StartFailed(death) from None
