"""Which models are put to sleep for others: how often they are loaded again, beside Belady's choice and the last use.

A simulation, without processes: of 30 equal models 10 have room at a time; 20,000 requests come one after another, to
models by Zipf's law with exponent 1.0, and every 2,000 requests it is drawn anew which model is how popular. Counted
are loads. Belady's choice knows all that is to come: nobody can load less often.

    python benchmarks/eviction.py        this alone, in seconds; `run.py --only eviction` is the same

    loads                           marserve's choice (`memory/eviction.py`), as multiples of Belady's loads
    loads, last use                 the same for the one that was used longest ago (LRU)
    loads, popularity known         the same for the one that is least popular now, which nobody can know
    seconds of loading              models of 50 MB to 1 GB, some four times as slow to load as others of their size,
                                    in room for a third of their bytes: beside LRU
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from figures import Figure, Goal

from marserve.memory.eviction import Demand, Resident, choose_victims
from marserve.memory.ledger import HOST

if TYPE_CHECKING:
    from plan import Plan

MODELS, PLACES, REQUESTS, DRAWN_ANEW_EVERY, EXPONENT = 30, 10, 20_000, 2_000, 1.0
SEEDS = (1, 2, 3, 4, 5)
MB = 10**6

Trace = Sequence[int]


def shifting_zipf(
    seed: int,
    *,
    models: int = MODELS,
    requests: int = REQUESTS,
    every: int = DRAWN_ANEW_EVERY,
    exponent: float = EXPONENT,
) -> list[int]:
    """Numbers of models in the order in which they are asked for."""
    chance = random.Random(seed)
    weights = [1.0 / (rank + 1) ** exponent for rank in range(models)]
    trace: list[int] = []
    while len(trace) < requests:
        ranked = list(range(models))
        chance.shuffle(ranked)
        trace += chance.choices(ranked, weights, k=min(every, requests - len(trace)))
    return trace


def belady_loads(trace: Trace, places: int = PLACES) -> int:
    """Loads of who knows the future: what is needed again last leaves."""
    never = len(trace)
    next_use, seen = [never] * len(trace), {}
    for position in range(len(trace) - 1, -1, -1):
        next_use[position] = seen.get(trace[position], never)
        seen[trace[position]] = position
    resident: dict[int, int] = {}
    loads = 0
    for position, model in enumerate(trace):
        if model not in resident:
            loads += 1
            if len(resident) >= places:
                del resident[max(resident, key=resident.__getitem__)]
        resident[model] = next_use[position]
    return loads


def lru_loads(trace: Trace, places: int = PLACES) -> int:
    """Loads of who lets the one go that was used longest ago."""
    equal = [1] * (max(trace) + 1)
    return len(_lru(trace, equal, places))


def known_popularity_loads(
    trace: Trace, seed: int, places: int = PLACES, *, models: int = MODELS, every: int = DRAWN_ANEW_EVERY
) -> int:
    """Loads of who is told at each moment how popular every model is, and lets the least popular one go."""
    chance = random.Random(seed)
    weights = [1.0 / (rank + 1) ** EXPONENT for rank in range(models)]
    resident: set[int] = set()
    rank_of: dict[int, int] = {}
    loads = 0
    for position, model in enumerate(trace):
        if position % every == 0:  # the same draws as the trace's own
            ranked = list(range(models))
            chance.shuffle(ranked)
            chance.choices(ranked, weights, k=min(every, len(trace) - position))
            rank_of = {each: rank for rank, each in enumerate(ranked)}
        if model not in resident:
            loads += 1
            if len(resident) >= places:
                resident.remove(max(resident, key=rank_of.__getitem__))
            resident.add(model)
    return loads


def own_loads(trace: Trace, places: int = PLACES) -> int:
    """Loads under `memory/eviction.py`."""
    equal = [1] * (max(trace) + 1)
    return len(_own(trace, equal, [1.0] * len(equal), places))


def _own(trace: Trace, sizes: Sequence[int], load_s: Sequence[float], room: int) -> list[int]:
    """The models that are loaded, in order, under `memory/eviction.py`."""
    demand: Demand[int] = Demand()
    demand.add((model, 0) for model in range(len(sizes)))
    resident: set[int] = set()
    loaded: list[int] = []
    held = 0
    for position, model in enumerate(trace):
        demand.add([(model, 1)])
        if model in resident:
            continue
        loaded.append(model)
        views = [Resident(each, {HOST: sizes[each]}, load_s[each], demand.of(each)) for each in sorted(resident)]
        for gone in choose_victims(views, {HOST: held + sizes[model] - room}, float(position)) or ():
            resident.remove(gone)
            held -= sizes[gone]
        resident.add(model)
        held += sizes[model]
    return loaded


def _lru(trace: Trace, sizes: Sequence[int], room: int) -> list[int]:
    """The models that are loaded, in order, when those go that were used longest ago."""
    resident: dict[int, None] = {}
    loaded: list[int] = []
    held = 0
    for model in trace:
        if model in resident:
            del resident[model]
        else:
            loaded.append(model)
            held += sizes[model]
            while held > room:
                oldest = next(iter(resident))
                del resident[oldest]
                held -= sizes[oldest]
        resident[model] = None
    return loaded


def _unequal(seed: int) -> tuple[list[int], list[float]]:
    """Sizes in bytes, and seconds that loading takes."""
    chance = random.Random(seed)
    sizes = [int(50 * MB * 20 ** chance.random()) for _ in range(MODELS)]
    return sizes, [size / (500 * MB) * chance.choice((1.0, 4.0)) for size in sizes]


def measure(plan: Plan) -> list[Figure]:
    """The figures, as `run.py` wants them."""
    plan.say("eviction: a simulation")
    return figures(SEEDS[:2] if plan.is_quick else SEEDS)


def figures(seeds: Sequence[int]) -> list[Figure]:
    """One value for each seed."""
    traces = {seed: shifting_zipf(seed) for seed in seeds}
    best = [float(belady_loads(trace)) for trace in traces.values()]
    own = [float(own_loads(trace)) for trace in traces.values()]
    lru = [float(lru_loads(trace)) for trace in traces.values()]
    known = [float(known_popularity_loads(trace, seed)) for seed, trace in traces.items()]
    seconds: dict[str, list[float]] = {"own": [], "lru": []}
    for seed, trace in traces.items():
        sizes, load_s = _unequal(seed)
        room = sum(sizes) // 3
        room = max(room, max(sizes))
        choices: dict[str, Callable[[], list[int]]] = {
            "own": lambda: _own(trace, sizes, load_s, room),  # noqa: B023 - called at once
            "lru": lambda: _lru(trace, sizes, room),  # noqa: B023
        }
        for name, loads in choices.items():
            seconds[name].append(sum(load_s[model] for model in loads()))
    what = f"{MODELS} models, {PLACES} places"
    return [
        Figure(f"loads, {what}", "", own, "Belady's choice", best, goal=Goal("at most", 1.7, "compared")),
        Figure(f"loads, {what}: beside last use", "", own, "LRU", lru, goal=Goal("at most", 1.0, "compared")),
        Figure(f"loads of last use, {what}", "", lru, "Belady's choice", best),
        Figure(f"loads with popularity known, {what}", "", known, "Belady's choice", best),
        Figure(
            f"loading, {MODELS} unequal models",
            "s",
            seconds["own"],
            "LRU",
            seconds["lru"],
            goal=Goal("at most", 1.0, "compared"),
        ),
    ]


def main() -> None:
    """Print the table."""
    from figures import table
    from rich.console import Console

    Console(width=160).print(table(figures(SEEDS)))


if __name__ == "__main__":
    main()
