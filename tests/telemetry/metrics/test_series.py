"""Families of the page that are fed: counters add, gauges set, histograms observe; all bounded."""

from __future__ import annotations

import pytest

from marserve.telemetry.metrics.metric_definitions import Definition
from marserve.telemetry.metrics.series import BOUNDS, MAX_SERIES, Series


def series(kind: str) -> Series:
    """A family of this type with one dimension beside the host."""
    return Series(Definition("M", kind, "ms", ("Model", "Hostname")), "box")


def test_a_counter_adds_and_a_gauge_keeps_the_last() -> None:
    """`times` counts an update so often."""
    counter, gauge = series("counter"), series("gauge")
    for family in (counter, gauge):
        family.update(("a",), 2.0)
        family.update(("a",), 3.0, times=2)

    assert counter.lines() == ['M{Model="a",Hostname="box"} 8.0']
    assert gauge.lines() == ['M{Model="a",Hostname="box"} 3.0']


def test_a_histogram_has_the_buckets_of_torchserves_client() -> None:
    """Cumulative, with the rest, the sum and the count."""
    family = series("histogram")
    for value in (0.005, 0.3, 99.0):
        assert family.update(("a",), value)

    lines = family.lines()

    assert lines[0] == 'M_bucket{Model="a",Hostname="box",le="0.005"} 1.0'
    assert lines[len(BOUNDS)] == 'M_bucket{Model="a",Hostname="box",le="+Inf"} 3.0'
    assert lines[-2:] == ['M_sum{Model="a",Hostname="box"} 99.305', 'M_count{Model="a",Hostname="box"} 3.0']


@pytest.mark.parametrize(
    ("kind", "values", "amount"),
    [
        ("counter", ("a",), -1.0),
        ("counter", ("a",), float("nan")),
        ("histogram", ("a",), float("nan")),
        ("gauge", (), 1.0),
        ("gauge", ("a", "b"), 1.0),
    ],
)
def test_what_does_not_fit_is_lost(kind: str, values: tuple[str, ...], amount: float) -> None:
    """And makes no series."""
    family = series(kind)

    assert not family.update(values, amount)
    assert family.lines() == []


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_there_are_not_more_series_than_the_bound(kind: str) -> None:
    """Those that are there go on."""
    family = series(kind)
    taken = [family.update((str(number),), 1.0) for number in range(MAX_SERIES + 5)]

    assert taken == [True] * MAX_SERIES + [False] * 5
    assert family.update(("0",), 1.0)


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_a_series_goes_with_who_updated_it_last(kind: str) -> None:
    """Others' stay."""
    family = series(kind)
    family.update(("mine",), 1.0, owner="m")
    family.update(("theirs",), 1.0, owner="t")

    family.forget("m")

    assert all('Model="theirs"' in line for line in family.lines())
    assert family.lines()
    family.clear()
    assert family.lines() == []
