"""Models that may sleep make room on devices: who leaves, who waits, and who is let in when the memory is there."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from marserve.errors import NoMemoryNow, NotEnoughDeviceMemory, NotEnoughMemory
from marserve.machine.accelerators import DeviceReading
from marserve.machine.devices import Assigner
from marserve.memory import eviction, waiting_line
from marserve.memory.device_memory import DeviceMemory, MemoryOnDevices
from marserve.memory.host_memory import HostMemory, Sizes
from marserve.memory.learned_memory import LearnedMemory
from marserve.memory.ledger import HOST, Ledger
from marserve.memory.needs import MIB
from marserve.memory.waiting_line import WaitingLine
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Reservations
from marserve.telemetry.happenings import Happenings
from marserve.telemetry.metrics.counts import VersionMetrics

pytestmark = pytest.mark.anyio

TOTAL = 80_000


@pytest.fixture
def anyio_backend() -> str:
    """What they run on."""
    return "asyncio"


class Slot:
    """A worker's place, and what its process does: it takes its memory at once, and frees it when it has ended."""

    def __init__(self, pool: Sleeper, key: str, uses: tuple[int, ...]) -> None:
        self.worker_key, self.uses = key, uses
        self.process: list[int] = []  # devices that it holds memory of
        self._pool = pool
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        pool = self._pool
        try:
            await pool.reservations.enter(self.uses)
            pool.reservations.begin(self.worker_key, self.uses)
        except (NotEnoughMemory, NoMemoryNow) as error:
            pool.failed.append(error)
            return
        self.process = list(self.uses)
        assert min(pool.house.watch.free_of(device) for device in range(pool.house.watch.devices)) >= 0
        pool.is_loading = False
        pool.reservations.loaded_on_device(self.worker_key, 0)

    def end(self) -> None:
        """The process is gone."""
        self.process = []
        self._pool.reservations.ended_on_device(self.worker_key)


class Sleeper:
    """A pool: awake with workers, or asleep."""

    def __init__(self, house: House, reservations: Reservations, options: PoolOptions) -> None:
        self.house, self.reservations, self.options = house, reservations, options
        self.slots: list[Slot] = []
        self.leaving: list[Slot] = []
        self.metrics = VersionMetrics(options.model, options.version)
        self.can_sleep, self.is_awaited = True, True
        self.is_loading = self.has_requests = False
        self.wanted_workers = 0
        self.template_pids: list[int] = []
        self.has_gone = asyncio.Event()
        self.reasons: list[str] = []
        self.failed: list[Exception] = []
        self._begun = 0

    @property
    def is_in_use(self) -> bool:
        """Whether it has requests, or is being loaded."""
        return self.has_requests or self.is_loading

    def ask(self, workers: int = 1) -> None:
        """A request comes, and brings workers. Raises NotEnoughDeviceMemory."""
        self.metrics.requests += 1
        if self.slots:
            return
        self.reservations.ask(workers)
        self.start(workers)

    def start(self, workers: int) -> None:
        """Begin workers in the places that are kept for them."""
        self.is_loading = True
        for _ in range(workers):
            devices = self.reservations.place()
            assert devices is not None
            self._begun += 1
            self.slots.append(Slot(self, f"{self._begun}", devices))

    @property
    def is_loaded(self) -> bool:
        """Whether all of its workers have taken their memory."""
        return bool(self.slots) and all(slot.process for slot in self.slots)

    def devices_read(self) -> None:
        """None is ever lost."""

    async def wait_until_asleep(self) -> None:
        """Until `see_out`."""
        await self.has_gone.wait()

    @property
    def ready_workers(self) -> int:
        """Workers that have taken their memory."""
        return sum(bool(slot.process) for slot in self.slots)

    @property
    def pids_by_worker(self) -> list[list[int]]:
        """A number for each process, of those that are leaving, too."""
        return [[1] for slot in (*self.slots, *self.leaving) if slot.process]

    def sleep(self, reason: str) -> None:
        """Tell the workers to end: `see_out` has them ended."""
        self.reasons.append(reason)
        self.has_gone.clear()
        for slot in self.slots:
            slot.task.cancel()
        self.leaving += self.slots
        self.slots, self.is_loading = [], False
        self.reservations.shrink(0)

    def see_out(self) -> None:
        """The processes of those that were told to end have ended."""
        leaving, self.leaving = self.leaving, []
        for slot in leaving:
            slot.end()
        self.reservations.emptied()
        self.has_gone.set()


