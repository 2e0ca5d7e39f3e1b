"""The host's memory for models: keeps a budget for all versions of a server, measures what their processes hold, and
remembers it for the next load.

`ledger.py` keeps what is reserved; `waiting_line.py` lets loads begin when there is room, and evicts other models when
there is not. A version's memory counts as free when its processes have ended, not when their end was ordered.

Only versions that may sleep (`load: on_demand`, or `minWorkers: 0` with `idleTimeout`) are evicted, unless they are
pinned, in use, or came a moment ago. Everything here belongs to the event loop's thread; sizes are read in another one,
for at most a fiftieth of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marserve.errors import NoMemoryNow, NotEnoughMemory
from marserve.memory.learned_memory import LearnedMemory, key_of
from marserve.memory.ledger import HOST, DoesNotFit, HostReservation
from marserve.memory.needs import Learned, Need, need_of
from marserve.memory.waiting_line import RETRY_AFTER_S, Holder, WaitingLine, label_of, mib
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool
from marserve.pool.reservation import Reservations
from marserve.pool.worker_end.memory import held_bytes, past_peak_bytes

log = logging.getLogger("marserve.registry.memory")

# How often the sizes of all versions are read.
LOOK_EVERY_S = 5.0
# The same for a version without requests and new processes since the last reading: it has hardly grown.
LOOK_AT_REST_S = 30.0
LOOK_WHILE_LOADING_S = 0.25
LOOK_AFTER_WAITING_S = 0.02
# After a reading there is a pause of so many times as long as it took.
PAUSE_PER_READING = 50.0
WRITE_EVERY_S = 5.0


class Sizes(NamedTuple):
    """The sizes of one version's processes, in bytes: all together, the largest worker's own, and how far the largest
    past peak of one of them exceeds its present size.
    """

    all_together: int
    largest_worker: int
    past_peak: int


class Doing(NamedTuple):
    """A version's number of requests so far, and its processes: those of each worker, and the template's."""

    requests: int
    workers: Sequence[Sequence[int]]
    template: Sequence[int]


class MemoryOnHost(Reservations):
    """A version's reservations of the host's memory, for its pool. Made by `HostMemory.admit`."""

    def __init__(self, host: HostMemory, holder: Holder, reserved: HostReservation) -> None:
        self.holder, self.reserved = holder, reserved
        self.pool: Pool | None = None
        self.read_at = 0.0
        self.read_when: Doing | None = None  # requests and processes when its sizes were read
        self._host = host
        self._ledger = host.line.ledger

    def ask(self, workers: int) -> None:
        """Reserve memory for so many workers. Raises NotEnoughMemory."""
        self._host.ask(self, workers)

    def grow(self, workers: int) -> int:
        """Reserve memory for up to so many workers that no other version uses. Returns how many."""
        ledger, reserved = self._ledger, self.reserved
        allowed = ledger.grow(reserved, workers)
        if allowed < workers:  # the next call finds the memory of spare versions
            more = reserved.need.resident(workers) - reserved.own_bytes
            self._host.line.give_up_spare(more - ledger.free_bytes - ledger.leaving(HOST))
        return allowed

    def shrink(self, workers: int) -> None:
        """Give back the reservations beyond so many workers."""
        self._ledger.shrink(self.reserved, workers)

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait for the memory that was asked for, at most `startupTimeout`. Raises NoMemoryNow."""
        options = self.holder.options
        if not self.reserved.workers and self.pool is not None and self.pool.wanted_workers:
            try:  # the wait before was given up; this is the next try
                self.ask(self.pool.wanted_workers)
            except NotEnoughMemory as error:
                log.warning("%s", error)
                raise NoMemoryNow(options.model, retry_after_s=RETRY_AFTER_S) from None
        try:
            async with asyncio.timeout(options.startup_timeout_s):
                await self.holder.door.wait()
        except TimeoutError:
            limit_s = options.startup_timeout_s
            log.warning("%s: no memory came free within startupTimeout, %g s", self.holder.label, limit_s)
            self._host.line.withdraw(self.holder)
            self._host.look_soon()
            raise NoMemoryNow(options.model, retry_after_s=RETRY_AFTER_S) from None

    def loaded(self) -> None:
        """A worker has loaded the model: measure it soon."""
        self.holder.loaded(time.monotonic())
        self.holder.is_unsettled = True
        self.holder.generation += 1  # a reading under way began before
        self._host.look_soon()

    def emptied(self) -> None:
        """Processes have ended."""
        pool = self.pool
        if pool is not None and not pool.template_pids and not any(pool.pids_by_worker):
            self.holder.generation += 1
            self.reserved.measured_bytes = 0
            self.holder.loaded_at = None
        self._host.look_soon()

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """The version serves no requests: `give_up` is called before any other is evicted. None: it serves again."""
        self.holder.give_up = give_up

    def close(self) -> None:
        """The pool has ended and has no process any more."""
        self._host.close(self)

    @property
    def held_bytes(self) -> int:
        """How much its processes held when they were last measured."""
        return self.reserved.measured_bytes

    @property
    def described(self) -> Mapping[str, Any]:
        """The member `memory` of describe."""
        reserved, need = self.reserved, self.reserved.need
        state = "asleep"
        if reserved.is_waiting:
            state = "waiting"
        elif self.pool is not None and self.pool.ready_workers:
            state = "loaded"
        elif reserved.leaving_bytes:
            state = "leaving"
        elif reserved.workers:
            state = "loading"
        return {
            "memory": {
                "state": state,
                "residentBytes": reserved.measured_bytes,
                "promisedBytes": reserved.promised_bytes,
                "neededBytes": need.first_bytes,
                "neededForAnotherWorkerBytes": need.more_bytes,
                "source": need.source,
                "mayMakeRoom": self.holder.may_leave,
            }
        }

    def may_hold_more(self, doing: Doing, now: float) -> bool:
        """Whether to read its sizes again: it is in use, had requests or new processes since, or was read long ago."""
        is_at_work = self.pool is not None and self.pool.is_in_use
        return is_at_work or doing != self.read_when or now >= self.read_at + LOOK_AT_REST_S

    def note(self, sizes: Sizes, workers: int, learned: LearnedMemory) -> None:
        """Take over the sizes of its processes."""
        pool, holder, reserved = self.pool, self.holder, self.reserved
        assert pool is not None
        if not holder.is_unsettled or not pool.ready_workers or not sizes.all_together:
            reserved.measured_bytes = sizes.all_together
            return
        first = max(sizes.largest_worker, sizes.all_together - max(0, workers - 1) * sizes.largest_worker)
        peak = first + sizes.past_peak
        seen = Learned(first, sizes.largest_worker, peak, holder.load_s)
        learned.put(key_of(holder.options), seen)
        if pool.is_loading:
            reserved.measured_bytes = sizes.all_together
            return
        holder.is_unsettled = False
        self._ledger.settle(reserved, sizes.all_together, seen)
        log.info(
            "%s holds %s MiB with %d workers, %s MiB at most while it was loaded",
            reserved.label,
            mib(sizes.all_together),
            workers,
            mib(peak + (workers - 1) * sizes.largest_worker),
        )


