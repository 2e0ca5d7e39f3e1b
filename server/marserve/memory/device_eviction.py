"""Decides on which device a worker goes where none has room for it, and which models are put to sleep for that. Pure.

The policy is that of the host's memory (`eviction.py`): least worth for each byte first, nobody that is in use or came
a moment ago. Each device is full by itself, and a worker of several needs room on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from marserve.memory.eviction import Resident, choose_victims

Devices = tuple[int, ...]
Name = TypeVar("Name", bound=Hashable)
NOTHING: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class DeviceResident(Generic[Name]):
    """A model on devices that may make room at all: what it holds on which, in bytes. The rest as `Resident`."""

    name: Name
    sizes: Mapping[int, int]
    load_s: float
    demand: float
    stays_until: float = -math.inf
    is_in_use: bool = False

    def on(self, device: int) -> Resident[Name]:
        """As the choice for one device sees it."""
        return Resident(
            self.name, self.sizes.get(device, 0), self.load_s, self.demand, self.stays_until, self.is_in_use
        )


@dataclass(frozen=True, slots=True)
class Place(Generic[Name]):
    """Where the worker goes. `names` leave for it; None: not enough of them may leave now, but later some can."""

    devices: Devices
    names: tuple[Name, ...] | None


def most_on(
    free: Mapping[int, int], residents: Sequence[DeviceResident[Name]], later: Mapping[int, int] = NOTHING
) -> Mapping[int, int]:
    """What could be had of each device if all left that may."""
    return {
        device: size + later.get(device, 0) + sum(resident.sizes.get(device, 0) for resident in residents)
        for device, size in free.items()
    }


def choose_victims_on(
    devices: Devices,
    needed_bytes: int,
    free: Mapping[int, int],
    residents: Sequence[DeviceResident[Name]],
    now: float,
) -> tuple[Name, ...] | None:
    """Who is put to sleep so that so much comes free on each of the devices. None: not enough of them may leave now.

    `free` is what could be had of a device without that, below 0 where others wait for it before; a device that is not
    in it has room for anybody.
    """
    chosen: list[DeviceResident[Name]] = []
    for device in devices:
        if device not in free:
            continue
        short = needed_bytes - free[device] - sum(resident.sizes.get(device, 0) for resident in chosen)
        if short <= 0:
            continue
        others = [resident for resident in residents if resident not in chosen and resident.sizes.get(device, 0)]
        names = choose_victims([resident.on(device) for resident in others], short, now).names
        if not names:
            return None
        chosen += [resident for resident in others if resident.name in names]
    for resident in sorted(chosen, key=lambda resident: -resident.on(0).worth):
        others = [other for other in chosen if other is not resident]
        if _is_enough(devices, needed_bytes, free, others):  # one that left for a later device made room on this, too
            chosen = others
    return tuple(resident.name for resident in chosen)


def _is_enough(
    devices: Devices, needed_bytes: int, free: Mapping[int, int], leaving: Sequence[DeviceResident[Name]]
) -> bool:
    return all(
        free[device] + sum(resident.sizes.get(device, 0) for resident in leaving) >= needed_bytes
        for device in devices
        if device in free
    )


def choose_place(
    candidates: Sequence[Devices],
    needed_bytes: int,
    free: Mapping[int, int],
    residents: Sequence[DeviceResident[Name]],
    now: float,
    later: Mapping[int, int] = NOTHING,
) -> Place[Name] | None:
    """Where a worker goes that needs so much on each of its devices; as `choose_victims_on`.

    `later` is what is promised on a device to models that may leave once they have come. Where those leave that are
    worth least together; where nobody may now, to the device with the most that can. None: it would fit nowhere, even
    if all of them left.
    """
    could_be_had = most_on(free, residents, later)
    possible = [
        devices
        for devices in candidates
        if all(could_be_had.get(device, needed_bytes) >= needed_bytes for device in devices)
    ]
    if not possible:
        return None
    worth = {resident.name: resident.on(0).worth for resident in residents}
    leaving = {devices: choose_victims_on(devices, needed_bytes, free, residents, now) for devices in possible}
    able = [(devices, names) for devices, names in leaving.items() if names is not None]
    if able:
        return Place(*min(able, key=lambda choice: sum(worth[name] for name in choice[1])))
    return Place(max(possible, key=lambda devices: min(could_be_had.get(device, 0) for device in devices)), None)
