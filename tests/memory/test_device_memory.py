"""A version's memory on devices: places that are kept, workers that begin, what is refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from marserve.errors import NotEnoughDeviceMemory, NotEnoughMemory
from marserve.machine.accelerators import DeviceReading
from marserve.machine.devices import Assigner
from marserve.memory.device_memory import DeviceMemory, MemoryOnDevices
from marserve.memory.learned_memory import LearnedMemory
from marserve.memory.ledger import Ledger
from marserve.memory.needs import MIB
from marserve.memory.waiting_line import WaitingLine
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Reservations
from marserve.telemetry.metrics.counts import VersionMetrics


@dataclass
class FakeWatch:
    """Devices with so many MiB free of 80,000 each; None where nobody can say."""

    free: list[int | None]
    read_at: float = 0.0
    looks: int = 0
    lost: set[int] = field(default_factory=set)
    sound_at: dict[int, float] = field(default_factory=dict)
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def of(self, device: int) -> DeviceReading | None:
        """What is known of one."""
        free = None if device in self.lost else self.free[device]
        return None if free is None else DeviceReading(str(device), (80_000 - free) * MIB, 80_000 * MIB)

    def trouble_of(self, device: int) -> str:
        """Whether one is lost."""
        return "GPU is lost" if device in self.lost else ""

    def sound_since(self, device: int) -> float:
        """Since when it answers again."""
        return self.sound_at.get(device, -math.inf)

    def listen(self, listener: Callable[[], None]) -> None:
        """Keep it for `read`."""
        self.listeners.append(listener)

    def read(self, *lost: int) -> None:
        """A reading that finds these devices lost; others have answered for a while."""
        self.lost = set(lost)
        for listener in self.listeners:
            listener()

    def look_soon(self) -> None:
        """Something changed."""
        self.looks += 1


@dataclass
class FakeSlot:
    """A place for a worker; of one that has begun its key."""

    uses: tuple[int, ...]
    worker_key: str = ""


@dataclass
class FakePool:
    """A pool that takes the places that are kept for it."""

    reservations: Reservations
    slots: list[FakeSlot] = field(default_factory=list)
    leaving: list[FakeSlot] = field(default_factory=list)
    metrics: VersionMetrics = field(default_factory=lambda: VersionMetrics("m", "1.0"))
    can_sleep: bool = False
    is_in_use: bool = False
    is_awaited: bool = True
    reasons: list[str] = field(default_factory=list)
    readings: int = 0

    def devices_read(self) -> None:
        """Workers may have to move."""
        self.readings += 1

    async def wait_until_asleep(self) -> None:
        """No process of the host is looked at."""

    def sleep(self, reason: str) -> None:
        """Its workers are told to end; `end` has them ended."""
        self.reasons.append(reason)
        self.slots.clear()
        self.reservations.shrink(0)

    def end(self, *keys: str) -> None:
        """The processes of these workers have ended."""
        for key in keys:
            self.reservations.ended_on_device(key)

    def resize(self, count: int) -> list[tuple[int, ...]]:
        """Make slots, and begin their workers."""
        while len(self.slots) < count:
            devices = self.reservations.place()
            assert devices is not None
            key = f"w{len(self.slots) + 1}"
            self.slots.append(FakeSlot(devices, key))
            self.reservations.begin(key, devices)
        return [slot.uses for slot in self.slots]


class House:
    """Devices and what is housed on them."""

    def __init__(self, *free: int | None) -> None:
        self.watch = FakeWatch(list(free))
        line = WaitingLine(Ledger(readings=self.watch), least_residence_s=10.0, watch=self.watch)
        self.memory = DeviceMemory(line, self.watch, Assigner(len(free)), LearnedMemory(None))

    def add(self, inner: Reservations | None = None, **options: object) -> FakePool:
        """A version whose workers take 30,000 MiB each, unless `options` say otherwise."""
        given = {"gpu_ids": tuple(range(len(self.watch.free))), "device_memory_bytes": 30_000 * MIB, **options}
        chosen = PoolOptions(str(given.pop("model", "m")), "1.0", **{"min_workers": 1, "max_workers": 9, **given})  # type: ignore[arg-type]

        return self.memory.house(inner or Reservations(), chosen, FakePool)


def test_workers_of_a_new_version_have_places_before_they_are_started() -> None:
    """Another version that comes meanwhile finds them taken."""
    house = House(70_000, 70_000)
    first = house.add(min_workers=2)

    second = house.add(model="n", min_workers=2)
    with pytest.raises(NotEnoughDeviceMemory):
        house.add(model="o")

    assert first.resize(2) == [(0,), (1,)]
    assert second.resize(2) == [(0,), (1,)]


def test_a_version_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    """Need and how it is known, what each device has, who is there, what to do. Nothing is left of it."""
    house = House(31_000, 2_000)
    house.add(model="n")

    with pytest.raises(NotEnoughDeviceMemory) as error:
        house.add(min_workers=1)

    assert str(error.value) == (
        "Model m version 1.0 does not fit into the memory of its devices: a worker needs 30,000 MiB (declared), and "
        "device 0 has 1,000 MiB of 80,000 MiB free, device 1 has 2,000 MiB of 80,000 MiB free. On them: n 1.0 with "
        "30,000 MiB. Scale down or unregister what is there, name other devices (deviceIds), or say what a worker "
        "needs with the key deviceMemory of the model's configuration."
    )
    assert str(error.value.for_clients()).endswith("device 1 has 2,000 MiB of 80,000 MiB free.")
    assert isinstance(error.value.for_clients(), NotEnoughMemory)
    assert house.memory.refused == 1
    assert house.memory.ledger.could_be_had(0) == 1_000 * MIB


def test_of_several_workers_all_fit_or_none_is_kept() -> None:
    """A third one would not: the two places are free again."""
    house = House(70_000)

    with pytest.raises(NotEnoughDeviceMemory):
        house.add(min_workers=3)

    assert house.memory.ledger.could_be_had(0) == 70_000 * MIB


def test_a_device_that_is_full_is_passed_over() -> None:
    """TorchServe would take it in its turn."""
    house = House(5_000, 70_000)

    assert house.add(min_workers=2).resize(2) == [(1,), (1,)]


def test_a_worker_of_several_devices_needs_memory_on_each() -> None:
    """The first two have no room for a second worker; the next two are one group."""
    house = House(40_000, 40_000, 40_000, 40_000)
    options = {"parallel_level": 2, "parallel_type": "tp", "min_workers": 2}

    assert house.add(**options).resize(2) == [(0, 1), (2, 3)]
    with pytest.raises(NotEnoughDeviceMemory):
        house.add(model="n", **options)


def test_a_group_without_memory_is_passed_over() -> None:
    """And of those that fit, one that is leaving comes last."""
    house = House(5_000, 70_000, 70_000, 70_000, 70_000, 70_000)
    pool = house.add(parallel_level=2, parallel_type="tp", min_workers=0)
    pool.leaving.append(FakeSlot((2, 3)))

    pool.reservations.ask(1)

    assert pool.resize(1) == [(4, 5)]


def test_devices_of_which_nothing_is_known_refuse_nobody() -> None:
    """An old driver, or a vendor whose tool tells no memory."""
    house = House(None, None)

    assert house.add(min_workers=5, device_memory_bytes=1 << 60).resize(5)[:3] == [(0,), (1,), (0,)]


def test_a_version_on_the_cpu_keeps_its_room() -> None:
    """Nothing is wrapped."""
    inner = Reservations()

    assert House(70_000).add(inner, gpu_ids=()).reservations is inner


def test_growing_stops_where_devices_are_full() -> None:
    """As many as fit, and nobody was refused."""
    house = House(70_000, 40_000)
    pool = house.add()
    pool.resize(1)

    assert pool.reservations.grow(9) == 3
    assert pool.resize(3) == [(0,), (1,), (0,)]
    assert pool.reservations.grow(4) == 3
    assert house.memory.refused == 0


def test_host_memory_that_is_refused_gives_the_places_back() -> None:
    """Nothing has changed then."""

    class Full(Reservations):
        def ask(self, workers: int) -> None:
            if workers > 1:
                raise NotEnoughMemory("m", "1.0", needed_bytes=2, source="declared", could_be_had=1, budget_bytes=1)

    house = House(70_000)
    pool = house.add(Full())
    pool.resize(1)

    with pytest.raises(NotEnoughMemory):
        pool.reservations.ask(2)

    assert house.memory.ledger.could_be_had(0) == 40_000 * MIB


def test_a_worker_that_starts_again_asks_again() -> None:
    """Somebody else has taken the memory meanwhile: it is not started in vain."""
    house = House(70_000)
    pool = house.add()
    pool.resize(1)
    pool.reservations.ended_on_device("w1")
    house.watch.free[0] = 10_000

    with pytest.raises(NotEnoughDeviceMemory):
        pool.reservations.begin("w1", (0,))
    house.watch.free[0] = 70_000
    pool.reservations.begin("w1", (0,))

    assert house.memory.ledger.could_be_had(0) == 40_000 * MIB
    assert house.watch.looks >= 1


def test_whether_a_replacement_fits_beside_is_asked_of_its_own_device() -> None:
    """Room elsewhere does not help: it takes its predecessor's device over."""
    house = House(40_000, 70_000)
    pool = house.add()
    assert pool.resize(1) == [(0,)]

    assert not pool.reservations.fits_beside((0,))
    assert pool.reservations.fits_beside((1,))


