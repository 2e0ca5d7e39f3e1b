"""Decides which models are put to sleep so that another one can be loaded. Pure: time is passed in.

Worth keeping is what would soon have to be loaded again, and dearly: a model's *worth* is its predicted demand times
the seconds that loading it takes, and models leave in order of worth per byte, the least first.

Demand is predicted from a count of requests that fades: on a clock that ticks once for each request to any model, a
request counts half after `HALF_LIVES_PER_MODEL` requests for each model there is. Often and lately both count, and a
model that was popular once is forgotten at the speed at which others are asked for. Under Zipf's popularity that is
drawn anew from time to time this loads a fifth to a quarter less often than leaving in order of the last use does
(`benchmarks/eviction.py`).

Nothing leaves that is in use, pinned, or has been there for less than the least residence: models that take each
other's place in turn would all be loading and none answering.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# After so many requests for each model that is known, a request counts half.
HALF_LIVES_PER_MODEL = 5.0
LEAST_HALF_LIFE = 50.0
# Beyond this the counts are written down anew: they are kept in units that grow with the clock.
_RESCALE_AT = 1e100
# A load that took no measurable time still has a price, and so has a model that nobody asked for.
LEAST_LOAD_S = 0.001
LEAST_DEMAND = 1e-9

Name = TypeVar("Name", bound=Hashable)


class Demand(Generic[Name]):
    """How much each model is asked for: requests, fading as the requests to all models go by."""

    def __init__(self) -> None:
        self._counts: dict[Name, float] = {}
        self._unit = 1.0

    def add(self, requests: Iterable[tuple[Name, int]]) -> None:
        """So many requests have come for these models since the last call; models that are new become known."""
        arrived = [(name, number) for name, number in requests]
        for name, _ in arrived:
            self._counts.setdefault(name, 0.0)
        total = sum(number for _, number in arrived)
        if not total:
            return
        half_life = max(LEAST_HALF_LIFE, HALF_LIVES_PER_MODEL * len(self._counts))
        # Those that came together are one moment in the middle of their time; an hour's worth must not overflow.
        self._unit *= 2.0 ** min(total / half_life, 256.0)
        for name, number in arrived:
            self._counts[name] += number * self._unit
        if self._unit > _RESCALE_AT:
            self._counts = {name: count / self._unit for name, count in self._counts.items()}
            self._unit = 1.0

    def of(self, name: Name) -> float:
        """The faded number of requests for a model, 0 for one that is not known."""
        return self._counts.get(name, 0.0) / self._unit

    def forget(self, name: Name) -> None:
        """The model is no more."""
        self._counts.pop(name, None)


@dataclass(frozen=True, slots=True)
class Resident(Generic[Name]):
    """A model that is in memory, as the choice sees it. Times in seconds, the moment on the caller's clock.

    `load_s` is what loading it again would take; `demand` as `Demand.of` says; `stays_until` is the end of its least
    residence. What `is_in_use` has requests that wait or run.
    """

    name: Name
    size_bytes: int
    load_s: float
    demand: float
    stays_until: float = -math.inf
    is_in_use: bool = False

    @property
    def worth(self) -> float:
        """Seconds of loading that keeping it is expected to save, up to a factor that is the same for all."""
        return max(LEAST_DEMAND, self.demand) * max(LEAST_LOAD_S, self.load_s)

    def may_leave(self, now: float) -> bool:
        """Whether it may be put to sleep now."""
        return not self.is_in_use and now >= self.stays_until


@dataclass(frozen=True, slots=True)
class Choice(Generic[Name]):
    """Who leaves. Empty where those that may leave now are not enough together.

    `look_again_at` is when more of them may leave because their least residence is over; None where nothing but the
    end of requests changes that.
    """

    names: tuple[Name, ...] = ()
    look_again_at: float | None = None


def choose_victims(residents: Sequence[Resident[Name]], needed_bytes: int, now: float) -> Choice[Name]:
    """Who is put to sleep so that at least `needed_bytes` come free; pinned models are not to be among `residents`.

    All or nothing: where those that may leave are too small together, none leaves in vain.
    """
    if needed_bytes <= 0:
        return Choice()
    may_leave = [resident for resident in residents if resident.may_leave(now)]
    if sum(resident.size_bytes for resident in may_leave) < needed_bytes:
        ends = [resident.stays_until for resident in residents if resident.stays_until > now]
        return Choice(look_again_at=min(ends, default=None))
    ordered = sorted(may_leave, key=lambda resident: resident.worth / max(1, resident.size_bytes))
    chosen: list[Resident[Name]] = []
    freed = 0
    for resident in ordered:
        if freed >= needed_bytes:
            break
        chosen.append(resident)
        freed += resident.size_bytes
    for resident in sorted(chosen, key=lambda resident: -resident.worth):
        if freed - resident.size_bytes >= needed_bytes:  # the last one was so large that this need not go, too
            chosen.remove(resident)
            freed -= resident.size_bytes
    alone = min(
        (resident for resident in may_leave if resident.size_bytes >= needed_bytes),
        key=lambda resident: resident.worth,
        default=None,
    )
    if alone is not None and alone.worth < sum(resident.worth for resident in chosen):
        chosen = [alone]
    return Choice(tuple(resident.name for resident in chosen))
