"""How workers come to life: in a fresh interpreter, or forked from a template.

`Launchers` is the server's (one for all pools): the environment that workers inherit, and templates that only import
and that models of many versions share. `Launcher` is one version's, and decides for it: forked after loading where
that is safe, forked before loading where it is not, fresh where the model's configuration or the system asks for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from marserve.lineage import VARIABLE
from marserve.machine.describe import count_cores
from marserve.machine.devices import Assigner, Vendor, show_only
from marserve.messages import Load, Preload
from marserve.pool.cause_of_death import Cause, Death
from marserve.pool.cgroups import WorkerCgroups
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.forked import StartFailed, Template
from marserve.pool.launchers.fresh import launch_fresh
from marserve.pool.launchers.group import GroupShape, form_group
from marserve.pool.launchers.leftovers import Leftovers
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.memory import watch_oom_kills
from marserve.pool.output import WorkerLog, WorkerOutput

__all__ = ["GroupShape", "Launched", "Launcher", "Launchers", "StartFailed", "WorkerEnds", "WorkerProcess"]

log = logging.getLogger("marserve.pool.launchers")

LOOK_AT_KILLS_S = 1.0

WorkerStart = Literal["auto", "fork", "fresh"]


class Launched:
    """A worker process on its way. `needs_load`: it waits on the wire to be told what to load.

    `load_s` is how long its template took to load the model, 0 where it has none; `how` is a phrase for describe.
    `environment` is what it is told to add to its own.
    """

    def __init__(
        self,
        process: WorkerProcess,
        *,
        needs_load: bool,
        how: str,
        load_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process, self.needs_load, self.how, self.load_s = process, needs_load, how, load_s
        self._environment = dict(environment or {})

    def order(self, load: Load) -> Load:
        """The order to load that it is to be sent."""
        told = self.process.load(load)
        return msgspec.structs.replace(told, environment={**told.environment, **self._environment})


class Launchers:
    """What all pools share: the environment that workers inherit, their ids (counted up from `first_worker_id`, those
    of workers of several processes or devices from `first_group_id`), the devices of the machine's `vendor` that they
    are given in turn, how many cores they may keep busy together, where they get control groups (None: nowhere),
    whether the kernel killed any for memory, and templates that only import.
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
        cores: int | None = None,
        cgroups: WorkerCgroups | None = None,
    ) -> None:
        self.leftovers = Leftovers()
        self.environment = {**environment, VARIABLE: self.leftovers.lineage}
        self.log = log
        self.devices = devices or Assigner(0)
        self.cores = cores or count_cores()
        self.oom_kills = watch_oom_kills()
        self.cgroups = cgroups
        self._kills_look: asyncio.TimerHandle | None = None
        self._vendor = vendor
        self._next_worker_id = first_worker_id
        self._next_group_id = first_group_id
        self._import_templates: dict[tuple[str, ...], asyncio.Task[Template | None]] = {}

    def next_worker_id(self, level: int = 0) -> str:
        """An id that no worker of this server had before.

        Those with a parallel `level` count for themselves and in steps of it, as TorchServe's ports of the ranks do.
        """
        if level:
            self._next_group_id += level
            return str(self._next_group_id - level)
        self._next_worker_id += 1
        return str(self._next_worker_id - 1)

    def show_devices(self, devices: Sequence[int]) -> dict[str, str]:
        """The environment in which a worker sees these devices and no others."""
        return show_only(devices, self._vendor, self.environment)

    def watch_kills(self) -> None:
        """Look once a second whether the kernel has killed for memory, from now until `close`."""
        if self._kills_look is None and self.oom_kills.can_be_seen:
            self._look_at_kills()

    def _look_at_kills(self) -> None:
        self.oom_kills.look(time.monotonic())
        self._kills_look = asyncio.get_running_loop().call_later(LOOK_AT_KILLS_S, self._look_at_kills)

    async def import_template(self, modules: tuple[str, ...]) -> Template | None:
        """A template that has imported these modules and no model; None where even that cannot be forked."""
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
        ready = await template.open(Preload(list(modules)))
        if not ready.refusals:
            return template
        log.info("importing %s makes forking unsafe: %s", ", ".join(modules), "; ".join(ready.refusals))
        await template.close()
        return None

    async def close(self) -> None:
        """End the shared templates, and whatever else was started and is still there."""
        if self._kills_look is not None:
            self._kills_look.cancel()
            self._kills_look = None
        tasks, self._import_templates = list(self._import_templates.values()), {}
        for task in tasks:
            if not task.done():
                task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Template):
                await result.close()
        await self.leftovers.end(self.leftovers.lineage)