def test_what_a_worker_took_is_known_for_the_next_one() -> None:
    """Of two the larger counts; what runtimes cannot tell leaves the estimate."""
    house = House(70_000)
    pool = house.add(device_memory_bytes=None, weight_bytes=0)
    pool.resize(1)
    assert pool.reservations.described["deviceMemory"] == {
        "neededBytes": 512 * MIB,
        "source": "estimated",
        "promisedBytes": {"0": 512 * MIB},
    }

    for reserved in (9_488, 2_000, 0):
        pool.reservations.loaded_on_device("w1", reserved * MIB)

    assert pool.reservations.described["deviceMemory"]["neededBytes"] == 10_000 * MIB
    assert pool.reservations.described["deviceMemory"]["source"] == "learned"

    for reserved in (19_488, 1):  # after larger batches
        pool.reservations.peaked_on_device(reserved * MIB)

    assert pool.reservations.described["deviceMemory"]["neededBytes"] == 20_000 * MIB


def test_a_slot_that_goes_before_its_worker_began_leaves_no_promise() -> None:
    """It waited for host memory, and was scaled down meanwhile."""
    house = House(70_000)
    pool = house.add()
    devices = pool.reservations.place()
    assert devices == (0,)
    pool.slots.append(FakeSlot(devices))
    pool.reservations.shrink(1)
    assert house.memory.ledger.could_be_had(0) == 40_000 * MIB

    pool.slots.clear()
    pool.reservations.shrink(0)

    assert house.memory.ledger.could_be_had(0) == 70_000 * MIB


