"""Which models are in memory: keeps a budget for all versions of a server, lets loads begin when there is room, and
puts sleeping models' neighbours to sleep when there is none.

`admission.py` keeps the books and `eviction.py` chooses; here processes are looked at, pools are told, and whoever
waits is let in. A version's memory is believed to be free when its processes have ended, not when they were told to.

Only versions that may sleep (`load: on_demand`, or `minWorkers: 0` with `idleTimeout`) make room for others, unless
they are pinned, in use, or came a moment ago. Everything here belongs to the event loop's thread; sizes are read in
another one, never for more than a fiftieth of its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from marserve.errors import NoMemoryNow, NotEnoughMemory
from marserve.memory.admission import Account, DoesNotFit, Learned, Ledger, Need, budget_of, need_of
from marserve.memory.eviction import Demand, Resident, choose_victims
from marserve.memory.learned_memory import Key, LearnedMemory
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Room, WithoutDevices
from marserve.pool.worker_end.memory import held_bytes, past_peak_bytes
from marserve.settings import Settings
from marserve.telemetry.metrics.counts import MemoryFigures, VersionMetrics

log = logging.getLogger("marserve.registry.memory")

# How often the sizes of all are read, of those that are loading, and how often those who wait are looked after.
LOOK_EVERY_S = 5.0
# Of a version that has had no request, and no other process, since it was read: nothing says that it has grown.
LOOK_AT_REST_S = 30.0
LOOK_WHILE_LOADING_S = 0.25
LOOK_AFTER_WAITING_S = 0.02
# A reading that took long is followed by so many times as long without one.
PAUSE_PER_READING = 50.0
WRITE_EVERY_S = 5.0
RETRY_AFTER_S = 1.0
# Whoever asks is in the queue a moment after the memory was asked for; a check takes a little longer.
UNAWAITED_S = 0.25


def residency_of(
    settings: Settings, memory_bytes: int, shared_pids: Callable[[], Sequence[int]], *, state_folder: Path | None
) -> Residency | None:
    """The memory for models that the settings speak of, on a machine or in a container of so much; None: no bound."""
    budget = budget_of(memory_bytes) if settings.model_memory == "auto" else settings.model_memory
    if not budget:
        return None
    log.info("Memory for models: %s MiB (model_memory=%s)", _mib(budget), settings.model_memory)
    path = state_folder / "memory.json" if state_folder is not None else None
    return Residency(budget, LearnedMemory(path), least_residence_s=settings.least_residence, shared_pids=shared_pids)


def house(residency: Residency | None, options: PoolOptions, make: Callable[[Room | None], Housed]) -> Housed:
    """Make a version's pool with memory for its least number of workers. Raises NotEnoughMemory; then none is made."""
    if residency is None:
        return make(None)
    tenancy = residency.admit(options)
    try:
        pool = tenancy.pool = make(tenancy)
    except BaseException:
        tenancy.close()
        raise
    return pool


class SleepyPool(Protocol):
    """A pool, as its tenancy sees it."""

    options: PoolOptions
    metrics: VersionMetrics

    @property
    def can_sleep(self) -> bool:
        """Whether it may be without workers until somebody asks."""

    @property
    def is_in_use(self) -> bool:
        """Whether it has requests, or is being loaded."""

    @property
    def is_loading(self) -> bool:
        """Whether workers are on their way."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a worker."""

    @property
    def wanted_workers(self) -> int:
        """Workers that there should be now."""

    @property
    def ready_workers(self) -> int:
        """Workers that have loaded the model."""

    @property
    def pids_by_worker(self) -> Sequence[Sequence[int]]:
        """The processes of each worker."""

    @property
    def template_pids(self) -> Sequence[int]:
        """The process that workers are forked from."""

    def sleep(self, reason: str) -> None:
        """Begin to have no process."""

    async def wait_until_asleep(self) -> None:
        """Wait until the processes have ended that were told to."""

    def end_loading(self, why: str) -> None:
        """End what is loading the model."""


Housed = TypeVar("Housed", bound=SleepyPool)


