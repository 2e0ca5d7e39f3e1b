"""The ledger of memory: what is reserved of the host and of each device, and which reservations wait. Pure: readings
and times are passed in, and nothing is started or ended here. `host_memory.py` and `device_memory.py` ask it before a
load, and refuse one that has no room; `waiting_line.py` lets those in that wait.

A reservation is made before a process is started, so several loads at once never count on the same bytes.

- A version has one `HostReservation`. It is charged the larger of its promise (the peak while it loads, its need
  afterwards) and of what its processes held when they were last measured. The host's budget is fixed.
- A worker has one `DeviceReservation` over all of its devices. The free memory of a device is what the driver says,
  less the promises to workers that have not taken their memory yet. A loading worker has taken a part of its promise,
  which cannot be distinguished from memory of other programs. So while workers load, two bounds are computed, neither
  of which promises too much, and the larger one counts: the memory free now, less the whole promises of the loading
  workers; and the memory free when the first of them began, less all promises since, but at most what is free now.

Memory that is about to come free (`leaving`) is not free: a reservation stays until the processes that hold it have
ended. Reservations that do not fit yet wait in one line. A reservation is granted when each of its resources has enough
beside all that came before it, so that a large model gets its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Literal, Protocol

from marserve.machine.accelerators import DeviceReading
from marserve.memory.needs import Learned, Need

# The host's memory, or a device by its number.
Resource = int | Literal["host"]
HOST: Final = "host"


class DoesNotFit(Exception):
    """A load does not fit, even if every version that may leave did. Sizes in bytes.

    `holders` are the versions that stay, by label, largest first; `could_be_had` is what they leave of the budget.
    """

    def __init__(self, needed_bytes: int, could_be_had: int, holders: Sequence[tuple[str, int]]) -> None:
        self.needed_bytes, self.could_be_had, self.holders = needed_bytes, could_be_had, holders
        super().__init__(f"{needed_bytes} bytes are needed, {could_be_had} could be had")


class Readings(Protocol):
    """The latest readings of devices."""

    @property
    def read_at(self) -> float:
        """When the latest reading was taken, monotonic seconds."""

    def of(self, device: int) -> DeviceReading | None:
        """The latest reading of a device; None without one."""


@dataclass(slots=True, eq=False)
class HostReservation:
    """A version's share of the host's memory, in bytes. Processes that are ending hold `leaving_bytes`."""

    resources: ClassVar[tuple[Resource, ...]] = (HOST,)
    label: str
    need: Need
    workers: int = 0
    promised_bytes: int = 0
    measured_bytes: int = 0
    leaving_bytes: int = 0
    is_waiting: bool = False

    @property
    def own_bytes(self) -> int:
        """What the version is charged, without `leaving_bytes`."""
        return max(self.promised_bytes, self.measured_bytes)

    @property
    def added_bytes(self) -> int:
        """What it is charged beyond what its processes hold: what it waits for."""
        return self.own_bytes - self.measured_bytes


@dataclass(slots=True, eq=False)
class DeviceReservation:
    """One worker's share of each of its devices, in bytes. `loaded_at` is when it had loaded the model, None before.

    `is_claimed`: a worker waits for it; `is_leaving`: the worker is being ended.
    """

    label: str
    resources: tuple[int, ...]
    added_bytes: int
    loaded_at: float | None = None
    is_waiting: bool = False
    is_claimed: bool = False
    is_leaving: bool = False

    def is_seen(self, read_at: float) -> bool:
        """Whether the reading at `read_at` includes the worker's memory: it was taken after the load."""
        return self.loaded_at is not None and read_at > self.loaded_at


Reservation = HostReservation | DeviceReservation


@dataclass(slots=True)
class _Device:
    """All reservations of one device, and those made since the first load under way began (`since`)."""

    reservations: list[DeviceReservation] = field(default_factory=list)
    since: list[DeviceReservation] = field(default_factory=list)
    free_before: int = 0


