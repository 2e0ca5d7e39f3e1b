"""Has a worker begin on a device only where there is memory for it: keeps the books of all versions, chooses devices.

A version's room (`pool/reservation.py`) is wrapped: host memory stays the inner one's affair. `device_admission.py`
decides; here the latest readings are brought to it, places are kept for workers that are about to start, and what a
worker took is remembered for the next one. `device_line.py` has others make room. Where nothing tells how much memory a
device has, every answer is yes. A device that is lost takes no worker: `device_moves.py` decides where the next one
goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from marserve.errors import NoMemoryNow, NotEnoughDeviceMemory
from marserve.machine.devices import Assigner, choose_group
from marserve.memory.admission import Learned
from marserve.memory.device_admission import CONTEXT_BYTES, DeviceBooks, DeviceNeed, Promise, device_need
from marserve.memory.device_eviction import Devices
from marserve.memory.device_line import DeviceLine, Guest, SleepyPool, Watch
from marserve.memory.device_moves import SETTLED_S, Site, choose_site
from marserve.memory.learned_memory import LearnedMemory
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Room, Unbounded

log = logging.getLogger("marserve.registry.memory")


class Kept(NamedTuple):
    """A worker's place, and whether there is memory for it already."""

    devices: Devices
    promises: list[Promise]
    is_there: bool


class HasDevices(Protocol):
    """A slot."""

    @property
    def uses(self) -> Devices:
        """The devices of its worker."""

    @property
    def worker_key(self) -> str:
        """The key of its present worker; empty where there is none."""


class HasSlots(SleepyPool, Protocol):
    """A pool, as its room sees it."""

    @property
    def slots(self) -> Sequence[HasDevices]:
        """The places of its workers."""

    @property
    def leaving(self) -> Sequence[HasDevices]:
        """Those whose workers are about to end."""


Housed = TypeVar("Housed", bound=HasSlots)


