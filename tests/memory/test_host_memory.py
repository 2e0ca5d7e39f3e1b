"""Who is in memory: pools are told to sleep, those who wait are let in when it is free, and not before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from marserve.errors import NoMemoryNow, NotEnoughMemory
from marserve.memory import host_memory
from marserve.memory.host_memory import HostMemory, MemoryOnHost, Sizes, sizes_of
from marserve.memory.learned_memory import LearnedMemory, key_of
from marserve.memory.ledger import Ledger
from marserve.memory.needs import MIB, Learned
from marserve.memory.waiting_line import WaitingLine
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What they run on."""
    return "asyncio"


class Sleeper:
    """A pool without processes. Its memory is `held`; its processes end when the test says so."""

    def __init__(self, options: PoolOptions, world: World) -> None:
        self.options = options
        self.metrics = VersionMetrics(options.model, options.version)
        self.can_sleep = not options.min_workers
        self.is_in_use = False
        self.is_loading = False
        self.is_awaited = True
        self.wanted_workers = 0
        self.ready_workers = 0
        self.reasons: list[str] = []
        self.ended_loads: list[str] = []
        self.held = 0
        self.own = 0
        self.past_peak = 0
        self.readings = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._number = world.number(self)

    @property
    def pids_by_worker(self) -> list[list[int]]:
        """A number for each worker that is there."""
        return [[self._number]] * max(self.ready_workers, int(self.is_loading))

    @property
    def template_pids(self) -> list[int]:
        """It has none."""
        return []

    def sleep(self, reason: str) -> None:
        """Remember why."""
        self.reasons.append(reason)
        self.wanted_workers = 0

    async def wait_until_asleep(self) -> None:
        """Its processes end."""
        await self.may_end.wait()
        self.ready_workers = self.held = 0

    def end_loading(self, why: str) -> None:
        """Remember why."""
        self.ended_loads.append(why)
        self.is_loading, self.held = False, 0


class World:
    """A host's memory that measures sleepers, and is watched."""

    def __init__(self, budget: int, **facts: float) -> None:
        self.pools: dict[int, Sleeper] = {}
        self.learned = LearnedMemory(None)
        line = WaitingLine(Ledger(budget), least_residence_s=facts.get("least_residence_s", 0.0))
        self.host = HostMemory(line, self.learned, read_sizes=self._read)

    def number(self, pool: Sleeper) -> int:
        """A process id, which the reading of sizes finds it by."""
        self.pools[len(self.pools) + 1] = pool
        return len(self.pools)

    def _read(self, workers: Sequence[Sequence[int]], template: Sequence[int]) -> Sizes:
        pools = {pid: self.pools[pid] for own in workers for pid in own}
        held = sum(pool.held for pool in pools.values())
        own = max((pool.own for pool in pools.values()), default=0)
        for pool in pools.values():
            pool.readings += 1
        return Sizes(held, own, max((pool.past_peak for pool in pools.values()), default=0))

    def add(self, name: str, size: int, *, workers: int = 0, pinned: bool = False, **facts: float) -> MemoryOnHost:
        """A version that declares its size; one that sleeps until it is asked unless it has workers."""
        options = PoolOptions(
            name,
            "1.0",
            workers,
            max(1, workers),
            idle_timeout_s=None if workers else 1e9,
            memory_bytes=size,
            is_pinned=pinned,
            startup_timeout_s=facts.get("startup_timeout_s", 20.0),
        )
        return self._version_of(self.host.house(options, lambda reservations: self._make(options, reservations)))

    def _make(self, options: PoolOptions, reservations: object) -> Sleeper:
        pool = Sleeper(options, self)
        pool.reservations = reservations  # type: ignore[attr-defined]
        return pool

    def _version_of(self, pool: Sleeper) -> MemoryOnHost:
        reservations = pool.reservations  # type: ignore[attr-defined]
        assert isinstance(reservations, MemoryOnHost)
        return reservations

    async def load(self, version: MemoryOnHost, *, held: int | None = None) -> Sleeper:
        """Ask, enter, and have it loaded."""
        pool = pool_of(version)
        if not version.reserved.workers:
            version.ask(1)
        pool.wanted_workers = 1
        await asyncio.wait_for(version.enter(()), 5)
        pool.ready_workers = 1
        pool.held = pool.own = held if held is not None else version.reserved.need.first_bytes
        version.loaded()
        await self.until(lambda: not version.holder.is_unsettled)
        return pool

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0)


