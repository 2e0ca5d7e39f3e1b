"""Decides where the next worker of a slot goes while devices are lost. Pure: what is known of devices is passed in.

A worker stays where its slot was placed first (`home`). While that is lost it goes to another place of the model's, and
back when home has been sound for a while: a device that comes and goes does not move workers each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marserve.memory.eviction import Devices

# So long a device has to be sound before workers that found another place are moved back to it.
SETTLED_S = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """One place that a worker could have: a device, or a group of them.

    `is_settled`: sound for `SETTLED_S`; `fits`: there is memory for one worker more; `workers` are there already, of
    all versions.
    """

    devices: Devices
    is_sound: bool = True
    is_settled: bool = True
    fits: bool = True
    workers: int = 0


def choose_site(present: Devices, home: Devices, sites: Sequence[Site]) -> Devices | None:
    """Where the next worker goes of a slot that is at `present`; None where all places are lost: it waits.

    Of other places those with memory for it come first, then the one with the fewest workers.
    """
    sound = {site.devices: site for site in sites if site.is_sound}
    if home in sound and (present not in sound or (sound[home].is_settled and sound[home].fits)):
        return home
    if present in sound:
        return present
    if not sound:
        return None
    return min(sound.values(), key=lambda site: (not site.fits, site.workers)).devices