class Sizes(NamedTuple):
    """What was read of one version's processes, in bytes: all together, the largest worker by itself, and by how much
    one of them was larger before.
    """

    all_together: int
    largest_worker: int
    past_peak: int


class Doing(NamedTuple):
    """How many requests a version had had, and which processes it had: those of each worker, and the template's."""

    requests: int
    workers: Sequence[Sequence[int]]
    template: Sequence[int]


class Tenancy(WithoutDevices):
    """One version's place in the host's memory: what its pool asks. Made by `Residency.admit`."""

    def __init__(self, residency: Residency, options: PoolOptions, account: Account, key: tuple[str, str, int]) -> None:
        self.options = options
        self.account = account
        self.key = key
        self.pool: SleepyPool | None = None
        self.load_s = 0.0
        self.loaded_at: float | None = None
        self.begun_at = 0.0
        self.seen_requests = 0
        self.is_unsettled = False
        self.read_at = 0.0
        self.read_when: Doing | None = None  # what it had done when its sizes were read
        self.unawaited_since: float | None = None
        self.generation = 0
        self.give_up: Callable[[], None] | None = None
        self._residency = residency
        self._door = asyncio.Event()

    # ---------------------------------------------------------------------------------------------- what a pool asks

    def ask(self, workers: int) -> None:
        """Promise memory for so many workers. Raises NotEnoughMemory."""
        self._residency.ask(self, workers)

    def grow(self, workers: int) -> int:
        """How many of so many workers there is memory for that nobody else uses."""
        allowed = self._residency.ledger.grow(self.account, workers)
        if allowed < workers:  # who wants more asks again, and may find what spare versions held
            self._residency.want_spare(self.account.need.resident(workers) - self.account.own_bytes)
        return allowed

    def shrink(self, workers: int) -> None:
        """There are to be so few workers."""
        self._residency.ledger.shrink(self.account, workers)

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait for the memory that was asked for, at most `startupTimeout`. Raises NoMemoryNow."""
        if not self.account.workers and self.pool is not None and self.pool.wanted_workers:
            try:  # the wait before was given up, and here is the next try
                self.ask(self.pool.wanted_workers)
            except NotEnoughMemory as error:
                log.warning("%s", error)
                raise NoMemoryNow(self.options.model, retry_after_s=RETRY_AFTER_S) from None
        try:
            async with asyncio.timeout(self.options.startup_timeout_s):
                await self._door.wait()
        except TimeoutError:
            log.warning(
                "%s: no memory came free within startupTimeout, %g s",
                self.account.label,
                self.options.startup_timeout_s,
            )
            self._residency.give_up(self)
            raise NoMemoryNow(self.options.model, retry_after_s=RETRY_AFTER_S) from None

    def loaded(self) -> None:
        """A worker has loaded the model: see what it took."""
        if self.loaded_at is None:
            now = time.monotonic()
            self.loaded_at, self.load_s = now, max(0.0, now - self.begun_at)
        self.is_unsettled = True
        self.generation += 1  # what is being read now was begun before
        self._residency.look_soon()

    def emptied(self) -> None:
        """Processes have ended."""
        pool = self.pool
        if pool is not None and not pool.template_pids and not any(pool.pids_by_worker):
            self.generation += 1
            self.account.measured_bytes = 0
            self.loaded_at = None
        self._residency.look_soon()

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """The version serves nobody: before any other leaves, `give_up` is called. None: it serves."""
        self.give_up = give_up

    def close(self) -> None:
        """There is no process any more."""
        self._residency.close(self)

    @property
    def held_bytes(self) -> int:
        """What its processes were last seen to hold."""
        return self.account.measured_bytes

    @property
    def described(self) -> Mapping[str, Any]:
        """The member `memory` of describe."""
        account, need = self.account, self.account.need
        state = "asleep"
        if account.is_waiting:
            state = "waiting"
        elif self.pool is not None and self.pool.ready_workers:
            state = "loaded"
        elif account.leaving_bytes:
            state = "leaving"
        elif account.workers:
            state = "loading"
        return {
            "memory": {
                "state": state,
                "residentBytes": account.measured_bytes,
                "promisedBytes": account.promised_bytes,
                "neededBytes": need.first_bytes,
                "neededForAnotherWorkerBytes": need.more_bytes,
                "source": need.source,
                "mayMakeRoom": self.may_leave,
            }
        }

    # ---------------------------------------------------------------------------------------------- what residency asks

    @property
    def may_leave(self) -> bool:
        """Whether it makes room for others at all."""
        if self.give_up is not None:
            return True
        return self.pool is not None and self.pool.can_sleep and not self.options.is_pinned

    def may_hold_more(self, doing: Doing, now: float) -> bool:
        """Whether its sizes should be read again: it is at work, has been since, has other processes, or long ago."""
        is_at_work = self.pool is not None and self.pool.is_in_use
        return is_at_work or doing != self.read_when or now >= self.read_at + LOOK_AT_REST_S

    def let_in(self) -> None:
        """There is room: whoever waits at the door may begin."""
        self.begun_at = time.monotonic()
        self._door.set()

    def keep_out(self) -> None:
        """There is no room yet."""
        self._door.clear()


class Residency:
    """The memory for models of one server."""

    def __init__(
        self,
        budget_bytes: int,
        learned: LearnedMemory,
        *,
        least_residence_s: float,
        shared_pids: Callable[[], Sequence[int]] = list,
        read_sizes: Callable[[Sequence[Sequence[int]], Sequence[int]], Sizes] | None = None,
    ) -> None:
        """`shared_pids` are processes that belong to no version: templates that have only imported."""
        self.ledger = Ledger(budget_bytes)
        self.refused = 0
        self._learned = learned
        self._least_residence_s = least_residence_s
        self._shared_pids = shared_pids
        self._read_sizes = read_sizes or sizes_of
        self._demand: Demand[Tenancy] = Demand()
        self._tenancies: dict[Account, Tenancy] = {}
        self._soon = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()
        self._not_before = 0.0
        self._written_at = 0.0
        self._is_told = False

    def figures(self) -> MemoryFigures:
        """For the metrics."""
        return MemoryFigures(self.ledger.budget_bytes, self.ledger.held_bytes, self.refused)

    # ---------------------------------------------------------------------------------------------- coming and going

    def admit(self, options: PoolOptions) -> Tenancy:
        """A place for a version, with memory promised for its least number of workers.

        Raises NotEnoughMemory; nothing is left of it then. Its pool is to be set, and it is to be closed at its end.
        """
        key = _key(options)
        learned = self._learned.get(key)
        account = self.ledger.open(_label(options), self._need(options))
        tenancy = Tenancy(self, options, account, key)
        tenancy.load_s = learned.load_s if learned is not None else 0.0
        self._tenancies[account] = tenancy
        self._demand.add([(tenancy, 0)])
        if options.min_workers:
            try:
                self.ask(tenancy, options.min_workers)
            except NotEnoughMemory:
                self.close(tenancy)
                raise
        return tenancy

    def _need(self, options: PoolOptions) -> Need:
        shares_weights = options.worker_start != "fresh" and not (options.gpu_ids or options.ranks or options.python)
        return need_of(
            declared_bytes=options.memory_bytes,
            learned=self._learned.get(_key(options)),
            weight_bytes=options.weight_bytes,
            shares_weights=shares_weights,
            uses_devices=bool(options.gpu_ids),
        )

    def foresee(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> dict[str, Any]:
        """What so many workers of a version would take in the host's memory, and what there is, in bytes.

        It has `before` workers; None: it is not there, though a version of its name may be. `leaving` will have gone
        before. Nothing changes, and nothing is promised. Raises NotEnoughMemory, as `ask` would.
        """
        there = None if before is None else self._account_of(options)
        account = there or Account(_label(options), self._need(options))
        gone = None if leaving is None else self._account_of(leaving)
        ledger = self.ledger

        def stays(other: Account) -> bool:
            return other is not gone and not self._tenancies[other].may_leave

        try:
            own, could_be_had = ledger.weigh(account, workers, stays)
        except DoesNotFit as error:
            raise self._refusal(options, account, error) from None
        more = own - account.own_bytes - (gone.own_bytes if gone is not None else 0)
        return {
            "moreBytes": more,
            "source": account.need.source,
            "freeBytes": ledger.free_bytes,
            "couldBeHadBytes": could_be_had,
            "budgetBytes": ledger.budget_bytes,
            "othersMakeRoom": more > ledger.free_bytes,
        }

    def _account_of(self, options: PoolOptions) -> Account | None:
        """The account of the version of this name that serves."""
        label = _label(options)
        there = (each for each in self._tenancies.values() if each.account.label == label and each.give_up is None)
        return next((each.account for each in there), None)

    def close(self, tenancy: Tenancy) -> None:
        """A version and all of its processes are gone."""
        self.ledger.close(tenancy.account)
        self._tenancies.pop(tenancy.account, None)
        self._demand.forget(tenancy)
        tenancy.let_in()
        self.look_soon()

    def ask(self, tenancy: Tenancy, workers: int) -> None:
        """Promise a version memory for so many workers; others begin to leave where that is needed for it.

        Raises NotEnoughMemory, with the numbers, where it cannot be had.
        """
        account, ledger = tenancy.account, self.ledger
        try:
            is_in = ledger.ask(account, workers, stays=lambda other: not self._tenancies[other].may_leave)
        except DoesNotFit as error:
            self.refused += 1
            raise self._refusal(tenancy.options, account, error) from None
        if is_in:
            tenancy.let_in()
        else:
            tenancy.keep_out()
            self._make_room()
        self.look_soon()

    def _refusal(self, options: PoolOptions, account: Account, error: DoesNotFit) -> NotEnoughMemory:
        return NotEnoughMemory(
            options.model,
            options.version,
            needed_bytes=error.needed_bytes,
            source=account.need.source,
            could_be_had=error.could_be_had,
            budget_bytes=self.ledger.budget_bytes,
            holders=error.holders,
        )

    def want_spare(self, needed_bytes: int) -> None:
        """Somebody would have a use for so much more: versions end that serve nobody."""
        short = needed_bytes - self.ledger.free_bytes - self.ledger.leaving_bytes
        if short > 0:
            self._give_up_spare(short)

    def give_up(self, tenancy: Tenancy) -> None:
        """Who waits for memory waits no longer."""
        self.ledger.withdraw(tenancy.account)
        tenancy.keep_out()
        self.look_soon()

    # ---------------------------------------------------------------------------------------------- making room

    def _make_room(self) -> None:
        """Let those in for whom there is room; where there is none, tell others to leave, for as many as possible."""
        ledger = self.ledger
        for account in ledger.grant():
            tenancy = self._tenancies[account]
            tenancy.let_in()
        places = 0
        while places <= len(ledger.waiting):
            short = ledger.shortage(places)
            if short and not self._evict(short, for_whom=ledger.waiting[places - 1] if places else None):
                if not places:
                    self._bear(short)
                return
            places += 1
        self._is_told = False

    def _forget_unawaited(self) -> None:
        """Let nobody leave for a model whose clients have all gone, or whose deadlines have passed, while it waited."""
        now = time.monotonic()
        for account in list(self.ledger.waiting):
            tenancy = self._tenancies[account]
            pool = tenancy.pool
            if pool is None or not pool.can_sleep or pool.is_awaited:
                tenancy.unawaited_since = None
            elif tenancy.unawaited_since is None:
                tenancy.unawaited_since = now
            elif now - tenancy.unawaited_since >= UNAWAITED_S:
                tenancy.unawaited_since = None
                self.ledger.withdraw(account)
                tenancy.keep_out()
                pool.sleep("asleep: nobody waits for it any more")

    def _evict(self, needed_bytes: int, for_whom: Account | None) -> bool:
        """Tell versions to leave that hold so much together; False, and nothing is done, where that is not possible."""
        now = time.monotonic()
        self._count_demand()
        spare = self._give_up_spare(needed_bytes)
        if spare >= needed_bytes:
            return True
        names = choose_victims(self._residents(), needed_bytes - spare, now).names
        why = f"{for_whom.label} needs {_mib(for_whom.own_bytes)} MiB" if for_whom else "models have grown"
        for tenancy in names:
            self._put_to_sleep(tenancy, why)
        return bool(names)

    def _give_up_spare(self, needed_bytes: int) -> int:
        """Have versions end that serve nobody, until so much is on its way; gives how much is."""
        freed = 0
        for tenancy in list(self._tenancies.values()):
            give_up = tenancy.give_up
            if give_up is None or freed >= needed_bytes:
                continue
            log.info("%s makes room (%s MiB)", tenancy.account.label, _mib(tenancy.account.own_bytes))
            freed += self.ledger.leave(tenancy.account)  # it is off the books when its processes have ended
            tenancy.generation += 1
            tenancy.loaded_at = None
            tenancy.is_unsettled = False
            tenancy.give_up = None
            give_up()
        return freed

    def _residents(self) -> list[Resident[Tenancy]]:
        residents = []
        for account, tenancy in self._tenancies.items():
            if not tenancy.may_leave or tenancy.give_up is not None or account.is_waiting or not account.own_bytes:
                continue
            assert tenancy.pool is not None
            since = tenancy.loaded_at
            residents.append(
                Resident(
                    tenancy,
                    account.own_bytes,
                    tenancy.load_s,
                    self._demand.of(tenancy),
                    stays_until=since + self._least_residence_s if since is not None else 0.0,
                    is_in_use=tenancy.pool.is_in_use,
                )
            )
        return residents

    def _count_demand(self) -> None:
        arrived = []
        for tenancy in self._tenancies.values():
            if tenancy.pool is not None:
                requests = tenancy.pool.metrics.requests
                arrived.append((tenancy, requests - tenancy.seen_requests))
                tenancy.seen_requests = requests
        self._demand.add(arrived)

    def _put_to_sleep(self, tenancy: Tenancy, why: str) -> None:
        pool = tenancy.pool
        assert pool is not None
        log.info("%s makes room (%s MiB): %s", tenancy.account.label, _mib(tenancy.account.own_bytes), why)
        size = self.ledger.leave(tenancy.account)
        tenancy.generation += 1
        tenancy.loaded_at = None
        tenancy.is_unsettled = False
        pool.metrics.evictions += 1
        pool.sleep(f"asleep: it made room, for {why}")
        task = asyncio.create_task(self._see_out(tenancy, pool, size))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _see_out(self, tenancy: Tenancy, pool: SleepyPool, size: int) -> None:
        try:
            await pool.wait_until_asleep()
        finally:
            self.ledger.gone(tenancy.account, size)
            self._make_room()

    def _bear(self, over_bytes: int) -> None:
        """Models hold more than there is, and none of them may leave: end what is still loading, or say so, once."""
        loading = [
            tenancy
            for account, tenancy in self._tenancies.items()
            if tenancy.pool is not None and tenancy.pool.is_loading and account.measured_bytes > account.promised_bytes
        ]
        for tenancy in loading:
            account = tenancy.account
            why = (
                f"while it was loaded it took {_mib(account.measured_bytes)} MiB, more than the "
                f"{_mib(account.promised_bytes)} MiB that were {account.need.source}, and there is no more for it"
            )
            log.error("%s is not loaded: %s", account.label, why)
            account.measured_bytes = 0
            tenancy.generation += 1
            tenancy.pool.end_loading(why)  # type: ignore[union-attr]
        if not loading and not self._is_told:
            self._is_told = True
            log.warning(
                "Models hold %s MiB more than model_memory, %s MiB, and none of them may be put to sleep now",
                _mib(over_bytes),
                _mib(self.ledger.budget_bytes),
            )

    # ---------------------------------------------------------------------------------------------- the watch

    def look_soon(self) -> None:
        """Something has changed: look again at once."""
        self._soon.set()

    async def run(self) -> None:
        """Look at the processes for ever, as often as there is reason to."""
        await asyncio.to_thread(self._learned.read)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._soon.wait()
            self._soon.clear()
            self._forget_unawaited()
            self._make_room()
            await self._measure()
            if self._learned.is_changed and time.monotonic() - self._written_at >= WRITE_EVERY_S:
                await asyncio.to_thread(self._learned.write)
                self._written_at = time.monotonic()

    async def close_all(self) -> None:
        """See those out that are leaving, and keep what was learned."""
        if self._leaving:
            await asyncio.wait(self._leaving)
        await asyncio.to_thread(self._learned.write)

    def _pause_s(self) -> float | None:
        if self.ledger.waiting:
            return LOOK_AFTER_WAITING_S
        if any(tenancy.pool is not None and tenancy.pool.is_loading for tenancy in self._tenancies.values()):
            return LOOK_WHILE_LOADING_S
        if self._learned.is_changed:
            return WRITE_EVERY_S
        return LOOK_EVERY_S if any(account.own_bytes for account in self._tenancies) else None

    async def _measure(self) -> None:
        """Read sizes: of those that have just loaded or are loading, and from time to time of all."""
        now = time.monotonic()
        wants_all = now >= self._not_before
        chosen = [
            (tenancy, tenancy.generation, doing)
            for account, tenancy in self._tenancies.items()
            if (pool := tenancy.pool) is not None
            and not account.leaving_bytes
            and not account.is_waiting
            and (doing := _doing(pool))
            and (tenancy.is_unsettled or pool.is_loading or (wants_all and tenancy.may_hold_more(doing, now)))
        ]
        shared = list(self._shared_pids()) if wants_all else None
        if not chosen and shared is None:
            return
        read, read_sizes = [], self._read_sizes
        read = await asyncio.to_thread(lambda: [read_sizes(doing.workers, doing.template) for *_, doing in chosen])
        if shared is not None:
            self.ledger.shared_bytes = (await asyncio.to_thread(read_sizes, [], shared)).all_together
        if wants_all:
            took_s = time.monotonic() - now
            self._not_before = time.monotonic() + max(LOOK_EVERY_S, PAUSE_PER_READING * took_s)
        for (tenancy, generation, doing), sizes in zip(chosen, read, strict=True):
            if tenancy.generation == generation and tenancy.account in self._tenancies:
                tenancy.read_at, tenancy.read_when = now, doing
                self._note(tenancy, sizes, len(doing.workers))
        self._make_room()

    def _note(self, tenancy: Tenancy, sizes: Sizes, workers: int) -> None:
        account, pool = tenancy.account, tenancy.pool
        assert pool is not None
        if not tenancy.is_unsettled or not pool.ready_workers or not sizes.all_together:
            account.measured_bytes = sizes.all_together
            return
        first = max(sizes.largest_worker, sizes.all_together - max(0, workers - 1) * sizes.largest_worker)
        peak = first + sizes.past_peak
        learned = Learned(first, sizes.largest_worker, peak, tenancy.load_s)
        self._learned.put(tenancy.key, learned)
        if pool.is_loading:
            account.measured_bytes = sizes.all_together
            return
        tenancy.is_unsettled = False
        self.ledger.settle(account, sizes.all_together, learned)
        log.info(
            "%s holds %s MiB with %d workers, %s MiB at most while it was loaded",
            account.label,
            _mib(sizes.all_together),
            workers,
            _mib(peak + (workers - 1) * sizes.largest_worker),
        )


def sizes_of(workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
    """Read them. Blocks: the kernel walks page tables, milliseconds for gigabytes."""
    pids = [*template, *(pid for own in workers for pid in own)]
    held = {pid: held_bytes(pid) for pid in pids}
    return Sizes(
        sum(each.proportional for each in held.values()),
        max((sum(held[pid].own for pid in own) for own in workers), default=0),
        max(map(past_peak_bytes, pids), default=0),
    )


def _doing(pool: SleepyPool) -> Doing:
    return Doing(pool.metrics.requests, [list(pids) for pids in pool.pids_by_worker], list(pool.template_pids))


def _key(options: PoolOptions) -> Key:
    return options.model, options.version, options.weight_bytes


def _label(options: PoolOptions) -> str:
    return f"{options.model} {options.version}"


def _mib(size_bytes: int) -> str:
    return f"{round(size_bytes / (1024 * 1024)):,}"
