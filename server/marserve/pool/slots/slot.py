"""One worker slot: a place for a worker, with an id and a history, filled again whenever its worker ends.

`run()` starts a worker, waits for its end, finds out why it ended, waits as the restart policy says, and begins again,
until the slot is retired. A slot keeps its id and the time of its start over all its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from marserve.errors import NoMemoryNow, NotEnoughMemory, without_stop
from marserve.machine.device_readings import describe_usage
from marserve.messages import CheckpointRead, Request, line_ids, shown_id
from marserve.pool.checks.health import HealthView
from marserve.pool.launchers.launcher import StartFailed
from marserve.pool.slots.first_load import FirstLoad
from marserve.pool.slots.life import LAST_OUTPUT_S, Life, LifeContext
from marserve.pool.slots.lives import Lives
from marserve.pool.slots.restart_policy import RestartPolicy
from marserve.pool.worker_end.cause_of_death import OF_NODES, Cause, Death
from marserve.pool.worker_end.memory import resident_bytes
from marserve.telemetry.logs.line_ids import with_traceback

log = logging.getLogger("marserve.pool")

# The traceback of a failed load is logged on the event loop, a line of the log for each of its lines.
MOST_TRACEBACK_LINES = 400
# Of the requests that a worker had when it ended, in its sentence.
MOST_NAMED = 3

# After so many failed starts in a row that were the nodes' fault the load counts as failed.
MOST_NODES = 3

Status = Literal["READY", "LOADING", "UNLOADING"]


@dataclass(frozen=True, slots=True)
class DeathView:
    """How a worker ended: the class of cause, when (UTC, seconds), what is known, and its last words."""

    cause: str
    at: float
    detail: str
    traceback: str = ""
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What describe says of one worker slot. `pid` is -1 while there is no process; times are UTC seconds.

    `ranks` are the process ids of a group of ranks, `devices` those of a worker of several devices. `next_start_at` is
    infinite if the slot is tried again only when it is scaled, None if no start is pending. `gpu_usage` says in words
    what its device is doing. `node` names the worker's machine if it is not the server's; `waits_for` says why the
    worker is not started yet. `computes_on` is what the model runs on, if its handler says so; `engine` is
    the runtime with its version, and `cpu_flags` the instructions that its kernels depend on; `checkpoint` is how its
    weights came. `health` is what its handler says of the worker, None where it is not asked.
    """

    id: str
    started_at: float
    status: Status
    pid: int
    gpu_id: int | None
    memory_bytes: int
    restarts: int
    load_s: float
    how_started: str
    last_death: DeathView | None
    ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    next_start_at: float | None = None
    gpu_usage: str = "N/A"
    node: str = ""
    waits_for: str = ""
    computes_on: str = ""
    engine: str = ""
    cpu_flags: tuple[str, ...] = ()
    checkpoint: CheckpointRead | None = None
    health: HealthView | None = None


@dataclass(kw_only=True)
class SlotContext(LifeContext):
    """What every slot of a version uses, and what it reports to.

    `changed` is called after a slot's state changed, `no_memory` when there is no memory for a worker, `crashed` when a
    worker that had loaded the model ended unasked, or a slot was given up. `due` begins to replace a slot's worker.
    """

    lives: Lives
    first_load: FirstLoad
    changed: Callable[[], None]
    no_memory: Callable[[NoMemoryNow], None]
    crashed: Callable[[Slot, Death], None]
    due: Callable[[Slot, str], None]


