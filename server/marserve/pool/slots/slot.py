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
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from marserve.errors import BadFrame, NoMemoryNow, NotEnoughMemory, without_stop
from marserve.machine.limits import explain
from marserve.messages import (
    MAX_WARNINGS,
    Check,
    Checked,
    DeviceLost,
    DevicePeak,
    Lengths,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    OutOfStep,
    Piece,
    Raised,
    Results,
    Warned,
)
from marserve.pool.checks.certifier import Certifier
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Landed, Question
from marserve.pool.dispatch.lengths.lengths import FROM_HANDLER
from marserve.pool.launchers.cgroups import WorkerCgroup, WorkerCgroups
from marserve.pool.launchers.launcher import AnyLauncher, StartFailed, WorkerEnds, WorkerProcess
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Room
from marserve.pool.slots.first_load import FirstLoad
from marserve.pool.slots.hang_report import LOOK_BEFORE_S, Sample, describe_hangs, read_sample
from marserve.pool.slots.restart_policy import RestartPolicy
from marserve.pool.worker_end.cause_of_death import (
    OF_NODES,
    Cause,
    Death,
    Evidence,
    classify_exit,
    death_of_load,
    error_of,
)
from marserve.pool.worker_end.client import WorkerClient
from marserve.pool.worker_end.memory import OomKills, resident_bytes
from marserve.pool.worker_end.output import WorkerLog, WorkerOutput
from marserve.shared_page import Page, create_page
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.wire import Body

log = logging.getLogger("marserve.pool")

# How long a worker that was asked to stop has to end before SIGTERM, and then before SIGKILL.
STOP_GRACE_S = 2.0
LAST_OUTPUT_S = 0.5
# How long a worker past its limit has after SIGTERM before SIGKILL. Its clients wait meanwhile.
TERM_GRACE_S = 0.25

# The traceback of a failed load is logged on the event loop, a record for each line.
MOST_TRACEBACK_LINES = 400

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
    worker is not started yet. `computes_on` is what the model runs on, if its handler says so.
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


# A protocol: `Pool` lies above all that it is made of.
class SlotOwner(Protocol):
    """The pool, as its slots see it."""

    options: PoolOptions
    load: Load
    launcher: AnyLauncher
    dispatcher: Dispatcher
    metrics: VersionMetrics
    log: WorkerLog
    threads: int
    lives: dict[str, Life]
    oom_kills: OomKills
    certifier: Certifier
    cgroups: WorkerCgroups | None
    room: Room
    first_load: FirstLoad

    def usage_of(self, gpu_id: int | None) -> str:
        """What a device is doing, in words."""

    def no_memory(self, error: NoMemoryNow) -> None:
        """There is no memory for a worker."""

    def slot_changed(self) -> None:
        """A slot's state changed."""

    def batch_ended(self) -> None:
        """A batch ended."""

    def worker_measured(self, metrics: Metrics) -> None:
        """A handler measured something."""

    def worker_due(self, slot: Slot, reason: str) -> None:
        """A slot's worker has served long enough: replace it when a replacement is there."""

    def crashed(self, slot: Slot, death: Death) -> None:
        """A worker that had loaded the model ended unasked, or a slot was given up."""


