"""Tests for batches with a goal: what is learned of costs, what is chosen, and how it does under load of known cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import pytest

from marserve.pool.dispatch.lengths.asked_lengths import BUSY_SHARE
from marserve.pool.dispatch.lengths.latency_goal import WAY_S, BatchCosts, GoalPolicy
from marserve.pool.options import PoolOptions
from support.known_cost import Cost, KnownCost, bursty, poisson

Arrive = Callable[[float, int, int], list[float]]

# ------------------------------------------------------------------------------------------- what is learned


def test_nothing_is_known_before_the_first_batch() -> None:
    """And nothing costs anything."""
    costs = BatchCosts()

    assert costs.is_empty
    assert costs.cost(4) == 0.0
    assert costs.fit() == (0.0, 0.0)


def test_a_slow_batch_now_and_then_says_nothing() -> None:
    """The middle one of the last batches counts."""
    costs = BatchCosts()

    for number in range(30):
        costs.learn(4, 0.5 if number % 5 == 4 else 0.02)

    assert costs.cost(4) == pytest.approx(0.02)


def test_sizes_between_those_that_were_seen_lie_on_a_line() -> None:
    """And beyond them on the fit through all."""
    costs = BatchCosts()

    for size in (2, 8, 16) * 5:
        costs.learn(size, 0.010 + 0.002 * size)

    assert costs.cost(5) == pytest.approx(0.020)
    assert costs.cost(20) == pytest.approx(0.050, rel=0.05)
    assert costs.fit() == (pytest.approx(0.010, rel=0.05), pytest.approx(0.002, rel=0.05))


def test_costs_that_double_are_known_after_few_batches_for_all_sizes() -> None:
    """For those too that were not seen since."""
    costs = BatchCosts()
    for size in (2, 8, 16) * 5:
        costs.learn(size, 0.010 + 0.002 * size)

    for _ in range(10):
        costs.learn(8, 2 * (0.010 + 0.002 * 8))

    assert costs.cost(8) == pytest.approx(0.052, rel=0.05)
    assert costs.cost(16) == pytest.approx(0.084, rel=0.15)
    assert costs.cost(2) == pytest.approx(0.028, rel=0.15)


def test_of_batches_of_microseconds_some_are_enough_until_they_take_longer() -> None:
    """A jump to what counts is seen at once."""
    goal = GoalPolicy(0.1, 8)
    for _ in range(1000):
        goal.learn(4, 1e-5)
    assert goal.describe()["costs"][0]["bySize"]["4"] == pytest.approx(0.01)

    for _ in range(10):
        goal.learn(4, 0.02)

    assert goal.describe()["costs"][0]["bySize"]["4"] == pytest.approx(20.0)


def test_sizes_above_32_are_learned_in_steps() -> None:
    """What is kept stays small however large batches may be."""
    costs = BatchCosts()

    for size in range(1, 1025):
        costs.learn(size, 0.001 * size)

    assert len(costs.known()) < 80
    assert costs.cost(1000) == pytest.approx(1.0, rel=0.1)


# ------------------------------------------------------------------------------------------- what is chosen


def informed(cost: Callable[[int], float], goal_s: float, most: int = 64) -> GoalPolicy:
    """A policy that has seen every size often."""
    goal = GoalPolicy(goal_s, most)
    for _ in range(5):
        for size in range(1, most + 1):
            goal.learn(size, cost(size))
    return goal


def test_a_newcomer_is_careful() -> None:
    """Nothing is known of large batches: each may be twice as large as the largest so far."""
    goal = GoalPolicy(0.1, 64)

    assert goal.choose(50, 0.0) <= 2
    goal.learn(2, 0.001)
    assert goal.choose(50, 0.0) <= 4


def test_all_go_together_where_one_more_costs_little() -> None:
    """The usual case: most of the cost is there for each batch."""
    goal = informed(lambda size: 0.010 + 0.001 * size, 0.1)

    assert goal.choose(20, 0.01) == 20
    assert goal.choose(1, 0.01) == 1


def test_a_batch_that_would_miss_the_goal_by_its_size_is_not_formed() -> None:
    """Some can be kept: they go, in smaller batches."""
    goal = informed(lambda size: 0.010 + 0.001 * size, 0.050)

    assert goal.choose(64, 0.0) <= 40


def test_a_size_beyond_which_items_cost_more_is_not_exceeded() -> None:
    """A cliff, as where a cache or a device's memory is full."""
    goal = informed(lambda size: 0.005 + 0.001 * size if size <= 16 else 0.004 * size, 0.2)

    assert goal.choose(32, 0.01) == 16