class Watch:
    """Reads what the living processes hold; `others` is what programs of others do, in MiB by device."""

    def __init__(self, house: House, devices: int) -> None:
        self.devices, self.others = devices, [0] * devices
        self.looks = 0
        self.is_quick, self.read_at = True, 0.0
        self._house = house
        self._seen = [TOTAL] * devices

    def of(self, device: int) -> DeviceReading:
        """What is known of one."""
        if self.is_quick:
            self.read()
        return DeviceReading(str(device), (TOTAL - self._seen[device]) * MIB, TOTAL * MIB)

    def read(self) -> None:
        """Look at the devices now."""
        self._seen = [self.free_of(device) for device in range(self.devices)]
        self.read_at = time.monotonic()

    def trouble_of(self, device: int) -> str:
        """Each is sound."""
        return ""

    def sound_since(self, device: int) -> float:
        """Always."""
        return -math.inf

    def listen(self, listener: object) -> None:
        """Nothing is heard of readings."""

    def look_soon(self) -> None:
        """Something changed."""
        self.looks += 1

    def free_of(self, device: int) -> int:
        """MiB that nobody holds."""
        held = sum(
            pool.megabytes * slot.process.count(device)
            for pool in self._house.pools
            for slot in (*pool.slots, *pool.leaving)
        )
        return TOTAL - self.others[device] - held


class Model(Sleeper):
    """A pool whose workers take so many MiB each."""

    @property
    def megabytes(self) -> int:
        """What a worker takes."""
        assert self.options.device_memory_bytes is not None
        return self.options.device_memory_bytes // MIB


class House:
    """Devices, and the models on them."""

    def __init__(self, devices: int, *, least_residence_s: float = 0.0, budget: int = 0) -> None:
        self.pools: list[Model] = []
        self.watch = Watch(self, devices)
        line = WaitingLine(Ledger(budget, self.watch), least_residence_s=least_residence_s, watch=self.watch)
        self.host = HostMemory(line, LearnedMemory(None), read_sizes=lambda *_: Sizes(0, 0, 0)) if budget else None
        self.memory = DeviceMemory(line, self.watch, Assigner(devices), LearnedMemory(None))

    def add(self, name: str, megabytes: int = 30_000, inner: Reservations | None = None, **given: object) -> Model:
        """A model that is loaded when it is asked for."""
        options = PoolOptions(
            name, "1.0", **{"min_workers": 0, "max_workers": 4, **given},  # type: ignore[arg-type]
            gpu_ids=tuple(range(self.watch.devices)), device_memory_bytes=megabytes * MIB,
        )  # fmt: skip

        def make(reservations: Reservations) -> Model:
            assert isinstance(reservations, MemoryOnDevices)
            self.pools.append(Model(self, reservations, options))
            return self.pools[-1]

        if self.host is not None:
            return self.host.house(options, lambda reservations: self.memory.house(reservations, options, make))
        return self.memory.house(inner or Reservations(), options, make)

    async def add_loaded(self, name: str, megabytes: int = 30_000, requests: int = 1, **given: object) -> Model:
        """A model that was asked for so often, and is there."""
        model = self.add(name, megabytes, **given)  # type: ignore[arg-type]
        for _ in range(requests):
            model.ask()
        await until(lambda: model.is_loaded, f"{name} is loaded")
        return model


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait, for at most 5 s."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)
    assert condition(), what


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_line, "LOOK_S", 0.005)
    monkeypatch.setattr(eviction, "LEAST_LOAD_S", 60.0)  # a busy machine makes no load longer than another


async def test_an_eviction_is_noted_for_explanations_and_traces() -> None:
    """With whose it was."""
    house, happenings = House(1), Happenings()
    seldom = await house.add_loaded("seldom", 60_000)
    seldom.metrics.happenings = happenings

    house.add("new").ask()

    assert [(each.kind, each.model, each.version) for each in happenings] == [("eviction", "seldom", "1.0")]


