"""Who waits for memory of devices, and who leaves for them: models that may sleep make room for others.

`device_eviction.py` chooses, `device_admission.py` keeps the books; here pools are told, and whoever waits is let in
when a reading after the last end shows that the memory is there. Its place is promised to it meanwhile: first come,
first served, on each device. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from marserve.errors import NoMemoryNow
from marserve.machine.accelerators import DeviceReading
from marserve.memory.device_admission import DeviceBooks, Promise
from marserve.memory.device_eviction import (
    DeviceResident,
    Devices,
    Place,
    choose_place,
    choose_victims_on,
)
from marserve.memory.eviction import Demand
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

log = logging.getLogger("marserve.registry.memory")

# How often those who wait are looked after, beside whenever a worker has ended.
LOOK_S = 0.1
RETRY_AFTER_S = 1.0
# As in the host's memory: whoever asks is in the queue a moment after the memory was asked for.
UNAWAITED_S = 0.25


class Watch(Protocol):
    """What brings readings (`machine/device_watch.py`)."""

    @property
    def read_at(self) -> float:
        """When the latest reading was taken, monotonic seconds."""

    def of(self, device: int) -> DeviceReading | None:
        """What is known of a device."""

    def trouble_of(self, device: int) -> str:
        """Why a device takes no worker; empty where it can."""

    def sound_since(self, device: int) -> float:
        """Since when a device has been without trouble, monotonic seconds; -inf: always."""

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called after each reading."""

    def look_soon(self) -> None:
        """Read again soon."""


class SleepyPool(Protocol):
    """A pool, as those see it that want its memory."""

    metrics: VersionMetrics

    @property
    def can_sleep(self) -> bool:
        """Whether it may be without workers until somebody asks."""

    @property
    def is_in_use(self) -> bool:
        """Whether it has requests, or is being loaded."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a worker."""

    def sleep(self, reason: str) -> None:
        """Begin to have no process."""

    def devices_read(self) -> None:
        """Devices were read, of which some are lost, or were: workers may have to move."""


@dataclass(eq=False)
class Guest:
    """A version that uses devices, as the line sees it. `loaded_at` is in monotonic seconds, None: no worker is there.

    `read_promises` reads what was promised to its workers that are there or loading, `read_kept` to those that are not
    begun. `give_up` ends it where it serves nobody and is only kept.
    """

    label: str
    options: PoolOptions
    read_promises: Callable[[], Sequence[Promise]]
    read_kept: Callable[[], Sequence[Promise]]
    pool: SleepyPool | None = None
    give_up: Callable[[], None] | None = None
    load_s: float = 0.0
    loaded_at: float | None = None
    seen_requests: int = 0
    unawaited_since: float | None = None

    @property
    def may_leave(self) -> bool:
        """Whether it makes room for others at all."""
        return self.give_up is not None or (
            self.pool is not None and self.pool.can_sleep and not self.options.is_pinned
        )


@dataclass(eq=False)
class Waiting:
    """A worker's place that is promised, and not there yet. `is_claimed`: a worker is at the door for it."""

    guest: Guest
    devices: Devices
    promises: Sequence[Promise]
    is_claimed: bool = False