class Slot:
    """A place for one worker at a time."""

    def __init__(
        self,
        slot_id: str,
        context: SlotContext,
        gpu_id: int | None,
        generation: int = 0,
        devices: tuple[int, ...] = (),
    ) -> None:
        self.id = slot_id
        self.generation = generation
        self.devices = devices
        self.home = devices or (() if gpu_id is None else (gpu_id,))
        self.waits_for_device = False
        options = context.options
        self.name = f"W-{slot_id}-{options.model}_{options.version}"
        self.gpu_id = gpu_id
        self.started_at = time.time()
        self.last_death: DeathView | None = None
        self.restarts = 0
        self.load_failures = 0
        self._vain = 0  # as for `WorkerHealth`
        self._failed_loads = 0
        self.has_given_up = False
        self.next_start_at: float | None = None
        self._pause_ends: float | None = None  # the same by the monotonic clock; infinite for not by itself
        self.is_retired = False
        self._context = context
        self._policy = RestartPolicy(options)
        self._life: Life | None = None
        self._nudged = asyncio.Event()
        self._starting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    def successor(self) -> Slot:
        """A slot that can take this one's place: same id, start time, device and history, and a new worker."""
        heir = Slot(self.id, self._context, self.gpu_id, self.generation + 1, self.devices)
        heir.home = self.home
        heir.started_at, heir.last_death, heir.restarts = self.started_at, self.last_death, self.restarts + 1
        heir._vain = self._vain if self._life is None else self._life.vain_for_heir
        return heir

    def start(self) -> None:
        """Begin the slot's story."""
        self.task = asyncio.create_task(self.run(), name=self.name)

    async def run(self) -> None:
        """Fill the slot, again and again, until it is retired."""
        while not self.is_retired:
            try:
                death = await self._live_once()
            except Exception as error:  # a slot that stopped trying would leave requests waiting for ever
                log.exception("%s: its worker could not be looked after", self.name)
                death = Death(Cause.LOAD_FAILED, f"the worker could not be looked after: {error!r}")
            if self.is_retired:
                break
            restart = self._policy.ended(time.monotonic(), death.exit_code)
            was_given_up, self.has_given_up = self.has_given_up, restart.gave_up
            if restart.gave_up and not was_given_up:
                self.load_failures += death.cause in OF_NODES
                again = f"every {restart.delay_s:g} s" if restart.delay_s < math.inf else "when it is scaled"
                log.error("%s gave up: %s. It is tried again %s.", self.name, without_stop(death.detail), again)
                self._context.crashed(self, death)
            elif restart.delay_s:
                log.info("%s Retry worker: %s in %g seconds.", self.name, self.id, restart.delay_s)
            if restart.delay_s:  # before the pool looks: it holds requests until then, or refuses them with that time
                self.next_start_at = time.time() + restart.delay_s
                self._pause_ends = time.monotonic() + restart.delay_s
                self._nudged.clear()
            self._context.changed()
            if restart.delay_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(restart.delay_s if restart.delay_s < math.inf else None):
                        await self._nudged.wait()
                self.next_start_at = self._pause_ends = None
                if self.is_retired:
                    break
            self.restarts += 1
            self._context.metrics.worker_restarts += 1

    @property
    def uses(self) -> tuple[int, ...]:
        """The devices that its worker uses; empty on the CPU."""
        return self.devices or (() if self.gpu_id is None else (self.gpu_id,))

    @property
    def worker_key(self) -> str:
        """The key of the present worker in the pool and its room; empty without one."""
        return self._life.key if self._life is not None else ""

    @property
    def cannot_load(self) -> bool:
        """Whether the model failed to load at least twice since it was last loaded in this slot."""
        return self._failed_loads >= 2

    def next_start(self, now: float) -> float | None:
        """When its next worker is started, by the monotonic clock; `now` during a start; None for not by itself."""
        if self.is_retired or self.waits_for_device or self._pause_ends == math.inf:
            return None
        return now if self._pause_ends is None else self._pause_ends

    def nudge(self) -> None:
        """Make the next try at once."""
        self._pause_ends = None
        self._nudged.set()

    def retire(self, *, at_once: bool) -> None:
        """Begin to end the worker and the slot: when its batches are done, or at once. It gets no further batches.

        May be called again with `at_once`. `wait_until_gone` waits for the end.
        """
        self.is_retired = True
        self._nudged.set()
        if self._life is not None:
            self._life.retire(at_once=at_once)
            if not self._life.is_ready and self._starting is not None:
                self._starting.cancel()

    async def wait_until_gone(self) -> None:
        """Wait until a retired slot has ended and its process is reaped."""
        if self.task is not None:
            await asyncio.wait([self.task])

    @property
    def is_ready(self) -> bool:
        """Whether a worker of this slot has loaded the model and takes batches."""
        life = self._life
        return life is not None and life.is_ready and not life.ended.is_set() and not self.is_retired

    @property
    def has_lost_template(self) -> bool:
        """Whether the template that its worker was forked from has stopped answering."""
        process = self._life.process if self._life is not None else None
        return process is not None and process.has_lost_template

    @property
    def load_s(self) -> float:
        """How long the present worker's load took; 0 without a worker."""
        return self._life.load_s if self._life is not None else 0.0

    def view(self) -> WorkerView:
        """What describe says. Reads `/proc`: for single calls, not for every scrape."""
        life, gpu_id, context = self._life, self.gpu_id, self._context
        process = life.process if life is not None else None
        node = process.node if process is not None else ""
        pids = self.pids if process is None or not node else [process.pid]
        memory_bytes = process.remote_bytes if process is not None and node else sum(map(resident_bytes, pids))
        status: Status = (
            "READY" if self.is_ready else "UNLOADING" if self.is_retired or self.has_given_up else "LOADING"
        )
        return WorkerView(
            id=self.id,
            started_at=self.started_at,
            status=status,
            pid=pids[0] if pids else -1,
            gpu_id=gpu_id,
            memory_bytes=memory_bytes,
            restarts=self.restarts,
            load_s=self.load_s,
            how_started=life.how if life is not None else "",
            last_death=self.last_death,
            next_start_at=self.next_start_at,
            ranks=tuple(pids) if context.options.ranks else (),
            devices=self.devices,
            gpu_usage="N/A" if gpu_id is None else describe_usage(gpu_id, context.launchers.read_device(gpu_id)),
            node=node,
            waits_for=context.reservations.why_none() if self.waits_for_device else context.launcher.waits_for(self.id),
            computes_on=life.computes_on if life is not None else "",
            engine=life.engine if life is not None else "",
            cpu_flags=life.cpu_flags if life is not None else (),
            checkpoint=life.checkpoint if life is not None else None,
            health=life.health.health.view if life is not None and life.health is not None else None,
        )

    @property
    def computes_on(self) -> str:
        """What the present worker's model runs on, by its handler's word; empty where that is not known."""
        return self._life.computes_on if self._life is not None else ""

    @property
    def build_ratios(self) -> Mapping[str, float]:
        """How many times as fast as its parent the present worker's build was, by rows; empty without one."""
        return self._life.build_ratios if self._life is not None else {}

    @property
    def pids(self) -> list[int]:
        """The present worker's process, or those of its ranks; empty without a worker."""
        return self._life.pids if self._life is not None else []

    async def _live_once(self) -> Death:
        """Run one worker from start to end. Returns why it ended, after all its requests were given back or failed."""
        context, lives = self._context, self._context.lives.by_key
        key = f"{self.id}/{self.restarts}" + (f"+{self.generation}" if self.generation else "")
        self._life = life = lives[key] = Life(
            context,
            key,
            self.id,
            self.name,
            answered=self._policy.answered,
            due=lambda reason: context.due(self, reason),
            vain=self._vain,
        )
        context.metrics.worker_starts += 1
        context.changed()
        self._starting = asyncio.ensure_future(self._start_when_there_is_room(life))
        try:
            await self._starting
            self._policy.loaded()
            self.has_given_up = False
            self._failed_loads = 0
            log.info("%s State change WORKER_STARTED -> WORKER_MODEL_LOADED", self.name)
            context.reservations.loaded_on_device(key, life.device_bytes)
            context.reservations.loaded()
            context.changed()
            await life.ended.wait()
        except StartFailed as failure:
            life.known = life.known or failure.death
            life.traceback = failure.traceback
        except NoMemoryNow as error:
            life.known = life.known or Death(Cause.OUT_OF_MEMORY, "the memory for it did not come free in time")
            context.no_memory(error)
        except NotEnoughMemory as error:
            life.known = life.known or Death(Cause.OUT_OF_MEMORY, str(error))
            context.no_memory(NoMemoryNow(context.options.model, retry_after_s=1.0))
        except asyncio.CancelledError:
            if not self.is_retired:
                raise
        try:
            death = await life.finish()
            if not life.is_ready and not self.is_retired:
                self._failed_loads += 1
                # Another node may do, so the load counts as failed only after several.
                self.load_failures += death.cause not in OF_NODES or self._failed_loads >= MOST_NODES
            is_unasked = not (self.is_retired and death.cause is Cause.STOPPED)
            if is_unasked:
                # Before its clients get the error: they may ask describe why.
                self._record(death, life.traceback, life.running)
                if life.is_ready:
                    context.crashed(self, death)
            life.hand_back(death)
            await life.output.drained(LAST_OUTPUT_S)
            if is_unasked and self.last_death is not None:
                self.last_death = dataclasses.replace(self.last_death, last_lines=tuple(life.output.last_lines))
        finally:
            del lives[key]
            self._life = None
            context.reservations.ended_on_device(key)
            context.reservations.emptied()
        context.batch_ended()
        context.changed()
        return death

    async def _start_when_there_is_room(self, life: Life) -> None:
        await self._find_devices()
        await self._context.reservations.enter(self.uses)
        await self._context.launcher.reserve(self.id)
        async with self._context.first_load.turn():
            self._context.reservations.begin(life.key, self.uses)
            await life.start(self.gpu_id, self.devices)

    async def _find_devices(self) -> None:
        """Move to other devices if its own are lost; wait while all that it may use are lost."""
        reservations = self._context.reservations
        if reservations.site_for(self.uses, self.home) is None:
            self.waits_for_device = True
            log.warning("%s waits for a device: %s", self.name, reservations.why_none())
            self._context.changed()
        try:
            devices = await reservations.find_site(self.uses, self.home)
        finally:
            if self.waits_for_device:
                self.waits_for_device = False
                self._context.changed()  # requests wait for its start from now on
        if devices != self.uses:
            where = "on device" if len(devices) == 1 else "on devices"
            log.warning("%s starts %s %s in place of %s", self.name, where, _listed(devices), _listed(self.uses))
            self.gpu_id = devices[0]
            self.devices = devices if self.devices else ()

    def _record(self, death: Death, traceback: str, running: Sequence[Request]) -> None:
        metrics = self._context.metrics
        metrics.worker_deaths[death.cause.value] += 1
        metrics.note("death", time.monotonic(), f"{self.name} ended ({death.cause.value})")
        is_known = self.last_death is not None and self.last_death.traceback == traceback
        self.last_death = DeathView(death.cause.value, time.time(), death.detail, traceback)
        # A load that fails the same way again and again is logged with its traceback once.
        shown = "" if is_known else "\n".join(middle_left_out(traceback.rstrip().splitlines()))
        extra = with_traceback(shown, line_ids(running))
        log.warning("%s ended (%s): %s%s", self.name, death.cause, death.detail, name_requests(running), extra=extra)


def name_requests(running: Sequence[Request]) -> str:
    """The end of a sentence on a worker that had these requests: the ids of a few, and how many more."""
    ids = list(dict.fromkeys(shown_id(each.id) for each in running))
    if not ids:
        return ""
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"; it had request{'s' if len(ids) > 1 else ''} {', '.join(ids[:MOST_NAMED])}{more}"


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def middle_left_out(lines: list[str]) -> list[str]:
    """The beginning and the end of a traceback, about `MOST_TRACEBACK_LINES` at most."""
    first, last = MOST_TRACEBACK_LINES // 4, MOST_TRACEBACK_LINES - MOST_TRACEBACK_LINES // 4
    if len(lines) <= MOST_TRACEBACK_LINES:
        return lines
    return [*lines[:first], f"… {len(lines) - first - last} lines are left out …", *lines[-last:]]