async def test_who_is_asked_for_least_makes_room_and_whoever_waits_begins_when_it_is_gone() -> None:
    """Not when it was told to go: a process frees its memory when it ends."""
    house = House(1)
    often, seldom = await house.add_loaded("often", requests=9), await house.add_loaded("seldom")
    new = house.add("new")

    new.ask()

    assert (often.reasons, seldom.reasons) == ([], ["asleep: it made room on device 0, for new 1.0"])
    assert (often.metrics.evictions, seldom.metrics.evictions) == (0, 1)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not new.is_loaded
    seldom.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")
    assert often.is_loaded


async def test_what_is_in_use_pinned_or_always_there_stays() -> None:
    """Who cannot have room until one of them ends its requests waits for that; who never could is refused."""
    house = House(1)
    busy = await house.add_loaded("busy")
    pinned = await house.add_loaded("pinned", is_pinned=True)
    busy.has_requests = True
    new = house.add("new")

    with pytest.raises(NotEnoughDeviceMemory, match=r"pinned 1\.0 with 30,000 MiB"):
        house.add("large", 60_000).ask()
    new.ask()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert busy.reasons == []
    busy.has_requests = False
    await until(lambda: bool(busy.leaving), "the one that was in use is told to go")
    busy.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")

    assert pinned.reasons == []
    new.can_sleep = False
    with pytest.raises(NotEnoughDeviceMemory):
        house.add("newer").ask()


async def test_what_came_a_moment_ago_stays_for_the_least_residence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models that take each other's place would both be loading and none answering."""
    house = House(1, least_residence_s=60.0)
    first = await house.add_loaded("first", 60_000)
    clock = SimpleNamespace(now=time.monotonic(), monotonic=lambda: clock.now)
    monkeypatch.setattr(waiting_line, "time", clock)
    second = house.add("second", 60_000)

    second.ask()
    house.memory.line.settle()
    assert first.reasons == []
    clock.now += 60.0

    await until(lambda: bool(first.leaving), "the first one is told to go")


async def test_room_is_made_on_one_device_not_on_all() -> None:
    """Where those leave that are worth least; others stay where they are."""
    house = House(3)
    loaded = [await house.add_loaded(str(number), 60_000, requests=5 - number) for number in range(3)]
    new = house.add("new", 60_000)

    new.ask()
    for model in loaded:
        model.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")

    assert [bool(model.reasons) for model in loaded] == [False, False, True]
    assert new.slots[0].uses == (2,)


async def test_a_model_that_is_always_there_has_sleepy_ones_leave_for_all_of_its_workers() -> None:
    """On both devices, when it is registered; each worker begins when there is room on its own."""
    house = House(2)
    sleepy = [await house.add_loaded(str(number), 60_000) for number in range(2)]

    always = house.add("always", 60_000, min_workers=2)
    always.can_sleep = False
    always.start(2)
    assert all(model.reasons for model in sleepy)
    sleepy[0].see_out()
    await until(lambda: any(slot.process for slot in always.slots), "the first one is there")
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert [slot.uses for slot in always.slots if slot.process] == [(0,)]
    sleepy[1].see_out()
    await until(lambda: always.is_loaded, "both are there")

    assert sorted(slot.uses for slot in always.slots) == [(0,), (1,)]


async def test_a_worker_of_several_devices_begins_when_there_is_room_on_each() -> None:
    """The devices next to each other on which those leave that are worth least."""
    house = House(4)
    sleepy = [await house.add_loaded(str(number), 60_000, requests=9 - number) for number in range(4)]
    group = house.add("group", 60_000, parallel_type="tp", parallel_level=2)

    group.ask()
    assert [bool(model.reasons) for model in sleepy] == [False, False, True, True]
    sleepy[2].see_out()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not group.is_loaded
    sleepy[3].see_out()
    await until(lambda: group.is_loaded, "the group is there")

    assert group.slots[0].uses == (2, 3)


async def test_nobody_leaves_for_a_worker_more() -> None:
    """Autoscaling takes what is free, as in the host's memory."""
    house = House(1)
    idle, growing = await house.add_loaded("idle", 40_000), await house.add_loaded("growing")

    assert growing.reservations.grow(2) == 1
    assert idle.reasons == []


async def test_who_waits_too_long_is_told_and_its_place_is_free_again() -> None:
    """`startupTimeout` bounds it: an honest 503."""
    house = House(1)
    busy = await house.add_loaded("busy", 60_000)
    busy.has_requests = True
    late = house.add("late", 60_000, startup_timeout_s=0.02)

    late.ask()
    await until(lambda: bool(late.failed), "it is told")

    assert isinstance(late.failed[0], NoMemoryNow)
    late.sleep("there was no memory to load it")
    assert house.memory.ledger.could_be_had(0) == 20_000 * MIB
    assert busy.reasons == []


