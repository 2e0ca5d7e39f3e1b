"""Figures of the last 1, 5 and 60 minutes, and since the start."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.histogram import SECONDS_BOUNDS, Histogram, SecondsHistogram
from marserve.telemetry.metrics.windows import MOST_KEPT, SINCE_START, Windows, quantile

BOUNDS = (0.1, 0.2, 0.4)
SPACING = {60.0: 5.0, 300.0: 30.0, 3600.0: 300.0}


def serve(metrics: VersionMetrics, count: int = 1, seconds: float = 0.05, batch: int = 1) -> None:
    """Count requests that were answered, and their batches."""
    metrics.requests += count
    metrics.answers[200] += count
    metrics.total_seconds.observe(seconds, times=count)
    metrics.batch_sizes.observe(batch, times=count // batch)


def run(metrics: VersionMetrics, until: float, every: float = 5.0, since: float = 0.0) -> None:
    """One request before each sample."""
    for number in range(int((until - since) / every) + 1):
        metrics.sample(since + number * every)
        serve(metrics)


def test_before_the_first_sample_only_the_whole_is_known() -> None:
    """A rate needs two points in time."""
    metrics = VersionMetrics("m", "1")
    serve(metrics)

    assert metrics.windows.figures(1.0, metrics) is None
    found = metrics.windows.figures(1.0, metrics, SINCE_START)
    assert found is not None
    assert (found.seconds, found.requests, found.per_second(found.requests)) == (0.0, 1, 0.0)


def test_the_figures_are_those_since_the_windows_begin() -> None:
    """What was counted before it does not count."""
    metrics = VersionMetrics("m", "1")
    serve(metrics, 1000, 0.39)
    metrics.errors["killed"] += 3
    metrics.sample(0.0)
    serve(metrics, 100, 0.05, batch=2)
    metrics.errors["handler"] += 1
    metrics.refused["queue_full"] += 2
    metrics.cancelled += 4
    metrics.busy_seconds += 15.0

    found = metrics.windows.figures(10.0, metrics)

    assert found is not None
    assert (found.seconds, found.requests, found.answers, found.cancelled) == (10.0, 100, {200: 100}, 4)
    assert (found.errors, found.refused) == ({"handler": 1}, {"queue_full": 2})
    assert (found.busy_workers, found.batch_sizes.mean, found.batch_sizes.count) == (1.5, 2.0, 50)
    assert found.total_seconds.quantile(0.99) == pytest.approx(0.05, rel=0.05)
    assert found.total_seconds.mean == pytest.approx(0.05)


def test_since_the_start_is_all_that_was_counted() -> None:
    """Samples that went are in it."""
    metrics = VersionMetrics("m", "1")
    run(metrics, 10_000.0)

    found = metrics.windows.figures(10_000.0, metrics, SINCE_START)

    assert found is not None
    assert (found.seconds, found.requests) == (10_000.0, 2001)


def test_an_idle_model_has_a_rate_of_zero_and_no_times() -> None:
    """There is no time that 95 % of nothing stayed under."""
    metrics = VersionMetrics("m", "1")
    metrics.sample(0.0)

    found = metrics.windows.figures(1.0, metrics)

    assert found is not None
    assert (found.per_second(found.requests), found.total_seconds.quantile(0.95)) == (0.0, None)
    assert (found.batch_sizes.mean, found.answers) == (None, {})


@pytest.mark.parametrize("window", SPACING)
def test_a_window_begins_where_it_should_or_a_sample_earlier(window: float) -> None:
    """And says how long it was."""
    metrics = VersionMetrics("m", "1")
    run(metrics, 4000.0)

    for step in range(200):
        now = 4005.0 + 5 * step
        metrics.sample(now)
        for late in (0.0, 4.9):
            found = metrics.windows.figures(now + late, metrics, window)
            assert found is not None
            assert window <= found.seconds <= window + SPACING[window]
            assert found.requests == pytest.approx(found.seconds / 5, abs=2)
        serve(metrics)


def test_a_model_that_rested_is_not_said_to_have_been_asked() -> None:
    """Its last sample held until the requests came, however old it is."""
    metrics = VersionMetrics("m", "1")
    for number in range(1000):
        metrics.sample(number * 5.0)
    serve(metrics, 60)
    metrics.sample(5000.0)

    found = metrics.windows.figures(5000.0, metrics)

    assert found is not None
    assert (found.seconds, found.requests) == (60.0, 60)


def test_a_model_younger_than_a_window_has_the_time_since_it_began() -> None:
    """Not an hour with most of it empty."""
    metrics = VersionMetrics("m", "1")
    run(metrics, 50.0)

    found = metrics.windows.figures(50.0, metrics, 3600.0)

    assert found is not None
    assert (found.seconds, found.requests) == (50.0, 11)


def test_two_samples_at_one_time_are_one() -> None:
    """A pool samples as it starts, and the timer may follow at once."""
    metrics = VersionMetrics("m", "1")
    metrics.sample(1.0)
    serve(metrics)
    metrics.sample(1.0)
    metrics.sample(0.5)

    assert len(metrics.windows) == 1


STEPS = st.lists(
    st.tuples(st.floats(0.1, 700.0), st.integers(0, 5), st.sampled_from(["", "killed", "handler"])), max_size=60
)


@given(STEPS, st.sampled_from([*SPACING, SINCE_START]))
def test_differences_are_never_negative_and_add_up(steps: list[tuple[float, int, str]], window: float) -> None:
    """Whenever samples come, and whatever happened between them."""
    metrics, now = VersionMetrics("m", "1"), 0.0
    metrics.sample(now)
    done: list[tuple[float, int]] = []
    for pause, requests, error in steps:
        now += pause
        serve(metrics, requests)
        done.append((now, requests))
        if error:
            metrics.errors[error] += 1
        metrics.sample(now)
    found = metrics.windows.figures(now, metrics, window)

    if found is None:
        assert not steps
        return
    assert found.requests == found.answers.get(200, 0) == found.total_seconds.count
    assert min(found.total_seconds.counts) >= 0
    assert all(count > 0 for count in found.errors.values())
    # All that came within the window is in it, and nothing from before its begin.
    assert found.requests >= sum(count for at, count in done if at > now - window)
    assert found.requests <= sum(count for at, count in done if at > now - found.seconds - 1e-6)
    assert len(metrics.windows) <= MOST_KEPT


def test_a_version_keeps_a_bounded_number_of_samples() -> None:
    """However long and often it is asked, and with whatever causes."""
    metrics, draw, most, now = VersionMetrics("m", "1"), random.Random(1), 0, 0.0
    for _ in range(4000):
        now += draw.choice((0.1, 5.0, 5.0, 5.0, 61.0))
        serve(metrics, draw.randint(1, 1000), draw.random())
        metrics.sample(now)
        most = max(most, len(metrics.windows))

    assert most <= MOST_KEPT


def test_a_version_that_is_asked_all_the_time_keeps_little() -> None:
    """Some 30 KiB, with one kind of times."""
    metrics = VersionMetrics("m", "1")
    serve(metrics, 10_000, 0.3)
    tracemalloc.start()
    try:
        for number in range(1500):
            metrics.sample(number * 5.0)
            serve(metrics, 1000, 0.01 * (number % 50))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 80 * 1024


def test_versions_without_requests_keep_next_to_nothing() -> None:
    """A server may have a thousand that sleep: less than half a KiB each."""
    versions = [VersionMetrics(f"m{number}", "1") for number in range(200)]
    tracemalloc.start()
    try:
        for number in range(100):
            for version in versions:
                version.sample(number * 5.0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert {len(version.windows) for version in versions} == {1}
    assert kept / len(versions) < 600


def test_a_version_that_is_asked_no_more_forgets_its_samples() -> None:
    """After an hour."""
    metrics = VersionMetrics("m", "1")
    run(metrics, 600.0)
    for number in range(800):
        metrics.sample(605.0 + number * 5.0)

    found = metrics.windows.figures(4600.0, metrics, 3600.0)

    assert len(metrics.windows) == 1
    assert found is not None
    assert (found.requests, found.seconds) == (0, 3600.0)


@pytest.mark.parametrize(
    ("counts", "value"),
    [([0, 0, 0, 0], None), ([100, 0, 0, 0], 0.095), ([50, 0, 50, 0], 0.38), ([0, 0, 0, 5], 0.4)],
)
def test_a_quantile_is_read_off_between_bounds(counts: list[int], value: float | None) -> None:
    """Values above the last bound are only known to be above it."""
    assert quantile(0.95, BOUNDS, counts) == (None if value is None else pytest.approx(value))


@given(st.lists(st.floats(0.0, 100.0), min_size=2, max_size=200), st.sampled_from([50, 90, 95, 99]))
def test_a_quantile_is_between_the_bounds_around_the_true_one(values: list[float], percent: int) -> None:
    """That is how far off it can be."""
    histogram = Histogram(SECONDS_BOUNDS)
    for value in values:
        histogram.observe(value)
    true = sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
    high = next(bound for bound in SECONDS_BOUNDS if true <= bound)
    low = max((bound for bound in SECONDS_BOUNDS if bound < true), default=0.0)

    found = quantile(percent / 100, histogram.bounds, histogram.buckets)

    assert found is not None
    assert low <= found <= high


@given(
    st.lists(st.floats(0.0001, 120.0, exclude_min=True), min_size=1, max_size=200), st.sampled_from([50, 90, 95, 99])
)
def test_a_percentile_of_a_window_is_within_5_percent_of_the_true_one(values: list[float], percent: int) -> None:
    """Whatever was counted before the window, and whether values come singly or as those of a batch."""
    metrics = VersionMetrics("m", "1")
    metrics.requests += 1
    metrics.total_seconds.observe_all([0.3, 0.01, 7.0])
    metrics.sample(0.0)
    metrics.total_seconds.observe_all(values[::2])
    for value in values[1::2]:
        metrics.total_seconds.observe(value)
    true = sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]

    figures = metrics.windows.figures(5.0, metrics)

    assert figures is not None
    assert figures.total_seconds.count == len(values)
    assert figures.total_seconds.quantile(percent / 100) == pytest.approx(true, rel=0.0501)


@given(st.lists(st.one_of(st.floats(0.0, 200.0), st.sampled_from(SECONDS_BOUNDS)), max_size=50))
def test_the_page_counts_times_as_a_histogram_of_its_bounds_would(values: list[float]) -> None:
    """The fine counts change nothing there; a value that equals a bound is under it."""
    plain, fine = Histogram(SECONDS_BOUNDS), SecondsHistogram()
    for value in values:
        plain.observe(value)
    fine.observe_all(values)

    assert fine.buckets == plain.buckets
    assert sum(fine.fine) == len(values)


def test_counts_of_more_than_four_bytes_are_kept_whole() -> None:
    """A busy server has them after some months."""
    metrics = VersionMetrics("m", "1")
    for number in range(3):
        serve(metrics, 2**32, 0.05)
        metrics.sample(number * 5.0)
    serve(metrics, 7, 0.05)

    figures = metrics.windows.figures(11.0, metrics)

    assert figures is not None
    assert figures.total_seconds.count == 2**33 + 7


@pytest.mark.parametrize(("spread", "most_kib"), [(0.1, 80), (0.5, 120), (3.0, 240)])
def test_a_version_keeps_bounded_memory_however_its_times_spread(spread: float, most_kib: int) -> None:
    """All three kinds of times, in samples of more than an hour."""
    metrics, draw = VersionMetrics("m", "1"), random.Random(1)
    tracemalloc.start()
    try:
        for number in range(1500):
            for times in (metrics.queue_seconds, metrics.handler_seconds, metrics.total_seconds):
                times.observe(draw.lognormvariate(-4, spread), times=50)
            metrics.sample(number * 5.0)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < most_kib * 1024


def test_a_time_of_11_ms_is_said_to_be_11_ms() -> None:
    """Not 17.5, between the 10 and 25 of the page."""
    metrics = VersionMetrics("m", "1")
    serve(metrics, 1000, 0.0111)

    figures = metrics.windows.figures(1.0, metrics, SINCE_START)

    assert figures is not None
    assert figures.total_seconds.quantile(0.5) == pytest.approx(0.0111, rel=0.05)


def test_busy_workers_are_those_of_the_last_minute() -> None:
    """As the figures have them, at less cost."""
    metrics = VersionMetrics("m", "1")
    assert metrics.windows.busy_workers(1.0, 0.0) is None
    metrics.busy_seconds = 4.0
    metrics.sample(10.0)
    assert metrics.windows.busy_workers(10.0, 4.0) is None
    metrics.busy_seconds = 34.0
    assert metrics.windows.busy_workers(30.0, 34.0) == 1.5
    for number in range(20):
        metrics.sample(30.0 + number * 5)
        metrics.busy_seconds += 10.0

    found = metrics.windows.figures(125.0, metrics)

    assert found is not None
    assert metrics.windows.busy_workers(125.0, metrics.busy_seconds) == found.busy_workers > 0


def test_batches_and_their_requests_are_those_of_the_last_minute() -> None:
    """As the figures have them, at less cost: a scrape makes FLOPs of them."""
    metrics = VersionMetrics("m", "1")
    sizes = metrics.batch_sizes
    assert metrics.windows.batches(1.0, sizes) is None
    metrics.sample(0.0)
    sizes.observe(4)
    metrics.sample(10.0)
    assert metrics.windows.batches(10.0, sizes) == (1, 4, 10.0)
    for number in range(20):
        metrics.sample(30.0 + number * 5)
        sizes.observe(1000)
        sizes.observe(2)

    found = metrics.windows.figures(125.0, metrics)

    assert found is not None
    batches, requests, seconds = metrics.windows.batches(125.0, sizes) or (0, 0, 0)
    assert (batches, requests, seconds) == (found.batch_sizes.count, found.batch_sizes.sum, found.seconds)
    assert batches < 40


def test_an_empty_windows_has_no_samples() -> None:
    """Nothing is made before it is needed."""
    assert len(Windows()) == 0