def test_a_slot_that_goes_beside_one_that_has_begun_leaves_no_promise() -> None:
    """The one that stays has taken its place already, and is not owed another one on the same device."""
    house = House(70_000)
    pool = house.add()
    pool.resize(1)
    pool.reservations.ask(2)
    devices = pool.reservations.place()
    assert devices == (0,)
    pool.slots.append(FakeSlot(devices))

    pool.slots.pop()
    pool.reservations.shrink(1)

    assert house.memory.ledger.holders(0) == [("m 1.0", 30_000 * MIB)]


def test_a_version_that_goes_leaves_no_promise() -> None:
    """Whether its workers had begun or not."""
    house = House(70_000)
    pool = house.add(min_workers=2)
    pool.resize(1)

    pool.reservations.close()

    assert house.memory.ledger.could_be_had(0) == 70_000 * MIB
    assert isinstance(pool.reservations, MemoryOnDevices)
    assert house.memory.ledger.holders(0) == []


def test_what_a_worker_would_take_is_told_and_nothing_is_kept() -> None:
    """With the places that there are; where there are too few it is refused, as keeping them would be."""
    house = House(70_000, 20_000)
    options = PoolOptions("m", "1.0", 1, 9, gpu_ids=(0, 1), device_memory_bytes=30_000 * MIB)

    told = house.memory.foresee(options, None, 2)
    with pytest.raises(NotEnoughDeviceMemory):
        house.memory.foresee(options, 1, 4)

    assert told == {"bytesPerWorker": 30_000 * MIB, "source": "declared", "places": 2, "othersMakeRoom": False}
    assert house.memory.refused == 0
    assert house.add(min_workers=2).resize(2) == [(0,), (0,)]


