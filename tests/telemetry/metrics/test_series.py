"""Families of the page that are fed: counters add, gauges set, histograms observe; all bounded."""

from __future__ import annotations

import pytest

from marserve.telemetry.metrics.histogram import Histogram
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

    assert counter.rows() == [(("a", "box"), 8.0)]
    assert gauge.rows() == [(("a", "box"), 3.0)]


def test_a_histogram_has_the_buckets_of_torchserves_client() -> None:
    """And one more, for larger values."""
    family = series("histogram")
    for value in (0.005, 0.3, 99.0):
        assert family.update(("a",), value)

    [(values, histogram)] = family.rows()

    assert values == ("a", "box")
    assert isinstance(histogram, Histogram)
    assert (histogram.bounds, histogram.buckets[0], histogram.buckets[-1]) == (BOUNDS, 1, 1)
    assert (histogram.sum, histogram.count) == (99.305, 3)


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
    assert family.rows() == []


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

    assert [values for values, _ in family.rows()] == [("theirs", "box")]
    family.clear()
    assert family.rows() == []
