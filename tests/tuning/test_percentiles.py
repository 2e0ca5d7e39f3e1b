"""Percentiles and their bounds."""

from __future__ import annotations

import random

import pytest

from marserve.tuning.percentiles import percentile_of, percentiles_of


def test_the_p99_of_fewer_than_300_requests_cannot_be_known() -> None:
    """Even the largest of 299 may lie below it."""
    few = percentile_of([float(number) for number in range(299)], 0.99)
    enough = percentile_of([float(number) for number in range(300)], 0.99)

    assert (few.seconds, few.low, few.high, few.needed) == (None, None, None, 300)
    assert enough.seconds == 297.0
    assert enough.high == 299.0


@pytest.mark.parametrize(("share", "needed"), [(0.5, 6), (0.9, 30), (0.95, 60), (0.99, 300), (0.999, 3000)])
def test_each_percentile_says_how_many_requests_it_takes(share: float, needed: int) -> None:
    """Three beyond it, on average."""
    assert percentile_of([], share).needed == needed
    assert percentile_of([1.0] * (needed - 1), share).seconds is None
    assert percentile_of([1.0] * needed, share).seconds == 1.0


def test_the_bounds_hold_the_true_percentile_as_often_as_they_say() -> None:
    """Each misses it in about one run of twenty, by no distribution's favour."""
    dice = random.Random(7)
    truth = {0.5: 0.5**2, 0.9: 0.9**2, 0.99: 0.99**2}
    below, above, runs = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0), 400
    for _ in range(runs):
        times = sorted(dice.random() ** 2 for _ in range(400))
        for share, true in truth.items():
            found = percentile_of(times, share)
            assert found.low is not None
            assert found.high is not None
            below[share] += true < found.low
            above[share] += true > found.high

    assert all(missed <= 0.08 * runs for missed in (*below.values(), *above.values()))


def test_the_bounds_of_a_median_are_those_of_the_sign_test() -> None:
    """Of 20: the sixth and the fifteenth, which leave a tail of 2.1 %; the seventh would leave 5.8 %."""
    found = percentile_of([float(number) for number in range(1, 21)], 0.5)

    assert (found.low, found.seconds, found.high) == (6.0, 11.0, 15.0)


def test_times_may_come_in_any_order() -> None:
    """They are sorted; names are those of the field."""
    found = percentiles_of([3.0, 1.0, 2.0] * 200)

    assert [each.name for each in found] == ["p50", "p90", "p95", "p99", "p99.9"]
    assert found[0].seconds == 2.0
    assert found[-1].seconds is None
