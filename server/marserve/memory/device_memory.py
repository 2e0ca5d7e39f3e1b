"""Memory of devices: lets a worker start only on a device with memory for it, and chooses which.

It wraps the version's reservations of the host's memory. `ledger.py` keeps what is reserved; this file makes
reservations for workers that are about to start, and remembers for the next one how much a worker took.
`waiting_line.py` evicts other models. A device without readings has no bound. A device that is lost takes no worker:
`device_moves.py` decides which devices the next one gets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marserve.errors import NoMemoryNow, NotEnoughDeviceMemory
from marserve.machine.device_watch import DeviceWatch
from marserve.machine.devices import Assigner, choose_group
from marserve.memory.device_moves import SETTLED_S, Site, choose_site
from marserve.memory.eviction import Devices
from marserve.memory.host_memory import MemoryOnHost
from marserve.memory.learned_memory import LearnedMemory, key_of
from marserve.memory.ledger import DeviceReservation
from marserve.memory.needs import CONTEXT_BYTES, DeviceNeed, Learned, device_need
from marserve.memory.waiting_line import Holder, WaitingLine
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool
from marserve.pool.reservation import Reservations

log = logging.getLogger("marserve.registry.memory")


class DeviceMemory:
    """The devices' memory for the models of one server."""

    def __init__(self, line: WaitingLine, watch: DeviceWatch, assigner: Assigner, learned: LearnedMemory) -> None:
        self.line, self.watch, self.assigner, self.learned = line, watch, assigner, learned
        self.ledger = line.ledger
        self.refused = 0
        self._versions: list[MemoryOnDevices] = []
        self._has_read = asyncio.Event()
        self._had_trouble = False
        watch.listen(self._read)

    def house(self, inner: Reservations, options: PoolOptions, make: Callable[[Reservations], Pool]) -> Pool:
        """Make a version's pool with reservations of devices for its least number of workers, if it uses devices.

        Raises NotEnoughDeviceMemory; then no pool is made.
        """
        if not options.gpu_ids:
            return make(inner)
        holder = inner.holder if isinstance(inner, MemoryOnHost) else Holder(options)
        version = MemoryOnDevices(self, inner, holder)
        try:
            version.reserve_or_count(options.min_workers)
            pool = version.pool = holder.pool = make(version)
        except BaseException:
            version.give_back_all()
            raise
        self._versions.append(version)
        self.line.add(holder)
        self.line.settle()
        return pool

    def foresee(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> dict[str, Any]:
        """How much a worker of a version would take on its devices, in bytes, and for how many more there is room.

        It has `before` workers, None: it is not there; `leaving` will have gone before. Nothing is reserved. Empty
        without devices or readings. Raises NotEnoughDeviceMemory without room for `workers`.
        """
        if not options.gpu_ids:
            return {}
        there = None if before is None else self.line.find(options)  # a version is not evicted for itself
        version = MemoryOnDevices(self, Reservations(), there or Holder(options), options)
        return version.foresee(max(0, workers - (before or 0)), None if leaving is None else self.line.find(leaving))

    def forget(self, version: MemoryOnDevices) -> None:
        """Remove a version whose workers have all ended."""
        self._versions = [each for each in self._versions if each is not version]
        self.line.remove(version.holder)

    async def wait_for_reading(self) -> None:
        """Wait for the next reading of the devices."""
        await self._has_read.wait()

    def _read(self) -> None:
        self._has_read.set()
        self._has_read = asyncio.Event()
        # Until a device is lost every worker is on its first devices, and pools need not look.
        self._had_trouble = self._had_trouble or any(version.lost_devices for version in self._versions)
        for version in list(self._versions) if self._had_trouble else ():
            if version.pool is not None:
                version.pool.devices_read()


class MemoryOnDevices(Reservations):
    """A version's reservations of memory, of devices too, for its pool. See `Reservations`."""

    def __init__(
        self, devices: DeviceMemory, inner: Reservations, holder: Holder, options: PoolOptions | None = None
    ) -> None:
        """`options` differ from the holder's only for a dry run."""
        self.pool: Pool | None = None
        self.holder = holder
        self._devices, self._inner, self._options = devices, inner, options or holder.options
        self._line, self._ledger, self._watch = devices.line, devices.ledger, devices.watch

    # ---------------------------------------------------------------------------------------------- what a pool asks

    def ask(self, workers: int) -> None:
        """Reserve devices, then the host's memory. Raises NotEnoughMemory, and nothing has changed then."""
        kept = self.reserve_or_count(workers)
        try:
            self._inner.ask(workers)
        except BaseException:
            self._give_back(kept)
            raise
        self._line.settle()

    def grow(self, workers: int) -> int:
        """Reserve free memory for up to so many workers, of devices and of the host. Returns how many."""
        allowed = self._inner.grow(workers)
        for count in range(self._count() + 1, allowed + 1):
            try:
                self.reserve(count)
            except NotEnoughDeviceMemory:
                self._inner.shrink(count - 1)
                return count - 1
        return allowed

    def shrink(self, workers: int) -> None:
        """Give back the reservations beyond so many workers."""
        self._give_back(self._count() - workers)
        self._forget_gone()
        self._inner.shrink(workers)

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait for the host's memory, then for the worker's reservation of its devices, if that waits.

        Raises NoMemoryNow; that reservation is dropped then.
        """
        await self._inner.enter(devices)
        holder = self.holder
        mine = (each for each in (*holder.kept, *holder.owed) if each.resources == tuple(devices) and each.is_waiting)
        waiting = next((each for each in mine if not each.is_claimed), None)
        if waiting is None:
            return
        try:
            await self._line.wait(waiting)
        except NoMemoryNow:
            for kept in (holder.kept, holder.owed):
                kept[:] = [each for each in kept if each is not waiting]
            self._line.release([waiting])
            raise

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> Devices | None:
        """See `Reservations`."""
        present, first = tuple(devices), tuple(home)
        if not self._has_lost(self._candidates()) and present == first:
            return present
        return choose_site(present, first, self._sites(present))

    def why_none(self) -> str:
        """See `Reservations`."""
        return "; ".join(f"device {device} takes no worker: {words}" for device, words in self.lost_devices.items())

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> Devices:
        """See `Reservations`."""
        present, has_waited = tuple(devices), False
        while (site := self.site_for(present, home)) is None:
            has_waited = True
            await self._devices.wait_for_reading()
        if site != present or has_waited:
            self._move_place(present, site)
        return site

    def place(self) -> Devices | None:
        """The devices reserved for the next worker; None without a reservation."""
        if not self.holder.kept:
            return None
        self.holder.owed.append(self.holder.kept.pop(0))
        return self.holder.owed[-1].resources

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """A worker is about to be started on these devices. Raises NotEnoughDeviceMemory if it cannot fit."""
        wanted, holder = tuple(devices), self.holder
        for kept in (holder.owed, holder.kept):
            for reservation in kept:
                if reservation.resources == wanted and not reservation.is_waiting:
                    kept.remove(reservation)
                    self._note_begun(key, reservation)
                    return
        need = self._need()
        if not self._fits(wanted, need):
            self._line.make_room_on(holder, wanted, need.size)
            raise self._refusal([wanted], need)
        self._note_begun(key, self._line.reserve(holder, wanted, need.size))

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Whether one more worker fits on these devices, beside those that are there."""
        wanted = tuple(devices)
        return any(each.resources == wanted for each in self.holder.kept) or self._fits(wanted, self._need())

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """A worker has loaded the model; its runtime took at most so much of a device, 0 for unknown."""
        now = time.monotonic()
        self.holder.loaded(now)
        if key in self.holder.begun:  # the next reading includes its memory
            self.holder.begun[key].loaded_at = now
        if reserved_bytes:
            self.peaked_on_device(reserved_bytes)
        self._watch.look_soon()

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """A worker's runtime took at most so much of a device: the next worker needs as much, and a context."""
        size, learned, key = reserved_bytes + CONTEXT_BYTES, self._devices.learned, key_of(self._options)
        before = learned.get(key)
        if before is None or size > before.first_bytes:
            learned.put(key, Learned(size, size, size, 0.0))

    def ended_on_device(self, key: str) -> None:
        """A worker's process has ended."""
        ended = self.holder.begun.pop(key, None)
        self._line.release([ended] if ended is not None else [])
        if not self.holder.begun:
            self.holder.loaded_at = None
        self._forget_gone()

    def loaded(self) -> None:
        """A worker has loaded the model."""
        self._inner.loaded()

    def emptied(self) -> None:
        """Processes have ended."""
        self._inner.emptied()

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """See `Reservations`."""
        self.holder.give_up = give_up

    def close(self) -> None:
        """The pool has ended and has no process any more."""
        self.give_back_all()
        self._devices.forget(self)
        self._inner.close()

    @property
    def held_bytes(self) -> int | None:
        """How much of the host's memory the version's processes hold."""
        return self._inner.held_bytes

    @property
    def described(self) -> Mapping[str, Any]:
        """The members `memory` and `deviceMemory` of describe."""
        need = self._need()
        on_devices: Counter[str] = Counter()
        for reservation in self.holder.begun.values():
            on_devices.update({str(device): reservation.added_bytes for device in reservation.resources})
        described = {"neededBytes": need.size, "source": need.source, "promisedBytes": dict(on_devices)}
        lost = {str(device): words for device, words in self.lost_devices.items()}
        return {**self._inner.described, "deviceMemory": described, **({"lostDevices": lost} if lost else {})}

    # ---------------------------------------------------------------------------------------------- places

    def reserve(self, workers: int, *, others_may_leave: bool = False) -> int:
        """Reserve devices until there are reservations for so many workers. Returns how many were made.

        With `others_may_leave` a reservation that does not fit yet waits: call `settle` then. If all devices are lost,
        one is made on a lost device, and its worker waits for the device. Raises NotEnoughDeviceMemory, and drops the
        new ones then.
        """
        need, before = self._need(), self._count()
        while self._count() < workers:
            devices = self._choose(need)
            is_lost = self._has_lost([devices])
            is_there = others_may_leave if is_lost else self._fits(devices, need)
            if not is_there:
                candidates = self._sound_candidates()
                place = self._line.find_place(self.holder, candidates, need.size) if others_may_leave else None
                if place is None:
                    self._give_back(self._count() - before)
                    raise self._refusal(self._candidates(), need)
                devices = place.devices
            self.holder.kept.append(self._line.reserve(self.holder, devices, need.size, waits=not is_there))
        return self._count() - before

    def reserve_or_count(self, workers: int) -> int:
        """As `reserve` with `others_may_leave`; a refusal is counted."""
        try:
            return self.reserve(workers, others_may_leave=True)
        except NotEnoughDeviceMemory:
            self._devices.refused += 1
            raise

    def give_back_all(self) -> None:
        """Give up all reservations."""
        holder = self.holder
        self._line.release([*holder.kept, *holder.owed])
        holder.kept.clear()
        holder.owed.clear()
        for key in list(holder.begun):
            self.ended_on_device(key)

    def foresee(self, more: int, leaving: Holder | None) -> dict[str, Any]:
        """See `DeviceMemory.foresee`: whether there is room for so many more workers."""
        need, candidates, places = self._need(), self._sound_candidates(), 0
        freed: Counter[int] = Counter()
        if leaving is not None:
            for reservation in (*leaving.begun.values(), *leaving.kept, *leaving.owed):
                freed.update(dict.fromkeys(reservation.resources, reservation.added_bytes))
        for group in candidates:
            had = [size + freed[on] for on in group if (size := self._ledger.could_be_had(on)) is not None]
            if len(had) < len(group):
                return {}
            places += min(had) // max(1, need.size)
        if others_leave := places < more:
            self._see_whether_others_leave(more, need, candidates, leaving)
        foreseen = {"bytesPerWorker": need.size, "source": need.source, "places": places}
        return {**foreseen, "othersMakeRoom": others_leave}

    def _see_whether_others_leave(
        self, more: int, need: DeviceNeed, candidates: list[Devices], leaving: Holder | None
    ) -> None:
        """Raise NotEnoughDeviceMemory if so many more do not fit even then. Nothing stays reserved."""
        tried: list[DeviceReservation] = []
        try:
            for _ in range(more):
                devices = next((group for group in candidates if self._fits(group, need)), None)
                if devices is None:
                    place = self._line.find_place(self.holder, candidates, need.size, leaving)
                    if place is None:
                        raise self._refusal(candidates, need)
                    devices = place.devices
                tried.append(self._ledger.reserve(self.holder.label, devices, need.size))
        finally:
            for reservation in tried:
                self._ledger.release(reservation)

    def _note_begun(self, key: str, reservation: DeviceReservation) -> None:
        self.holder.begun[key] = reservation
        if self.holder.loaded_at is None:
            self.holder.begun_at = time.monotonic()
        self._forget_gone()

    def _count(self) -> int:
        return len(self.holder.kept) + (len(self.pool.slots) if self.pool is not None else 0)

    def _give_back(self, count: int) -> None:
        kept = self.holder.kept
        given = kept[max(0, len(kept) - max(0, count)) :]
        del kept[len(kept) - len(given) :]
        self._line.release(given)

    def _forget_gone(self) -> None:
        """Give back the reservations for workers whose slots went before they began."""
        slots = self.pool.slots if self.pool is not None else ()
        expected = Counter(slot.uses for slot in slots if slot.worker_key not in self.holder.begun)
        gone = []
        for reservation in self.holder.owed:
            expected[reservation.resources] -= 1
            if expected[reservation.resources] < 0:
                gone.append(reservation)
        self.holder.owed[:] = [each for each in self.holder.owed if each not in gone]
        self._line.release(gone)

    # ---------------------------------------------------------------------------------------------- devices

    def _sites(self, present: Devices) -> list[Site]:
        """The sites for a worker that is on `present`; groups of devices that another worker has are left out."""
        need, now = self._need(), time.monotonic()
        taken: Counter[Devices] = Counter()
        if self._options.parallel_level and self.pool is not None:
            taken.update(slot.uses for slot in self.pool.slots)
        kept = {reservation.resources for reservation in self.holder.kept}
        return [
            Site(
                group,
                is_sound=not self._has_lost([group]),
                is_settled=all(self._watch.sound_since(device) <= now - SETTLED_S for device in group),
                fits=group in kept or self._fits(group, need),
                workers=-1 if group in kept else max(self._ledger.count(device) for device in group),
            )
            for group in self._candidates()
            if group == present or taken[group] <= 0
        ]

    def _move_place(self, old: Devices, new: Devices) -> None:
        """Reserve `new` for a worker instead of `old`, if there is memory for it."""
        holder = self.holder
        owed = next((each for each in holder.owed if each.resources == old and not each.is_claimed), None)
        if owed is not None:
            holder.owed.remove(owed)
            self._line.release([owed])
        need = self._need()
        if all(each.resources != new for each in holder.kept) and self._fits(new, need):
            holder.owed.append(self._line.reserve(holder, new, need.size))

    def _has_lost(self, candidates: Sequence[Devices]) -> bool:
        return any(self._watch.trouble_of(device) for group in candidates for device in group)

    @property
    def lost_devices(self) -> dict[int, str]:
        """The lost devices of this version, each with what is wrong."""
        troubles = ((device, self._watch.trouble_of(device)) for device in self._options.gpu_ids)
        return {device: words for device, words in troubles if words}

    def _choose(self, need: DeviceNeed) -> Devices:
        options = self._options
        if options.parallel_level:
            taken = [reservation.resources for reservation in self.holder.kept]
            taken += [slot.uses for slot in self.pool.slots] if self.pool is not None else []
            groups = self._candidates()
            if self._has_lost(groups):  # prefer groups that are free and sound
                groups = [group for group in groups if group not in taken] or groups
                groups = [group for group in groups if not self._has_lost([group])] or groups
            fitting = [group for group in groups if self._fits(group, need)] or groups
            leaving = [slot.uses for slot in self.pool.leaving] if self.pool is not None else []
            ids = [device for group in fitting for device in group]
            return choose_group(ids, options.parallel_level, taken, leaving)
        device = self._devices.assigner.assign(
            options.model,
            options.version,
            options.gpu_ids,
            lambda device: self._fits((device,), need),
            lambda device: not self._watch.trouble_of(device),
        )
        assert device is not None
        return (device,)

    def _candidates(self) -> list[Devices]:
        level = self._options.parallel_level or 1
        ids = self._options.gpu_ids
        return [tuple(ids[at : at + level]) for at in range(0, len(ids) - level + 1, level)]

    def _sound_candidates(self) -> list[Devices]:
        """The candidates without a lost device; all of them if every one has a lost device."""
        candidates = self._candidates()
        return [group for group in candidates if not self._has_lost([group])] or candidates

    def _fits(self, devices: Devices, need: DeviceNeed) -> bool:
        had = [self._ledger.could_be_had(device) for device in devices]
        return all(size is None or need.size <= size for size in had)

    def _need(self) -> DeviceNeed:
        options = self._options
        learned = self._devices.learned.get(key_of(options))
        return device_need(
            declared_bytes=options.device_memory_bytes,
            learned_bytes=learned.first_bytes if learned is not None else None,
            weight_bytes=options.weight_bytes,
            devices_per_worker=options.parallel_level,
        )

    def _refusal(self, candidates: Sequence[Devices], need: DeviceNeed) -> NotEnoughDeviceMemory:
        devices = sorted({device for chosen in candidates for device in chosen})
        ledger = self._ledger
        totals = ((device, ledger.could_be_had(device) or 0, ledger.total(device)) for device in devices)
        self._watch.look_soon()  # so that the next try has a new reading
        return NotEnoughDeviceMemory(
            self._options.model,
            self._options.version,
            needed_bytes=need.size,
            source=need.source,
            devices=[(device, had, total) for device, had, total in totals if total],
            holders=[holder for device in devices for holder in ledger.holders(device)],
        )
