"""Figures of the last minute."""

from __future__ import annotations

import pytest

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.recent import KEPT, Recent, quantile

BOUNDS = (0.1, 0.2, 0.4)


def test_before_the_first_sample_nothing_is_known() -> None:
    """A rate needs two points in time."""
    assert Recent().figures(1.0, Histogram(BOUNDS), Histogram((1, 2))) is None


def test_the_figures_are_those_since_the_oldest_sample() -> None:
    """What was counted before it does not count."""
    recent, seconds, batches = Recent(), Histogram(BOUNDS), Histogram((1, 2, 4))
    seconds.observe(0.39, times=1000)
    batches.observe(1, times=1000)
    recent.sample(0.0, seconds, batches)
    seconds.observe(0.05, times=100)
    batches.observe(2, times=50)

    found = recent.figures(10.0, seconds, batches)

    assert found is not None
    assert (found.requests_per_s, found.mean_batch) == (10.0, 2.0)
    assert found.p95_s == pytest.approx(0.095)


def test_an_idle_model_has_a_rate_of_zero_and_no_times() -> None:
    """There is no time that 95 % of nothing stayed under."""
    recent = Recent()
    recent.sample(0.0, Histogram(BOUNDS), Histogram((1,)))

    assert recent.figures(1.0, Histogram(BOUNDS), Histogram((1,))) == (0.0, None, None)


def test_samples_older_than_a_minute_go() -> None:
    """The window moves."""
    recent, seconds, batches = Recent(), Histogram(BOUNDS), Histogram((1,))
    for number in range(KEPT + 1):
        recent.sample(number * 5.0, seconds, batches)
        seconds.observe(0.1)

    found = recent.figures(KEPT * 5.0, seconds, batches)

    assert found is not None
    assert found.requests_per_s == pytest.approx(KEPT / 55)


def test_busy_workers_are_those_of_the_samples_time() -> None:
    """Seconds of work a second; unknown before there is a sample."""
    recent, nothing = Recent(), Histogram(BOUNDS)
    assert recent.busy_workers(1.0, 0.0) is None
    recent.sample(10.0, nothing, nothing, 4.0)
    assert recent.busy_workers(10.0, 4.0) is None
    recent.sample(20.0, nothing, nothing, 9.0)

    assert recent.busy_workers(30.0, 34.0) == 1.5


@pytest.mark.parametrize(
    ("counts", "value"),
    [([0, 0, 0, 0], None), ([100, 0, 0, 0], 0.095), ([50, 0, 50, 0], 0.38), ([0, 0, 0, 5], 0.4)],
)
def test_a_quantile_is_read_off_between_bounds(counts: list[int], value: float | None) -> None:
    """Values above the last bound are only known to be above it."""
    assert quantile(0.95, BOUNDS, counts) == (None if value is None else pytest.approx(value))