def test_what_one_that_leaves_before_holds_there_is_room_for() -> None:
    """Whether its worker has begun or not; what others hold, that may not leave, is none."""
    house = House(40_000)
    house.add().resize(1)
    house.watch.free[0] = 10_000
    old = PoolOptions("m", "1.0", 1, 1, gpu_ids=(0,))
    new = replace(old, version="2.0", device_memory_bytes=38_000 * MIB)

    with pytest.raises(NotEnoughDeviceMemory):
        house.memory.foresee(new, None, 1)
    told = house.memory.foresee(new, None, 1, old)
    with pytest.raises(NotEnoughDeviceMemory):
        house.memory.foresee(new, None, 2, old)
    with pytest.raises(NotEnoughDeviceMemory):
        house.memory.foresee(new, None, 1, replace(old, model="another"))

    assert (told["places"], told["othersMakeRoom"]) == (1, False)
    assert house.memory.ledger.holders(0) == [("m 1.0", 30_000 * MIB)]


def test_a_version_on_the_cpu_needs_no_device() -> None:
    """And where nobody knows what is free, nothing is told."""
    cpu = PoolOptions("m", "1.0", 1, 1)
    unknown = PoolOptions("m", "1.0", 1, 1, gpu_ids=(0,), device_memory_bytes=1)

    assert House(10).memory.foresee(cpu, None, 1) == {}
    assert House(None).memory.foresee(unknown, None, 1) == {}


def test_a_lost_device_is_given_to_no_new_worker() -> None:
    """Though nothing is known of its memory, and of the others' it is known that they are nearly full."""
    house = House(70_000, 35_000)
    house.watch.read(0)

    assert house.add(min_workers=1).resize(1) == [(1,)]
    with pytest.raises(NotEnoughDeviceMemory):
        house.add(model="n")


def test_where_all_devices_are_lost_a_place_is_kept_and_its_worker_waits() -> None:
    """It is no lack of memory; growing is for later."""
    house = House(70_000, 70_000)
    house.watch.read(1)
    pool = house.add(gpu_ids=(1,))
    reservations = pool.reservations
    assert reservations.place() == (1,)
    pool.slots.append(FakeSlot((1,)))

    assert reservations.site_for((1,), (1,)) is None
    assert reservations.why_none() == "device 1 takes no worker: GPU is lost"
    assert reservations.described["lostDevices"] == {"1": "GPU is lost"}
    assert reservations.grow(2) == 1
    house.watch.read()
    assert reservations.site_for((1,), (1,)) == (1,)
    assert "lostDevices" not in reservations.described


@pytest.mark.anyio
async def test_a_worker_that_waits_goes_on_with_the_reading_that_finds_a_device_sound() -> None:
    """Any of those that it may have; the place that was kept for it moves along."""
    house = House(70_000, 70_000)
    house.watch.read(0, 1)
    pool = house.add()
    devices = pool.reservations.place()
    assert devices is not None
    pool.slots.append(FakeSlot(devices))
    assert house.memory.ledger.count(devices[0]) == 1
    finding = asyncio.ensure_future(pool.reservations.find_site(devices, devices))
    for _ in range(3):
        await asyncio.sleep(0)
        house.watch.read(0, 1)
    await asyncio.sleep(0)
    assert not finding.done()
    other = 1 - devices[0]

    house.watch.read(devices[0])
    site = await asyncio.wait_for(finding, 10)

    assert site == (other,)
    assert [house.memory.ledger.count(device) for device in (devices[0], other)] == [0, 1]
    pool.reservations.begin("w1", site)
    assert house.memory.ledger.holders(other) == [("m 1.0", 30_000 * MIB)]