def pool_of(version: MemoryOnHost) -> Sleeper:
    """The sleeper of a version."""
    assert isinstance(version.pool, Sleeper)
    return version.pool


@contextlib.asynccontextmanager
async def world(budget: int, **facts: float) -> AsyncIterator[World]:
    """A world that is watched."""
    made = World(budget, **facts)
    task = asyncio.create_task(made.host.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        for pool in made.pools.values():
            pool.may_end.set()
        await made.host.close_all()


async def test_who_finds_room_begins_at_once() -> None:
    """Nobody is disturbed."""
    async with world(250) as there:
        first, second = there.add("a", 100), there.add("b", 100)
        await there.load(first)
        await there.load(second)

        assert there.host.line.ledger.held_bytes == 200
        assert pool_of(first).reasons == []


async def test_who_finds_none_waits_until_the_processes_of_another_are_gone() -> None:
    """The one that is asked for least is told to sleep; its memory counts until its processes have ended."""
    async with world(250) as there:
        often, seldom, new = (there.add(name, 100) for name in ("often", "seldom", "new"))
        for version in (often, seldom):
            await there.load(version)
        pool_of(often).metrics.requests, pool_of(seldom).metrics.requests = 10, 1
        pool_of(seldom).may_end.clear()

        new.ask(1)
        entering = asyncio.create_task(new.enter(()))
        await asyncio.sleep(0.05)
        was_in = entering.done()
        state = new.described["memory"]["state"], seldom.described["memory"]["state"]
        pool_of(seldom).may_end.set()
        await asyncio.wait_for(entering, 5)

        assert not was_in
        assert state == ("waiting", "loaded")
        assert pool_of(often).reasons == []
        assert len(pool_of(seldom).reasons) == 1
        assert "new 1.0 needs" in pool_of(seldom).reasons[0]
        assert pool_of(seldom).metrics.evictions == 1


async def test_what_is_in_use_or_pinned_never_makes_room() -> None:
    """Who comes waits until a request has ended, or is refused after `startupTimeout`."""
    async with world(250) as there:
        pinned, busy = there.add("pinned", 100, pinned=True), there.add("busy", 100)
        new = there.add("new", 100, startup_timeout_s=0.1)
        for version in (pinned, busy):
            await there.load(version)
        pool_of(busy).is_in_use = True

        new.ask(1)
        with pytest.raises(NoMemoryNow) as refused:
            await new.enter(())
        charged = there.host.line.ledger.held_bytes
        pool_of(busy).is_in_use = False
        await there.load(new)

        assert refused.value.retry_after_s == 1.0
        assert charged == 200
        assert pool_of(busy).reasons != []
        assert pool_of(pinned).reasons == []


async def test_who_could_never_fit_is_refused_at_once_with_the_numbers() -> None:
    """Beside what is pinned, or always there; nobody is put to sleep for it."""
    async with world(250 * MIB) as there:
        await there.load(there.add("always", 100 * MIB, workers=1))
        idle = there.add("idle", 100 * MIB)
        await there.load(idle)
        with pytest.raises(NotEnoughMemory) as refused:
            there.add("large", 151 * MIB, workers=1)
        asleep = there.add("asleep", 151 * MIB)

        with pytest.raises(NotEnoughMemory):
            asleep.ask(1)

        assert (
            "large version 1.0 does not fit into memory: it needs 151 MiB (declared), and 150 MiB of the 250 MiB for "
            "models can be had. Loaded, and not to be unloaded: always 1.0 with 100 MiB. Unregister or scale down"
        ) in str(refused.value)
        assert "always" not in str(refused.value.for_clients())
        assert there.host.refused == 2
        assert pool_of(idle).reasons == []
        assert there.host.line.ledger.held_bytes == 200 * MIB


async def test_what_serves_nobody_leaves_before_anything_else() -> None:
    """For a load and for more workers; a version that may sleep is not put to sleep for it."""
    async with world(100) as there:
        sleeper = there.add("sleeper", 30)
        await there.load(sleeper)
        spare = there.add("spare", 60, workers=1)
        await there.load(spare)
        given_up: list[str] = []

        def give_up() -> None:
            given_up.append("spare")

        spare.make_spare(give_up)
        assert spare.described["memory"]["mayMakeRoom"]
        comer = there.add("comer", 50, workers=1)
        assert given_up == ["spare"]
        entering = asyncio.create_task(comer.enter(()))
        await asyncio.sleep(0)
        assert not entering.done()  # its processes are still there

        spare.close()
        await asyncio.wait_for(entering, 5)
        assert pool_of(sleeper).reasons == []
        assert there.host.line.ledger.held_bytes <= 100


async def test_what_serves_again_stays() -> None:
    """Whoever needs its memory then is refused, as beside any version that serves."""
    async with world(100) as there:
        spare = there.add("spare", 60, workers=1)
        await there.load(spare)
        given_up: list[str] = []
        spare.make_spare(lambda: given_up.append("spare"))
        assert spare.grow(1) == 1
        assert given_up == []

        spare.make_spare(None)
        with pytest.raises(NotEnoughMemory):
            there.add("comer", 50, workers=1)

        assert given_up == []


async def test_more_workers_have_what_serves_nobody_leave() -> None:
    """The next time that somebody asks for more there is room for it."""
    async with world(100) as there:
        grower = there.add("grower", 30, workers=1)
        await there.load(grower)
        spare = there.add("spare", 60, workers=1)
        await there.load(spare)
        spare.make_spare(spare.close)

        assert grower.grow(2) == 1
        assert grower.grow(2) == 2


async def test_what_came_a_moment_ago_stays_for_the_least_residence() -> None:
    """Models that take each other's place in turn would all be loading, and none answering."""
    async with world(150, least_residence_s=0.2) as there:
        first, second = there.add("a", 100), there.add("b", 100)
        await there.load(first)
        since = first.holder.loaded_at

        await there.load(second)

        assert since is not None
        assert time.monotonic() - since >= 0.2
        assert pool_of(first).reasons != []


async def test_nobody_leaves_for_a_model_that_nobody_waits_for_any_more() -> None:
    """Its clients have gone, or their deadlines have passed, while it waited for memory."""
    async with world(150) as there:
        busy, new = there.add("busy", 100), there.add("new", 100)
        await there.load(busy)
        pool_of(busy).is_in_use = True

        new.ask(1)
        pool_of(new).is_awaited = False
        await there.until(lambda: bool(pool_of(new).reasons))
        pool_of(busy).is_in_use = False
        await asyncio.sleep(0.05)

        assert pool_of(busy).reasons == []
        assert there.host.line.ledger.held_bytes == 100


async def test_several_who_wait_are_all_let_in() -> None:
    """For each of them somebody leaves, without waiting for the others to be gone first."""
    async with world(300) as there:
        old = [there.add(f"old-{number}", 100) for number in range(3)]
        for version in old:
            await there.load(version)
        new = [there.add(f"new-{number}", 100) for number in range(3)]

        for version in new:
            version.ask(1)
        reasons = [len(pool_of(version).reasons) for version in old]
        await asyncio.wait_for(asyncio.gather(*(version.enter(()) for version in new)), 5)

        assert reasons == [1, 1, 1]


async def test_a_model_that_grows_makes_idle_ones_leave() -> None:
    """Before the kernel chooses somebody."""
    async with world(300) as there:
        growing, idle = there.add("growing", 100), there.add("idle", 100)
        for version in (growing, idle):
            await there.load(version)
        pool_of(growing).is_in_use = True
        pool_of(growing).held = 250

        pool_of(growing).is_loading = True  # looked at more often then
        there.host.look_soon()
        await there.until(lambda: bool(pool_of(idle).reasons))

        assert "models have grown" in pool_of(idle).reasons[0]


@pytest.mark.parametrize(
    ("change", "is_read"),
    [(lambda pool: None, False), (lambda pool: setattr(pool.metrics, "requests", 1), True),
     (lambda pool: setattr(pool, "is_in_use", True), True), (lambda pool: setattr(pool, "ready_workers", 2), True)],
    ids=["at rest", "had a request", "at work", "another worker"],
)  # fmt: skip
async def test_of_a_model_at_rest_nothing_is_read(
    change: Callable[[Sleeper], None], is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel walks a process's memory for it: hundreds of idle workers would keep a core busy for nothing."""
    monkeypatch.setattr(host_memory, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(host_memory, "PAUSE_PER_READING", 0.0)
    async with world(300) as there:
        quiet, busy = there.add("quiet", 100), there.add("busy", 100)
        for version in (quiet, busy):
            await there.load(version)
        pool_of(busy).is_in_use = True
        await there.until(lambda: pool_of(quiet).readings > 0 and pool_of(busy).readings > 1)
        before, others = pool_of(quiet).readings, pool_of(busy).readings

        change(pool_of(quiet))
        pool_of(quiet).held = 110
        await there.until(lambda: pool_of(busy).readings > others + 5)

        assert (pool_of(quiet).readings > before) == is_read
        assert (quiet.reserved.measured_bytes == 110) == is_read


async def test_a_model_at_rest_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its own may have taken memory."""
    monkeypatch.setattr(host_memory, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(host_memory, "PAUSE_PER_READING", 0.0)
    monkeypatch.setattr(host_memory, "LOOK_AT_REST_S", 0.05)
    async with world(300) as there:
        quiet = there.add("quiet", 100)
        await there.load(quiet)

        pool_of(quiet).held = 110
        await there.until(lambda: quiet.reserved.measured_bytes == 110)


async def test_a_load_that_takes_more_than_there_is_is_ended() -> None:
    """And the others are left alone: it is the one that was not what it said."""
    async with world(300 * MIB) as there:
        busy, liar = there.add("busy", 150 * MIB), there.add("liar", 50 * MIB)
        await there.load(busy)
        pool_of(busy).is_in_use = True

        liar.ask(1)
        await asyncio.wait_for(liar.enter(()), 5)
        pool = pool_of(liar)
        pool.is_loading, pool.is_in_use, pool.held = True, True, 400 * MIB
        there.host.look_soon()
        await there.until(lambda: bool(pool.ended_loads))

        assert "it took 400 MiB, more than the 50 MiB that were declared" in pool.ended_loads[0]
        assert pool_of(busy).ended_loads == pool_of(busy).reasons == []


async def test_what_a_load_took_is_learned() -> None:
    """With its peak; and the next version of the same files is admitted by it."""
    async with world(1000) as there:
        version = there.add("a", 100)
        pool_of(version).past_peak = 70
        await there.load(version, held=120)

        learned = there.learned.get(key_of(version.holder.options))

        assert learned is not None
        assert (learned.first_bytes, learned.more_bytes, learned.peak_bytes) == (120, 120, 190)
        assert version.described["memory"]["residentBytes"] == 120


async def test_who_leaves_for_good_takes_its_charge_along() -> None:
    """Whoever waits for the memory is let in."""
    async with world(150) as there:
        always, new = there.add("always", 100, workers=1), there.add("new", 40)
        await there.load(always)
        later = there.add("later", 100)
        with pytest.raises(NotEnoughMemory):
            later.ask(1)

        always.close()
        await there.load(later)
        await there.load(new)

        assert there.host.line.ledger.held_bytes == 140


async def test_processes_that_end_by_themselves_give_their_memory_back() -> None:
    """A model that went to sleep because nobody asked."""
    async with world(150) as there:
        idle, new = there.add("idle", 100), there.add("new", 100)
        pool = await there.load(idle)

        pool.ready_workers = pool.held = 0
        idle.shrink(0)
        idle.emptied()

        assert there.host.line.ledger.held_bytes == 0
        await there.load(new)
        assert pool.reasons == []


async def test_a_pool_that_cannot_be_made_leaves_nothing() -> None:
    """On the books."""
    async with world(150) as there:
        options = PoolOptions("a", "1.0", 1, 1, memory_bytes=100)

        def fail(_: object) -> Sleeper:
            raise RuntimeError("no pool")

        with pytest.raises(RuntimeError):
            there.host.house(options, fail)

        assert there.host.line.ledger.held_bytes == 0


# ------------------------------------------------------------------------------------------------- what was learned


def test_what_was_learned_outlives_the_server(tmp_path: Path) -> None:
    """For weights of the same size, and for no others."""
    path = tmp_path / "state" / "memory.json"
    first = LearnedMemory(path)
    first.put(("m", "1.0", 500), Learned(10, 2, 30, 1.25))

    first.write()
    second = LearnedMemory(path)
    second.read()

    assert second.get(("m", "1.0", 500)) == Learned(10, 2, 30, 1.25)
    assert second.get(("m", "1.0", 501)) is None
    assert [file.name for file in path.parent.iterdir()] == ["memory.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        '{"format": 2, "models": []}',
        '{"format": 1, "models": 5}',
        '{"format": 1, "models": [5, {}, {"model": "m"}]}',
        '{"format": 1, "models": [{"model": "m", "version": "1", "weightBytes": 1, "firstBytes": -1, "moreBytes": 1,'
        ' "peakBytes": 1, "loadSeconds": 1}]}',
    ],
)
def test_a_file_that_makes_no_sense_counts_as_empty(tmp_path: Path, text: str) -> None:
    """What it holds is only a convenience."""
    path = tmp_path / "memory.json"
    path.write_text(text)
    learned = LearnedMemory(path)

    learned.read()

    assert learned.get(("m", "1", 1)) is None


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And nothing else fails for it."""
    (tmp_path / "file").write_text("in the way")
    learned = LearnedMemory(tmp_path / "file" / "memory.json")

    for number in range(3):
        learned.put(("m", "1.0", number), Learned(1, 1, 1, 1.0))
        learned.write()

    assert len(caplog.records) == 1


def test_sizes_of_this_process_are_read() -> None:
    """All of it, and what of it is its own."""
    sizes = sizes_of([[os.getpid()]], [])

    assert sizes.all_together > 5 * MIB
    assert 0 < sizes.largest_worker <= sizes.all_together
    assert sizes.past_peak >= 0


async def test_what_would_be_needed_is_told_and_not_promised() -> None:
    """For a version that is not there, and for one that would get more workers; who could never fit is refused."""
    async with world(100 * MIB) as here:
        served = here.add("served", 60 * MIB, workers=1)
        await here.load(served)
        asleep = here.add("asleep", 20 * MIB)
        await here.load(asleep)
        new = PoolOptions("new", "1.0", 1, 1, memory_bytes=30 * MIB)
        before = (here.host.line.ledger.held_bytes, here.host.refused)

        told = here.host.foresee(new, None, 1)
        more = here.host.foresee(served.holder.options, 1, 1)
        with pytest.raises(NotEnoughMemory, match="needs 50 MiB"):
            here.host.foresee(PoolOptions("huge", "1.0", 1, 1, memory_bytes=50 * MIB), None, 1)

        huge = replace(new, memory_bytes=90 * MIB)
        instead = here.host.foresee(huge, None, 1, served.holder.options)
        with pytest.raises(NotEnoughMemory, match="needs 101 MiB"):
            here.host.foresee(replace(huge, memory_bytes=101 * MIB), None, 1, served.holder.options)

        assert (instead["moreBytes"], instead["othersMakeRoom"]) == (30 * MIB, True)
        assert told == {
            "moreBytes": 30 * MIB,
            "source": "declared",
            "freeBytes": 20 * MIB,
            "couldBeHadBytes": 40 * MIB,
            "budgetBytes": 100 * MIB,
            "othersMakeRoom": True,
        }
        assert (more["moreBytes"], more["othersMakeRoom"]) == (0, False)
        assert (here.host.line.ledger.held_bytes, here.host.refused) == before
        assert pool_of(asleep).reasons == []
