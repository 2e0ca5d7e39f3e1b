"""The line of versions and workers that wait for memory, and the eviction of models that may sleep.

`ledger.py` keeps what is reserved, `eviction.py` chooses; this file puts pools to sleep, and lets waiting reservations
in. The host's memory is free when the processes that held it have ended; a device's when a reading after the last end
shows it. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marserve.errors import NoMemoryNow
from marserve.machine.device_watch import DeviceWatch
from marserve.memory.eviction import Demand, Devices, Place, Resident, choose_place, choose_victims
from marserve.memory.ledger import HOST, DeviceReservation, HostReservation, Ledger, Reservation, Resource
from marserve.memory.needs import MIB, Need
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool

log = logging.getLogger("marserve.registry.memory")

# How often the line of workers that wait for a device is settled, beside each end of a worker.
LOOK_S = 0.1
RETRY_AFTER_S = 1.0
# For how long no request may be seen: one is queued a moment after its memory was asked for, a check a little later.
UNAWAITED_S = 0.25


@dataclass(eq=False)
class Holder:
    """A version with its reservations. Times in monotonic seconds; `loaded_at` None: no worker has the model.

    Of the devices' reservations `kept` are for workers that were asked for, `owed` for slots that were made, `begun`
    for workers that were started, by key. `give_up` ends a version that serves no requests (a spare one). `generation`
    counts the events that make a measurement under way invalid; `is_unsettled`: a worker has loaded the model since the
    last measurement.
    """

    options: PoolOptions
    pool: Pool | None = None
    on_host: HostReservation | None = None
    kept: list[DeviceReservation] = field(default_factory=list)
    owed: list[DeviceReservation] = field(default_factory=list)
    begun: dict[str, DeviceReservation] = field(default_factory=dict)
    give_up: Callable[[], None] | None = None
    load_s: float = 0.0
    begun_at: float = 0.0
    loaded_at: float | None = None
    seen_requests: int = 0
    unawaited_since: float | None = None
    generation: int = 0
    is_unsettled: bool = False
    door: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def label(self) -> str:
        """The version's name in messages."""
        return label_of(self.options)

    @property
    def may_leave(self) -> bool:
        """Whether the version may be evicted."""
        return self.give_up is not None or (
            self.pool is not None and self.pool.can_sleep and not self.options.is_pinned
        )

    @property
    def sizes(self) -> Mapping[Resource, int]:
        """How much of each resource comes free when the version leaves, in bytes."""
        held: dict[Resource, int] = {}
        for reservation in self.begun.values():
            for device in reservation.resources:
                held[device] = held.get(device, 0) + reservation.added_bytes
        if self.on_host is not None and self.on_host.own_bytes and not self.on_host.is_waiting:
            held[HOST] = self.on_host.own_bytes
        return held

    def loaded(self, now: float) -> None:
        """A worker has loaded the model."""
        if self.loaded_at is None:
            self.loaded_at, self.load_s = now, max(0.0, now - self.begun_at)


