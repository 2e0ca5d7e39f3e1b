"""One pool: the workers of one model version, their number, and the clock for the dispatcher, which has none.

The pool builds its parts and passes news between them: the dispatcher learns from it how the slots are. Registry and
surfaces see `Pool` and nothing else of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from marserve.errors import (
    CannotProfile,
    CannotReplay,
    LoadFailed,
    MarserveError,
    NoMemoryNow,
    NotEnoughMemory,
)
from marserve.messages import (
    FLOPS_NOT_COUNTED,
    FLOPS_WATCHED_BATCHES,
    Answer,
    Called,
    Checked,
    Load,
    Metrics,
    Part,
    Receiver,
    Request,
    Returned,
)
from marserve.option_values import Tolerance
from marserve.pool.changes import Changes
from marserve.pool.checks.certifier import Certifier
from marserve.pool.checks.profiles import Profiles, ProfileWish, TakenProfile
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Job
from marserve.pool.dispatch.queue import GivenUp
from marserve.pool.launchers.launcher import AnyLauncher, Launchers, make_launcher
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Reservations
from marserve.pool.sizing.scaling import Scaling
from marserve.pool.sizing.succession import Succession
from marserve.pool.sizing.upkeep import Upkeep
from marserve.pool.slots.first_load import FirstLoad
from marserve.pool.slots.life import Life
from marserve.pool.slots.lives import Lives
from marserve.pool.slots.slot import DeathView, Slot, SlotContext, WorkerView
from marserve.pool.slots.slots import Slots
from marserve.pool.wake_timer import WakeTimer
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.pool.worker_end.output import WorkerLog
from marserve.telemetry.kept_requests import Replayed
from marserve.telemetry.metrics.counts import Gauges, VersionMetrics

__all__ = ["DeathView", "Pool", "WorkerView"]

log = logging.getLogger("marserve.pool")


OnCalled = Callable[[Request, Called, bytes, Callable[[Returned, bytes], None]], None]


def _refuse_call(request: Request, message: Called, body: bytes, reply: Callable[[Returned, bytes], None]) -> None:
    reply(Returned(message.call, 501, [], "Other models cannot be called here."), b"")


class Pool:
    """The workers of one model version. Built by the registry; all methods belong to the event loop's thread."""

    def __init__(
        self,
        options: PoolOptions,
        load: Load,
        launchers: Launchers,
        worker_log: WorkerLog,
        *,
        on_measured: Callable[[Metrics], None] | None = None,
        on_called: OnCalled | None = None,
        on_failed: Callable[[str], None] | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        """`on_measured` takes what handlers measure, `on_called` their calls of other models.

        `on_failed` takes the reason, when a crash is to end the server.

        `reservations` reserve memory; without them memory has no bound.
        """
        self.options = options
        self.reservations: Reservations = reservations or Reservations()
        load = msgspec.structs.replace(
            load,
            memory_limit_bytes=options.max_worker_memory_bytes,
            checks_health=options.health_interval_s > 0,
        )
        metrics = self.metrics = VersionMetrics(options.model, options.version, self._gauges)
        changes = self._changes = Changes()
        lives = self.lives = Lives(options.response_timeout_s, all_ended=changes.tell)
        dispatcher = self.dispatcher = Dispatcher(options, metrics, lives)
        launcher = self.launcher = make_launcher(launchers, options, load)
        threads = self.threads = threads_of(options, load, launcher, launchers)
        self.certifier = Certifier(
            options, Path(load.model_dir), dispatcher, metrics, lives.check, has_slots=lambda: bool(self.slots)
        )
        self.profiles = Profiles(options, lives.profile, lives.requests_of)
        self._context = SlotContext(
            options=options,
            load=load,
            launchers=launchers,
            launcher=launcher,
            threads=threads,
            log=worker_log,
            metrics=metrics,
            dispatcher=dispatcher,
            certifier=self.certifier,
            profiles=self.profiles,
            reservations=self.reservations,
            lives=lives,
            first_load=FirstLoad(None if launcher.is_remote else launchers.first_loads),
            changed=self._slot_changed,
            batch_ended=self._batch_ended,
            measured=on_measured or _ignore,
            called=on_called or _refuse_call,
            ask_health=lives.ask_health,
            no_memory=self._no_memory,
            crashed=self._crashed,
            due=self._due,
        )
        self._on_failed = on_failed or _ignore
        self._tell_state: Callable[[], None] = lambda: None
        slots = self._processes = Slots(self._context)
        self.slots = slots.placed
        """The slots, oldest first, without those that are leaving."""
        self.scaling = Scaling(options, dispatcher, metrics, self.reservations, slots)
        self._succession = Succession(self.reservations, slots, changes, self._slot_changed)
        self._upkeep = Upkeep(options, lambda: list(lives.by_key.values()))
        self._wake = WakeTimer(dispatcher, changes.tell)
        self._minimum, self._maximum = options.min_workers, options.max_workers
        self._is_stopped = False
        self.certifier.apply()

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request, receiver: Receiver) -> Job:
        """Take one request; its end is passed to the receiver. Raises as `Dispatcher.submit`, and NotEnoughMemory."""
        now = time.monotonic()
        scaling = self.scaling
        if scaling.is_resting and not self.dispatcher.is_draining:
            self._begin_scaling(now)
        job = self.dispatcher.submit(request, receiver, now)
        # A timer that is due within the batch delay is due before this job can need one; with a goal there is no delay.
        options = self.options
        if job.deadline is not None or (
            job.flight is None
            and (options.batch_policy != "goal" or self.dispatcher.living_slots <= 0)
            and self._wake.at > now + options.max_batch_delay_s
        ):
            self._wake.set()
        return job

    def hand_over(self, other: Pool, tell: Callable[[Receiver], None]) -> int:
        """Move the waiting requests that name no version to another version's pool; returns how many.

        `tell` is called with the receiver of each.
        """
        if other is self or other.options.sequences is not None:
            return 0
        jobs = self.dispatcher.withdraw()
        for job in jobs:
            tell(job.receiver)
        now = time.monotonic()
        if other.scaling.is_resting and jobs and not other.dispatcher.is_draining:
            other.scaling.begin(now)
        other.dispatcher.adopt(jobs, now)
        other._wake.set()
        self._slot_changed()  # wakes `wait_until_idle`: the pool may be empty now
        return len(jobs)

    def _begin_scaling(self, now: float) -> None:
        try:
            self.scaling.begin(now)
        except NotEnoughMemory as error:
            self.metrics.refused[error.cause] += 1
            raise

    # ------------------------------------------------------------------------------------------- workers

    def start(self) -> None:
        """Begin to start the minimum of workers."""
        log.info(
            "%s %s: %d threads for each of at most %d workers, on %d cores",
            self.options.model,
            self.options.version,
            self.threads,
            self.options.max_workers,
            self._context.launchers.cores,
        )
        self._context.launchers.watch_kills()
        self._upkeep.start()
        self.certifier.start()
        self.metrics.sample(time.monotonic())
        self.scale(self._minimum, self._maximum)

    def scale(self, minimum: int, maximum: int) -> None:
        """Begin to have `minimum` to `maximum` workers; surplus workers finish their batches first.

        Slots that gave up are tried again at once. Returns at once; `wait_until_ready` waits. Does nothing once the
        pool is stopped. Raises NotEnoughMemory before anything has changed.
        """
        if self._is_stopped:
            return
        before, count = len(self.slots), min(max(minimum, len(self.slots)), maximum)
        if count > before:
            self.reservations.ask(count)
        self._minimum, self._maximum = minimum, maximum
        for slot in self.slots:
            if slot.has_given_up:
                slot.has_given_up = False
                slot.nudge()
        self.scaling.bound(minimum, maximum, count)
        self._processes.resize(count)
        if count < before:
            self.reservations.shrink(count)

    @property
    def leaving(self) -> list[Slot]:
        """The slots that were retired and whose workers have not ended yet."""
        return self._processes.leaving

    @property
    def can_sleep(self) -> bool:
        """Whether the pool may be without workers until a request comes."""
        return self.scaling.can_wake

    @property
    def is_in_use(self) -> bool:
        """Whether the pool has requests, or workers that load the model, and so should not be put to sleep."""
        return not self.dispatcher.is_empty or self.is_loading

    @property
    def is_loading(self) -> bool:
        """Whether workers are being started. A worker that waits for a device or for its next try does not count."""
        return self._processes.is_loading

    @property
    def is_awaited(self) -> bool:
        """Whether a request or a check waits for a worker."""
        return bool(self.dispatcher.waiting) or self.certifier.is_awaited

    def end_loading(self, why: str) -> None:
        """End the processes that load the model: they take more memory than there is."""
        death = Death(Cause.OUT_OF_MEMORY, why)
        for life in self.lives.by_key.values():
            if not life.is_ready:
                life.kill(death)
        self.launcher.kill_loading()

    @property
    def pids_by_worker(self) -> list[list[int]]:
        """The processes of each worker, those of leaving workers included."""
        return [life.pids for life in self.lives.by_key.values() if life.pids]

    @property
    def held_bytes(self) -> int | None:
        """How much its processes hold of the host's memory, None if that has no bound."""
        return self.reservations.held_bytes

    @property
    def template_pids(self) -> list[int]:
        """The process that workers are forked from; empty without one."""
        return self.launcher.template_pids

    def sleep(self, reason: str) -> None:
        """Begin to end all processes until the next request. Only for a pool that `can_sleep` and is not in use."""
        self.scaling.sleep(reason)

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """The pool serves no requests for now: `give_up` may be called to free its memory. None: it serves again."""
        self.reservations.make_spare(give_up)

    async def wait_until_asleep(self) -> None:
        """Wait until the processes whose end began before this call are gone."""
        await self._processes.wait_until_asleep()

    async def wait_until_ready(self) -> bool:
        """Wait until the minimum of workers has loaded the model.

        Returns False if the pool was scaled or stopped meanwhile. Raises LoadFailed when a worker failed to load, or
        waits because its device is lost.
        """
        minimum = self._minimum
        failures = {slot.id: slot.load_failures for slot in self.slots}
        while self._minimum == minimum and not self._is_stopped:
            for slot in self.slots:
                if slot.load_failures > failures.get(slot.id, 0):
                    raise self._load_failed(slot)
                if slot.waits_for_device:
                    raise self._waits_for_device()
            if self.ready_workers >= minimum:
                return True
            await self._changes.wait()
        return False

    async def wait_until_scaled_down(self) -> None:
        """Wait until the workers that were retired are gone."""
        await self._processes.wait_until_gone()

    def workers(self) -> list[WorkerView]:
        """What describe says of the workers, oldest first."""
        return [slot.view() for slot in self.slots]

    @property
    def minimum(self) -> int:
        """The number of workers asked for."""
        return self._minimum

    @property
    def maximum(self) -> int:
        """The number of workers allowed."""
        return self._maximum

    @property
    def ready_workers(self) -> int:
        """Workers that have loaded the model."""
        return sum(slot.is_ready for slot in self.slots)

    @property
    def wanted_workers(self) -> int:
        """Workers that there should be now: the number of slots."""
        return len(self.slots)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self.dispatcher.waiting

    @property
    def running(self) -> int:
        """Requests that are with workers."""
        return self.dispatcher.running

    @property
    def is_healthy(self) -> bool:
        """Whether the minimum of slots have not given up (the contract's §1.6).

        A slot that waits because its device is lost counts as given up.
        """
        return sum(not slot.has_given_up and not slot.waits_for_device for slot in self.slots) >= self._minimum

    @property
    def last_death(self) -> DeathView | None:
        """The latest end of a worker that the server did not order."""
        deaths = [slot.last_death for slot in self.slots if slot.last_death is not None]
        return max(deaths, key=lambda death: death.at, default=None)

    @property
    def described(self) -> dict[str, Any]:
        """Members of describe's answer that only the pool knows."""
        described: dict[str, Any] = {"threadsPerWorker": self.threads}
        autoscaler = self.scaling.describe()
        if autoscaler is not None:
            described["autoscaler"] = autoscaler
        if self.dispatcher.goal is not None:
            described["goal"] = self.dispatcher.goal.describe()
            if self.options.length_from is not None:
                described["goal"] |= {
                    "lengthFrom": self.options.length_from,
                    "paddingBudget": self.options.padding_budget,
                }
            if self.dispatcher.asked_lengths is not None and self.dispatcher.asked_lengths.is_offered:
                described["goal"]["lengths"] = self.dispatcher.asked_lengths.describe()
        sequences = self.dispatcher.describe_sequences()
        if sequences is not None:
            described["sequences"] = sequences
        if self.options.peak_flops is not None:
            described["flops"] = self._describe_flops()
        described |= self.reservations.described
        described["batching"] = self.certifier.describe([life.warm_up_s for life in self._lives_with_warm_up()])
        return described

    def _describe_flops(self) -> dict[str, Any]:
        if (flops := self.metrics.flops) is not None:
            return {
                "state": "counted",
                "perBatch": flops.per_batch,
                "perRequest": flops.per_request,
                "inputs": flops.inputs,
                "dtype": flops.dtype,
                "peakPerSecond": flops.peak,
            }
        if any(warning.startswith(FLOPS_NOT_COUNTED) for warning in self.warnings):
            return {"state": "not counted"}
        batches = sum(self.metrics.batch_sizes.buckets)
        return {"state": "counting" if batches > FLOPS_WATCHED_BATCHES else "waiting for batches"}

    @property
    def declaration(self) -> Mapping[str, Any] | None:
        """What the model declares, by the worker that loaded it last; None for nothing, and before the first load."""
        return self._context.declaration

    @property
    def warnings(self) -> list[str]:
        """Sentences for describe."""
        of_workers = [warning for life in self.lives.by_key.values() for warning in life.warnings]
        return list(dict.fromkeys([*self.launcher.warnings, *of_workers]))

    @property
    def warm_up_failure(self) -> str:
        """A sentence about warm-up inputs that a worker did not answer; else empty."""
        return next((life.warm_up_failure for life in self.lives.by_key.values() if life.warm_up_failure), "")

    def _lives_with_warm_up(self) -> list[Life]:
        return [life for life in self.lives.by_key.values() if life.is_ready and life.warm_up_s]

    # ------------------------------------------------------------------------------------------- batching

    def reconfigure(self, *, batch_size: int | None = None, max_batch_delay_s: float | None = None) -> None:
        """Form batches by other values from now on; None leaves a value as it is. Batches formed before are kept.

        The certificate still counts: where the model has samples a size larger than the checked one is checked first.
        """
        options = self.options
        options = self.options = self._context.options = dataclasses.replace(
            options,
            batch_size=options.batch_size if batch_size is None else batch_size,
            max_batch_delay_s=options.max_batch_delay_s if max_batch_delay_s is None else max_batch_delay_s,
        )
        for life in self.lives.by_key.values():
            life.allow_batches_of(options.batch_size)
        self.certifier.reconfigure(options)
        self._wake.set()

    async def check(self, samples: Sequence[list[Part]] = ()) -> dict[str, Any]:
        """Compare batches of these inputs, or of the model's samples, with single requests; as `Certifier.check`."""
        if self.scaling.is_resting and not self.dispatcher.is_draining:
            self._begin_scaling(time.monotonic())  # a check wakes a sleeping model
        return await self.certifier.check(samples)

    async def compare(
        self, pairs: Sequence[tuple[Answer, Answer]], how: Tolerance | Literal["handler", "scores"]
    ) -> Checked:
        """Have a worker compare pairs of answers; as `Certifier.compare`."""
        return await self.certifier.compare(pairs, how)

    async def replay(self, requests: Sequence[Request]) -> Replayed:
        """Have a worker run requests again as one batch; nothing is started for it. As `Certifier.replay`."""
        options = self.options
        if not self.ready_workers:
            state = "sleeps" if self.scaling.can_wake else "has no worker that has loaded it"
            raise CannotReplay(
                f"Version {options.version} of {options.model} {state}, and nothing is loaded for a replay: send it "
                "a request, or scale it up, or name another version."
            )
        return await self.certifier.replay(requests)

    async def profile(self, wish: ProfileWish, begun: Callable[[list[int]], None]) -> TakenProfile:
        """Have one worker measure its batches while it serves; nothing is started for it.

        It is one that has work, or else the one that gets the next. `begun` is called with its processes, if they are
        of this machine. Raises as `Profiles.run`, and CannotProfile if there is no worker, or none that runs one batch
        at a time.
        """
        options = self.options
        name = f"Version {options.version} of {options.model}"
        if options.is_concurrent:
            raise CannotProfile(
                f"{name} answers many batches at once (asyncCommunication), so that no time belongs to one batch. "
                "Profile it without that, or attach py-spy to its worker."
            )
        lanes = self.dispatcher.lanes
        serving = [life for life in self.lives.by_key.values() if life.is_ready and life.key in lanes.by_key]
        if not serving:
            state = "sleeps" if self.scaling.can_wake else "has no worker that has loaded it"
            raise CannotProfile(f"{name} {state}, so that nothing can be measured: send it requests, or scale it up.")
        busy = [life for life in serving if lanes.by_key[life.key].flights]
        idle = [life for life in serving if lanes.idle and life.key == lanes.idle[-1].key]
        chosen = max(busy, key=lambda life: life.requests) if busy else (idle or serving)[0]
        self.profiles.refuse_second()  # before py-spy is begun
        before = {life.key: life.requests for life in serving}
        is_here = chosen.process is not None and not chosen.process.node
        begun(chosen.pids if is_here else [])
        profiled, bodies = await self.profiles.run(chosen.key, wish)
        others = [
            (life.name, life.requests - before[life.key], lane.mean_run_s)
            for life in self.lives.by_key.values()
            if life.key in before and (lane := lanes.by_key.get(life.key)) is not None
        ]
        return TakenProfile(chosen.name, profiled, [bytes(body) for body in bodies], others)

    # ------------------------------------------------------------------------------------------- the end

    def refuse_new(self) -> None:
        """Refuse new requests; accepted ones go on."""
        self.dispatcher.is_draining = True

    async def drain(self, deadline_s: float) -> int:
        """Wait until nothing waits or runs, at most `deadline_s` seconds. Returns how many requests are left."""
        self.refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.wait_until_idle()
        return self.queued + self.running

    async def wait_until_idle(self) -> None:
        """Wait until nothing waits or runs. Requests that come meanwhile are accepted and waited for, too."""
        while not self.dispatcher.is_empty:
            await self._changes.wait()

    def refuse_accepted(self, error: MarserveError) -> list[GivenUp]:
        """Refuse accepted requests that are not answered yet with `error`; returns them, the oldest first."""
        self.refuse_new()
        given_up = self.dispatcher.refuse_accepted(error, time.monotonic())
        self._changes.tell()
        return given_up

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain, then end every worker and the template, and reap them. What is left is refused as VersionStops.

        Safe to call more than once, and again while it runs: the shorter drain counts.
        """
        left = await self.drain(drain_s) if drain_s > 0 else 0
        self.refuse_new()
        self._is_stopped = True
        self.scaling.stop()
        await self.certifier.stop()
        await self._upkeep.stop()
        await self._succession.stop()
        if left:
            log.warning("%s %s: %d requests given up", self.options.model, self.options.version, left)
        self.dispatcher.fail_waiting(self.dispatcher.stops(), time.monotonic())
        await self._processes.close()
        await self.launcher.close()
        self.reservations.close()
        self._context.launchers.devices.forget(self.options.model, self.options.version)
        self.dispatcher.fail_waiting(self.dispatcher.stops(), time.monotonic())
        self._wake.cancel()
        self.lives.close()
        self.metrics.stages.end()
        self._changes.tell()

    # ------------------------------------------------------------------------------------------- slots' news

    def follow(self, tell: Callable[[], None]) -> None:
        """Have `tell` called after each change of what its workers do: they start, have loaded, end."""
        self._tell_state = tell

    def _slot_changed(self) -> None:
        """A slot's state changed."""
        now, dispatcher = time.monotonic(), self.dispatcher
        dispatcher.living_slots = self._count_living()
        if dispatcher.living_slots > 0:
            dispatcher.hold_for_start.end()
        else:
            dispatcher.hold_for_start.note(self._next_start(now), now, may_wait=not self.scaling.can_wake)
        death = self.last_death
        dispatcher.last_death = "" if death is None else death.cause
        waits = any(slot.waits_for_device for slot in self.slots)
        dispatcher.awaited_device = self.reservations.why_none() if waits else ""
        dispatcher.fail_stranded(now)
        self._wake.set()
        self._changes.tell()
        self._tell_state()
        self._leave_lost_templates()
        self.devices_read()

    def devices_read(self) -> None:
        """Move workers to other devices where theirs is lost, or back to their own. Slots between two tries try now."""
        for slot in self.slots if self.options.gpu_ids else ():
            site = self.reservations.site_for(slot.uses, slot.home)
            if site is None or site == slot.uses:
                continue
            if slot.is_ready:
                self._due(slot, "device")
            elif slot.next_start_at is not None:
                slot.nudge()

    def _leave_lost_templates(self) -> None:
        """Replace workers of a template that was given up, once another template has a worker; it then ends."""
        ready = [slot for slot in self.slots if slot.is_ready]
        lost = [slot for slot in ready if slot.has_lost_template]
        if lost and len(lost) < len(ready):
            self._due(lost[0], "template")

    def _count_living(self) -> int:
        """How many slots requests may wait for; while asleep 1, for the slot that a request brings.

        Slots that gave up, failed to load more than once, or wait for a device do not count: their requests are refused
        at once. In a pool that may sleep one failed load is enough.
        """
        slots = [slot for slot in self.slots if not slot.waits_for_device]
        if not self.scaling.can_wake:
            return sum(not slot.has_given_up and not slot.cannot_load for slot in slots)
        if not self.slots:
            return 1
        return sum(not slot.has_given_up and (slot.is_ready or not slot.load_failures) for slot in slots)

    def _next_start(self, now: float) -> float | None:
        """When the next worker is started by itself, by the monotonic clock; None if none will be."""
        moments = [slot.next_start(now) for slot in self.slots]
        return min((moment for moment in moments if moment is not None), default=None)

    def _batch_ended(self) -> None:
        """A batch ended, or a worker did."""
        dispatcher, options = self.dispatcher, self.options
        if dispatcher.keeps_time or (
            # As in `submit`: a timer that is due within the batch delay is due before a waiting job can need one.
            len(dispatcher.queue)
            and (options.batch_policy == "goal" or self._wake.at > time.monotonic() + options.max_batch_delay_s)
        ):
            self._wake.set()
        self._changes.tell()

    def _due(self, slot: Slot, reason: str) -> None:
        """Replace a worker that has served long enough, when a replacement is there."""
        if not self._is_stopped and not self.dispatcher.is_draining:
            self._succession.begin(slot, reason)

    def _no_memory(self, error: NoMemoryNow) -> None:
        """The memory for a worker did not come free in time: fail what waits for a sleeping model."""
        if self.scaling.can_wake:
            self.dispatcher.fail_waiting(error, time.monotonic())
            self.scaling.sleep("there was no memory to load it")

    def _crashed(self, slot: Slot, death: Death) -> None:
        """A worker crashed, or a slot was given up: with `onCrash: fail` the server ends (`on_failed`)."""
        if self.options.on_crash == "fail" and slot in self.slots:
            self._on_failed(f"{slot.name} ended ({death.cause}): {death.detail}")

    # ------------------------------------------------------------------------------------------- the rest

    def _waits_for_device(self) -> LoadFailed:
        why = f"its workers wait for a device: {self.reservations.why_none()}"
        return LoadFailed(self.options.model, self.options.version, reason=why, cause=Cause.DEVICE_LOST.value)

    def _load_failed(self, slot: Slot) -> LoadFailed:
        death = slot.last_death
        return LoadFailed(
            self.options.model,
            self.options.version,
            out_of_memory=death is not None and death.cause == Cause.OUT_OF_MEMORY.value,
            reason=death.detail if death is not None else "",
            cause=death.cause if death is not None else "",
        )

    def _gauges(self) -> Gauges:
        states = {"ready": 0, "loading": 0, "failed": 0, "stopping": len(self.leaving)}
        loads: dict[str, float] = {}
        computing: dict[str, int] = {}
        build_ratios: dict[tuple[str, str], float] = {}
        for slot in self.slots:
            if slot.is_ready:
                loads[slot.name] = slot.load_s
                if slot.computes_on:
                    computing[slot.computes_on] = computing.get(slot.computes_on, 0) + 1
                build_ratios |= {(slot.computes_on, rows): ratio for rows, ratio in slot.build_ratios.items()}
            else:
                states["failed" if slot.has_given_up else "loading"] += 1
        states["ready"] = len(loads)
        target = self.scaling.autoscaler.target
        sequences = self.dispatcher.describe_sequences()
        checks_health = self.options.health_interval_s > 0
        now = time.monotonic()
        busy = self.metrics.windows.busy_workers(now, self.metrics.busy_seconds)
        return Gauges(
            queue_length=self.queued,
            workers=states,
            load_s=loads,
            computing=computing,
            build_ratios=build_ratios,
            workers_target=target,
            sequences=None if sequences is None else sequences["living"],
            memory_bytes=self.held_bytes,
            failing=sum(life.is_failing for life in self.lives.by_key.values()) if checks_health else None,
            oldest_s=self.dispatcher.oldest_wait_s(now),
            busy_ratio=busy / states["ready"] if busy is not None and states["ready"] else None,
            flops_utilisation=self._flops_utilisation(states["ready"], now),
        )

    def _flops_utilisation(self, workers: int, now: float) -> float | None:
        flops = self.metrics.flops
        last_minute = self.metrics.windows.batches(now, self.metrics.batch_sizes) if flops is not None else None
        if flops is None or last_minute is None or not workers:
            return None
        batches, requests, seconds = last_minute
        return flops.of(batches, requests) / (seconds * workers * flops.peak)


def threads_of(options: PoolOptions, load: Load, launcher: AnyLauncher, launchers: Launchers) -> int:
    """Intra-op threads for each worker of a version."""
    threads = (options.rank_threads if options.ranks else 0) or load.threads or launcher.threads
    wish = launchers.environment.get("OMP_NUM_THREADS")
    return threads or threads_for(options.max_workers * max(1, options.ranks), launchers.cores, wish)


def threads_for(workers: int, cores: int, wish: str | None) -> int:
    """Intra-op threads for each of `workers` workers: what the operator's OMP_NUM_THREADS says, else a fair share.

    `cores` is how many may be busy at once: the container's quota counts, not the machine's size.
    """
    if wish is not None and wish.isdigit() and int(wish) > 0:
        return int(wish)
    return max(1, cores // max(1, workers))


def _ignore(_: object) -> None:
    """The callback of a pool that was given none."""
