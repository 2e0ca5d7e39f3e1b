"""Observes a pool for the autoscaler, and carries its decisions out.

A pool at rest (nothing waits, nothing runs, as few workers as allowed) has no timer: the first request begins the
watch, which ends when the pool is at rest again. A request to a sleeping pool wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from marserve.errors import NotEnoughMemory
from marserve.machine.describe import available_bytes
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Reservations
from marserve.pool.sizing.autoscaler import Autoscaler, Decision, Observation
from marserve.pool.slots.slots import Slots
from marserve.pool.worker_end.memory import own_bytes
from marserve.telemetry.metrics.counts import VersionMetrics

log = logging.getLogger("marserve.pool.scaling")

LOOK_S = 0.25
IDLE_LOOK_S = 2.0
LEAST_LOOK_S = 0.02
MEMORY_LOOK_S = 1.0


class Scaling:
    """The watch over one pool. All methods belong to the event loop's thread."""

    def __init__(
        self,
        options: PoolOptions,
        dispatcher: Dispatcher,
        metrics: VersionMetrics,
        reservations: Reservations,
        slots: Slots,
        *,
        read_available: Callable[[], int | None] = available_bytes,
        read_own: Callable[[int], int] = own_bytes,
    ) -> None:
        self.autoscaler = Autoscaler(options)
        self.changed_at = time.time()  # UTC, for describe
        self.is_resting = False
        self._options, self._dispatcher, self._metrics = options, dispatcher, metrics
        self._reservations, self._slots = reservations, slots
        self._read_available = read_available
        self._read_own = read_own
        self._timer: asyncio.TimerHandle | None = None
        self._is_fast = False
        self._has_template = False
        self._is_stopped = False
        self._memory: tuple[int | None, int | None] = (None, None)
        self._memory_at: float | None = None
        self._reading: asyncio.Task[tuple[int | None, int | None]] | None = None
        self._bound()

    @property
    def is_active(self) -> bool:
        """Whether the number of workers changes by itself."""
        scaler = self.autoscaler
        return not self._is_stopped and (scaler.may_sleep or scaler.maximum > scaler.minimum > 0)

    @property
    def can_wake(self) -> bool:
        """Whether a request that finds no worker starts one."""
        return self.autoscaler.may_sleep and not self._is_stopped

    def bound(self, minimum: int, maximum: int, count: int) -> None:
        """Keep between `minimum` and `maximum` workers from now on; at present `count` are wanted."""
        scaler = self.autoscaler
        scaler.minimum, scaler.maximum = minimum, max(minimum, maximum)
        self._bound()
        if count != scaler.target:
            scaler.target, scaler.reason = count, "as it was asked for"
            self.changed_at = time.time()
        if self.is_active and not self._is_at_rest():
            self._look_again(LOOK_S, closely=False)

    def _bound(self) -> None:
        """Without autoscaling keep to the least number of workers while awake."""
        if not self._options.autoscale:
            self.autoscaler.maximum = min(self.autoscaler.maximum, self.autoscaler.least_awake)
        self.is_resting = self.is_active and not self._is_fast

    def begin(self, now: float) -> None:
        """A request comes to a pool at rest: begin the watch, and wake the pool if it sleeps.

        Raises NotEnoughMemory if the model would have to be loaded and does not fit.
        """
        if self._timer is None:
            self.autoscaler.resume(now)
        if self.autoscaler.target == 0 and self.can_wake:
            try:
                self._reservations.ask(self.autoscaler.least_awake)
            except NotEnoughMemory as error:
                raise error.for_clients() from None
        decision = self.autoscaler.wake(now)
        if decision is not None:
            if not self._slots.has_template:
                self._metrics.loads_on_demand += 1
            self._carry_out(decision)
        self._look_again(LOOK_S, closely=True)

    def sleep(self, reason: str) -> None:
        """Begin to end workers and template until the next request. Ignored for a pool that may not sleep."""
        if not self.can_wake:
            return
        decision = self.autoscaler.sleep(time.monotonic(), reason)
        if decision is not None:
            self._carry_out(decision)
        self._has_template = self._is_fast = False
        self._slots.drop_template()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.is_resting = True

    def stop(self) -> None:
        """End the watch for good."""
        self._is_stopped = True
        self.is_resting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reading is not None:
            self._reading.cancel()

    def describe(self) -> dict[str, Any] | None:
        """Members for describe, None without autoscaling."""
        if not self.is_active:
            return None
        at = datetime.fromtimestamp(self.changed_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"target": self.autoscaler.target, "reason": self.autoscaler.reason, "at": at}

    # ------------------------------------------------------------------------------------------- the watch

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        decision = self.autoscaler.decide(now, self._observe(now))
        if decision is not None:
            self._carry_out(decision)
        if self._has_template and self.autoscaler.may_drop_template(now):
            self._has_template = False
            log.info("%s: its template may go, too", self._name)
            self._slots.drop_template()
        if not self.is_active or self._is_at_rest():
            self._is_fast = False
            self.is_resting = self.is_active
        elif self._dispatcher.is_empty:
            idle_timeout_s = self.autoscaler.idle_timeout_s or IDLE_LOOK_S
            self._look_again(max(LEAST_LOOK_S, min(IDLE_LOOK_S, idle_timeout_s / 4)), closely=False)
        else:
            self._look_again(LOOK_S, closely=True)

    def _look_again(self, after_s: float, *, closely: bool) -> None:
        """Look again after that time. With `closely` the pool is busy, and `begin` need not be called."""
        if self._is_stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._is_fast = closely
        self.is_resting = not closely and self.is_active
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _is_at_rest(self) -> bool:
        scaler = self.autoscaler
        if not self._dispatcher.is_empty:
            return False
        if scaler.idle_timeout_s == math.inf:  # it sleeps only by a call of `sleep`
            return scaler.target <= scaler.least_awake
        return scaler.target <= scaler.minimum and not self._has_template

    def _carry_out(self, decision: Decision) -> None:
        before = len(self._slots.placed)
        allowed = self._reservations.grow(decision.target) if decision.target > before else decision.target
        if allowed < decision.target:
            self.autoscaler.target = max(allowed, before)
            self.autoscaler.reason = f"no more, for the memory for models is used up, though {decision.reason}"
            if allowed <= before:
                return
            decision = Decision(allowed, self.autoscaler.reason)
        log.info("%s: %d workers instead of %d: %s", self._name, decision.target, before, decision.reason)
        self._metrics.note("scaling", time.monotonic(), f"{decision.target} workers instead of {before}")
        self.changed_at = time.time()
        if decision.target and self.autoscaler.may_sleep:
            self._has_template = True
        self._slots.resize(decision.target)
        if decision.target < before:
            self._reservations.shrink(decision.target)

    @property
    def _name(self) -> str:
        return f"{self._options.model} {self._options.version}"

    def _observe(self, now: float) -> Observation:
        dispatcher = self._dispatcher
        slots = self._slots.placed
        ready = sum(slot.is_ready for slot in slots)
        failed = sum(slot.has_given_up or (slot.load_failures > 0 and not slot.is_ready) for slot in slots)
        waiting = dispatcher.waiting
        if waiting:
            self._look_at_memory(now)
        available, each = self._memory
        return Observation(
            waiting=waiting,
            running=dispatcher.running,
            oldest_wait_s=dispatcher.oldest_wait_s(now),
            ready=ready,
            busy=dispatcher.busy_lanes,
            starting=len(slots) - ready - failed,
            failed=failed,
            batch_s=dispatcher.mean_batch_s,
            bytes_available=available,
            bytes_per_worker=each,
        )

    def _look_at_memory(self, now: float) -> None:
        """Begin to read the available memory and what a worker takes, unless that was done a moment ago.

        In a thread, since the kernel may take a while; the result is there well before it is needed.
        """
        if self._reading is None and (self._memory_at is None or now - self._memory_at >= MEMORY_LOOK_S):
            self._memory_at = now
            pids = [slot.pids for slot in self._slots.placed if slot.is_ready]
            self._reading = asyncio.create_task(asyncio.to_thread(self._read_memory, pids))
            self._reading.add_done_callback(self._memory_read)

    def _read_memory(self, workers: Sequence[Sequence[int]]) -> tuple[int | None, int | None]:
        return self._read_available(), max((sum(map(self._read_own, pids)) for pids in workers), default=None)

    def _memory_read(self, reading: asyncio.Task[tuple[int | None, int | None]]) -> None:
        self._reading = None
        if reading.cancelled():
            return
        if reading.exception() is not None:
            log.warning("%s: its memory could not be read: %s", self._name, reading.exception())
            return
        self._memory = reading.result()