class Slot:
    """A place for one worker at a time."""

    def __init__(
        self,
        slot_id: str,
        owner: SlotOwner,
        gpu_id: int | None,
        generation: int = 0,
        devices: tuple[int, ...] = (),
    ) -> None:
        self.id = slot_id
        self.generation = generation
        self.devices = devices
        self.home = devices or (() if gpu_id is None else (gpu_id,))
        self.waits_for_device = False
        self.name = f"W-{slot_id}-{owner.options.model}_{owner.options.version}"
        self.gpu_id = gpu_id
        self.started_at = time.time()
        self.last_death: DeathView | None = None
        self.restarts = 0
        self.load_failures = 0
        self._failed_loads = 0
        self.has_given_up = False
        self.next_start_at: float | None = None
        self._pause_ends: float | None = None  # the same by the monotonic clock; infinite for not by itself
        self.is_retired = False
        self._owner = owner
        self._policy = RestartPolicy(
            max_retry_timeout_s=owner.options.max_retry_timeout_s,
            retry_failed_every_s=owner.options.retry_failed_every_s,
            max_restarts=owner.options.max_restarts,
            no_restart_exit_codes=owner.options.no_restart_exit_codes,
        )
        self._life: Life | None = None
        self._nudged = asyncio.Event()
        self._starting: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    def successor(self) -> Slot:
        """A slot that can take this one's place: same id, start time, device and history, and a new worker."""
        heir = Slot(self.id, self._owner, self.gpu_id, self.generation + 1, self.devices)
        heir.home = self.home
        heir.started_at, heir.last_death, heir.restarts = self.started_at, self.last_death, self.restarts + 1
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
                self._owner.crashed(self, death)
            elif restart.delay_s:
                log.info("%s Retry worker: %s in %g seconds.", self.name, self.id, restart.delay_s)
            if restart.delay_s:  # before the pool looks: it holds requests until then, or refuses them with that time
                self.next_start_at = time.time() + restart.delay_s
                self._pause_ends = time.monotonic() + restart.delay_s
                self._nudged.clear()
            self._owner.slot_changed()
            if restart.delay_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(restart.delay_s if restart.delay_s < math.inf else None):
                        await self._nudged.wait()
                self.next_start_at = self._pause_ends = None
                if self.is_retired:
                    break
            self.restarts += 1
            self._owner.metrics.worker_restarts += 1

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
        life = self._life
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
            gpu_id=self.gpu_id,
            memory_bytes=memory_bytes,
            restarts=self.restarts,
            load_s=self.load_s,
            how_started=life.how if life is not None else "",
            last_death=self.last_death,
            next_start_at=self.next_start_at,
            ranks=tuple(pids) if self._owner.options.ranks else (),
            devices=self.devices,
            gpu_usage=self._owner.usage_of(self.gpu_id),
            node=node,
            waits_for=self._owner.room.why_none() if self.waits_for_device else self._owner.launcher.waits_for(self.id),
            computes_on=life.computes_on if life is not None else "",
        )

    @property
    def pids(self) -> list[int]:
        """The present worker's process, or those of its ranks; empty without a worker."""
        return self._life.pids if self._life is not None else []

    async def _live_once(self) -> Death:
        """Run one worker from start to end. Returns why it ended, after all its requests were given back or failed."""
        owner = self._owner
        key = f"{self.id}/{self.restarts}" + (f"+{self.generation}" if self.generation else "")
        self._life = life = Life(self, owner, key)
        owner.lives[life.key] = life
        owner.metrics.worker_starts += 1
        owner.slot_changed()
        self._starting = asyncio.ensure_future(self._start_when_there_is_room(life))
        try:
            await self._starting
            self._policy.loaded()
            self.has_given_up = False
            self._failed_loads = 0
            log.info("%s State change WORKER_STARTED -> WORKER_MODEL_LOADED", self.name)
            owner.room.loaded_on_device(life.key, life.device_bytes)
            owner.room.loaded()
            owner.slot_changed()
            await life.ended.wait()
        except StartFailed as failure:
            life.known = life.known or failure.death
            life.traceback = failure.traceback
        except NoMemoryNow as error:
            life.known = life.known or Death(Cause.OUT_OF_MEMORY, "the memory for it did not come free in time")
            owner.no_memory(error)
        except NotEnoughMemory as error:
            life.known = life.known or Death(Cause.OUT_OF_MEMORY, str(error))
            owner.no_memory(NoMemoryNow(owner.options.model, retry_after_s=1.0))
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
                self._record(death, life.traceback)  # before its clients get the error: they may ask describe why
                if life.is_ready:
                    owner.crashed(self, death)
            life.hand_back(death)
            await life.output.drained(LAST_OUTPUT_S)
            if is_unasked and self.last_death is not None:
                self.last_death = dataclasses.replace(self.last_death, last_lines=tuple(life.output.last_lines))
        finally:
            del owner.lives[life.key]
            self._life = None
            owner.room.ended_on_device(life.key)
            owner.room.emptied()
        owner.batch_ended()
        owner.slot_changed()
        return death

    async def _start_when_there_is_room(self, life: Life) -> None:
        await self._find_devices()
        await self._owner.room.enter(self.uses)
        await self._owner.launcher.reserve(self.id)
        async with self._owner.first_load.turn():
            self._owner.room.begin(life.key, self.uses)
            await life.start(self.gpu_id)

    async def _find_devices(self) -> None:
        """Move to other devices if its own are lost; wait while all that it may use are lost."""
        room = self._owner.room
        if room.site_for(self.uses, self.home) is None:
            self.waits_for_device = True
            log.warning("%s waits for a device: %s", self.name, room.why_none())
            self._owner.slot_changed()
        try:
            devices = await room.find_site(self.uses, self.home)
        finally:
            if self.waits_for_device:
                self.waits_for_device = False
                self._owner.slot_changed()  # requests wait for its start from now on
        if devices != self.uses:
            where = "on device" if len(devices) == 1 else "on devices"
            log.warning("%s starts %s %s in place of %s", self.name, where, _listed(devices), _listed(self.uses))
            self.gpu_id = devices[0]
            self.devices = devices if self.devices else ()

    def _record(self, death: Death, traceback: str) -> None:
        self._owner.metrics.worker_deaths[death.cause.value] += 1
        is_known = self.last_death is not None and self.last_death.traceback == traceback
        self.last_death = DeathView(death.cause.value, time.time(), death.detail, traceback)
        log.warning("%s ended (%s): %s", self.name, death.cause, death.detail)
        if not is_known:  # a load that fails the same way again and again is logged once
            for line in middle_left_out(traceback.rstrip().splitlines()):  # a log record is one line
                log.warning("%s %s", self.name, line)

    def answered(self) -> None:
        """The present worker has answered: its next end begins a new row of failures."""
        self._policy.answered()