class Launcher:
    """Starts the workers of one model version."""

    def __init__(
        self,
        launchers: Launchers,
        load: Load,
        start: WorkerStart,
        *,
        uses_devices: bool,
        group: GroupShape | None = None,
        python: str = "",
        may_share_imports: bool = True,
    ) -> None:
        """`python` is the interpreter of the model's own environment, empty for the server's, from which alone workers
        can be forked. Without `may_share_imports` they are never forked from a template that other models share.
        """
        self._launchers = launchers
        self._load = load
        self._start = start
        self._group = group
        self._why_not_first = ""
        if group is not None:
            self._why_not_first = "its workers are groups of processes"
        elif uses_devices:
            self._why_not_first = "its workers use devices"
        elif python:
            self._why_not_first = "its workers run in a virtual environment (useVenv)"
        if sys.platform != "linux":
            self._why_not_first = "this system does not show what is safe"
        self._may_load_first = start != "fresh" and not self._why_not_first
        self._may_fork = start != "fresh" and sys.platform == "linux" and may_share_imports and not python
        self._python = python
        self._preload: tuple[str, ...] = ("torch",) if uses_devices or group is not None else ()
        self._template: Template | None = None
        self._loading: Template | None = None
        self._opening: asyncio.Task[Template | None] | None = None
        self.warnings: list[str] = []

    async def launch(
        self, worker_id: str, ends: WorkerEnds, threads: int, output: WorkerOutput, devices: Sequence[int] = ()
    ) -> Launched:
        """Start one worker on these ends. Raises StartFailed; the caller bounds the wait and closes the ends.

        The further ranks of a group print into `output`; `devices` are those that it is to see, and no others.
        """
        if self._start == "fork" and self._why_not_first:
            raise _fork_refused(self._why_not_first)
        if self._group is not None:
            return await self._launch_group(self._group, worker_id, ends, threads, output, devices)
        template = await self._model_template()
        if template is not None:
            process = await template.fork(worker_id, ends, threads)
            return Launched(process, needs_load=False, how="forked, model loaded", load_s=template.load_s)
        shown = self._launchers.show_devices(devices)
        if self._may_fork:
            shared = await self._launchers.import_template(self._preload)
            if shared is not None:
                process = await shared.fork(worker_id, ends, threads)
                return Launched(process, needs_load=True, how="forked before loading", environment=shown)
        launchers = self._launchers
        lineage = launchers.leftovers.child("fresh")
        process = launch_fresh(ends, launchers.environment, threads, lineage=lineage, python=self._python)
        return Launched(process, needs_load=True, how="fresh", environment=shown)

    async def end_leftovers(self, process: WorkerProcess, page_inode: int) -> None:
        """End what a worker that has ended left behind outside of its process group."""
        leftovers = self._launchers.leftovers
        await asyncio.gather(*(leftovers.end(lineage, page_inode) for lineage in process.lineages))

    async def _launch_group(
        self,
        shape: GroupShape,
        worker_id: str,
        ends: WorkerEnds,
        threads: int,
        output: WorkerOutput,
        devices: Sequence[int],
    ) -> Launched:
        """Start the ranks of a group: forked from a template that has torch imported, where that is safe, or fresh.

        A group is formed anew whenever one of its ranks dies; without a template each rank would import torch again.
        """
        shared = await self._launchers.import_template(self._preload) if self._may_fork else None

        async def start(rank: int, own: WorkerEnds, more: Sequence[int], seed: int) -> WorkerProcess:
            if shared is None:
                lineage = self._launchers.leftovers.child("fresh")
                environment = self._launchers.environment
                return launch_fresh(own, environment, threads, more, lineage=lineage, python=self._python)
            return await shared.fork(f"{worker_id}.{rank}", own, threads, more=more, seed=seed)

        order = msgspec.structs.replace(self._load, threads=threads, gpu_id=devices[0] if devices else None)
        group = await form_group(
            dataclasses.replace(shape, devices=self._launchers.show_devices(devices)),
            order,
            worker_id,
            ends,
            output,
            start,
        )
        how = f"{shape.size} ranks, {'fresh' if shared is None else 'forked before loading'}"
        return Launched(group, needs_load=True, how=how)

    async def _model_template(self) -> Template | None:
        """The template that has loaded the model, opened once for all who wait; None where workers load themselves."""
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
            task.exception()  # whoever waited has it; nobody waiting is no fault

    async def _open_template(self) -> Template | None:
        load = self._load
        launchers = self._launchers
        template = Template(load.model, load.version, launchers.environment, launchers.log, launchers.leftovers)
        self._loading = template
        try:
            ready = await template.open(load)
        finally:
            self._loading = None
        if not ready.refusals:
            self._template = template
            return template
        await template.close()
        reasons = "; ".join(ready.refusals)
        if self._start == "fork":
            raise _fork_refused(reasons)
        self._may_load_first = False
        self._preload = tuple(ready.preload)
        self.warnings.append(f"Each worker loads the model for itself, forking it is not safe: {reasons}")
        log.info("%s %s: forking the loaded model is not safe: %s", load.model, load.version, reasons)
        return None

    @property
    def template_pids(self) -> list[int]:
        """The process of the version's template, also while it loads; none where there is none."""
        templates = (self._template, self._loading)
        return [template.pid for template in templates if template is not None and template.pid > 0]

    def kill_loading(self) -> None:
        """End a template that is loading the model, by force; nothing if none is."""
        if self._loading is not None:
            self._loading.kill()

    async def give_up_loading(self) -> None:
        """End a template that takes too long to load; nothing if none is loading."""
        opening = self._opening
        if opening is not None:
            opening.cancel()
            await asyncio.wait([opening])

    async def close(self) -> None:
        """End the version's template."""
        await self.give_up_loading()
        await self.drop_template()

    async def drop_template(self) -> None:
        """End the version's template, if it is open; the next worker opens another."""
        template, self._template = self._template, None
        if template is not None:
            await template.close()


def _fork_refused(reasons: str) -> StartFailed:
    return StartFailed(
        Death(
            Cause.FORK_REFUSED,
            f"workerStart is fork, but the loaded model must not be forked: {reasons}. "
            "Set workerStart: auto to have each worker load the model for itself.",
        )
    )


async def _share(opening: asyncio.Task[Template | None]) -> Template | None:
    """Wait for a template that others may wait for too. Raises StartFailed when one of them gave it up."""
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if waiting is not None and waiting.cancelling():
            raise
        death = Death(Cause.STARTUP_TIMEOUT, "the template took too long to load and was ended")
        raise StartFailed(death) from None
