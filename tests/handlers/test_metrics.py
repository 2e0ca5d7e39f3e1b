"""`context.metrics`: what each call collects, and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from marserve_handlers import metrics as metrics_module
from marserve_handlers.metrics import (
    CachingMetric,
    Dimension,
    MetricsCache,
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
    MetricTypes,
    Units,
)
from support.inventory import inventory

MODEL_DIMENSIONS = [("ModelName", "m"), ("Level", "Model")]


@pytest.fixture
def cache() -> MetricsCache:
    """A cache of model `m` in the middle of a batch of two."""
    cache = MetricsCache(model_name="m")
    cache.set_request_ids({0: "a", 1: "b"})
    return cache


def test_a_counter_is_collected_with_default_dimensions(cache: MetricsCache) -> None:
    """Name, value, unit, kind, dimensions and all request ids, once; draining takes it away."""
    cache.add_counter("Jobs", 2)

    assert cache.drain() == [("Jobs", 2.0, "Count", "counter", MODEL_DIMENSIONS, "a,b")]
    assert cache.drain() == []


def test_an_index_names_one_request(cache: MetricsCache) -> None:
    """With `idx` only that request's id is attached."""
    cache.add_counter("Jobs", 1, 1)

    assert cache.drain()[0].request_ids == "b"


@pytest.mark.parametrize(
    ("call", "arguments", "unit", "kind"),
    [
        ("add_time", ("T", 1.5), "Milliseconds", "gauge"),
        ("add_time", ("T", 1.5, None, "s"), "Seconds", "gauge"),
        ("add_size", ("T", 1.5), "Megabytes", "gauge"),
        ("add_size", ("T", 1.5, None, "kB"), "Kilobytes", "gauge"),
        ("add_size", ("T", 1.5, None, "GB"), "Gigabytes", "gauge"),
        ("add_size", ("T", 1.5, None, "B"), "Bytes", "gauge"),
        ("add_percent", ("T", 1.5), "Percent", "gauge"),
        ("add_metric", ("T", 1.5, "count"), "Count", "counter"),
        ("add_metric", ("T", 1.5, "widgets"), "widgets", "counter"),
        ("add_metric", ("T", 1.5, "ms", None, [], MetricTypes.HISTOGRAM), "Milliseconds", "histogram"),
    ],
)
def test_each_call_has_its_unit_and_type(
    cache: MetricsCache, call: str, arguments: tuple[Any, ...], unit: str, kind: str
) -> None:
    """Units are spelled out, types are those of the contract."""
    getattr(cache, call)(*arguments)

    (value,) = cache.drain()
    assert (value.name, value.value, value.unit, value.kind) == ("T", 1.5, unit, kind)
    assert value.dimensions == MODEL_DIMENSIONS


def test_an_error_belongs_to_no_model(cache: MetricsCache) -> None:
    """`add_error` has `Level:Error` alone, unit `unit`."""
    cache.add_error("Trouble", 1)

    assert cache.drain() == [("Trouble", 1.0, "unit", "counter", [("Level", "Error")], "a,b")]


@pytest.mark.parametrize("calls", ["add_counter", "add_time", "add_metric"])
def test_what_initialize_measures_belongs_to_its_model(calls: str) -> None:
    """Under the dimensions of a request's values, also those that a metrics file lists; without a request's id."""
    cache = MetricsCache(model_name="m")
    listed = cache.add_metric_to_cache("Listed", "Count", ["ModelName", "Level"], MetricTypes.COUNTER)
    arguments: dict[str, tuple[Any, ...]] = {"add_metric": ("New", 1, "Count"), "add_time": ("HandlerTime", 2.5)}

    getattr(cache, calls)(*arguments.get(calls, ("Listed", 1)))
    cache.add_counter("Coloured", 1, dimensions=[Dimension("Colour", "blue")])

    values = cache.drain()
    assert [value.dimensions for value in values] == [MODEL_DIMENSIONS, [("Colour", "blue"), *MODEL_DIMENSIONS]]
    assert ([value.request_ids for value in values], cache.dropped) == (["", ""], 0)
    assert listed.dimension_names == ["ModelName", "Level"]


def test_a_metric_first_seen_while_loading_still_counts_in_batches(cache: MetricsCache) -> None:
    """Under the same dimensions, so that a server that detected it then takes it now."""
    cache.set_request_ids(None)
    cache.add_counter("Jobs", 1)
    cache.set_request_ids({0: "a"})
    cache.add_counter("Jobs", 1)

    values = cache.drain()
    assert [value.dimensions for value in values] == [MODEL_DIMENSIONS] * 2
    assert [value.request_ids for value in values] == ["", "a"]


