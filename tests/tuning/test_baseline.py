"""Whether a slower build is noticed, and an equal one is not."""

from __future__ import annotations

import math
import random

import pytest

from marserve.tuning.baseline import compare, fails_more, left_out_of, turn_s


def _pairs(slower: float, seed: int, pairs: int = 15, requests: int = 40) -> list[tuple[float, float]]:
    """Turns on a shared machine: times are spread, its speed wanders, others hold it up now and then."""
    dice = random.Random(seed)
    level, measured = 1.0, []

    def turn(factor: float) -> float:
        nonlocal level
        level = min(3.0, max(0.5, level * math.exp(dice.gauss(0, 0.05))))
        times = [0.01 * level * factor * math.exp(dice.gauss(0, 0.2)) for _ in range(requests)]
        if dice.random() < 0.1:  # somebody else has the processor for a while
            times[0] += 0.2
        return turn_s(times)

    for number in range(pairs):
        if number % 2:
            second, first = turn(slower), turn(1.0)
        else:
            first, second = turn(1.0), turn(slower)
        measured.append((first, second))
    return measured


def test_a_build_that_is_a_fifth_slower_is_caught_ten_times_of_ten() -> None:
    """Though the machine's speed wanders by more than that."""
    assert [compare(_pairs(1.2, seed)).is_slower() for seed in range(10)] == [True] * 10


def test_a_rerun_of_the_same_build_is_never_called_slower() -> None:
    """Nor faster, in ten times the twenty runs that are asked for."""
    found = [compare(_pairs(1.0, 100 + seed)) for seed in range(200)]

    assert not any(times.is_slower() or times.is_faster() for times in found)


def test_a_fault_of_some_requests_is_seen_and_a_hiccup_is_not() -> None:
    """A third of the requests twice as long is a third more; one in forty is left out."""
    assert turn_s([1.0] * 39 + [50.0]) == 1.0
    assert turn_s([1.0] * 26 + [2.0] * 14) > 1.3


def test_a_faster_build_is_called_faster() -> None:
    """By the same interval."""
    found = compare(_pairs(0.8, 3))

    assert found.is_faster()
    assert not found.is_slower()
    assert str(found) == f"{found.middle:.3f} [{found.low:.3f} to {found.high:.3f}]"


def test_the_interval_errs_in_one_run_of_five_hundred_at_most() -> None:
    """By tossed coins: nine pairs keep their whole span (1 of 512), more leave some out."""
    assert [left_out_of(pairs) for pairs in (9, 12, 15, 20)] == [0, 0, 1, 3]
    for pairs in range(9, 60):
        tail = sum(math.comb(pairs, heads) for heads in range(left_out_of(pairs) + 1)) / 2**pairs
        assert tail <= 1 / 500


def test_fewer_than_nine_pairs_are_refused() -> None:
    """They show nothing; so does a turn of no time, or without an answer."""
    with pytest.raises(ValueError, match="8 pairs show nothing"):
        compare([(1.0, 1.0)] * 8)
    with pytest.raises(ValueError, match="no time"):
        compare([(0.0, 1.0)] * 9)
    with pytest.raises(ValueError, match="without an answer"):
        turn_s([])


def test_a_build_that_fails_more_often_is_seen_by_exact_bounds() -> None:
    """Five failures of a hundred beside none may be chance at this certainty; twenty are not."""
    assert not fails_more(5, 100, 0, 100)
    assert fails_more(20, 100, 0, 100)
    assert not fails_more(20, 100, 20, 100)