def test_sizes_that_leave_nothing_over_are_found() -> None:
    """Where eight cost what one costs, nine are better left at eight."""
    goal = informed(lambda size: 0.02 * -(-size // 8), 0.15)

    assert goal.choose(9, 0.01) == 8
    assert goal.choose(20, 0.01) in (4, 8, 16)


def test_when_none_can_be_kept_the_most_are_done_a_second() -> None:
    """Everybody is late: the queue has to become shorter."""
    goal = informed(lambda size: 0.010 + 0.001 * size, 0.005)

    assert goal.choose(64, 1.0) == 64


def test_two_workers_share_what_waits() -> None:
    """Half each is done sooner than all in one."""
    goal = informed(lambda size: 0.001 + 0.010 * size, 0.5)

    assert goal.choose(8, 0.0, workers=2) <= 4


def test_an_item_joins_only_within_the_padding_budget() -> None:
    """A quarter of the batch may be padding."""
    goal = GoalPolicy(0.1, 8, padding_budget=0.25)

    assert goal.may_join(100, 1, 100, 80)
    assert goal.may_join(100, 1, 100, 50)
    assert not goal.may_join(100, 1, 100, 40)
    assert not goal.may_join(100, 1, 100, 300)


def test_a_batch_goes_ahead_where_it_could_not_grow_or_is_cheap_and_the_goal_is_kept() -> None:
    """Nothing goes ahead before anything is known."""
    quick = informed(lambda size: WAY_S / 10 + 1e-6 * size, 0.050, most=64)
    slow = informed(lambda size: 0.001 + 1e-5 * size, 0.050, most=64)

    assert not GoalPolicy(0.1, 8).allows_ahead(8, 0.0)
    assert quick.allows_ahead(16, 0.0)
    assert not slow.allows_ahead(16, 0.0)
    assert slow.allows_ahead(64, 0.0)
    assert slow.allows_ahead(100, 0.0)
    assert not slow.allows_ahead(64, 0.049)


def test_describe_says_what_was_learned_and_chosen() -> None:
    """In milliseconds, as the configuration."""
    goal = informed(lambda size: 0.010 + 0.001 * size, 0.1, most=8)
    for _ in range(40):
        goal.answered(0.05)
    for _ in range(100):
        goal.learn(6, 0.016)
    goal.learn(1, 0.011)  # the last one before a lull says little
    goal.choose(1, 0.0)

    described = goal.describe()

    assert described["latencyGoalMs"] == 100.0
    assert described["chosenBatchSize"] == 6
    assert (described["p95Ms"], described["isKept"]) == (50.0, True)
    (costs,) = described["costs"]
    assert costs["batchMs"] == pytest.approx(10, rel=0.02)
    assert costs["itemMs"] == pytest.approx(1, rel=0.02)
    assert costs["bySize"]["8"] == pytest.approx(18.0)


# ------------------------------------------------------------------------------------------- under load


def linear(size: int, _length: int, _now: float) -> float:
    """10 ms a batch and 1 ms an item."""
    return 0.010 + 0.001 * size


def cliff(size: int, _length: int, _now: float) -> float:
    """Above 16 every item costs four times as much."""
    return 0.005 + 0.001 * size if size <= 16 else 0.004 * size


def steps(size: int, _length: int, _now: float) -> float:
    """20 ms for each eight items or fewer."""
    return 0.020 * -(-size // 8)


def options(policy: Literal["idle", "fixed", "goal"], size: int, delay_s: float = 0.0, **more: Any) -> PoolOptions:
    """Those of a pool with a queue that is never full."""
    return PoolOptions(
        "m", "1", 1, 1, batch_policy=policy, batch_size=size, max_batch_delay_s=delay_s, queue_size=5000, **more
    )


LEARNING = 500
MEASURED = 3500
SIZES = (4, 8, 16, 32, 64)
# With the sizes among which the best of the grid is, in a tenth of the time.
QUICKLY_MEASURED = 1000


def is_kept(
    settings: PoolOptions, cost: Cost, arrive: Arrive, rate: float, goal_s: float, workers: int, measured: int
) -> bool:
    """Whether all are answered, and the 95th percentile is within the goal, once 500 requests have passed."""
    arrivals = arrive(rate, LEARNING + measured, 7)
    played = KnownCost(settings, cost, workers).run(arrivals)
    return not played.refused and played.percentile(0.95, since=arrivals[LEARNING]) <= goal_s


def most_kept(settings: PoolOptions, cost: Cost, arrive: Arrive, goal_s: float, workers: int, measured: int) -> float:
    """The highest rate a second, in steps of a 40th of what could be at most, at which the goal is kept."""
    top = workers * max(size / cost(size, 1, 0.0) for size in range(1, 65))
    low, high = 0, 40
    while low < high:
        middle = (low + high + 1) // 2
        if is_kept(settings, cost, arrive, top * middle / 40, goal_s, workers, measured):
            low = middle
        else:
            high = middle - 1
    return top * low / 40


@pytest.mark.parametrize(
    ("cost", "arrive", "goal_s", "workers", "sizes", "measured"),
    [
        (steps, bursty, 0.15, 1, (8, 16), QUICKLY_MEASURED),
        pytest.param(linear, poisson, 0.1, 1, SIZES, MEASURED, marks=pytest.mark.long),
        pytest.param(linear, bursty, 0.1, 1, SIZES, MEASURED, marks=pytest.mark.long),
        pytest.param(cliff, poisson, 0.1, 1, SIZES, MEASURED, marks=pytest.mark.long),
        pytest.param(cliff, bursty, 0.1, 2, SIZES, MEASURED, marks=pytest.mark.long),
        pytest.param(steps, bursty, 0.15, 1, SIZES, MEASURED, marks=pytest.mark.long),
    ],
)
def test_throughput_within_the_goal_comes_near_the_best_static_setting(
    cost: Cost, arrive: Arrive, goal_s: float, workers: int, sizes: tuple[int, ...], measured: int
) -> None:
    """At least nine tenths of what the best of a grid of batch sizes and delays keeps to the same goal.

    The policy is told the goal and nothing else.
    """
    waits: list[tuple[Literal["idle", "fixed"], float]] = [("idle", 0.0), ("idle", goal_s / 4), ("fixed", goal_s / 10)]

    static = {
        (size, policy, delay_s): most_kept(options(policy, size, delay_s), cost, arrive, goal_s, workers, measured)
        for size, (policy, delay_s) in product(sizes, waits)
    }
    best = max(static.values())

    assert best > 0
    goal = options("goal", 64, latency_goal_s=goal_s)
    assert is_kept(goal, cost, arrive, 0.9 * best, goal_s, workers, measured), static


@pytest.mark.parametrize("arrive", [pytest.param(poisson, marks=pytest.mark.long), bursty])
def test_the_goal_is_kept_again_within_30_s_after_the_cost_doubled(
    arrive: Arrive,
) -> None:
    """And the costs that describe shows are the new ones."""
    goal_s, doubled_at = 0.12, 40.0

    def cost(size: int, length: int, now: float) -> float:
        return linear(size, length, now) * (2.0 if now >= doubled_at else 1.0)

    played = KnownCost(options("goal", 64, latency_goal_s=goal_s), cost).run(arrive(150.0, 15_000, 3))

    assert played.now > doubled_at + 50
    assert played.percentile(0.95, until=doubled_at) <= goal_s
    assert played.percentile(0.95, since=doubled_at + 30) <= goal_s
    assert played.dispatcher.goal is not None
    (learned,) = played.dispatcher.goal.describe()["costs"]
    assert learned["batchMs"] == pytest.approx(20.0, rel=0.1)
    assert learned["itemMs"] == pytest.approx(2.0, rel=0.1)


def test_a_free_worker_never_waits_while_somebody_does() -> None:
    """Whatever is learned: a batch leaves as soon as there is a worker for it."""
    played = KnownCost(options("goal", 64, latency_goal_s=0.5), steps).run(poisson(20.0, 500, 5))

    assert played.percentile(0.2) == pytest.approx(0.02)
    assert played.percentile(1.0) < 0.1


def test_batches_of_one_length_keep_the_padding_budget_and_do_more() -> None:
    """Short and long texts mixed: batches hold about one length, and the same load is answered sooner."""
    dice = random.Random(11)
    lengths = [dice.choice([16, 20, 24, 400, 450, 512]) for _ in range(3000)]

    def cost(size: int, longest: int, _now: float) -> float:
        return 0.005 + 1e-5 * size * longest

    def play(**more: Any) -> KnownCost:
        pool = options("goal", 32, latency_goal_s=0.3, **more)
        return KnownCost(pool, cost).run(poisson(330.0, 3000, 2), lengths)

    mixed, alike = play(), play(length_from="header:length", padding_budget=0.3)

    for _, batch in alike.batches:
        assert sum(batch) >= 0.7 * max(batch) * len(batch)
    assert len(alike.latencies) == 3000
    assert alike.percentile(0.95) < 0.5 * mixed.percentile(0.95)


def test_lengths_that_only_the_handler_knows_are_asked_for_and_keep_the_budget() -> None:
    """The bytes say nothing of them: asked ahead, they make the same load answered sooner, at a bounded price."""
    dice = random.Random(11)
    lengths = [dice.choice([16, 20, 24, 400, 450, 512]) for _ in range(3000)]

    def cost(size: int, longest: int, _now: float) -> float:
        return 0.005 + 1e-5 * size * longest

    def play(length_s: float | None) -> KnownCost:
        pool = options("goal", 32, latency_goal_s=0.3, padding_budget=0.3)
        return KnownCost(pool, cost, length_s=length_s).run(poisson(330.0, 3000, 2), lengths)

    mixed, asked, dear = play(None), play(0.0002), play(0.02)

    assert mixed.asked == 0
    assert len(asked.latencies) == len(dear.latencies) == 3000
    assert asked.asked > 500
    assert asked.percentile(0.95) < 0.6 * mixed.percentile(0.95)
    for played in (asked, dear):
        busy_s = sum(cost(len(batch), max(batch), 0.0) for _, batch in played.batches)
        assert 0 < played.dispatcher.metrics.length_seconds <= BUSY_SHARE * busy_s + 4 * 0.02
        assert played.dispatcher.metrics.length_seconds == pytest.approx(
            played.asked * (0.0002 if played is asked else 0.02)
        )


def test_who_comes_to_a_free_worker_is_never_asked_about() -> None:
    """A lone request waits for nothing."""
    played = KnownCost(options("goal", 32, latency_goal_s=0.3), linear, length_s=0.001).run(
        [number * 0.1 for number in range(50)], [dice % 7 for dice in range(50)]
    )

    assert played.asked == 0
    assert played.percentile(1.0) == pytest.approx(linear(1, 1, 0.0))