async def test_a_worker_that_starts_again_does_not_wait_for_another_ones_device() -> None:
    """Another one's place on a device that is busy is no reason to keep it from its own, which is free."""
    house = House(2)
    busy = await house.add_loaded("busy", 60_000)
    growing = await house.add_loaded("growing", 60_000)
    busy.has_requests = True
    first = growing.slots[0]
    growing.reservations.ask(2)
    growing.start(1)
    assert (first.uses, growing.slots[1].uses) == ((1,), (0,))

    first.end()
    growing.slots[0] = again = Slot(growing, "again", first.uses)
    await until(lambda: bool(again.process), "it has started again")

    assert growing.slots[1].process == []
    busy.has_requests = False
    await until(lambda: bool(busy.leaving), "the one that was in use is told to go")
    busy.see_out()
    await until(lambda: growing.is_loaded, "the other one is there, too")


async def test_of_two_workers_that_wait_for_one_device_each_has_its_own_wait() -> None:
    """The first begins when there is room for it; the second waits, is told in the end, and loses only its own."""
    house = House(1)
    sleepy, busy = await house.add_loaded("sleepy"), await house.add_loaded("busy")
    busy.has_requests = True
    pair = house.add("pair", min_workers=2, startup_timeout_s=0.5)
    pair.can_sleep = False

    pair.start(2)
    sleepy.see_out()
    await until(lambda: any(slot.process for slot in pair.slots), "the first one is there")
    assert [bool(slot.process) for slot in pair.slots] == [True, False]
    await until(lambda: bool(pair.failed), "the second one is told")

    assert [type(error) for error in pair.failed] == [NoMemoryNow]
    assert house.memory.ledger.holders(0) == [("busy 1.0", 30_000 * MIB), ("pair 1.0", 30_000 * MIB)]


async def one_that_grows_beside_a_busy_one() -> tuple[House, Model, Model]:
    """A house with one device; a version with one worker there that waits for memory for another, and a busy one."""
    house = House(1)
    growing = await house.add_loaded("growing")
    busy = await house.add_loaded("busy", 40_000)
    busy.has_requests = True
    growing.reservations.ask(2)
    growing.start(1)
    return house, growing, busy


async def test_a_worker_that_begins_elsewhere_than_in_the_place_kept_for_it_has_that_given_back() -> None:
    """It had died when another one went that waited: that one's place was kept for it, and there was room before."""
    house, growing, busy = await one_that_grows_beside_a_busy_one()
    first = growing.slots[0]
    first.end()
    first.worker_key = "again"
    growing.slots.pop().task.cancel()
    growing.reservations.shrink(1)
    assert house.memory.ledger.holders(0) == [("busy 1.0", 40_000 * MIB), ("growing 1.0", 30_000 * MIB)]
    busy.slots.pop().end()

    growing.reservations.begin("again", (0,))

    assert house.memory.ledger.holders(0) == [("growing 1.0", 30_000 * MIB)]


async def test_a_worker_does_not_begin_in_a_place_that_is_not_there_yet() -> None:
    """It died, and others took its memory: what another one waits for is not to be begun in."""
    house, growing, _busy = await one_that_grows_beside_a_busy_one()
    growing.slots[0].end()
    house.watch.others[0] = 30_000

    with pytest.raises(NotEnoughDeviceMemory):
        growing.reservations.begin("again", (0,))

    house.watch.others[0] = 0
    await until(lambda: bool(growing.slots[1].process), "the one that waited is there")


async def test_a_place_that_was_waited_for_is_given_back_when_it_is_scaled_down() -> None:
    """The worker that is there owes nothing: nobody leaves for a place that no worker will take."""
    house, growing, busy = await one_that_grows_beside_a_busy_one()
    held = house.memory.ledger.holders(0)
    assert held == [("growing 1.0", 60_000 * MIB), ("busy 1.0", 40_000 * MIB)]

    growing.slots.pop().task.cancel()
    growing.reservations.shrink(1)

    assert house.memory.ledger.holders(0) == [("busy 1.0", 40_000 * MIB), ("growing 1.0", 30_000 * MIB)]
    busy.has_requests = False
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert busy.reasons == []
    growing.slots[0].end()
    growing.slots[0] = again = Slot(growing, "again", (0,))
    await until(lambda: bool(again.process), "its next start waits for nobody")


