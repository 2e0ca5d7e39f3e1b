"""One pool: the workers of one model version, how many there are, and the clock that the pure parts lack.

The supervisor owns the slots, carries out what the dispatcher asks for, wakes it when its next moment comes, and ends
workers that are past their response limit. Registry and surfaces see `Pool` and nothing else of this package.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time

from marserve.errors import Draining, LoadFailed
from marserve.messages import Load, Metric, Metrics, Receiver, Request
from marserve.pool.batcher import Flight
from marserve.pool.cause_of_death import Cause
from marserve.pool.dispatcher import Dispatcher
from marserve.pool.launchers import Launcher, Launchers
from marserve.pool.options import PoolOptions
from marserve.pool.output import WorkerLog
from marserve.pool.queue import Job
from marserve.pool.slot import DeathView, Life, Slot, WorkerView
from marserve.telemetry.metrics import Gauges, VersionMetrics

__all__ = ["DeathView", "Pool", "WorkerView"]

log = logging.getLogger("marserve.pool")

# How finely the response limit is watched.
MIN_WATCH_S = 0.02
MIN_WAKE_S = 0.001


class Pool:
    """The workers of one model version. Built by the registry; all methods belong to the event loop's thread."""

    def __init__(
        self, options: PoolOptions, load: Load, launchers: Launchers, metrics: VersionMetrics, worker_log: WorkerLog
    ) -> None:
        self.options = options
        self.load = load
        self.metrics = metrics
        self.log = worker_log
        self.dispatcher = Dispatcher(options, metrics, self)
        self.launcher = Launcher(launchers, load, options.worker_start, uses_devices=bool(options.gpu_ids))
        self.threads = load.threads or threads_for(options.max_workers, launchers.environment.get("OMP_NUM_THREADS"))
        self.lives: dict[str, Life] = {}
        self._launchers = launchers
        self._slots: list[Slot] = []
        self._leaving: dict[asyncio.Task[None], Slot] = {}
        self._minimum, self._maximum = options.min_workers, options.max_workers
        self._waiters: list[asyncio.Future[None]] = []
        self._wake: asyncio.TimerHandle | None = None
        self._wake_at = math.inf  # monotonic seconds; inf while no timer runs
        self._watch: asyncio.TimerHandle | None = None
        self._is_stopped = False
        metrics.read_gauges = self._gauges

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request, receiver: Receiver) -> Job:
        """Take one request; the receiver hears how it ended. Raises as `Dispatcher.submit`."""
        now = time.monotonic()
        job = self.dispatcher.submit(request, receiver, now)
        # A timer that is due within the batch delay is due before this job can need one.
        if job.deadline is not None or (job.flight is None and self._wake_at > now + self.options.max_batch_delay_s):
            self._set_wake()
        return job

    # ------------------------------------------------------------------------------------------- workers

    def start(self) -> None:
        """Begin to start the minimum of workers."""
        self.scale(self._minimum, self._maximum)

    def scale(self, minimum: int, maximum: int) -> None:
        """Fewer workers than `minimum`: start more. More than `maximum`: retire the last ones, when their work is done.

        Slots that gave up are tried again at once. Returns at once; `wait_until_ready` waits. A stopped pool stays so.
        """
        if self._is_stopped:
            return
        self._minimum, self._maximum = minimum, maximum
        for slot in self._slots:
            if slot.has_given_up:
                slot.has_given_up = False
                slot.nudge()
        while len(self._slots) < minimum:
            gpu_id = self._launchers.devices.assign(self.options.model, self.options.version, self.options.gpu_ids)
            slot = Slot(self._launchers.next_worker_id(), self, gpu_id)
            self._slots.append(slot)
            slot.start()
        while len(self._slots) > maximum:
            slot = self._slots.pop()
            self._leave(slot, at_once=False)
        self.slot_changed()

    async def wait_until_ready(self) -> bool:
        """Wait until the minimum of workers has loaded the model.

        Returns False if the pool was scaled or stopped meanwhile, so that it can no longer be. Raises LoadFailed when
        a worker failed to load.
        """
        minimum = self._minimum
        failures = {slot.id: slot.load_failures for slot in self._slots}
        while self._minimum == minimum and not self._is_stopped:
            for slot in self._slots:
                if slot.load_failures > failures.get(slot.id, 0):
                    raise self._load_failed(slot)
            if self.ready_workers >= minimum:
                return True
            await self._change()
        return False

    async def wait_until_scaled_down(self) -> None:
        """Wait until the workers that were retired are gone."""
        while self._leaving:
            await asyncio.wait(set(self._leaving))

    def workers(self) -> list[WorkerView]:
        """What describe says of the workers, oldest first."""
        return [slot.view() for slot in self._slots]

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
        return sum(slot.is_ready for slot in self._slots)

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
        """The contract's §1.6: as many slots that have not given up as there should be workers."""
        return sum(not slot.has_given_up for slot in self._slots) >= self._minimum

    @property
    def last_death(self) -> DeathView | None:
        """The latest end of a worker that nobody asked for."""
        deaths = [slot.last_death for slot in self._slots if slot.last_death is not None]
        return max(deaths, key=lambda death: death.at, default=None)

    @property
    def warnings(self) -> list[str]:
        """Sentences for describe."""
        return list(self.launcher.warnings)

    # ------------------------------------------------------------------------------------------- the end

    def refuse_new(self) -> None:
        """Take no more requests; what was accepted goes on."""
        self.dispatcher.is_draining = True

    async def drain(self, deadline_s: float) -> int:
        """Wait until nothing waits or runs, at most `deadline_s` seconds. Returns how many requests are left."""
        self.refuse_new()
        try:
            async with asyncio.timeout(deadline_s):
                while not self.dispatcher.is_empty:
                    await self._change()
        except TimeoutError:
            pass
        return self.queued + self.running

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain, then end every worker and the template, and reap them. What is left is refused as Draining.

        Safe to call more than once, and again while it runs: the shorter drain counts.
        """
        left = await self.drain(drain_s) if drain_s > 0 else 0
        self.refuse_new()
        self._is_stopped = True
        if left:
            log.warning("%s %s: %d requests given up", self.options.model, self.options.version, left)
        self.dispatcher.fail_waiting(Draining(), time.monotonic())
        for slot in (*self._slots, *self._leaving.values()):
            self._leave(slot, at_once=True)
        self._slots.clear()
        self.dispatcher.living_slots = 0
        await self.wait_until_scaled_down()
        await self.launcher.close()
        self._launchers.devices.forget(self.options.model, self.options.version)
        self.dispatcher.fail_waiting(Draining(), time.monotonic())
        for handle in (self._wake, self._watch):
            if handle is not None:
                handle.cancel()
        self._wake = self._watch = None
        self._wake_at = math.inf
        self._notify()

    # ------------------------------------------------------------------------------------------- dispatcher's actions

    def send(self, key: str, flight: Flight) -> None:
        """Send a flight to the worker behind `key`."""
        life = self.lives.get(key)
        if life is not None:
            life.exchange(flight)
            if self._watch is None:
                self._watch = asyncio.get_running_loop().call_later(self.options.response_timeout_s, self._check_time)

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Tell a worker that an item is no longer wanted."""
        life = self.lives.get(key)
        if life is not None:
            life.mark_cancelled(number, index)

    def lane_emptied(self, key: str) -> None:
        """A retired worker has done its last batch."""
        life = self.lives.get(key)
        if life is not None:
            life.stop()

    def all_ended(self) -> None:
        """The last client left: who waits for the end need not wait any longer."""
        self._notify()

    # ------------------------------------------------------------------------------------------- slots' news

    def slot_changed(self) -> None:
        """A slot's state changed."""
        self.dispatcher.living_slots = sum(not slot.has_given_up for slot in self._slots)
        self.dispatcher.fail_stranded(time.monotonic())
        self._set_wake()
        self._notify()

    def batch_ended(self) -> None:
        """A batch ended, or a worker did."""
        if len(self.dispatcher.queue):
            self._set_wake()
        if self._waiters:
            self._notify()

    def worker_measured(self, metrics: Metrics) -> None:
        """Hand on what a handler measured."""
        self.on_measured(metrics.values)

    def on_measured(self, values: list[Metric]) -> None:
        """Where measured values go; the registry puts its own function here when it builds the pool."""

    # ------------------------------------------------------------------------------------------- clock

    def _set_wake(self) -> None:
        """Have the dispatcher looked at again at its next moment."""
        when = self.dispatcher.next_wake()
        if when is None:
            return
        if self._wake is not None:
            if self._wake_at <= when:
                return
            self._wake.cancel()
        # uvloop counts whole milliseconds; less than one would be no timer but a turn of the loop after another.
        delay_s = max(MIN_WAKE_S, when - time.monotonic())
        self._wake = asyncio.get_running_loop().call_later(delay_s, self._woken)
        self._wake_at = when

    def _woken(self) -> None:
        self._wake = None
        self._wake_at = math.inf
        self.dispatcher.pump(time.monotonic())
        self._set_wake()
        if self._waiters:
            self._notify()

    def _check_time(self) -> None:
        """Look at every worker's response limit; look again when the next one may be due."""
        now = time.monotonic()
        dues = [life.check_time(now) for life in list(self.lives.values())]
        waiting = [due for due in dues if due is not None]
        self._watch = (
            asyncio.get_running_loop().call_later(max(MIN_WATCH_S, min(waiting) - now), self._check_time)
            if waiting
            else None
        )

    # ------------------------------------------------------------------------------------------- the rest

    def _leave(self, slot: Slot, *, at_once: bool) -> None:
        """Retire a slot in the background; `wait_until_scaled_down` waits for it."""
        task = asyncio.create_task(slot.retire(at_once=at_once))
        self._leaving[task] = slot
        task.add_done_callback(lambda task: self._leaving.pop(task, None))

    def _load_failed(self, slot: Slot) -> LoadFailed:
        death = slot.last_death
        return LoadFailed(
            self.options.model,
            self.options.version,
            out_of_memory=death is not None and death.cause == Cause.OUT_OF_MEMORY.value,
            reason=death.detail if death is not None else "",
        )

    def _gauges(self) -> Gauges:
        states = {"ready": 0, "loading": 0, "failed": 0, "stopping": len(self._leaving)}
        for slot in self._slots:
            states["ready" if slot.is_ready else "failed" if slot.has_given_up else "loading"] += 1
        loads = {slot.name: slot.view().load_s for slot in self._slots if slot.is_ready}
        return Gauges(queue_length=self.queued, workers=states, load_s=loads)

    async def _change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def threads_for(workers: int, wish: str | None) -> int:
    """Intra-op threads for each of `workers` workers: what the operator's OMP_NUM_THREADS says, else a fair share."""
    if wish is not None and wish.isdigit() and int(wish) > 0:
        return int(wish)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, workers))