class DeviceRooms:
    """The devices' memory for all versions of a server."""

    def __init__(
        self, watch: Watch, assigner: Assigner, learned: LearnedMemory, *, least_residence_s: float = 10.0
    ) -> None:
        """Nobody leaves who came less than `least_residence_s` seconds ago."""
        self.watch, self.assigner, self.learned = watch, assigner, learned
        self.books = DeviceBooks()
        self.line = DeviceLine(watch, self.books, least_residence_s=least_residence_s)
        self.refused = 0
        self._has_read = asyncio.Event()
        self._had_trouble = False
        watch.listen(self._read)

    def house(self, inner: Room | None, options: PoolOptions, make: Callable[[Room | None], Housed]) -> Housed:
        """Make a version's pool with places for its least number of workers; as it was for one that uses no device.

        Raises NotEnoughDeviceMemory; then none is made.
        """
        if not options.gpu_ids:
            return make(inner)
        room = DeviceRoom(self, inner or Unbounded(), options)
        try:
            kept = room.reserve_or_count(options.min_workers)
            pool = room.pool = room.guest.pool = make(room)
        except BaseException:
            room.give_back_all()
            raise
        self.line.add(room.guest)
        room.join(kept)
        return pool

    def foresee(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> dict[str, Any]:
        """What a worker of a version would take on its devices, and for how many more there are places. Bytes.

        It has `before` workers, None: it is not there; `leaving` will have gone before. Nothing is kept. Empty where it
        uses no device, or nobody knows. Raises NotEnoughDeviceMemory where there are no places for `workers`.
        """
        if not options.gpu_ids:
            return {}
        room = DeviceRoom(self, Unbounded(), options)
        if before is not None:  # it makes no room for itself
            room.guest = self.line.guest_of(room.guest.label) or room.guest
        gone = None if leaving is None else self.line.guest_of(_label(leaving))
        return room.foresee(max(0, workers - (before or 0)), gone)

    async def wait_for_reading(self) -> None:
        """Wait for the next reading of the devices."""
        await self._has_read.wait()

    def _read(self) -> None:
        self._has_read.set()
        self._has_read = asyncio.Event()
        # Before a device was lost no worker is anywhere but at home.
        self._had_trouble = self._had_trouble or any(
            self.watch.trouble_of(device) for guest in self.line.guests for device in guest.options.gpu_ids
        )
        for guest in list(self.line.guests) if self._had_trouble else ():
            if guest.pool is not None:
                guest.pool.devices_read()

    def could_be_had(self, device: int) -> int | None:
        """What one more worker could have on a device; None where nobody knows."""
        reading = self.watch.of(device)
        if reading is None or reading.free_bytes is None:
            return None
        return self.books.could_be_had(device, reading.free_bytes, self.watch.read_at)

    def promise(self, label: str, devices: Devices, size: int) -> list[Promise]:
        """Promise a worker its memory on all of its devices."""
        promises = []
        for device in devices:
            reading = self.watch.of(device)
            free = reading.free_bytes if reading is not None else None
            promises.append(self.books.promise(label, device, size, free or 0, self.watch.read_at))
        return promises

    def end(self, promises: Sequence[Promise]) -> None:
        """A worker has ended."""
        for promise in promises:
            self.books.end(promise)
        self.line.ended(promises)
        self.watch.look_soon()


class DeviceRoom:
    """One version's memory, on devices too. See `Room`."""

    def __init__(self, rooms: DeviceRooms, inner: Room, options: PoolOptions) -> None:
        self.pool: HasSlots | None = None
        self._rooms, self._inner, self._options = rooms, inner, options
        self._label = _label(options)
        self._key = (options.model, options.version, options.weight_bytes)
        self._places: list[tuple[Devices, list[Promise]]] = []
        self._owed: list[tuple[Devices, list[Promise]]] = []
        self._begun: dict[str, list[Promise]] = {}
        self._begun_at: dict[str, float] = {}
        self.guest = Guest(self._label, options, self._read_begun, self._read_kept)

    # ---------------------------------------------------------------------------------------------- what a pool asks

    def ask(self, workers: int) -> None:
        """Keep places on devices, then ask for host memory. Raises NotEnoughMemory, and nothing has changed then."""
        kept = self.reserve_or_count(workers)
        try:
            self._inner.ask(workers)
        except BaseException:
            self._give_back(len(kept))
            raise
        self.join(kept)

    def grow(self, workers: int) -> int:
        """As many as there are places for, on devices and in the host's memory."""
        allowed = self._inner.grow(workers)
        for count in range(self._count() + 1, allowed + 1):
            try:
                self.reserve(count)
            except NotEnoughDeviceMemory:
                self._inner.shrink(count - 1)
                return count - 1
        return allowed

    def shrink(self, workers: int) -> None:
        """Fewer places are kept."""
        self._give_back(max(0, self._count() - workers))
        self._forget_gone()
        self._inner.shrink(workers)

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait for host memory, then for the worker's place on its devices, where that is not there yet.

        Raises NoMemoryNow; that place is lost then.
        """
        await self._inner.enter(devices)
        waiting = self._rooms.line.first_unclaimed(self.guest, tuple(devices))
        if waiting is None:
            return
        try:
            await self._rooms.line.wait(waiting)
        except NoMemoryNow:
            for kept in (self._places, self._owed):
                kept[:] = [place for place in kept if place[1] is not waiting.promises]
            self._rooms.end(waiting.promises)
            raise

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> Devices | None:
        """See `Room`."""
        present, first = tuple(devices), tuple(home)
        if not self._has_lost(self._candidates()) and present == first:
            return present
        return choose_site(present, first, self._sites(present))

    def why_none(self) -> str:
        """See `Room`."""
        return "; ".join(f"device {device} takes no worker: {words}" for device, words in self._lost_devices().items())

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> Devices:
        """See `Room`."""
        present, has_waited = tuple(devices), False
        while (site := self.site_for(present, home)) is None:
            has_waited = True
            await self._rooms.wait_for_reading()
        if site != present or has_waited:
            self._move_place(present, site)
        return site

    def _sites(self, present: Devices) -> list[Site]:
        """The places of a worker that is at `present`: of groups those alone that no other worker of it has."""
        watch, need, now = self._rooms.watch, self._need(), time.monotonic()
        taken: Counter[Devices] = Counter()
        if self._options.parallel_level and self.pool is not None:
            taken.update(slot.uses for slot in self.pool.slots)
        kept = {place[0] for place in self._places}
        return [
            Site(
                group,
                is_sound=not self._has_lost([group]),
                is_settled=all(watch.sound_since(device) <= now - SETTLED_S for device in group),
                fits=group in kept or self._fits(group, need),
                workers=-1 if group in kept else max(self._rooms.books.count(device) for device in group),
            )
            for group in self._candidates()
            if group == present or taken[group] <= 0
        ]

    def _move_place(self, old: Devices, new: Devices) -> None:
        """Keep a place for a worker at `new` in place of the one at `old`, if there is memory for it."""
        line = self._rooms.line
        owed = next((each for each in self._owed if each[0] == old and not line.is_claimed(each[1])), None)
        if owed is not None:
            self._owed.remove(owed)
            self._rooms.end(owed[1])
        need = self._need()
        if all(place[0] != new for place in self._places) and self._fits(new, need):
            self._owed.append((new, self._rooms.promise(self._label, new, need.size)))

    def _has_lost(self, candidates: Sequence[Devices]) -> bool:
        return any(self._rooms.watch.trouble_of(device) for group in candidates for device in group)

    def _lost_devices(self) -> dict[int, str]:
        """What is wrong with the devices of this version that are lost."""
        told = ((device, self._rooms.watch.trouble_of(device)) for device in self._options.gpu_ids)
        return {device: words for device, words in told if words}

    def place(self) -> Devices | None:
        """The devices of the next worker, kept since it was asked for; None where none were."""
        if not self._places:
            return None
        place = self._places.pop(0)
        self._owed.append(place)
        return place[0]

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """A worker is about to be started on these devices. Raises NotEnoughDeviceMemory where that is in vain."""
        wanted = tuple(devices)
        for kept in (self._owed, self._places):
            for place in kept:
                if place[0] == wanted and not self._rooms.line.is_awaited(place[1]):
                    kept.remove(place)
                    self._note_begun(key, place[1])
                    return
        need = self._need()
        if not self._fits(wanted, need):
            self._rooms.line.make_room(self.guest, wanted, need.size)
            raise self._refusal([wanted], need)
        self._note_begun(key, self._rooms.promise(self._label, wanted, need.size))

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Whether one more worker would fit on these devices, beside those that are there."""
        wanted = tuple(devices)
        return any(place[0] == wanted for place in self._places) or self._fits(wanted, self._need())

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """A worker has its model loaded; its runtime had taken so much of a device at most, 0: it cannot say."""
        now = self.guest.loaded_at = time.monotonic()
        self.guest.load_s = now - self._begun_at.get(key, now)
        for promise in self._begun.get(key, ()):
            self._rooms.books.loaded(promise, now)
        if reserved_bytes:
            self.peaked_on_device(reserved_bytes)
        self._rooms.watch.look_soon()

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """A worker's runtime had taken so much of a device at most: the next worker needs as much, and its context."""
        size = reserved_bytes + CONTEXT_BYTES
        before = self._rooms.learned.get(self._key)
        if before is None or size > before.first_bytes:
            self._rooms.learned.put(self._key, Learned(size, size, size, 0.0))

    def ended_on_device(self, key: str) -> None:
        """A worker's process has ended."""
        self._begun_at.pop(key, None)
        self._rooms.end(self._begun.pop(key, []))
        self._forget_gone()

    def loaded(self) -> None:
        """A worker has loaded the model."""
        self._inner.loaded()

    def emptied(self) -> None:
        """Processes have ended."""
        self._inner.emptied()

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """See `Room`."""
        self.guest.give_up = give_up
        self._inner.make_spare(give_up)

    def close(self) -> None:
        """There is no process any more."""
        self.give_back_all()
        self._rooms.line.remove(self.guest)
        self._inner.close()

    @property
    def held_bytes(self) -> int | None:
        """What the version's processes hold of the host's memory."""
        return self._inner.held_bytes

    @property
    def described(self) -> Mapping[str, Any]:
        """The members `memory` and `deviceMemory` of describe."""
        need = self._need()
        on_devices: dict[str, int] = {}
        for promises in self._begun.values():
            for promise in promises:
                on_devices[str(promise.device)] = on_devices.get(str(promise.device), 0) + promise.size
        told = {"neededBytes": need.size, "source": need.source, "promisedBytes": on_devices}
        lost = {str(device): words for device, words in self._lost_devices().items()}
        return {**self._inner.described, "deviceMemory": told, **({"lostDevices": lost} if lost else {})}

    # ---------------------------------------------------------------------------------------------- places

    def reserve(self, workers: int, *, others_may_leave: bool = False) -> list[Kept]:
        """Keep places until there are so many with those that are taken. Returns those that this took.

        Where there is none and `others_may_leave`, one is kept where there is none yet: `join` is to be called then.
        So is one on a device that is lost, where all are: its worker waits for it.
        Raises NotEnoughDeviceMemory, and no more are kept then than before.
        """
        need, line = self._need(), self._rooms.line
        kept: list[Kept] = []
        while self._count() < workers:
            devices = self._choose(need)
            is_lost = self._has_lost([devices])
            is_there = others_may_leave if is_lost else self._fits(devices, need)
            if not is_there:
                place = line.find(self.guest, self._sound_candidates(), need.size) if others_may_leave else None
                if place is None:
                    self._give_back(len(kept))
                    raise self._refusal(self._candidates(), need)
                devices = place.devices
            promises = self._rooms.promise(self._label, devices, need.size)
            self._places.append((devices, promises))
            kept.append(Kept(devices, promises, is_there))
        return kept

    def join(self, kept: Sequence[Kept]) -> None:
        """Have others leave for those that are not there yet; `enter` waits for them."""
        for place in kept:
            if not place.is_there:
                self._rooms.line.join(self.guest, place.devices, place.promises)

    def reserve_or_count(self, workers: int) -> list[Kept]:
        """As `reserve`, for somebody who asks: others may leave for it, and a refusal is counted."""
        try:
            return self.reserve(workers, others_may_leave=True)
        except NotEnoughDeviceMemory:
            self._rooms.refused += 1
            raise

    def foresee(self, more: int, leaving: Guest | None) -> dict[str, Any]:
        """See `DeviceRooms.foresee`: whether there are places for so many more workers."""
        need, candidates, places = self._need(), self._sound_candidates(), 0
        freed: Counter[int] = Counter()
        for promise in () if leaving is None else (*leaving.read_promises(), *leaving.read_kept()):
            freed[promise.device] += promise.size
        for group in candidates:
            had = [size + freed[device] for device in group if (size := self._rooms.could_be_had(device)) is not None]
            if len(had) < len(group):
                return {}
            places += min(had) // max(1, need.size)
        if others_leave := places < more:
            self._see_whether_others_leave(more, need, candidates, leaving)
        told = {"bytesPerWorker": need.size, "source": need.source, "places": places}
        return {**told, "othersMakeRoom": others_leave}

    def _see_whether_others_leave(
        self, more: int, need: DeviceNeed, candidates: list[Devices], leaving: Guest | None
    ) -> None:
        """Raise NotEnoughDeviceMemory where so many more find no places even then. What is tried is taken back."""
        rooms, tried = self._rooms, []
        try:
            for _ in range(more):
                devices = next((group for group in candidates if self._fits(group, need)), None)
                if devices is None:
                    place = rooms.line.find(self.guest, candidates, need.size, leaving)
                    if place is None:
                        raise self._refusal(candidates, need)
                    devices = place.devices
                tried += rooms.promise(self._label, devices, need.size)
        finally:
            for promise in tried:
                rooms.books.end(promise)

    def give_back_all(self) -> None:
        """Promise nobody anything any more."""
        for _, promises in (*self._places, *self._owed):
            self._rooms.end(promises)
        self._places.clear()
        self._owed.clear()
        for key in list(self._begun):
            self.ended_on_device(key)

    def _note_begun(self, key: str, promises: list[Promise]) -> None:
        self._begun[key], self._begun_at[key] = promises, time.monotonic()
        self._forget_gone()

    def _read_begun(self) -> list[Promise]:
        return [promise for promises in self._begun.values() for promise in promises]

    def _read_kept(self) -> list[Promise]:
        return [promise for place in (*self._places, *self._owed) for promise in place[1]]

    def _count(self) -> int:
        return len(self._places) + (len(self.pool.slots) if self.pool is not None else 0)

    def _give_back(self, count: int) -> None:
        for _ in range(min(count, len(self._places))):
            self._rooms.end(self._places.pop()[1])

    def _forget_gone(self) -> None:
        """Give back what was kept for workers whose slots went before they began."""
        slots = self.pool.slots if self.pool is not None else ()
        expected = Counter(slot.uses for slot in slots if slot.worker_key not in self._begun)
        owed, self._owed = self._owed, []
        for devices, promises in owed:
            if expected[devices] > 0:
                expected[devices] -= 1
                self._owed.append((devices, promises))
            else:
                self._rooms.end(promises)

    def _choose(self, need: DeviceNeed) -> Devices:
        options = self._options
        if options.parallel_level:
            taken = [place[0] for place in self._places]
            taken += [slot.uses for slot in self.pool.slots] if self.pool is not None else []
            groups = self._candidates()
            if self._has_lost(groups):  # no group is shared because another is lost
                groups = [group for group in groups if group not in taken] or groups
                groups = [group for group in groups if not self._has_lost([group])] or groups
            fitting = [group for group in groups if self._fits(group, need)] or groups
            leaving = [slot.uses for slot in self.pool.leaving] if self.pool is not None else []
            ids = [device for group in fitting for device in group]
            return choose_group(ids, options.parallel_level, taken, leaving)
        device = self._rooms.assigner.assign(
            options.model,
            options.version,
            options.gpu_ids,
            lambda device: self._fits((device,), need),
            lambda device: not self._rooms.watch.trouble_of(device),
        )
        assert device is not None
        return (device,)

    def _candidates(self) -> list[Devices]:
        level = self._options.parallel_level or 1
        ids = self._options.gpu_ids
        return [tuple(ids[at : at + level]) for at in range(0, len(ids) - level + 1, level)]

    def _sound_candidates(self) -> list[Devices]:
        """Those without a lost device; all where that leaves none."""
        candidates = self._candidates()
        return [group for group in candidates if not self._has_lost([group])] or candidates

    def _fits(self, devices: Devices, need: DeviceNeed) -> bool:
        had = [self._rooms.could_be_had(device) for device in devices]
        return all(size is None or need.size <= size for size in had)

    def _need(self) -> DeviceNeed:
        options = self._options
        learned = self._rooms.learned.get(self._key)
        return device_need(
            declared_bytes=options.device_memory_bytes,
            learned_bytes=learned.first_bytes if learned is not None else None,
            weight_bytes=options.weight_bytes,
            devices_per_worker=options.parallel_level,
        )

    def _refusal(self, candidates: Sequence[Devices], need: DeviceNeed) -> NotEnoughDeviceMemory:
        devices = sorted({device for chosen in candidates for device in chosen})
        told = []
        for device in devices:
            reading = self._rooms.watch.of(device)
            if reading is not None and reading.total_bytes:
                told.append((device, self._rooms.could_be_had(device) or 0, reading.total_bytes))
        holders = {device: self._rooms.books.holders(device) for device in devices}
        self._rooms.watch.look_soon()  # whoever makes room and tries again is not judged by an old reading
        return NotEnoughDeviceMemory(
            self._options.model,
            self._options.version,
            needed_bytes=need.size,
            source=need.source,
            devices=told,
            holders=[holder for device in devices for holder in holders[device]],
        )


def _label(options: PoolOptions) -> str:
    return f"{options.model} {options.version}"
