"""Decides which models are put to sleep so that another one can be loaded, in the host's memory or on devices, and
which device a worker gets if none has room. Pure: time is passed in.

A model's *worth* is its predicted demand times the seconds that its load takes. Models leave in order of worth per
byte, the least first.

Demand is predicted from a fading count of requests. Its clock ticks once for each request to any model; a request
counts half after `HALF_LIVES_PER_MODEL` ticks for each model there is. So frequency and recency both count, and a model
that was popular once is forgotten at the speed at which requests for others come. Under Zipf's popularity, drawn anew
from time to time, this loads a fifth to a quarter less often than eviction of the least recently used model
(`benchmarks/eviction.py`).

A model that is in use, pinned, or loaded for less than the least residence does not leave. Without the last rule models
that evict each other in turn would all be loading, and none answering.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from marserve.memory.ledger import Resource

# After so many requests for each known model a request counts half.
HALF_LIVES_PER_MODEL = 5.0
LEAST_HALF_LIFE = 50.0
# Counts are kept in units that grow with the clock; beyond this they are converted.
_RESCALE_AT = 1e100
# The least load time and demand that count: no model is worth nothing.
LEAST_LOAD_S = 0.001
LEAST_DEMAND = 1e-9

Devices = tuple[int, ...]
Name = TypeVar("Name", bound=Hashable)


class Demand(Generic[Name]):
    """The demand for each model: its requests, fading as requests to all models come."""

    def __init__(self) -> None:
        self._counts: dict[Name, float] = {}
        self._unit = 1.0

    def add(self, requests: Iterable[tuple[Name, int]]) -> None:
        """Add the requests for these models since the last call; new models become known."""
        arrived = [(name, number) for name, number in requests]
        for name, _ in arrived:
            self._counts.setdefault(name, 0.0)
        total = sum(number for _, number in arrived)
        if not total:
            return
        half_life = max(LEAST_HALF_LIFE, HALF_LIVES_PER_MODEL * len(self._counts))
        # Requests since the last call count as one moment; the bound keeps an hour of them from overflowing.
        self._unit *= 2.0 ** min(total / half_life, 256.0)
        for name, number in arrived:
            self._counts[name] += number * self._unit
        if self._unit > _RESCALE_AT:
            self._counts = {name: count / self._unit for name, count in self._counts.items()}
            self._unit = 1.0

    def of(self, name: Name) -> float:
        """The faded number of requests for a model, 0 for an unknown one."""
        return self._counts.get(name, 0.0) / self._unit

    def forget(self, name: Name) -> None:
        """Forget a model."""
        self._counts.pop(name, None)


@dataclass(frozen=True, slots=True)
class Resident(Generic[Name]):
    """A model that is in memory, with how many bytes it holds of each resource. Times in seconds.

    `load_s` is how long another load would take; `demand` is that of `Demand.of`; `stays_until` is the end of its
    least residence, on the caller's clock. `is_in_use`: it has requests that wait or run, or workers that load.
    """

    name: Name
    sizes: Mapping[Resource, int]
    load_s: float
    demand: float
    stays_until: float = -math.inf
    is_in_use: bool = False

    @property
    def worth(self) -> float:
        """The seconds of loading that keeping it is expected to save, up to a factor common to all models."""
        return max(LEAST_DEMAND, self.demand) * max(LEAST_LOAD_S, self.load_s)

    def may_leave(self, now: float) -> bool:
        """Whether it may be put to sleep now."""
        return not self.is_in_use and now >= self.stays_until


@dataclass(frozen=True, slots=True)
class Place(Generic[Name]):
    """The devices for a worker. `names` leave for it; None: not enough models may leave now, but later they may."""

    devices: Devices
    names: tuple[Name, ...] | None


def choose_victims(
    residents: Sequence[Resident[Name]], needed: Mapping[Resource, int], now: float
) -> tuple[Name, ...] | None:
    """The models that are put to sleep so that so many bytes of each resource come free.

    `residents` has no pinned ones. None if the models that may leave now are too small together.
    """
    chosen: list[Resident[Name]] = []
    for resource, size in needed.items():
        short = size - _held(chosen, resource)
        if short <= 0:
            continue
        others = [each for each in residents if each not in chosen and each.sizes.get(resource) and each.may_leave(now)]
        if _held(others, resource) < short:
            return None
        chosen += _choose_on(resource, short, others)
    return tuple(resident.name for resident in _without_needless(chosen, needed))


def _choose_on(resource: Resource, short: int, may_leave: Sequence[Resident[Name]]) -> Sequence[Resident[Name]]:
    """The models of least worth per byte that suffice, or one large model that alone is worth less than they are."""
    chosen: list[Resident[Name]] = []
    for resident in sorted(may_leave, key=lambda resident: resident.worth / resident.sizes[resource]):
        if _held(chosen, resource) >= short:
            break
        chosen.append(resident)
    chosen = _without_needless(chosen, {resource: short})
    large = [resident for resident in may_leave if resident.sizes[resource] >= short]
    alone = min(large, key=lambda resident: resident.worth, default=None)
    if alone is not None and alone.worth < sum(resident.worth for resident in chosen):
        return [alone]
    return chosen


def _without_needless(chosen: list[Resident[Name]], needed: Mapping[Resource, int]) -> list[Resident[Name]]:
    """The chosen models without needless ones: others are large enough, or free several resources."""
    for resident in sorted(chosen, key=lambda resident: -resident.worth):
        others = [other for other in chosen if other is not resident]
        if all(_held(others, resource) >= size for resource, size in needed.items()):
            chosen = others
    return chosen


def _held(residents: Sequence[Resident[Name]], resource: Resource) -> int:
    return sum(resident.sizes.get(resource, 0) for resident in residents)


def choose_place(
    candidates: Sequence[Devices],
    needed_bytes: int,
    free: Mapping[int, int],
    residents: Sequence[Resident[Name]],
    now: float,
    later: Mapping[int, int],
) -> Place[Name] | None:
    """The devices for a worker that needs so much on each of them. A device that is not in `free` has enough.

    `free` is what could be had without evictions, negative if earlier reservations wait for more; `later` is what is
    promised on a device to models that may leave after their load. Chosen are the devices whose victims are worth least
    together; if no victims may leave now, the devices that could get the most memory. None: it would fit nowhere, even
    if all of them left.
    """
    could_be_had = {device: size + later.get(device, 0) + _held(residents, device) for device, size in free.items()}
    possible = [
        devices
        for devices in candidates
        if all(could_be_had.get(device, needed_bytes) >= needed_bytes for device in devices)
    ]
    if not possible:
        return None
    worth = {resident.name: resident.worth for resident in residents}
    able = []
    for devices in possible:
        names = choose_victims(residents, {on: needed_bytes - free[on] for on in devices if on in free}, now)
        if names is not None:
            able.append((devices, names))
    if able:
        return Place(*min(able, key=lambda choice: sum(worth[name] for name in choice[1])))
    return Place(max(possible, key=lambda devices: min(could_be_had.get(device, 0) for device in devices)), None)