class DeviceLine:
    """The line of one server."""

    def __init__(self, watch: Watch, books: DeviceBooks, *, least_residence_s: float) -> None:
        self._watch, self._books = watch, books
        self._least_residence_s = least_residence_s
        self._guests: list[Guest] = []
        self._line: list[Waiting] = []
        self._leaving: list[Promise] = []
        self._ended_at = -1.0
        self._demand: Demand[Guest] = Demand()
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------------------------------------- coming and going

    def add(self, guest: Guest) -> None:
        """A version is there."""
        self._guests.append(guest)
        self._demand.add([(guest, 0)])

    def remove(self, guest: Guest) -> None:
        """A version and all of its workers are gone."""
        if guest in self._guests:
            self._guests.remove(guest)
        self._demand.forget(guest)
        self._changed.set()

    @property
    def guests(self) -> Sequence[Guest]:
        """The versions that are there."""
        return self._guests

    def guest_of(self, label: str) -> Guest | None:
        """The version of this name, if it is there."""
        return next((guest for guest in self._guests if guest.label == label), None)

    def ended(self, promises: Sequence[Promise]) -> None:
        """What was promised is so no more: a worker has ended, or never began."""
        if not promises:
            return
        gone = set(map(id, promises))
        self._leaving = [promise for promise in self._leaving if id(promise) not in gone]
        self._line = [waiting for waiting in self._line if not any(id(each) in gone for each in waiting.promises)]
        self._ended_at = time.monotonic()
        self._changed.set()

    # ---------------------------------------------------------------------------------------------- who waits

    def find(
        self, guest: Guest, candidates: Sequence[Devices], needed_bytes: int, leaving: Guest | None = None
    ) -> Place[Guest] | None:
        """Where a worker could go if others left; None: nowhere, even if all left that may. Nobody leaves yet.

        `leaving` is one that would leave though it may not.
        """
        free = self._free({device for chosen in candidates for device in chosen})
        residents, later = self._residents(guest, leaving), self._later(guest, leaving)
        return choose_place(candidates, needed_bytes, free, residents, time.monotonic(), later)

    def join(self, guest: Guest, devices: Devices, promises: Sequence[Promise]) -> None:
        """A worker waits for what it is promised; others begin to leave for it."""
        self._line.append(Waiting(guest, devices, promises))
        self._settle()

    def make_room(self, guest: Guest, devices: Devices, needed_bytes: int) -> None:
        """A worker could not begin again on its devices: have others leave, so that the next try finds room."""
        if self._is_judged_by_now():
            names = choose_victims_on(
                devices, needed_bytes, self._free(devices), self._residents(guest), time.monotonic()
            )
            self._send_away(names or (), guest)

    def first_unclaimed(self, guest: Guest, devices: Devices) -> Waiting | None:
        """The first place of a version on these devices that is not there yet, and that no worker waits for."""
        mine = (each for each in self._line if each.guest is guest and each.devices == devices)
        return next((each for each in mine if not each.is_claimed), None)

    async def wait(self, waiting: Waiting) -> None:
        """Wait until a place is there, or given back, at most `startupTimeout`. Raises NoMemoryNow."""
        guest = waiting.guest
        limit_s = guest.options.startup_timeout_s
        waiting.is_claimed = True
        try:
            async with asyncio.timeout(limit_s):
                while waiting in self._line:
                    self._changed.clear()
                    self._watch.look_soon()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._changed.wait()
                    self._settle()
        except TimeoutError:
            log.warning("%s: no memory of a device came free within startupTimeout, %g s", guest.label, limit_s)
            raise NoMemoryNow(guest.options.model, retry_after_s=RETRY_AFTER_S) from None
        finally:
            waiting.is_claimed = False

    def is_claimed(self, promises: Sequence[Promise]) -> bool:
        """Whether a worker waits for this place."""
        return any(waiting.promises is promises and waiting.is_claimed for waiting in self._line)

    def is_awaited(self, promises: Sequence[Promise]) -> bool:
        """Whether a place is not there yet."""
        return any(waiting.promises is promises for waiting in self._line)

    # ---------------------------------------------------------------------------------------------- who leaves

    def _settle(self) -> None:
        """Let in whose memory is there; for the others have as many leave as it takes."""
        self._forget_unawaited()
        if not self._is_judged_by_now():
            return
        taken: dict[int, int] = {}  # by those who wait before
        for waiting in list(self._line):
            if waiting not in self._line:
                continue
            free = {
                promise: size for promise in waiting.promises if (size := self._free_on(promise.device)) is not None
            }
            margins = [
                self._books.margin(promise.device, size, self._watch.read_at, promise) for promise, size in free.items()
            ]
            needed = max(promise.size for promise in waiting.promises)
            if all(size >= needed for size in margins):
                self._line.remove(waiting)
                self._changed.set()
                continue
            # Workers that are loading may have taken theirs: if not, more leave when that is seen.
            expected = {
                promise.device: size - taken.get(promise.device, 0) + self._leaving_on(promise.device)
                for promise, size in free.items()
            }
            residents = self._residents(waiting.guest)
            names = choose_victims_on(waiting.devices, needed, expected, residents, time.monotonic())
            self._send_away(names or (), waiting.guest)
            for promise in waiting.promises:
                taken[promise.device] = taken.get(promise.device, 0) + promise.size

    def _is_judged_by_now(self) -> bool:
        """Whether what is free was read after the last worker had ended: else too many would be told to leave."""
        self._watch.of(0)
        if self._watch.read_at > self._ended_at:
            return True
        self._watch.look_soon()
        return False

    def _send_away(self, guests: Sequence[Guest], for_whom: Guest) -> None:
        for guest in guests:
            promises = list(guest.read_promises())
            on = ", ".join(str(device) for device in sorted({promise.device for promise in promises}))
            log.info("%s makes room on device %s: %s needs it", guest.label, on, for_whom.label)
            self._leaving += promises
            guest.loaded_at = None
            if guest.give_up is not None:
                give_up, guest.give_up = guest.give_up, None
                give_up()
            else:
                assert guest.pool is not None
                guest.pool.metrics.evictions += 1
                guest.pool.sleep(f"asleep: it made room on device {on}, for {for_whom.label}")

    def _forget_unawaited(self) -> None:
        """Let nobody leave for a model whose clients have all gone while it waited."""
        now = time.monotonic()
        for guest in {waiting.guest for waiting in self._line}:
            pool = guest.pool
            if pool is None or not pool.can_sleep or pool.is_awaited:
                guest.unawaited_since = None
            elif guest.unawaited_since is None:
                guest.unawaited_since = now
            elif now - guest.unawaited_since >= UNAWAITED_S:
                guest.unawaited_since = None
                pool.sleep("asleep: nobody waits for it any more")

    # ---------------------------------------------------------------------------------------------- what there is

    def _free(self, devices: Iterable[int]) -> Mapping[int, int]:
        """What one more could be promised on each, with what is about to come free; none of those nobody can read."""
        return {
            device: self._books.margin(device, size, self._watch.read_at) + self._leaving_on(device)
            for device in devices
            if (size := self._free_on(device)) is not None
        }

    def _free_on(self, device: int) -> int | None:
        reading = self._watch.of(device)
        return None if reading is None else reading.free_bytes

    def _leaving_on(self, device: int) -> int:
        return sum(promise.size for promise in self._leaving if promise.device == device)

    def _residents(self, asking: Guest, leaving_too: Guest | None = None) -> list[DeviceResident[Guest]]:
        self._count_demand()
        leaving = set(map(id, self._leaving))
        residents = []
        for guest in self._guests:
            promises = guest.read_promises()
            may_leave = guest.may_leave or guest is leaving_too
            if guest is asking or not may_leave or not promises or any(id(each) in leaving for each in promises):
                continue
            sizes: dict[int, int] = {}
            for promise in promises:
                sizes[promise.device] = sizes.get(promise.device, 0) + promise.size
            if guest.give_up is not None:  # it serves nobody: it goes before any other
                residents.append(DeviceResident(guest, sizes, 0.0, 0.0))
                continue
            assert guest.pool is not None
            stays_until = guest.loaded_at + self._least_residence_s if guest.loaded_at is not None else 0.0
            demand = self._demand.of(guest)
            residents.append(
                DeviceResident(guest, sizes, guest.load_s, demand, stays_until, is_in_use=guest.pool.is_in_use)
            )
        return residents

    def _later(self, asking: Guest, leaving_too: Guest | None = None) -> Mapping[int, int]:
        later: dict[int, int] = {}
        for guest in self._guests:
            may_leave = guest.may_leave or guest is leaving_too
            for promise in guest.read_kept() if guest is not asking and may_leave else ():
                later[promise.device] = later.get(promise.device, 0) + promise.size
        return later

    def _count_demand(self) -> None:
        arrived = []
        for guest in self._guests:
            if guest.pool is not None:
                requests = guest.pool.metrics.requests
                arrived.append((guest, requests - guest.seen_requests))
                guest.seen_requests = requests
        self._demand.add(arrived)
