"""Costs of batches by size and length."""

from __future__ import annotations

import pytest

from marserve.tuning.costs import Costs


def test_costs_are_those_of_the_nearest_length_and_without_one_their_mean() -> None:
    """Lengths between two powers of two are one."""
    costs = Costs()
    assert costs.is_empty
    for length, seconds in ((10, 0.01), (1000, 0.03)):
        costs.learn(4, seconds, length)
        costs.learn(8, 2 * seconds, length)

    assert costs.cost(4, 15) == pytest.approx(0.01)
    assert costs.cost(4, 1) == pytest.approx(0.01)
    assert costs.cost(4, 900) == costs.cost(4, 100_000) == pytest.approx(0.03)
    assert costs.cost(6, 8) == pytest.approx(0.015)
    assert costs.cost(4) == pytest.approx(0.02)
    assert costs.known() == pytest.approx({4: 0.02, 8: 0.04})