class HostMemory:
    """The host's memory for the models of one server."""

    def __init__(
        self,
        line: WaitingLine,
        learned: LearnedMemory,
        *,
        shared_pids: Callable[[], Sequence[int]] = list,
        read_sizes: Callable[[Sequence[Sequence[int]], Sequence[int]], Sizes] | None = None,
    ) -> None:
        """`shared_pids` are processes that belong to no version: templates that only import."""
        self.line = line
        self.refused = 0
        self._learned = learned
        self._shared_pids = shared_pids
        self._read_sizes = read_sizes or sizes_of
        self._versions: dict[HostReservation, MemoryOnHost] = {}
        self._soon = asyncio.Event()
        self._not_before = 0.0
        self._written_at = 0.0
        self._is_logged = False

    # ---------------------------------------------------------------------------------------------- coming and going

    def house(self, options: PoolOptions, make: Callable[[Reservations], Pool]) -> Pool:
        """Make a version's pool with memory for its least number of workers.

        Raises NotEnoughMemory; then no pool is made.
        """
        version = self.admit(options)
        try:
            pool = version.pool = version.holder.pool = make(version)
        except BaseException:
            version.close()
            raise
        return pool

    def admit(self, options: PoolOptions) -> MemoryOnHost:
        """Add a version, with memory reserved for its least number of workers.

        Raises NotEnoughMemory; nothing is left of it then. The caller sets its pool, and closes it at the end.
        """
        learned = self._learned.get(key_of(options))
        holder = Holder(options, load_s=learned.load_s if learned is not None else 0.0)
        reserved = self.line.open(holder, self._need(options))
        version = self._versions[reserved] = MemoryOnHost(self, holder, reserved)
        self.line.add(holder)
        if options.min_workers:
            try:
                self.ask(version, options.min_workers)
            except NotEnoughMemory:
                self.close(version)
                raise
        return version

    def _need(self, options: PoolOptions) -> Need:
        shares_weights = options.worker_start != "fresh" and not (
            options.gpu_ids or options.ranks or options.has_own_python
        )
        return need_of(
            declared_bytes=options.memory_bytes,
            learned=self._learned.get(key_of(options)),
            weight_bytes=options.weight_bytes,
            shares_weights=shares_weights,
            uses_devices=bool(options.gpu_ids),
        )

    def foresee(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> dict[str, Any]:
        """How much of the host's memory so many workers of a version would take, and how much there is, in bytes.

        It has `before` workers; None: it is not there, though a version of its name may be. `leaving` will have gone
        before. Nothing changes, and nothing is reserved. Raises NotEnoughMemory, as `ask` would.
        """
        there = None if before is None else self._reserved_by(options)
        reserved = there or HostReservation(label_of(options), self._need(options))
        gone = None if leaving is None else self._reserved_by(leaving)
        ledger = self.line.ledger
        try:
            own, could_be_had = ledger.weigh(reserved, workers, lambda other: other is not gone and self._stays(other))
        except DoesNotFit as error:
            raise self._refusal(options, reserved, error) from None
        more = own - reserved.own_bytes - (gone.own_bytes if gone is not None else 0)
        return {
            "moreBytes": more,
            "source": reserved.need.source,
            "freeBytes": ledger.free_bytes,
            "couldBeHadBytes": could_be_had,
            "budgetBytes": ledger.budget_bytes,
            "othersMakeRoom": more > ledger.free_bytes,
        }

    def _reserved_by(self, options: PoolOptions) -> HostReservation | None:
        holder = self.line.find(options)
        return holder.on_host if holder is not None else None

    def _stays(self, other: HostReservation) -> bool:
        return not self.line.holder_of[other].may_leave

    def close(self, version: MemoryOnHost) -> None:
        """Remove a version whose processes have all ended."""
        self._versions.pop(version.reserved, None)
        self.line.remove(version.holder)
        self.look_soon()

    def ask(self, version: MemoryOnHost, workers: int) -> None:
        """Reserve memory for so many workers of a version, and evict others if needed.

        Raises NotEnoughMemory, with the numbers, if it cannot be had.
        """
        holder = version.holder
        try:
            is_in = self.line.ledger.ask(version.reserved, workers, self._stays)
        except DoesNotFit as error:
            self.refused += 1
            raise self._refusal(holder.options, version.reserved, error) from None
        if is_in:
            self.line.let_in(holder)
        else:
            holder.door.clear()
            self.settle()
        self.look_soon()

    def _refusal(self, options: PoolOptions, reserved: HostReservation, error: DoesNotFit) -> NotEnoughMemory:
        return NotEnoughMemory(
            options.model,
            options.version,
            needed_bytes=error.needed_bytes,
            source=reserved.need.source,
            could_be_had=error.could_be_had,
            budget_bytes=self.line.ledger.budget_bytes,
            holders=error.holders,
        )

    # ---------------------------------------------------------------------------------------------- making room

    def settle(self) -> None:
        """Evict models if others have grown beyond the budget, then settle the line."""
        over_bytes = self.line.ledger.excess_bytes
        if over_bytes and not self.line.make_room({HOST: over_bytes}, None):
            self._bear(over_bytes)
            return
        self._is_logged = False
        self.line.settle()

    def _bear(self, over_bytes: int) -> None:
        """Models hold more than the budget, and none may leave: end what is still loading, or log it once."""
        loading = [
            (version, version.pool)
            for reserved, version in self._versions.items()
            if version.pool is not None
            and version.pool.is_loading
            and reserved.measured_bytes > reserved.promised_bytes
        ]
        for version, pool in loading:
            reserved = version.reserved
            why = (
                f"while it was loaded it took {mib(reserved.measured_bytes)} MiB, more than the "
                f"{mib(reserved.promised_bytes)} MiB that were {reserved.need.source}, and there is no more for it"
            )
            log.error("%s is not loaded: %s", reserved.label, why)
            reserved.measured_bytes = 0
            version.holder.generation += 1
            pool.end_loading(why)
        if not loading and not self._is_logged:
            self._is_logged = True
            log.warning(
                "Models hold %s MiB more than model_memory, %s MiB, and none of them may be put to sleep now",
                mib(over_bytes),
                mib(self.line.ledger.budget_bytes),
            )

    # ---------------------------------------------------------------------------------------------- the watch

    def look_soon(self) -> None:
        """Settle and measure again at once: something has changed."""
        self._soon.set()

    async def run(self) -> None:
        """Settle the line and measure processes, for ever, as often as needed."""
        await asyncio.to_thread(self._learned.read)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._soon.wait()
            self._soon.clear()
            self.line.forget_unawaited()
            self.settle()
            await self._measure()
            if self._learned.is_changed and time.monotonic() - self._written_at >= WRITE_EVERY_S:
                await asyncio.to_thread(self._learned.write)
                self._written_at = time.monotonic()

    async def close_all(self) -> None:
        """Wait until all evicted models have gone, and write what was learned."""
        await self.line.close()
        await asyncio.to_thread(self._learned.write)

    def _pause_s(self) -> float | None:
        if self.line.ledger.is_host_awaited:
            return LOOK_AFTER_WAITING_S
        if any(version.pool is not None and version.pool.is_loading for version in self._versions.values()):
            return LOOK_WHILE_LOADING_S
        if self._learned.is_changed:
            return WRITE_EVERY_S
        return LOOK_EVERY_S if any(reserved.own_bytes for reserved in self._versions) else None

    async def _measure(self) -> None:
        """Read sizes: of versions that are loading or have just loaded, and from time to time of all."""
        now = time.monotonic()
        wants_all = now >= self._not_before
        chosen = [
            (version, version.holder.generation, doing)
            for reserved, version in self._versions.items()
            if (pool := version.pool) is not None
            and not reserved.leaving_bytes
            and not reserved.is_waiting
            and (doing := _doing(pool))
            and (version.holder.is_unsettled or pool.is_loading or (wants_all and version.may_hold_more(doing, now)))
        ]
        shared = list(self._shared_pids()) if wants_all else None
        if not chosen and shared is None:
            return
        read, read_sizes = [], self._read_sizes
        read = await asyncio.to_thread(lambda: [read_sizes(doing.workers, doing.template) for *_, doing in chosen])
        if shared is not None:
            self.line.ledger.shared_bytes = (await asyncio.to_thread(read_sizes, [], shared)).all_together
        if wants_all:
            took_s = time.monotonic() - now
            self._not_before = time.monotonic() + max(LOOK_EVERY_S, PAUSE_PER_READING * took_s)
        for (version, generation, doing), sizes in zip(chosen, read, strict=True):
            if version.holder.generation == generation and version.reserved in self._versions:
                version.read_at, version.read_when = now, doing
                version.note(sizes, len(doing.workers), self._learned)
        self.settle()


def sizes_of(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
    """Read the sizes of processes. Blocks: the kernel walks page tables, milliseconds for gigabytes."""
    pids = [*template, *(pid for own in workers for pid in own)]
    held = {pid: held_bytes(pid) for pid in pids}
    return Sizes(
        sum(each.proportional for each in held.values()),
        max((sum(held[pid].own for pid in own) for own in workers), default=0),
        max(map(past_peak_bytes, pids), default=0),
    )


def _doing(pool: Pool) -> Doing:
    return Doing(pool.metrics.requests, [list(pids) for pids in pool.pids_by_worker], list(pool.template_pids))


# Families of metrics that the host's memory keeps itself, and what reads their numbers.
FAMILIES: tuple[tuple[str, Callable[[HostMemory], Mapping[str, float]]], ...] = (
    ("marserve_memory_budget_bytes", lambda host: {"": host.line.ledger.budget_bytes}),
    ("marserve_memory_charged_bytes", lambda host: {"": host.line.ledger.held_bytes}),
    ("marserve_loads_refused_total", lambda host: {"": host.refused}),
)
