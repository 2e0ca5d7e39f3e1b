"""Exact binomial bounds: against sums that leave nothing out."""

from __future__ import annotations

import math

import pytest

from marserve.registry.observing.proportions import at_least, at_most, highest_rate, lowest_rate


def summed(first: int, last: int, trials: int, rate: float) -> float:
    """The probability of `first` to `last` hits, term by term."""
    return math.fsum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(first, last + 1))


@pytest.mark.parametrize("trials", [1, 7, 60, 300])
@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3, 0.9])
def test_tails_are_the_sums_of_their_terms(trials: int, rate: float) -> None:
    """For every number of hits, on both sides."""
    for hits in range(0, trials + 1, max(1, trials // 20)):
        assert at_least(hits, trials, rate) == pytest.approx(summed(hits, trials, trials, rate), rel=1e-9, abs=1e-13)
        assert at_most(hits, trials, rate) == pytest.approx(summed(0, hits, trials, rate), rel=1e-9, abs=1e-13)


def test_tails_at_the_ends() -> None:
    """Nothing is certain but what cannot be otherwise."""
    assert (at_least(0, 10, 0.1), at_least(11, 10, 0.1), at_least(3, 10, 0.0), at_least(3, 10, 1.0)) == (1, 0, 0, 1)
    assert (at_most(10, 10, 0.1), at_most(3, 10, 1.0), at_most(3, 10, 0.0)) == (1, 0, 1)


@pytest.mark.parametrize(("hits", "trials"), [(0, 20), (1, 50), (10, 200), (199, 200), (40, 2000), (50, 50)])
@pytest.mark.parametrize("doubt", [0.05, 1e-3, 1e-7])
def test_bounds_are_where_the_tail_is_as_large_as_the_doubt(hits: int, trials: int, doubt: float) -> None:
    """And at the ends where nothing bounds."""
    low, high = lowest_rate(hits, trials, doubt), highest_rate(hits, trials, doubt)

    assert low <= hits / trials <= high
    if hits:
        assert at_least(hits, trials, low - 3e-7) <= doubt <= at_least(hits, trials, low + 3e-7)
    else:
        assert low == 0
    if hits < trials:
        assert at_most(hits, trials, high + 3e-7) <= doubt <= at_most(hits, trials, high - 3e-7)
    else:
        assert high == 1


def test_no_trials_allow_every_rate() -> None:
    """Nothing seen, nothing known."""
    assert (lowest_rate(0, 0, 0.01), highest_rate(0, 0, 0.01)) == (0, 1)


def test_millions_of_trials_are_no_trouble() -> None:
    """The bounds close in on the rate."""
    assert lowest_rate(100_000, 10_000_000, 1e-6) == pytest.approx(0.01, rel=0.02)
    assert highest_rate(100_000, 10_000_000, 1e-6) == pytest.approx(0.01, rel=0.02)
