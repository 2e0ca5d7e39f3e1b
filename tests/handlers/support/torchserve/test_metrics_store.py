"""The older forms of metrics."""

from __future__ import annotations

import json
import logging

import pytest

from marserve_handlers.metrics import Dimension
from marserve_handlers.support.torchserve.metrics_store import Metric, MetricEncoder, MetricsStore, emit_metrics


def test_a_counter_adds_and_anything_else_replaces() -> None:
    """`metric_method` decides what `update` does."""
    counter = Metric("a", 1, "count", [], metric_method="counter")
    gauge = Metric("a", 1, "ms", [])
    counter.update(2)
    gauge.update(2)

    assert (counter.value, gauge.value) == (3, 2)
    counter.reset()
    assert counter.value == 0


def test_a_store_keeps_one_metric_for_each_name_and_request() -> None:
    """Values of one request come together; the model and the level are added."""
    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("Jobs", 1, 0)
    store.add_counter("Jobs", 2, 0)
    store.add_counter("Jobs", 5, 1)
    store.add_time("T", 1.5)
    store.add_size("S", 1)
    store.add_percent("P", 1)
    store.add_error("E", 1)
    store.add_metric("M", 1, "widgets", dimensions=[Dimension("c", "d")])

    assert [(m.name, m.value, m.request_id) for m in store.store] == [
        ("Jobs", 3, "a"),
        ("Jobs", 5, "b"),
        ("T", 1.5, "a,b"),
        ("S", 1, "a,b"),
        ("P", 1, "a,b"),
        ("E", 1, None),
        ("M", 1, "a,b"),
    ]
    assert [str(d) for d in store.store[-1].dimensions] == ["c:d", "ModelName:m", "Level:Model"]
    assert [str(d) for d in store.store[-2].dimensions] == ["Level:Error"]


@pytest.mark.parametrize(("call", "unit"), [("add_time", "h"), ("add_size", "bits")])
def test_an_unknown_unit_is_refused(call: str, unit: str) -> None:
    """As in the newer form."""
    with pytest.raises(ValueError, match=unit):
        getattr(MetricsStore(None, "m"), call)("x", 1, None, unit)


def test_metrics_are_written_as_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The line that the server reads: name, unit, value, dimensions, type, host, time, request."""
    store = MetricsStore({0: "a"}, "m")
    store.add_counter("Jobs", 1)
    with caplog.at_level(logging.INFO):
        emit_metrics(store.store)

    assert caplog.messages[0].startswith("[METRICS]Jobs.Count:1|#ModelName:m,Level:Model|#type:COUNTER|#hostname:")
    assert caplog.messages[0].endswith(",a")


def test_a_metric_is_written_as_json() -> None:
    """The encoder knows metrics and their dimensions, and refuses the rest."""
    document = json.loads(json.dumps(Metric("a", 1, "ms", [Dimension("b", "c")], "r"), cls=MetricEncoder))

    assert document["MetricName"] == "a"
    assert document["Unit"] == "Milliseconds"
    assert document["Dimensions"] == [{"Name": "b", "Value": "c"}]
    assert document["RequestId"] == "r"
    with pytest.raises(TypeError):
        json.dumps(object(), cls=MetricEncoder)
