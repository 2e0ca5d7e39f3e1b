"""Decides which devices the next worker of a slot gets while devices are lost. Pure: their state is passed in.

A worker stays on the devices of its slot's first placement (`home`). While these are lost it gets others of the
model's. It goes back when home has been sound for a while, so that a device that comes and goes does not move workers
each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marserve.memory.eviction import Devices

# How long a device has to be sound before workers are moved back to it.
SETTLED_S = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """A device, or a group of devices, that a worker could have.

    `is_settled`: sound for `SETTLED_S`; `fits`: there is memory for one more worker; `workers` of all versions are
    there already.
    """

    devices: Devices
    is_sound: bool = True
    is_settled: bool = True
    fits: bool = True
    workers: int = 0


def choose_site(present: Devices, home: Devices, sites: Sequence[Site]) -> Devices | None:
    """The devices for the next worker of a slot that is on `present`; None if all are lost, so that it waits.

    Among other devices those with memory for it come first, then those with the fewest workers.
    """
    sound = {site.devices: site for site in sites if site.is_sound}
    if home in sound and (present not in sound or (sound[home].is_settled and sound[home].fits)):
        return home
    if present in sound:
        return present
    if not sound:
        return None
    return min(sound.values(), key=lambda site: (not site.fits, site.workers)).devices
