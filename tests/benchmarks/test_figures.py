"""What measurements come to, beside others and beside a goal."""

from __future__ import annotations

import io
from importlib import import_module
from typing import Any

import pytest
from rich.console import Console


@pytest.fixture
def figures() -> Any:
    """The module under test."""
    return import_module("figures")


def test_a_ratio_is_taken_within_each_round_and_the_median_last(figures: Any) -> None:
    """A round in which the whole machine was slow must not move the ratio."""
    figure = figures.Figure("rate", "/s", [100.0, 10.0, 300.0], "other", [50.0, 10.0, 100.0])

    assert figure.compared == 2.0  # of 2, 1 and 3; the medians' ratio is 2 as well, the means' is not


def test_a_difference_is_taken_within_each_round(figures: Any) -> None:
    """Latency is compared by what is added to it."""
    figure = figures.Figure("p50", "ms", [3.0, 9.0, 4.0], "other", [1.0, 8.0, 1.0], "difference")

    assert figure.compared == 2.0


def test_an_interval_is_between_two_of_the_ratios_that_hold_the_median_nineteen_times_in_twenty(figures: Any) -> None:
    """Of six or seven that is all of them, of forty the 14th to the 27th; of five there is none."""

    def interval(count: int) -> Any:
        return figures.Figure("rate", "/s", [float(one) for one in range(1, count + 1)], "o", [1.0] * count).interval

    assert interval(5) is None
    assert interval(6) == (1.0, 6.0)
    assert interval(7) == (1.0, 7.0)
    assert interval(40) == (14.0, 27.0)


@pytest.mark.parametrize(("own", "met"), [([9.0, 10.0, 99.0], True), ([9.0, 10.1, 11.0], False)])
def test_a_goal_on_the_own_value_looks_at_its_median(figures: Any, own: list[float], met: bool) -> None:
    """One bad round misses no goal, two of three do."""
    figure = figures.Figure("kill", "ms", own, goal=figures.Goal("at most", 10.0, "own"))

    assert figure.is_met is met


def test_a_goal_on_the_comparison_needs_something_to_compare_with(figures: Any) -> None:
    """A figure with nothing beside it cannot meet a goal about the comparison."""
    goal = figures.Goal("at least", 1.0, "compared")

    assert figures.Figure("rate", "/s", [2.0], "other", [1.0], goal=goal).is_met is True
    assert figures.Figure("rate", "/s", [2.0], goal=goal).is_met is False
    assert figures.Figure("rate", "/s", [2.0]).is_met is None


def test_the_table_shows_both_values_the_comparison_and_the_goal(figures: Any) -> None:
    """Whoever reads a row sees what was beside what, in the same units."""
    goal = figures.Goal("at most", 0.15, "compared")
    rows = [figures.Figure("p50", "ms", [0.25], "bare", [0.2], "difference", goal, digits=2)]
    out = io.StringIO()

    Console(file=out, width=200).print(figures.table(rows))

    row = out.getvalue().splitlines()[-1].split()
    assert row == ["p50", "0.25", "ms", "bare", "0.20", "ms", "+0.05", "ms", "at", "most", "+0.15", "ms", "met"]


def test_the_document_holds_every_round(figures: Any) -> None:
    """A script may judge the spread itself."""
    (row,) = figures.document([figures.Figure("rate", "/s", [1.0, 3.0], "other", [2.0, 2.0])])

    assert row["marserve"] == {"median": 2.0, "rounds": [1.0, 3.0]}
    assert row["other"] == {"median": 2.0, "rounds": [2.0, 2.0]}
    assert row["compared"] == 1.0
    assert row["is_met"] is None