def test_every_value_that_is_not_taken_is_counted(cache: MetricsCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kind: a counter's negative value, no number, a wrong number of dimensions, one too many in a batch."""
    listed = cache.add_metric_to_cache("Listed", "Count", ["Colour", "Shape"], MetricTypes.GAUGE)
    found = []
    for add in (
        lambda: cache.add_counter("Jobs", -1),
        lambda: cache.add_counter("Jobs", "many"),  # type: ignore[arg-type]
        lambda: listed.add_or_update(1, ["blue"]),
        lambda: listed.update(1, dimensions=[Dimension("Colour", "blue")]),  # takes these dimensions as its own
        lambda: cache.add_percent("Full", 1),
    ):
        before = cache.dropped
        add()
        found.append((cache.dropped - before, len(cache.drain())))
    monkeypatch.setattr(metrics_module, "MAX_VALUES_HELD", 1)
    before = cache.dropped
    for _ in range(3):
        cache.add_percent("Full", 1)

    assert found == [(1, 0), (1, 0), (1, 0), (0, 1), (0, 1)]
    assert cache.dropped - before == 2


def test_the_callers_dimensions_are_not_touched(cache: MetricsCache) -> None:
    """Default dimensions go to a copy; two calls without any share nothing."""
    own = [Dimension("Colour", "blue")]
    cache.add_metric("Direct", 7, "count", dimensions=own)
    cache.add_counter("Jobs", 1)
    cache.add_counter("Jobs", 1)

    assert own == [Dimension("Colour", "blue")]
    assert [value.dimensions for value in cache.drain()] == [
        [("Colour", "blue"), *MODEL_DIMENSIONS],
        MODEL_DIMENSIONS,
        MODEL_DIMENSIONS,
    ]


def test_given_dimensions_of_a_default_name_win(cache: MetricsCache) -> None:
    """`ModelName` and `Level` are only added where absent."""
    cache.add_counter("Jobs", 1, dimensions=[Dimension("Level", "Host"), Dimension("ModelName", "other")])

    assert cache.drain()[0].dimensions == [("Level", "Host"), ("ModelName", "other")]


@pytest.mark.parametrize(("call", "unit"), [("add_time", "min"), ("add_size", "TB")])
def test_an_unknown_unit_is_refused(cache: MetricsCache, call: str, unit: str) -> None:
    """Times and sizes have their units; the error is a ValueError."""
    with pytest.raises(MetricsCacheValueError, match=unit):
        getattr(cache, call)("T", 1, None, unit)
    with pytest.raises(ValueError):
        getattr(cache, call)("T", 1, None, unit)


@pytest.mark.parametrize(
    "arguments", [(1, 1, "ms"), ("n", 1, 5), ("n", 1, "ms", None, "dims"), ("n", 1, "ms", None, [], "counter")]
)
def test_arguments_of_the_wrong_type_are_refused(cache: MetricsCache, arguments: tuple[Any, ...]) -> None:
    """Name and unit are text, dimensions a list, the type a MetricTypes."""
    with pytest.raises(MetricsCacheTypeError):
        cache.add_metric(*arguments)


def test_a_counter_never_shrinks(cache: MetricsCache, caplog: pytest.LogCaptureFixture) -> None:
    """A negative value is logged and nothing is collected; a gauge may be negative."""
    with caplog.at_level(logging.ERROR):
        cache.add_counter("Jobs", -1)
    cache.add_percent("Fullness", -1)

    assert [value.name for value in cache.drain()] == ["Fullness"]
    assert "only grows" in caplog.text


def test_a_value_that_is_no_number_is_logged(cache: MetricsCache, caplog: pytest.LogCaptureFixture) -> None:
    """A metric must not break the handler."""
    cache.add_counter("Jobs", "many")  # type: ignore[arg-type]

    assert cache.drain() == []
    assert "takes numbers" in caplog.text


def test_a_registered_metric_takes_values_in_order(cache: MetricsCache) -> None:
    """`add_metric_to_cache` emits nothing; its metric takes one value for each dimension name."""
    metric = cache.add_metric_to_cache("Sizes", "B", ["Colour", "Shape"], MetricTypes.HISTOGRAM)
    assert cache.drain() == []

    metric.add_or_update(3, ["blue", "round"], "a")

    assert cache.drain() == [("Sizes", 3.0, "Bytes", "histogram", [("Colour", "blue"), ("Shape", "round")], "a")]
    assert cache.get_metric("Sizes", MetricTypes.HISTOGRAM) is metric
    assert (metric.metric_name, metric.unit) == ("Sizes", "B")
    assert (metric.dimension_names, metric.metric_type) == (["Colour", "Shape"], MetricTypes.HISTOGRAM)


def test_a_wrong_number_of_dimension_values_is_logged(cache: MetricsCache, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is collected under dimensions that do not fit."""
    cache.add_metric_to_cache("Sizes", "B", ["Colour"]).add_or_update(3, ["blue", "round"])

    assert cache.drain() == []
    assert "Sizes has dimensions" in caplog.text


def test_a_configured_metric_orders_dimensions_its_way(cache: MetricsCache) -> None:
    """`add_counter` on a registered metric gives the dimensions in the registered order."""
    cache.add_metric_to_cache("Jobs", "Count", ["Level", "Colour", "ModelName"])
    cache.add_counter("Jobs", 1, dimensions=[Dimension("Colour", "blue")])

    assert cache.drain()[0].dimensions == [("Level", "Model"), ("Colour", "blue"), ("ModelName", "m")]


def test_replacing_a_metric_is_warned_of(cache: MetricsCache, caplog: pytest.LogCaptureFixture) -> None:
    """Same name and type replaces; another type stands beside."""
    cache.add_metric_to_cache("Jobs", "Count")
    cache.add_metric_to_cache("Jobs", "Count", metric_type=MetricTypes.GAUGE)
    assert "replaced" not in caplog.text

    second = cache.add_metric_to_cache("Jobs", "Count")

    assert "replaced" in caplog.text
    assert cache.get_metric("Jobs") is second


def test_an_unknown_metric_is_a_key_error(cache: MetricsCache) -> None:
    """Asked by name and type."""
    with pytest.raises(MetricsCacheKeyError, match="no metric Nope of type gauge"):
        cache.get_metric("Nope", MetricTypes.GAUGE)


def test_the_ready_made_timings_are_known() -> None:
    """`HandlerTime` and `PredictionTime` are gauges from the start."""
    cache = MetricsCache(model_name="m")

    assert cache.get_metric("HandlerTime", MetricTypes.GAUGE).unit == "ms"
    assert cache.get_metric("PredictionTime", MetricTypes.GAUGE).dimension_names == ["ModelName", "Level"]
    assert list(cache.cache_keys()) == [MetricTypes.GAUGE]


def test_the_older_update_names_its_dimensions(cache: MetricsCache) -> None:
    """`update` takes dimensions with names, which become the metric's."""
    metric = cache.add_metric_to_cache("Jobs", "Count", ["a"])
    metric.update(2, "r", [Dimension("x", "1"), Dimension("y", "2")])

    assert cache.drain()[0].dimensions == [("x", "1"), ("y", "2")]
    assert metric.dimension_names == ["x", "y"]


def test_a_metric_of_its_own_only_checks() -> None:
    """A CachingMetric built by hand takes values and keeps none."""
    metric = CachingMetric("Jobs", "Count", ["a"])
    metric.add_or_update(1, ["x"])
    metric.emit_metrics("r", 1, "a:b")

    assert "Jobs" in str(metric)


def test_dimensions_written_as_text_are_read(cache: MetricsCache) -> None:
    """`emit_metrics` takes `name:value` pairs joined by commas."""
    cache.add_metric_to_cache("Jobs", "Count", ["a"]).emit_metrics("r", 1, "a:b:c,d:e,broken")

    assert cache.drain()[0].dimensions == [("a", "b:c"), ("d", "e")]


def test_a_flood_of_values_is_cut(
    cache: MetricsCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler in a loop cannot fill the worker's memory; the log says so once a batch."""
    monkeypatch.setattr(metrics_module, "MAX_VALUES_HELD", 3)
    for _ in range(6):
        cache.add_counter("Jobs", 1)

    assert len(cache.drain()) == 3
    assert caplog.text.count("More than") == 1
    cache.add_counter("Jobs", 1)
    assert len(cache.drain()) == 1


def test_dimensions_read_and_compare() -> None:
    """A dimension is its name and value."""
    assert str(Dimension("a", "b")) == "a:b"
    assert Dimension("a", "b").to_dict() == {"Name": "a", "Value": "b"}
    assert Dimension("a", "b") == Dimension("a", "b") != Dimension("a", "c")
    assert len({Dimension("a", "b"), Dimension("a", "b")}) == 1
    assert repr(Dimension("a", "b")) == "Dimension('a', 'b')"


def test_units_are_spelled_out() -> None:
    """The table of the contract; others stay."""
    assert [Units.spell_out(unit) for unit in ("ms", "percent", "", None, "furlong")] == [
        "Milliseconds",
        "Percent",
        "unit",
        "unit",
        "furlong",
    ]
    assert Units().units["MB"] == "Megabytes"


def test_the_inventorys_units_are_spelled_out_as_in_torchserve() -> None:
    """Short and long spelling of each, and no other."""

    assert Units.names == inventory("metric_units")
    assert all(Units.spell_out(short) == long for short, long in inventory("metric_units").items())