class Ledger:
    """The reservations of one server. `shared_bytes` is held by processes that belong to no version."""

    def __init__(self, budget_bytes: int = 0, readings: Readings | None = None) -> None:
        """`budget_bytes` is the host's; without `readings` the memory of devices has no bound."""
        self.budget_bytes = budget_bytes
        self.shared_bytes = 0
        self.on_host: list[HostReservation] = []
        self.line: list[Reservation] = []
        self._readings = readings
        self._devices: dict[int, _Device] = {}
        self._ended_at = -1.0

    # ------------------------------------------------------------------------------------------- what there is

    @property
    def held_bytes(self) -> int:
        """Memory of the host that is held, promised (to waiting reservations, too), or about to come free."""
        return self.shared_bytes + sum(each.own_bytes + each.leaving_bytes for each in self.on_host)

    @property
    def free_bytes(self) -> int:
        """Memory of the host that is not in `held_bytes`."""
        return max(0, self.budget_bytes - self.held_bytes)

    @property
    def excess_bytes(self) -> int:
        """How far models exceed the host's budget, since they grow while they serve, without what is leaving."""
        return max(0, -(self._expected(HOST) or 0))

    def leaving(self, resource: Resource) -> int:
        """How much of a resource is about to come free."""
        if isinstance(resource, str):
            return sum(each.leaving_bytes for each in self.on_host)
        return sum(each.added_bytes for each in self._device(resource).reservations if each.is_leaving)

    def could_be_had(self, device: int) -> int | None:
        """How much one more worker could be promised on this device; None without a reading."""
        margin = self.margin(device)
        return None if margin is None else max(0, margin)

    def margin(self, resource: Resource, before: Reservation | None = None) -> int | None:
        """How much one more reservation could be promised, negative if too much is; None without a reading.

        With `before`, a waiting reservation: what that one may count on, after those that came before it.
        """
        if isinstance(resource, str):
            line = self.line[: self.line.index(before)] if before in self.line else self.line
            return self.budget_bytes - self._begun_bytes() - _wanted(line, resource)
        free = self._free_on(resource)
        if free is None or self._readings is None:
            return None
        device, read_at = self._device(resource), self._readings.read_at
        if not device.since:
            return free
        first = device.since
        if isinstance(before, DeviceReservation) and before in first:
            first = first[: first.index(before)]
        loading = sum(each.added_bytes for each in first if not each.is_seen(read_at))
        since = device.free_before - sum(each.added_bytes for each in first)
        return max(free - loading, min(free, since))

    def total(self, device: int) -> int | None:
        """A device's memory, None without a reading."""
        reading = self._readings.of(device) if self._readings is not None else None
        return reading.total_bytes if reading is not None else None

    def _free_on(self, device: int) -> int | None:
        reading = self._readings.of(device) if self._readings is not None else None
        return None if reading is None else reading.free_bytes

    def _device(self, device: int) -> _Device:
        """A device. Once readings include all loads of `since`, that list begins anew."""
        found = self._devices.setdefault(device, _Device())
        if self._readings is not None and all(each.is_seen(self._readings.read_at) for each in found.since):
            found.since = []
        return found

    def _begun_bytes(self) -> int:
        return self.held_bytes - _wanted(self.line, HOST)

    def _expected(self, resource: Resource) -> int | None:
        """What waiting reservations will find once everything that is leaving has gone; None without a reading.

        This assumes that loading workers have taken their memory. If not, a later reading shows it, and more leaves.
        """
        if isinstance(resource, str):
            return self.budget_bytes - self._begun_bytes() + self.leaving(resource)
        free = self._free_on(resource)
        return None if free is None else free + self.leaving(resource)

    # ------------------------------------------------------------------------------------------- the line

    def grant(self) -> list[Reservation]:
        """Take out of the line, in order, the reservations that have enough of each of their resources by now."""
        granted: list[Reservation] = []
        full: set[Resource] = set()  # no reservation may overtake another that lacks the same resource
        for waiting in list(self.line):
            lacking = full.intersection(waiting.resources) or {
                resource
                for resource in waiting.resources
                if (margin := self.margin(resource, waiting)) is not None and margin < waiting.added_bytes
            }
            if not lacking and self.is_judged(waiting):
                self.line.remove(waiting)
                waiting.is_waiting = False
                granted.append(waiting)
            full |= lacking
        return granted

    def shortage(self, waiting: Reservation) -> Mapping[Resource, int]:
        """How much more of each resource must come free so that it can begin after those before it."""
        before = self.line[: self.line.index(waiting)]
        return {
            resource: waiting.added_bytes + _wanted(before, resource) - expected
            for resource in waiting.resources
            if (expected := self._expected(resource)) is not None
        }

    def is_judged(self, waiting: Reservation | None = None) -> bool:
        """Whether devices were read after the last worker's end: else too many models would be evicted."""
        if isinstance(waiting, HostReservation) or self._readings is None:
            return True
        return self._readings.read_at > self._ended_at

    def withdraw(self, reservation: HostReservation) -> None:
        """Take a waiting reservation out of the line, and drop its promise."""
        if reservation.is_waiting:
            self.line.remove(reservation)
            reservation.is_waiting = False
            reservation.workers = reservation.promised_bytes = 0

    # ------------------------------------------------------------------------------------------- the host

    def open(self, label: str, need: Need) -> HostReservation:
        """An empty reservation for a version."""
        reservation = HostReservation(label, need)
        self.on_host.append(reservation)
        return reservation

    def close(self, reservation: HostReservation) -> None:
        """Forget a version whose processes have all ended."""
        self.withdraw(reservation)
        if reservation in self.on_host:
            self.on_host.remove(reservation)

    def ask(self, reservation: HostReservation, workers: int, stays: Callable[[HostReservation], bool]) -> bool:
        """Promise the memory for so many workers. True: it is there now; False: the reservation waits for it.

        `stays` says which other versions never leave. Raises DoesNotFit, and nothing has changed then.
        """
        own, _ = self.weigh(reservation, workers, stays)
        grows = own > reservation.own_bytes
        reservation.workers = workers
        reservation.promised_bytes = max(reservation.promised_bytes, reservation.need.loading(workers))
        if grows and not reservation.is_waiting and (self.is_host_awaited or self.held_bytes > self.budget_bytes):
            reservation.is_waiting = True
            self.line.append(reservation)
        return not reservation.is_waiting

    def weigh(
        self, reservation: HostReservation, workers: int, stays: Callable[[HostReservation], bool]
    ) -> tuple[int, int]:
        """What it would be charged for so many workers, and what it could get at most. Changes nothing.

        The reservation need not be open. Raises DoesNotFit.
        """
        own = max(reservation.promised_bytes, reservation.need.loading(workers), reservation.measured_bytes)
        staying = [other for other in self.on_host if other is not reservation and stays(other)]
        could_be_had = self.budget_bytes - self.shared_bytes - sum(other.own_bytes for other in staying)
        if own > reservation.own_bytes and own > could_be_had:
            holders = sorted(((other.label, other.own_bytes) for other in staying), key=lambda holder: -holder[1])
            raise DoesNotFit(own, max(0, could_be_had), [holder for holder in holders if holder[1]])
        return own, max(0, could_be_had)

    def grow(self, reservation: HostReservation, workers: int) -> int:
        """Promise memory for up to so many workers, as far as it is free without evictions. Returns how many."""
        allowed = min(workers, reservation.workers)
        while allowed < workers:
            more = max(0, reservation.need.resident(allowed + 1) - reservation.own_bytes)
            if self.is_host_awaited or more > self.free_bytes:
                break
            allowed += 1
            reservation.promised_bytes = max(reservation.promised_bytes, reservation.need.resident(allowed))
        reservation.workers = max(reservation.workers, allowed)
        return allowed

    def shrink(self, reservation: HostReservation, workers: int) -> None:
        """Reduce the promise to so many workers; memory that the others hold stays charged until it is measured."""
        if reservation.is_waiting and not workers:
            self.withdraw(reservation)
            return
        reservation.workers = workers
        if not reservation.is_waiting:
            reservation.promised_bytes = reservation.need.resident(workers)

    def settle(self, reservation: HostReservation, measured_bytes: int, learned: Learned) -> None:
        """The model is loaded: the promise falls from the peak to the need that was measured."""
        need = reservation.need
        if need.source == "declared":
            need = replace(need, more_bytes=learned.more_bytes)
        else:
            need = Need(learned.first_bytes, learned.more_bytes, learned.peak_bytes, "learned")
        reservation.need = need
        reservation.promised_bytes = need.resident(reservation.workers)
        reservation.measured_bytes = measured_bytes

    def leave(self, reservation: HostReservation) -> int:
        """The version's processes are being ended. Returns how much will come free; `gone` gives that back."""
        size = reservation.own_bytes
        self.withdraw(reservation)
        reservation.workers = reservation.promised_bytes = reservation.measured_bytes = 0
        reservation.leaving_bytes += size
        return size

    def gone(self, reservation: HostReservation, size: int) -> None:
        """The processes that held so much have ended."""
        reservation.leaving_bytes = max(0, reservation.leaving_bytes - size)

    @property
    def is_host_awaited(self) -> bool:
        """Whether a version waits for the host's memory."""
        return any(HOST in waiting.resources for waiting in self.line)

    # ------------------------------------------------------------------------------------------- devices

    def reserve(self, label: str, devices: Sequence[int], size: int, *, waits: bool = False) -> DeviceReservation:
        """Promise a worker so much of each device, whether it fits or not; with `waits` it joins the line."""
        reservation = DeviceReservation(label, tuple(devices), size, is_waiting=waits)
        for number in reservation.resources:
            device = self._device(number)
            if not device.since:
                device.free_before = self._free_on(number) or 0
            device.reservations.append(reservation)
            device.since.append(reservation)
        if waits:
            self.line.append(reservation)
        return reservation

    def release(self, reservation: DeviceReservation, now: float | None = None) -> None:
        """Drop a reservation: the worker ended at `now`; None: it was never started, and no memory comes free."""
        for number in reservation.resources:
            device = self._devices[number]
            device.reservations = [each for each in device.reservations if each is not reservation]
            device.since = [each for each in device.since if each is not reservation]
        self.line = [waiting for waiting in self.line if waiting is not reservation]
        reservation.is_waiting = False
        self._ended_at = self._ended_at if now is None else now

    def count(self, device: int) -> int:
        """How many workers have reservations of a device."""
        return len(self._device(device).reservations)

    def holders(self, device: int) -> list[tuple[str, int]]:
        """The labels of the versions with reservations of a device, with the sum of each, largest first."""
        held: dict[str, int] = {}
        for each in self._device(device).reservations:
            held[each.label] = held.get(each.label, 0) + each.added_bytes
        return sorted(held.items(), key=lambda holder: -holder[1])


def _wanted(line: Sequence[Reservation], resource: Resource) -> int:
    return sum(waiting.added_bytes for waiting in line if resource in waiting.resources)