@pytest.mark.anyio
async def test_workers_of_a_lost_device_are_spread_over_the_others() -> None:
    """Each goes where the fewest are."""
    house = House(*[400_000] * 3)
    pool = house.add(min_workers=6)
    assert pool.resize(6) == [(0,), (1,), (2,)] * 2
    house.watch.read(1)
    assert pool.readings == 1
    moved = []
    for slot in (pool.slots[1], pool.slots[4]):
        pool.reservations.ended_on_device(slot.worker_key)
        site = await pool.reservations.find_site(slot.uses, (1,))
        slot.uses = site
        pool.reservations.begin(slot.worker_key, site)
        moved.append(site)

    assert sorted(moved) == [(0,), (2,)]


@pytest.mark.anyio
async def test_a_worker_that_moves_needs_memory_where_it_goes() -> None:
    """Refused as any start is; nothing is kept for it, and it is tried again."""
    house = House(70_000, 10_000)
    pool = house.add()
    (home,) = pool.resize(1)
    pool.reservations.ended_on_device("w1")
    house.watch.read(0)

    site = await pool.reservations.find_site(home, home)

    assert site == (1,)
    with pytest.raises(NotEnoughDeviceMemory):
        pool.reservations.begin("w1", site)
    assert house.memory.ledger.count(1) == 0


def test_no_group_is_shared_because_another_is_lost() -> None:
    """A free one is taken; where there is none, the worker waits."""
    house = House(*[400_000] * 6)
    options = {"parallel_level": 2, "parallel_type": "tp", "gpu_ids": (0, 1, 2, 3, 4, 5)}
    house.watch.read(3)
    pool = house.add(**options, min_workers=1)
    pool.resize(1)
    pool.reservations.ask(2)
    assert pool.resize(2) == [(0, 1), (4, 5)]
    pool.reservations.ask(3)
    devices = pool.reservations.place()
    assert devices == (2, 3)
    pool.slots.append(FakeSlot(devices))

    assert pool.reservations.site_for((2, 3), (2, 3)) is None
    assert pool.reservations.why_none() == "device 3 takes no worker: GPU is lost"
    pool.slots.pop(1)
    assert pool.reservations.site_for((2, 3), (2, 3)) == (4, 5)


def test_a_device_that_answers_again_has_its_workers_back_after_a_while() -> None:
    """Not at once: one that comes and goes would move them each time."""
    house = House(70_000, 70_000)
    pool = house.add()
    pool.resize(1)
    house.watch.read()
    house.watch.sound_at[0] = time.monotonic()

    assert pool.reservations.site_for((1,), (0,)) == (1,)
    house.watch.sound_at[0] -= 31
    assert pool.reservations.site_for((1,), (0,)) == (0,)


def test_new_workers_take_a_device_that_answers_again_at_once() -> None:
    """In its turn."""
    house = House(70_000, 70_000)
    house.watch.read(0)
    assert house.add().resize(1) == [(1,)]
    house.watch.read()
    house.watch.sound_at[0] = time.monotonic()

    assert house.add(model="n").resize(1) == [(0,)]


def test_a_dry_run_counts_no_place_on_a_lost_device() -> None:
    """What is known of the others is told."""
    house = House(70_000, 70_000)
    house.watch.read(1)
    options = PoolOptions("m", "1.0", 1, 9, gpu_ids=(0, 1), device_memory_bytes=30_000 * MIB)

    assert house.memory.foresee(options, None, 1)["places"] == 2