def _listed(devices: Sequence[int]) -> str:
    return ", ".join(map(str, devices))


def middle_left_out(lines: list[str]) -> list[str]:
    """The beginning and the end of a traceback, about `MOST_TRACEBACK_LINES` at most."""
    first, last = MOST_TRACEBACK_LINES // 4, MOST_TRACEBACK_LINES - MOST_TRACEBACK_LINES // 4
    if len(lines) <= MOST_TRACEBACK_LINES:
        return lines
    return [*lines[:first], f"… {len(lines) - first - last} lines are left out …", *lines[-last:]]


class Life:
    """One worker process of a slot, from its descriptors to its wait status. Takes the worker's messages."""

    def __init__(self, slot: Slot, owner: SlotOwner, key: str) -> None:
        self.key = key
        self.how = ""
        self.load_s = 0.0
        self.warm_up_s = 0.0
        self.device_bytes = 0
        self.warnings: list[str] = []
        self.warm_up_failure = ""
        self.computes_on = ""
        self.ready_at = 0.0
        self.requests = 0
        self.first_bytes = 0
        self.own_bytes = 0
        self.process: WorkerProcess | None = None
        self.known: Death | None = None
        self.traceback = ""
        self.is_ready = False
        self.ended = asyncio.Event()
        self.output = WorkerOutput(owner.options.model, owner.options.version, slot.id, owner.log)
        self._slot = slot
        self._owner = owner
        self._client = WorkerClient(
            self, max_frame_bytes=owner.load.max_answer_bytes * max(1, owner.options.batch_size)
        )
        self._page: Page | None = None
        self._page_inode = 0
        self._loaded: asyncio.Future[Loaded | NotLoaded | None] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._hang_up: asyncio.TimerHandle | None = None
        self._has_answered = False
        self._is_held = False
        self._runs_many = owner.options.is_concurrent
        self._runs_in_steps = owner.options.continuous_batching
        self._ended = 0
        self._heard_at = 0.0
        self._awaited_number = 0
        self._may_retry = True
        self._accused = 0
        self._first_look_at = 0.0
        self._first_looks: list[Sample | None] = []
        self._sigkill: asyncio.TimerHandle | None = None
        self._cgroup: WorkerCgroup | None = None
        self._recycle_after = owner.options.max_requests_per_worker or math.inf

    # ------------------------------------------------------------------------------------------- its start

    async def start(self, gpu_id: int | None) -> None:
        """Start the process and have the model loaded. Raises StartFailed."""
        owner = self._owner
        limit_s = owner.options.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._start(gpu_id, limit)
        except TimeoutError:
            await owner.launcher.give_up_loading()
            raise StartFailed(
                Death(Cause.STARTUP_TIMEOUT, f"the worker did not load the model within startupTimeout, {limit_s:g} s")
            ) from None
        except StartFailed:
            raise
        except Exception as error:
            if isinstance(error, OSError | RuntimeError) and (met := explain(error)):
                raise StartFailed(Death(Cause.LOAD_FAILED, f"no worker could be started: {met}")) from error
            log.exception("%s could not be started", self._slot.name)
            raise StartFailed(Death(Cause.LOAD_FAILED, f"the worker could not be started: {error}")) from error
        self.is_ready = True
        self.ready_at = time.monotonic()
        owner.dispatcher.open_lane(self.key, self.ready_at)

    async def _start(self, gpu_id: int | None, limit: asyncio.Timeout) -> None:
        owner = self._owner
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as ends:  # the worker has copies of its own by the time these are closed
            out, err = await self.output.open()
            ends.callback(os.close, out)
            ends.callback(os.close, err)
            page_descriptor = create_page()
            ends.callback(os.close, page_descriptor)
            self._page = Page(page_descriptor)
            self._page_inode = os.fstat(page_descriptor).st_ino
            wire_end = -1
            if not owner.launcher.is_remote:
                ours, theirs = socket.socketpair()
                ends.enter_context(theirs)
                try:
                    await loop.create_connection(lambda: self._client, sock=ours)
                except BaseException:
                    ours.close()
                    raise
                wire_end = theirs.fileno()
            launched = await owner.launcher.launch(
                self._slot.id,
                WorkerEnds(wire_end, out, err, page_descriptor),
                owner.threads,
                self.output,
                self._slot.devices,
                gpu_id,
                self._client,
            )
        self.process, self.how = launched.process, launched.how
        self.process.exited.add_done_callback(self._process_ended)
        if owner.cgroups is not None and owner.options.max_worker_memory_bytes and self.pids:
            self._cgroup = owner.cgroups.make(
                f"{owner.options.model}-{owner.options.version}-{self.key}", owner.options.max_worker_memory_bytes
            )
            if self._cgroup is not None:
                for pid in self.pids:
                    self._cgroup.add(pid)
        # A template may have loaded the model in vain, so the worker's own load gets the whole limit again.
        limit.reschedule(loop.time() + owner.options.startup_timeout_s)
        if launched.needs_load:
            order = msgspec.structs.replace(owner.load, gpu_id=gpu_id, threads=owner.threads)
            self._client.load(launched.order(order))
        loaded = await asyncio.shield(self._loaded)
        if isinstance(loaded, Loaded) and await self.process.is_whole():
            self.load_s = launched.load_s if loaded.seconds == 0.0 else loaded.seconds
            self.warm_up_s, self.warnings = loaded.warm_up_s, loaded.warnings
            self.warm_up_failure = loaded.warm_up_failure
            self.computes_on = loaded.computes_on
            self.device_bytes = loaded.device_bytes
            if owner.metrics.tap is not None:
                owner.metrics.tap.loaded(self._slot.name, self.load_s)
            if loaded.has_length_of:
                owner.dispatcher.offer_lengths()
            elif owner.options.length_from == FROM_HANDLER:
                self.warnings = [
                    *self.warnings,
                    "lengthFrom: handler is not used: it has no length_of(row)",
                ]
            log.info("%s loaded the model in %.3f s (%s)", self._slot.name, self.load_s, self.how)
            if loaded.warm_up_s:
                log.info("%s warmed up in %.3f s", self._slot.name, loaded.warm_up_s)
            for warning in self.warnings:
                log.warning("%s %s", self._slot.name, warning)
            return
        if isinstance(loaded, NotLoaded):
            if len(self.pids) <= 1:
                raise StartFailed(death_of_load(loaded), loaded.traceback)
            self.process.rank_said(0, death_of_load(loaded), loaded.traceback)
        raise StartFailed(self.known or await self._how_it_ended(), self.traceback)

    def _process_ended(self, _: object) -> None:
        """The process is gone. Close its connection soon: a process that it left behind may hold that open."""
        assert self.process is not None
        told = self.process.told
        if told is not None and self.known is None:
            self.known, self.traceback = told
        self._hang_up = asyncio.get_running_loop().call_later(LAST_OUTPUT_S, self._client.close)

    async def _how_it_ended(self) -> Death:
        """Why a worker closed its connection while loading, with its last lines of output."""
        assert self.process is not None
        status = await self.process.wait(STOP_GRACE_S)
        await self.output.drained(LAST_OUTPUT_S)
        death = classify_exit(status, known=self.known, evidence=self._evidence(status))
        if self.known is not None:
            return death
        death = self.process.explain(death)
        tail = " | ".join(self.output.last_lines[-3:])
        return Death(death.cause, f"{death.detail}; it said: {tail}" if tail else death.detail, death.exit_code)

    # ------------------------------------------------------------------------------------------- its work

    def exchange(self, flight: Flight) -> None:
        """Send a flight."""
        self._client.exchange(flight)

    def check(self, check: Check, bodies: Sequence[Body]) -> None:
        """Send a check."""
        self._client.check(check, bodies)

    def on_checked(self, message: Checked) -> None:
        """A check has ended."""
        self._check_ended(message.number)
        self._heard_at = time.monotonic()
        self._owner.certifier.on_checked(self.key, message)
        self._owner.batch_ended()

    def allow_batches_of(self, size: int) -> None:
        """Accept larger frames: batches of `size`, and so their answers, may be larger from now on."""
        self._client.take_frames_of(self._owner.load.max_answer_bytes * size)

    def mark_cancelled(self, number: int, index: int) -> None:
        """Tell the worker that an item is not wanted: by the page, or by a message if it reads during batches."""
        if self._runs_many:
            self._client.cancel(number, index)
        elif self._page is not None:
            self._page.cancel(number, index)
            if self.process is not None:
                self.process.item_cancelled(number, index)

    def hold(self) -> None:
        """Read nothing more from the worker: it blocks at its next piece, once the socket is full."""
        self._is_held = True
        self._client.pause_reading()

    def resume(self) -> None:
        """Read again. The response limit begins anew: the worker did not cause the wait."""
        self._is_held = False
        self._heard_at = time.monotonic()
        self._client.resume_reading()

    def on_loaded(self, message: Loaded) -> None:
        """The model is loaded."""
        if not self._loaded.done():
            self._loaded.set_result(message)

    def on_not_loaded(self, message: NotLoaded) -> None:
        """Loading failed."""
        if not self._loaded.done():
            self._loaded.set_result(message)

    def on_results(self, ended: Sequence[tuple[Results, list[Body]]]) -> None:
        """Batches have ended. The worker gets its next ones before clients get answers: their sockets take longest."""
        now = self._heard_at = time.monotonic()
        owner, dispatcher = self._owner, self._owner.dispatcher
        landed: list[Landed] = []
        try:
            for message, bodies in ended:
                self._check_ended(message.number)
                landed.append(
                    dispatcher.land(self.key, message.number, message.handler_s, message.results, bodies, now)
                )
        finally:  # if one of them is refused, those before it have ended all the same
            dispatcher.pump(now)
            self._client.flush()
            for batch in landed:
                dispatcher.tell(batch, now)
        self._note_answer()
        for (message, bodies), batch in zip(ended, landed, strict=True):
            self.requests += dispatcher.ended_in(batch) if self._runs_in_steps else len(message.results)
            if owner.certifier.samples_batches:
                owner.certifier.note(batch.flight, message, bodies)
        owner.batch_ended()
        if self.requests >= self._recycle_after:
            self.due("requests")

    def on_raised(self, message: Raised) -> None:
        """The handler raised for a whole batch."""
        self._check_ended(message.number)
        now = self._heard_at = time.monotonic()
        flights = self._owner.dispatcher.flights(self.key)
        self.requests += sum(len(flight.jobs) for flight in flights if flight.number == message.number)
        failed = self._owner.dispatcher.raised(self.key, message, now)
        self._note_answer()
        if self.requests >= self._recycle_after:
            self.due("requests")
        if failed:
            self._log_failure(", ".join(job.request.id for job in failed), message)
        self._owner.batch_ended()

    def _log_failure(self, ids: str, message: Raised) -> None:
        """Log under the requests' ids why they failed, without a traceback for an error meant for the client."""
        is_answer = message.kind == "prediction" and message.code < 500
        self.output.log_failure(f"Request {ids}: {message.message}", "" if is_answer else message.traceback)

    def on_piece(self, message: Piece, bodies: list[Body]) -> None:
        """A piece of a stream has come: the response limit begins anew."""
        now = self._heard_at = time.monotonic()
        self._owner.dispatcher.piece(self.key, message.number, message.results, bodies, now)

    def _check_ended(self, number: int) -> None:
        """Raise BadFrame for an answer to a batch that, by the shared page, the worker has not run yet."""
        if self._runs_many:
            self._ended += 1
            number = self._ended  # they end in any order
        if self._page is None or self._page.finished < number:
            raise BadFrame(f"batch {number} is answered, though the worker has not ended it")

    def _note_answer(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._slot.answered()

    def ask_lengths(self, question: Question) -> None:
        """Ask for lengths; a batch follows."""
        self._client.ask_lengths(question)

    def on_lengths(self, message: Lengths) -> None:
        """The handler has said how long some items are: the response limit of the batch behind begins anew."""
        self._heard_at = time.monotonic()
        self._owner.dispatcher.told_lengths(self.key, message.number, message.seconds, message.lengths)

    def on_metrics(self, message: Metrics) -> None:
        """What the handler measured."""
        self._owner.worker_measured(message)

    def on_out_of_step(self, message: OutOfStep) -> None:
        """The ranks did not end a call alike: end them, since their shared state cannot be trusted any more."""
        if self.known is None:
            self.traceback = message.traceback
        self.kill(Death(Cause.OUT_OF_STEP, message.detail))

    def on_device_peak(self, message: DevicePeak) -> None:
        """The worker uses more memory of its device than it did after its load."""
        self._owner.room.peaked_on_device(message.device_bytes)

    def on_warned(self, message: Warned) -> None:
        """Its handler has warnings for describe after its load."""
        for warning in message.warnings:
            if len(self.warnings) < MAX_WARNINGS and warning not in self.warnings:
                self.warnings = [*self.warnings, warning]
                log.warning("%s %s", self._slot.name, warning)

    def on_device_lost(self, message: DeviceLost) -> None:
        """The worker's device is lost to it, since the batch of that number: end the worker."""
        if self.known is None:
            self.traceback = message.traceback
            self._accused = message.number
        self.kill(Death(Cause.DEVICE_LOST, message.detail))

    def on_broken(self, error: BadFrame) -> None:
        """The worker broke the protocol: end it, since none of its further messages can be trusted."""
        self.kill(Death(Cause.BAD_FRAME, f"the worker broke the protocol: {error}"))

    def on_closed(self) -> None:
        """The connection has ended."""
        self._closed.set()
        if not self._loaded.done():
            self._loaded.set_result(None)
        self.ended.set()

    def check_time(self, now: float) -> float | None:
        """End the worker if its oldest batch is past the response limit; else return when to look again.

        The limit runs from the batch's begin, which the page shows, and anew from each piece of a stream. For a batch
        that is not begun it runs from its sending, or from the answer to the one before. After the batch has ended in
        the worker its answer has the same time again to be read.
        """
        flights = self._owner.dispatcher.flights(self.key)
        if not flights or self._page is None:
            return None
        flight = flights[0]
        if self._is_held:  # the worker waits for a slow client, which the connection's own limit ends
            self._heard_at = now
            return now + self._owner.options.response_timeout_s
        quiet_since = self._owner.dispatcher.quiet_since(self.key)
        if quiet_since is not None:
            return self._check_quiet(quiet_since, now)
        number, began = self._page.running
        since = began if number == flight.number and flight.sent_at <= began <= now else flight.sent_at
        limit_s = self._owner.options.response_timeout_s
        due = max(since, self._heard_at) + limit_s
        if now < due:
            look_at = due - min(LOOK_BEFORE_S, limit_s / 2)
            if now < look_at:
                return look_at
            if self._first_look_at < look_at:
                self._first_look_at = now
                self._first_looks = [read_sample(pid, now) for pid in self.pids]
            return due
        if self._page.finished >= flight.number > self._awaited_number:
            self._awaited_number = flight.number
            self._heard_at = now
            return now + limit_s
        self._may_retry = False
        # The worker may write any number into the page: an impossible time is ignored.
        ran_s = now - max(began, flight.sent_at) if number == flight.number and began <= now else None
        looks = [read_sample(pid, now) for pid in self.pids]
        doing = describe_hangs(self._first_looks, looks, ran_s)
        detail = f"no answer within responseTimeout, {limit_s:g} s"
        if self._owner.dispatcher.is_asked(self.key) and number != flight.number:
            detail += ", when the handler's length_of was asked"
        self.terminate(Death(Cause.RESPONSE_TIMEOUT, f"{detail}; {doing}" if doing else detail))
        return None

    def _check_quiet(self, since: float, now: float) -> float | None:
        """As `check_time` for a worker that runs many batches at once; of one of them it has said nothing `since`."""
        limit_s = self._owner.options.response_timeout_s
        if now < since + limit_s:
            return since + limit_s
        self._may_retry = False
        self.terminate(
            Death(Cause.RESPONSE_TIMEOUT, f"no answer to one of its requests in responseTimeout, {limit_s:g} s")
        )
        return None

    @property
    def pids(self) -> list[int]:
        """The worker's process, or those of its ranks; empty before the start."""
        return self.process.pids if self.process is not None else []

    def over_memory(self, own_bytes: int, limit_bytes: int) -> None:
        """End the worker: it holds more memory than it may, in a way that its own limit does not see."""
        self.kill(
            Death(
                Cause.OUT_OF_MEMORY,
                f"ended by the server: it held {own_bytes} bytes by itself, and maxWorkerMemory is {limit_bytes}",
            )
        )

    def due(self, reason: str) -> None:
        """Have the worker replaced: it has served long enough."""
        self._owner.worker_due(self._slot, reason)

    # ------------------------------------------------------------------------------------------- its end

    def retire(self, *, at_once: bool) -> None:
        """End when the batches in flight are done, or at once."""
        is_idle = self._owner.dispatcher.close_lane(self.key)
        if at_once or not self.is_ready or is_idle:
            self.stop()

    def stop(self) -> None:
        """Ask the worker to end: nothing is in flight any more, or its answers are not wanted."""
        self.known = self.known or Death(Cause.STOPPED, "stopped by the server")
        self._client.stop()
        if not self._loaded.done():
            self._loaded.set_result(None)
        self.ended.set()

    def kill(self, death: Death) -> None:
        """End the worker by force, for this reason."""
        self.known = self.known or death
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)
        self._client.close()

    def terminate(self, death: Death) -> None:
        """End the worker, for this reason: SIGTERM, and soon SIGKILL, to all of its process group."""
        self.known = self.known or death
        process = self.process
        if process is not None:
            process.signal_group(signal.SIGTERM)
            loop = asyncio.get_running_loop()
            self._sigkill = loop.call_later(TERM_GRACE_S, process.signal_group, signal.SIGKILL)
        self._client.close()

    async def finish(self) -> Death:
        """End and reap the process, and close its connection. Returns why it ended; `hand_back` must follow."""
        self.ended.set()
        status: int | None = None
        if self.process is not None:
            was_told = self.known is not None and self.known.cause is Cause.STOPPED
            await asyncio.wait([self.process.exited], timeout=STOP_GRACE_S if was_told else LAST_OUTPUT_S)
            status = await self.process.end(STOP_GRACE_S)
            await self._owner.launcher.end_leftovers(self.process, self._page_inode)
            with contextlib.suppress(TimeoutError):  # what it wrote last is still on its way in
                async with asyncio.timeout(LAST_OUTPUT_S):
                    await self._closed.wait()
        for timer in (self._hang_up, self._sigkill):
            if timer is not None:
                timer.cancel()
        self._client.close()
        if self.known is None and status is not None and status not in (0, signal.SIGKILL):
            await self.output.settled(LAST_OUTPUT_S)  # its last words may say more than its exit status
        death = classify_exit(status, known=self.known, evidence=self._evidence(status))
        if self.known is None and self.process is not None:
            death = self.process.explain(death)
        if self._cgroup is not None:
            self._cgroup.remove()
        return death

    def _evidence(self, status: int | None) -> Evidence:
        was_killed = self.known is None and (status is None or status == signal.SIGKILL)
        in_own_group = was_killed and self._cgroup is not None and self._cgroup.was_killed
        was_here = self.process is None or not self.process.node  # on other nodes the agent sees kills for memory
        was_counted = was_killed and was_here and self._owner.oom_kills.claim(time.monotonic())
        return Evidence(
            last_lines=self.output.last_lines,
            was_killed_for_memory=in_own_group or was_counted,
            memory_limit_bytes=self._owner.options.max_worker_memory_bytes,
        )

    def hand_back(self, death: Death) -> None:
        """Give its requests back to the dispatcher, to be run elsewhere or failed."""
        begun = 0
        if self._page is not None:
            begun = max(self._page.running[0], self._page.finished)
            self._page.close()
            self._page = None
        error = error_of(death)
        self._owner.dispatcher.died(
            self.key,
            begun,
            error,
            may_retry=self._may_retry,
            is_suspect=death.cause is not Cause.NODE_LOST,
            accused=self._accused,
            now=time.monotonic(),
        )
        self._owner.certifier.lost(self.key, death.cause.value)
