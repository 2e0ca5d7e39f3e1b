"""Who is put to sleep: what is worth least, in bytes and seconds; nothing that is in use or came a moment ago."""

from __future__ import annotations

import random

import pytest

from marserve.memory.eviction import Demand, Resident, choose_victims


def resident(name: str, *, size: int = 100, load_s: float = 1.0, demand: float = 1.0, **facts: float) -> Resident[str]:
    """A model in memory that may leave, unless the facts say otherwise."""
    stays = facts.pop("stays_until", 0.0)
    return Resident(name, {"host": size}, load_s, demand, stays_until=stays, is_in_use=bool(facts.pop("is_in_use", 0)))


def test_the_least_asked_for_leaves() -> None:
    """Of equal models the one with the least demand."""
    models = [resident("often", demand=5), resident("seldom", demand=1), resident("now and then", demand=2)]

    assert choose_victims(models, {"host": 100}, now=1.0) == ("seldom",)


def test_what_loads_fast_leaves_before_what_loads_slowly() -> None:
    """The price of an error counts, not only how probable it is."""
    models = [resident("slow", load_s=60.0, demand=1), resident("fast", load_s=1.0, demand=10)]

    assert choose_victims(models, {"host": 100}, now=1.0) == ("fast",)


def test_a_large_model_leaves_before_several_small_ones_that_are_worth_more() -> None:
    """Worth counts by the byte."""
    models = [resident("large", size=400, demand=2), *(resident(f"small-{n}", size=100, demand=1) for n in range(4))]

    assert choose_victims(models, {"host": 400}, now=1.0) == ("large",)


def test_no_more_leave_than_must() -> None:
    """When the last one to be chosen is large, those before it stay."""
    models = [resident("tiny", size=10, demand=0.01), resident("large", size=1000, demand=5)]

    assert choose_victims(models, {"host": 900}, now=1.0) == ("large",)


def test_what_is_in_use_never_leaves() -> None:
    """However little it is worth; and the others leave only if they are enough."""
    models = [resident("busy", size=1000, demand=0, is_in_use=1), resident("idle", size=100)]

    assert choose_victims(models, {"host": 100}, now=1.0) == ("idle",)
    assert choose_victims(models, {"host": 200}, now=1.0) is None


def test_what_came_a_moment_ago_stays_for_a_while() -> None:
    """Until the end of its least residence."""
    models = [resident("new", stays_until=10.0), resident("newer", stays_until=12.0)]

    assert choose_victims(models, {"host": 100}, now=9.0) is None
    assert choose_victims(models, {"host": 100}, now=10.0) == ("new",)


def test_nobody_leaves_in_vain() -> None:
    """Where all together are not enough, all stay."""
    assert choose_victims([resident("a"), resident("b")], {"host": 201}, now=1.0) is None


def test_nothing_leaves_where_nothing_is_needed() -> None:
    """Room enough."""
    assert choose_victims([resident("a")], {"host": 0}, now=1.0) == ()


@pytest.mark.parametrize("seed", range(50))
def test_whoever_is_chosen_frees_enough_and_may_leave(seed: int) -> None:
    """Of any models; and not one of the chosen could have stayed."""
    chance = random.Random(seed)
    models = [
        resident(
            str(number),
            size=chance.randrange(1, 1000),
            load_s=chance.random() * 10,
            demand=chance.random() * 5,
            stays_until=chance.choice((0.0, 20.0)),
            is_in_use=chance.random() < 0.3,
        )
        for number in range(chance.randrange(1, 20))
    ]
    free = {model.name: model.sizes["host"] for model in models if model.may_leave(10.0)}
    needed = chance.randrange(1, 3000)

    chosen = choose_victims(models, {"host": needed}, now=10.0)

    assert set(chosen or ()) <= set(free)
    assert bool(chosen) == (sum(free.values()) >= needed)
    if chosen:
        freed = sum(free[name] for name in chosen)
        assert freed >= needed
        assert all(freed - free[name] < needed for name in chosen)


def test_demand_fades_as_others_are_asked_for() -> None:
    """Half is left after the half-life, which grows with the number of models; time alone takes nothing away."""
    demand: Demand[str] = Demand()
    demand.add([("a", 8), ("b", 0)])
    before = demand.of("a")

    demand.add([("b", 50)])

    assert demand.of("a") == pytest.approx(before / 2)
    assert demand.of("b") > demand.of("a")


def test_demand_of_who_is_unknown_or_forgotten_is_none() -> None:
    """A model that was taken away begins anew."""
    demand: Demand[str] = Demand()
    demand.add([("a", 5)])
    demand.forget("a")

    assert demand.of("a") == demand.of("b") == 0.0


def test_demand_stays_a_number_for_ever() -> None:
    """Neither a night of requests at once nor a million of them one by one lets it overflow or vanish."""
    demand: Demand[str] = Demand()
    for _ in range(100):
        demand.add([("a", 10**9), ("b", 10**9)])
    for number in range(50_000):
        demand.add([("a" if number % 3 else "b", 1)])

    assert 0 < demand.of("b") < demand.of("a") < 1000