class WaitingLine:
    """The line of one server."""

    def __init__(self, ledger: Ledger, *, least_residence_s: float, watch: DeviceWatch | None = None) -> None:
        """A model stays for at least `least_residence_s` seconds after its load. `watch` reads devices."""
        self.ledger = ledger
        self.holders: list[Holder] = []
        self.holder_of: dict[Reservation, Holder] = {}
        self._watch = watch
        self._least_residence_s = least_residence_s
        self._demand: Demand[Holder] = Demand()
        self._changed = asyncio.Event()
        self._leaving: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------------------------------- coming and going

    def add(self, holder: Holder) -> None:
        """Add a version."""
        if holder not in self.holders:
            self.holders.append(holder)
            self._demand.add([(holder, 0)])

    def remove(self, holder: Holder) -> None:
        """Remove a version whose processes have all ended."""
        if holder.on_host is not None:
            self.ledger.close(holder.on_host)
            self.holder_of.pop(holder.on_host, None)
        if holder in self.holders:
            self.holders.remove(holder)
        self._demand.forget(holder)
        self._changed.set()
        holder.door.set()

    def find(self, options: PoolOptions) -> Holder | None:
        """The version of this name that serves; None without one."""
        label = label_of(options)
        return next((each for each in self.holders if each.label == label and each.give_up is None), None)

    async def close(self) -> None:
        """Wait until all evicted models have gone."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    # ---------------------------------------------------------------------------------------------- reservations

    def open(self, holder: Holder, need: Need) -> HostReservation:
        """An empty reservation of the host's memory for a version."""
        holder.on_host = self.ledger.open(holder.label, need)
        self.holder_of[holder.on_host] = holder
        return holder.on_host

    def reserve(self, holder: Holder, devices: Devices, size: int, *, waits: bool = False) -> DeviceReservation:
        """A worker's reservation; with `waits` others have to leave for it (`settle`)."""
        reservation = self.ledger.reserve(holder.label, devices, size, waits=waits)
        self.holder_of[reservation] = holder
        return reservation

    def release(self, reservations: Iterable[DeviceReservation]) -> None:
        """Drop reservations of workers that have ended, or were never started."""
        for reservation in reservations:
            self.ledger.release(reservation, time.monotonic())
            self.holder_of.pop(reservation, None)
        self._changed.set()
        if self._watch is not None:
            self._watch.look_soon()

    # ---------------------------------------------------------------------------------------------- waiting

    def settle(self) -> None:
        """Grant the waiting reservations that fit, and evict models for the others."""
        ledger = self.ledger
        for granted in ledger.grant():
            self._changed.set()
            if isinstance(granted, HostReservation):
                self.let_in(self.holder_of[granted])
        is_host_full = False
        for waiting in list(ledger.line):
            is_of_host = isinstance(waiting, HostReservation)
            if not waiting.is_waiting or (is_host_full and is_of_host):
                continue  # its version was just evicted, or an earlier reservation of the host finds no victims
            if ledger.is_judged(waiting):
                is_made = self.make_room(ledger.shortage(waiting), self.holder_of[waiting])
                is_host_full = is_host_full or (is_of_host and not is_made)
            elif self._watch is not None:
                self._watch.look_soon()

    def let_in(self, holder: Holder) -> None:
        """Let a version begin: it has its memory of the host."""
        holder.begun_at = time.monotonic()
        holder.door.set()

    async def wait(self, waiting: DeviceReservation) -> None:
        """Wait until it is granted, or released, at most `startupTimeout`. Raises NoMemoryNow."""
        holder = self.holder_of[waiting]
        limit_s = holder.options.startup_timeout_s
        waiting.is_claimed = True
        try:
            async with asyncio.timeout(limit_s):
                while waiting.is_waiting:
                    self._changed.clear()
                    if self._watch is not None:
                        self._watch.look_soon()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await self._changed.wait()
                    self.forget_unawaited()
                    self.settle()
        except TimeoutError:
            log.warning("%s: no memory of a device came free within startupTimeout, %g s", holder.label, limit_s)
            raise NoMemoryNow(holder.options.model, retry_after_s=RETRY_AFTER_S) from None
        finally:
            waiting.is_claimed = False

    def withdraw(self, holder: Holder) -> None:
        """Let a version wait for the host's memory no longer."""
        if holder.on_host is not None:
            self.ledger.withdraw(holder.on_host)
            holder.door.clear()

    def forget_unawaited(self) -> None:
        """Put waiting versions to sleep whose requests have all gone meanwhile, so that no model leaves for them."""
        now = time.monotonic()
        for holder in dict.fromkeys(self.holder_of[waiting] for waiting in self.ledger.line):
            pool = holder.pool
            if pool is None or not pool.can_sleep or pool.is_awaited:
                holder.unawaited_since = None
            elif holder.unawaited_since is None:
                holder.unawaited_since = now
            elif now - holder.unawaited_since >= UNAWAITED_S:
                holder.unawaited_since = None
                if holder.on_host is not None and holder.on_host.is_waiting:
                    self.withdraw(holder)
                pool.sleep("asleep: no request waits for it any more")

    # ---------------------------------------------------------------------------------------------- leaving

    def find_place(
        self, holder: Holder, candidates: Sequence[Devices], size: int, leaving: Holder | None = None
    ) -> Place[Holder] | None:
        """Which devices a worker could get if others left; None: none, even if all left that may. Nothing leaves yet.

        `leaving` is a version that would leave although it may not be evicted.
        """
        later: Counter[int] = Counter()
        for other in self.holders:
            if other is not holder and (other.may_leave or other is leaving):
                for reservation in (*other.kept, *other.owed):
                    later.update(dict.fromkeys(reservation.resources, reservation.added_bytes))
        free = self._free({device for chosen in candidates for device in chosen})
        return choose_place(candidates, size, free, self._residents(holder, leaving), time.monotonic(), later)

    def make_room_on(self, holder: Holder, devices: Devices, size: int) -> None:
        """Evict models for a worker that could not start on its devices, so that the next try finds room."""
        if self.ledger.is_judged():
            self.make_room({device: size - free for device, free in self._free(devices).items()}, holder)

    def make_room(self, needed: Mapping[Resource, int], asking: Holder | None) -> bool:
        """Evict models that hold so much together; False, without an effect, if that is not possible."""
        if all(size <= 0 for size in needed.values()):
            return True
        victims = choose_victims(self._residents(asking), needed, time.monotonic())
        for holder in victims or ():
            self._send_away(holder, asking, on_host=HOST in needed)
        return victims is not None

    def give_up_spare(self, needed_bytes: int) -> None:
        """End spare versions, until so much of the host's memory is about to come free."""
        for holder in list(self.holders):
            if needed_bytes > 0 and holder.give_up is not None and (size := holder.sizes.get(HOST, 0)):
                needed_bytes -= size
                self._send_away(holder, None, on_host=True)

    def _send_away(self, holder: Holder, asking: Holder | None, *, on_host: bool) -> None:
        on = ", ".join(map(str, sorted({on for each in holder.begun.values() for on in each.resources})))
        if not on_host:
            assert asking is not None
            log.info("%s makes room on device %s: %s needs it", holder.label, on, asking.label)
            reason = f"asleep: it made room on device {on}, for {asking.label}"
        else:
            why = "models have grown"
            if asking is not None and asking.on_host is not None:
                why = f"{asking.label} needs {mib(asking.on_host.own_bytes)} MiB"
            held = holder.sizes.get(HOST, 0)
            log.info("%s makes room (%s MiB)%s", holder.label, mib(held), "" if holder.give_up else f": {why}")
            reason = f"asleep: it made room, for {why}"
        for reservation in holder.begun.values():
            reservation.is_leaving = True
        size = self.ledger.leave(holder.on_host) if holder.on_host is not None else 0
        holder.generation += 1
        holder.loaded_at = None
        holder.is_unsettled = False
        if holder.give_up is not None:  # its reservations go when its processes have ended
            give_up, holder.give_up = holder.give_up, None
            give_up()
            return
        assert holder.pool is not None
        holder.pool.metrics.evictions += 1
        holder.pool.metrics.note("eviction", time.monotonic(), "was put to sleep to make room")
        holder.pool.sleep(reason)
        if holder.on_host is not None:
            task = asyncio.create_task(self._see_out(holder.on_host, holder.pool, size))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _see_out(self, reservation: HostReservation, pool: Pool, size: int) -> None:
        try:
            await pool.wait_until_asleep()
        finally:
            self.ledger.gone(reservation, size)
            self.settle()

    def _residents(self, asking: Holder | None, leaving_too: Holder | None = None) -> list[Resident[Holder]]:
        self._count_demand()
        residents = []
        for holder in self.holders:
            may_leave = holder.may_leave or holder is leaving_too
            is_leaving = any(each.is_leaving for each in holder.begun.values())
            if holder is asking or not may_leave or is_leaving or not (sizes := holder.sizes):
                continue
            if holder.give_up is not None:  # a spare version leaves before any other
                residents.append(Resident(holder, sizes, 0.0, 0.0))
                continue
            assert holder.pool is not None
            stays_until = holder.loaded_at + self._least_residence_s if holder.loaded_at is not None else 0.0
            residents.append(
                Resident(holder, sizes, holder.load_s, self._demand.of(holder), stays_until, holder.pool.is_in_use)
            )
        return residents

    def _count_demand(self) -> None:
        arrived = []
        for holder in self.holders:
            if holder.pool is not None:
                requests = holder.pool.metrics.requests
                arrived.append((holder, requests - holder.seen_requests))
                holder.seen_requests = requests
        self._demand.add(arrived)

    def _free(self, devices: Iterable[int]) -> Mapping[int, int]:
        """How much one more could be promised on each device with a reading, once what is leaving has gone."""
        margins = ((device, self.ledger.margin(device)) for device in devices)
        return {device: size + self.ledger.leaving(device) for device, size in margins if size is not None}


def label_of(options: PoolOptions) -> str:
    """A version's name in messages."""
    return f"{options.model} {options.version}"


def mib(size_bytes: int) -> str:
    """A size in MiB, for messages."""
    return f"{round(size_bytes / MIB):,}"