async def test_nobody_leaves_for_a_model_that_nobody_waits_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients have gone while it waited."""
    monkeypatch.setattr(waiting_line, "UNAWAITED_S", 0.01)
    house = House(1)
    busy = await house.add_loaded("busy", 60_000)
    busy.has_requests = True
    left = house.add("left", 60_000)

    left.ask()
    left.is_awaited = False
    await until(lambda: bool(left.reasons), "it is put to sleep")
    busy.has_requests = False
    for _ in range(20):
        await asyncio.sleep(0.001)

    assert left.reasons == ["asleep: no request waits for it any more"]
    assert busy.reasons == []


async def test_what_serves_nobody_leaves_before_anything_else() -> None:
    """A version that is kept so that it can be undone."""
    house = House(1)
    kept, seldom = await house.add_loaded("kept", requests=9), await house.add_loaded("seldom")
    given_up: list[str] = []
    kept.can_sleep = False
    kept.reservations.make_spare(lambda: given_up.append("kept"))
    new = house.add("new")

    new.ask()

    assert (given_up, seldom.reasons) == (["kept"], [])
    kept.sleep("it ends")
    kept.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")


async def test_what_others_take_meanwhile_has_one_more_leave() -> None:
    """A program that is not of this server: the reading after the end says that it was not enough."""
    house = House(1)
    first, second = await house.add_loaded("first"), await house.add_loaded("second", requests=3)
    new = house.add("new")

    new.ask()
    await until(lambda: bool(first.leaving), "the first one leaves")
    house.watch.others[0] = 25_000
    first.see_out()
    await until(lambda: bool(second.leaving), "the second one leaves, too")
    second.see_out()

    await until(lambda: new.is_loaded, "the new one is loaded")


async def test_nobody_is_judged_by_a_reading_from_before_the_last_end() -> None:
    """A tool's reading is seconds old: it would still show what has gone."""
    house = House(1)
    first, second = await house.add_loaded("first"), await house.add_loaded("second", requests=3)
    house.watch.is_quick = False
    house.watch.read()
    new = house.add("new")

    new.ask()
    first.see_out()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert second.reasons == []
    assert not new.is_loaded
    house.watch.read()

    await until(lambda: new.is_loaded, "the new one is loaded")
    assert second.reasons == []


async def test_host_memory_that_is_refused_has_nobody_leave() -> None:
    """It was looked for before anybody was told."""

    class Full(Reservations):
        def ask(self, workers: int) -> None:
            raise NotEnoughMemory("m", "1.0", needed_bytes=2, source="declared", could_be_had=1, budget_bytes=1)

    house = House(1)
    idle = await house.add_loaded("idle", 60_000)

    with pytest.raises(NotEnoughMemory):
        house.add("new", 60_000, Full()).ask()

    assert idle.reasons == []
    assert house.memory.ledger.could_be_had(0) == 20_000 * MIB


async def test_a_worker_whose_place_was_taken_has_others_leave_for_its_next_try() -> None:
    """One that is always there died, and a sleepy model was quicker: the next start finds room."""
    house = House(1)
    always = await house.add_loaded("always", 60_000)
    always.can_sleep = False
    always.slots[0].end()
    sleepy = await house.add_loaded("sleepy", 60_000)

    with pytest.raises(NotEnoughDeviceMemory):
        always.reservations.begin("again", (0,))
    sleepy.see_out()
    always.reservations.begin("again", (0,))

    assert sleepy.reasons == ["asleep: it made room on device 0, for always 1.0"]


@pytest.mark.parametrize("seed", range(20))
async def test_devices_never_hold_more_than_they_have(seed: int) -> None:
    """Models of any size, asked for in any order, with processes that end late: all are loaded in the end."""
    draw = random.Random(seed)
    house = House(2)
    models = [house.add(str(number), draw.randint(10_000, 70_000)) for number in range(8)]
    asked: set[Model] = set()
    for _ in range(80):
        model = draw.choice(models)
        model.ask()
        asked.add(model)
        for _ in range(draw.randint(0, 3)):
            await asyncio.sleep(0)
        for other in models:
            if draw.random() < 0.3:
                other.see_out()
        asked = {each for each in asked if not each.is_loaded and each.slots}

    async with asyncio.timeout(5):
        while any(each.slots and not each.is_loaded for each in models):
            for other in models:
                other.see_out()
            await asyncio.sleep(0.001)

    assert not any(model.failed for model in models)
    assert sum(model.metrics.evictions for model in models) > 5
    for model in models:
        model.sleep("the end")
        model.see_out()
        model.reservations.close()
    assert [house.memory.ledger.could_be_had(device) for device in (0, 1)] == [TOTAL * MIB] * 2


# ------------------------------------------------------------------------------------------- the host's memory as well


async def test_what_sleeps_for_the_hosts_memory_makes_room_on_its_device_too() -> None:
    """A worker that needs the device waits for it, and nothing else is told to leave."""
    house = House(1, budget=100)
    first = await house.add_loaded("first", 40_000, memory_bytes=60)
    second = await house.add_loaded("second", 40_000, requests=5, memory_bytes=10)
    new = house.add("new", 40_000, memory_bytes=80)

    new.ask()
    for _ in range(20):
        await asyncio.sleep(0.001)

    assert (len(first.reasons), second.reasons) == (1, [])
    assert not new.is_loaded
    first.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")
    assert second.reasons == []


async def test_what_sleeps_for_a_device_gives_the_hosts_memory_back_when_its_processes_have_ended() -> None:
    """It is reserved until then, and counts as about to come free."""
    house = House(1, budget=100)
    old = await house.add_loaded("old", 60_000, memory_bytes=50)
    new = house.add("new", 60_000, memory_bytes=50)
    ledger = house.memory.ledger

    new.ask()

    assert old.reasons == ["asleep: it made room on device 0, for new 1.0"]
    assert (ledger.leaving(HOST), ledger.held_bytes) == (50, 100)
    old.see_out()
    await until(lambda: new.is_loaded, "the new one is loaded")
    assert (ledger.leaving(HOST), ledger.held_bytes) == (0, 50)


async def test_a_version_that_serves_nobody_is_ended_once() -> None:
    """Though both the host's memory and the device's are wanted of it."""
    house = House(1, budget=100)
    spare = await house.add_loaded("spare", 60_000, memory_bytes=80)
    spare.can_sleep = False
    given_up: list[str] = []
    spare.reservations.make_spare(lambda: given_up.append("spare"))
    new = house.add("new", 60_000, memory_bytes=80)
    assert house.host is not None
    watch = asyncio.create_task(house.host.run())

    new.ask()
    for _ in range(20):
        await asyncio.sleep(0.001)

    assert given_up == ["spare"]
    spare.sleep("it ends")
    spare.see_out()
    spare.reservations.close()
    await until(lambda: new.is_loaded, "the new one is loaded")
    watch.cancel()
    await asyncio.wait([watch])


async def test_a_version_that_waits_for_both_is_forgotten_when_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing stays reserved for it, of the host or of a device."""
    monkeypatch.setattr(waiting_line, "UNAWAITED_S", 0.0)
    house = House(1, budget=100)
    busy = await house.add_loaded("busy", 60_000, memory_bytes=80)
    busy.has_requests = True
    left = house.add("left", 60_000, memory_bytes=80)
    line = house.memory.line

    left.ask()
    left.is_awaited = False
    assert len(line.ledger.line) == 2
    line.forget_unawaited()
    line.forget_unawaited()

    assert left.reasons == ["asleep: no request waits for it any more"]
    assert line.ledger.line == []
    assert line.ledger.held_bytes == 80
    assert line.ledger.holders(0) == [("busy 1.0", 60_000 * MIB)]


async def test_of_versions_that_have_gone_the_line_keeps_nothing() -> None:
    """Nor do reservations that were lost, withdrawn or moved."""
    house = House(2, budget=100)
    first = await house.add_loaded("first", 60_000, memory_bytes=80)
    second = house.add("second", 60_000, memory_bytes=80)
    second.ask()
    first.see_out()
    await until(lambda: second.is_loaded, "the second one is loaded")

    for model in (first, second):
        model.sleep("the end")
        model.see_out()
        model.reservations.close()
    line = house.memory.line
    await line.close()

    assert (line.holder_of, line.holders, line.ledger.line, line.ledger.on_host) == ({}, [], [], [])
    assert [line.ledger.count(device) for device in range(2)] == [0, 0]
