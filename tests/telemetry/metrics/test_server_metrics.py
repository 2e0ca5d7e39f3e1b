"""The Prometheus page: what is counted, under which names, and how many series there can be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from marserve.messages import Metric
from marserve.telemetry.metrics.counts import Flops, Gauges, Processes, VersionMetrics
from marserve.telemetry.metrics.handler_metrics import ModelMetrics
from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, Definitions
from marserve.telemetry.metrics.server_metrics import CONTENT_TYPE, Metrics
from support.inventory import inventory
from support.metric_pages import assert_equal


def read_page(metrics: Metrics, *names: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The page's samples by name and labels, read by Prometheus' own parser."""
    page = metrics.render(names).decode()
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name
            if f"\n{name}" not in page:  # the parser gives every counter OpenMetrics' ending
                name = name.removesuffix("_total")
            key = (name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} stands twice on the page"
            samples[key] = sample.value
    return samples


def value_of(samples: dict[Any, float], name: str, **labels: str) -> float:
    """The one sample with this name and these labels."""
    return samples[name, tuple(sorted(labels.items()))]


def busy_version(model: str = "echo", version: str = "1.0") -> VersionMetrics:
    """A version that took three requests without and one with its version named, in two batches."""
    counts = VersionMetrics(model, version)
    counts.requests += 4
    counts.named_requests += 1
    counts.answers[200] += 3
    counts.answers[503] += 1
    counts.errors["handler"] += 1
    counts.refused["queue_full"] += 2
    for queue_s, total_s in ((0.0001, 0.010), (0.002, 0.012), (0.003, 0.013), (0.004, 0.016)):
        counts.queue_seconds.observe(queue_s)
        counts.total_seconds.observe(total_s)
    counts.named_queue_s += 0.004
    counts.named_total_s += 0.016
    counts.handler_seconds.observe(0.008, times=3)
    counts.handler_seconds.observe(0.009)
    counts.batch_sizes.observe(3)
    counts.batch_sizes.observe(1)
    counts.worker_starts += 2
    counts.worker_restarts += 1
    counts.worker_deaths["signal"] += 1
    return counts


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(1, 64))))
def test_histogram_buckets_always_add_up(values: list[tuple[float, int]]) -> None:
    """No observation is lost or counted twice, and the page's buckets never fall."""
    counts = VersionMetrics("m", "1")
    for value, times in values:
        counts.total_seconds.observe(value, times)
    metrics = Metrics("host")
    metrics.register(counts)

    samples = read_page(metrics)

    buckets = [
        v
        for (name, labels), v in samples.items()
        if name == "marserve_request_seconds_bucket" and ("stage", "total") in labels
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == sum(times for _, times in values)
    assert value_of(samples, "marserve_request_seconds_count", model="m", version="1", stage="total") == buckets[-1]


def test_padding_is_on_the_page_of_versions_that_have_it() -> None:
    """Most models know no lengths, and a server may have a thousand."""
    by_length, other = VersionMetrics("m", "1"), VersionMetrics("m", "2")
    metrics = Metrics("host")
    metrics.register(by_length)
    metrics.register(other)
    by_length.padding.observe(0.2)

    shown = [dict(labels) for name, labels in read_page(metrics) if name == "marserve_batch_padding_ratio_count"]
    assert shown == [{"model": "m", "version": "1"}]


def test_what_is_counted_by_the_dozen_is_counted_before_each_page() -> None:
    """A quiet model's requests would wait for others."""
    counts, metrics = VersionMetrics("m", "1"), Metrics("host")
    metrics.register(counts)
    metrics.prepare_by(lambda: counts.batch_sizes.observe(1))

    pages = [value_of(read_page(metrics), "marserve_batch_size_count", model="m", version="1") for _ in range(2)]
    assert pages == [1, 2]


def test_a_histogram_that_was_shown_empty_shows_what_is_observed_later() -> None:
    """The text of an empty one is kept, and made anew with each value; again while none comes."""
    counts = VersionMetrics("m", "1")
    metrics = Metrics("host")
    metrics.register(counts)

    seen = []
    for value in (None, None, 3, None, 1):
        if value is not None:
            counts.batch_sizes.observe(value)
        samples = read_page(metrics)
        shown = [
            value_of(samples, f"marserve_batch_size_{name}", model="m", version="1", **labels)
            for name, labels in (("count", {}), ("sum", {}), ("bucket", {"le": "1.0"}), ("bucket", {"le": "+Inf"}))
        ]
        seen.append(shown)

    assert seen == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 3, 0, 1], [1, 3, 0, 1], [2, 4, 1, 2]]


def test_the_page_shows_what_was_counted() -> None:
    """Each attribute of a version comes out under its own name."""
    metrics = Metrics("box")
    version = busy_version()
    version.read_gauges = lambda: Gauges(
        workers_target=3, queue_length=7, workers={"ready": 2, "loading": 1}, load_s={"W-9000-echo_1.0": 3.5}
    )
    metrics.register(version)
    for status in (200, 200, 404, 503, 302):
        metrics.responses[status // 100] += 1
    metrics.count_refused("too_large")
    metrics.count_call("OK")
    metrics.count_call("OK")

    samples = read_page(metrics)

    host = {"Level": "Host", "Hostname": "box"}
    mine = {"model": "echo", "version": "1.0"}
    assert value_of(samples, "Requests2XX", **host) == 2
    assert value_of(samples, "Requests4XX", **host) == 1
    assert value_of(samples, "Requests5XX", **host) == 2  # TorchServe counts everything else here
    assert value_of(samples, "QueueTime", **host) == 4
    assert value_of(samples, "WorkerThreadTime", **host) == 3
    assert value_of(samples, "WorkerLoadTime", WorkerName="W-9000-echo_1.0", **host) == 3500
    assert value_of(samples, "PredictionTime", ModelName="echo", Level="Model", Hostname="box") == 9.0
    assert value_of(samples, "marserve_requests_total", **mine) == 4
    assert value_of(samples, "marserve_answers_total", status="503", **mine) == 1
    assert value_of(samples, "marserve_errors_total", cause="handler", **mine) == 1
    assert value_of(samples, "marserve_model_refused_total", cause="queue_full", **mine) == 2
    assert value_of(samples, "marserve_worker_deaths_total", cause="signal", **mine) == 1
    assert value_of(samples, "marserve_worker_restarts_total", **mine) == 1
    assert value_of(samples, "marserve_request_seconds_count", stage="handler", **mine) == 4
    assert value_of(samples, "marserve_batch_size_bucket", le="1.0", **mine) == 1
    assert value_of(samples, "marserve_queue_length", **mine) == 7
    assert value_of(samples, "marserve_workers", state="ready", **mine) == 2
    assert value_of(samples, "marserve_workers_target", **mine) == 3
    assert value_of(samples, "marserve_http_responses_total", **{"class": "3xx"}) == 1
    assert value_of(samples, "marserve_refused_total", cause="too_large") == 1
    assert value_of(samples, "marserve_grpc_calls_total", code="OK") == 2


def test_torchserves_counters_tell_named_versions_from_default() -> None:
    """`model_version` is the version the URL named, else the word `default`."""
    metrics = Metrics("box")
    metrics.register(busy_version())

    samples = read_page(metrics)

    named = {"model_name": "echo", "model_version": "1.0", "hostname": "box"}
    default = {"model_name": "echo", "model_version": "default", "hostname": "box"}
    assert value_of(samples, "ts_inference_requests_total", **named) == 1
    assert value_of(samples, "ts_inference_requests_total", **default) == 3
    assert value_of(samples, "ts_inference_latency_microseconds", **named) == 16000
    assert value_of(samples, "ts_inference_latency_microseconds", **default) == 35000
    assert value_of(samples, "ts_queue_latency_microseconds", **named) == 4000
    assert value_of(samples, "ts_queue_latency_microseconds", **default) == 5100


def test_a_version_nobody_asked_for_has_no_torchserve_series() -> None:
    """As in TorchServe, a series begins with its first request."""
    metrics = Metrics("box")
    metrics.register(VersionMetrics("echo", "1.0"))

    samples = read_page(metrics)

    assert not [name for name, _ in samples if name.startswith("ts_")]


def test_the_default_series_does_not_fall_when_a_version_leaves() -> None:
    """Prometheus reads a falling counter as a restart from zero and would count twice."""
    metrics = Metrics("box")
    first, second = busy_version(version="1.0"), busy_version(version="2.0")
    metrics.register(first)
    metrics.register(second)
    default = {"model_name": "echo", "model_version": "default", "hostname": "box"}
    before = read_page(metrics)

    metrics.remove(first)
    after = read_page(metrics)

    for name in ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"):
        assert value_of(after, name, **default) == value_of(before, name, **default)
    assert not [labels for _, labels in after if ("version", "1.0") in labels]


def test_a_version_that_comes_back_is_not_counted_twice() -> None:
    """Between two scrapes it went and came: sums are as if it had stayed, and go on."""
    metrics = Metrics("box")
    first, second = busy_version(version="1.0"), busy_version(version="2.0")
    metrics.register(first)
    metrics.register(second)
    default = {"model_name": "echo", "model_version": "default", "hostname": "box"}
    before = read_page(metrics)

    for _ in range(3):
        metrics.remove(first)
        during = read_page(metrics)
        metrics.register(first)
    first.requests += 5
    after = read_page(metrics)

    for name in ("ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"):
        was = value_of(before, name, **default)
        assert value_of(during, name, **default) == was
        assert value_of(after, name, **default) == was + (5 if name == "ts_inference_requests_total" else 0)
    named = {"model_name": "echo", "model_version": "1.0", "hostname": "box"}
    assert value_of(after, "ts_inference_requests_total", **named) == 1


def test_nothing_is_left_of_a_model_after_its_last_version() -> None:
    """Series come and go with their model, however often it is swapped."""
    metrics = Metrics("box")
    empty = metrics.render()

    for number in range(300):
        version = busy_version(version=str(number))
        metrics.register(version)
        metrics.update_custom("echo", [handler_time(1.0)])
        metrics.render()
        metrics.remove(version)

    assert not [labels for _, labels in read_page(metrics) if any("echo" in value for _, value in labels)]
    assert len(metrics.render().splitlines()) == len(empty.splitlines()) + 2  # QueueTime, WorkerThreadTime


def test_unknown_names_make_no_series() -> None:
    """10,000 requests for models that are not there leave the page as long as it was."""
    metrics = Metrics("box")
    metrics.register(busy_version())
    metrics.responses[404 // 100] += 1
    metrics.count_refused("model_not_found")
    before = len(metrics.render().splitlines())

    for _ in range(10_000):
        metrics.responses[404 // 100] += 1
        metrics.count_refused("model_not_found")

    assert len(metrics.render().splitlines()) == before


def test_a_filter_keeps_exactly_the_named_samples() -> None:
    """`name[]` is the sample's whole name; families without a sample left are not mentioned."""
    metrics = Metrics("box")
    metrics.register(busy_version())
    metrics.responses[200 // 100] += 1

    one = metrics.render(["Requests2XX"]).decode()
    histogram = metrics.render(["marserve_batch_size_count"]).decode()

    assert one.splitlines()[1:] == ["# TYPE Requests2XX counter", 'Requests2XX{Level="Host",Hostname="box"} 1.0']
    assert histogram.splitlines()[2:] == ['marserve_batch_size_count{model="echo",version="1.0"} 2.0']
    assert metrics.render(["Requests4XX", "nosuchmetric", "marserve_batch_size"]) == b""


def test_a_histogram_of_the_whole_server_has_no_labels_but_its_bounds() -> None:
    """It is of no version."""
    metrics = Metrics("box")
    histogram = Histogram((0.5, 1))
    metrics.declare_rows("marserve_loop_lag_seconds", lambda: [((), histogram)])

    histogram.observe(0.75)

    page = metrics.render(
        ["marserve_loop_lag_seconds_bucket", "marserve_loop_lag_seconds_sum", "marserve_loop_lag_seconds_count"]
    )
    assert page.decode().splitlines()[2:] == [
        'marserve_loop_lag_seconds_bucket{le="0.5"} 0.0',
        'marserve_loop_lag_seconds_bucket{le="1.0"} 1.0',
        'marserve_loop_lag_seconds_bucket{le="+Inf"} 1.0',
        "marserve_loop_lag_seconds_count 1.0",
        "marserve_loop_lag_seconds_sum 0.75",
    ]


def test_families_without_samples_are_announced() -> None:
    """Unfiltered, a metric that has no value yet appears as its two comment lines."""
    page = Metrics("box").render().decode()

    assert "# TYPE GPUUtilization gauge\n# HELP" in page
    assert page.endswith("\n")
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def handler_time(value: float, *dimensions: tuple[str, str]) -> Metric:
    """What BaseHandler sends after a batch."""
    given = list(dimensions) or [("ModelName", "echo"), ("Level", "Model")]
    return Metric("HandlerTime", value, "ms", "gauge", given, "id")


def test_a_declared_handler_metric_is_shown() -> None:
    """HandlerTime comes from BaseHandler over the wire and is a gauge: the newest value counts."""
    metrics = Metrics("box")

    metrics.update_custom("echo", [handler_time(1.5), handler_time(2.5, ("Level", "Model"), ("ModelName", "echo"))])

    samples = read_page(metrics)
    assert value_of(samples, "HandlerTime", ModelName="echo", Level="Model", Hostname="box") == 2.5


@pytest.mark.parametrize(
    "metric",
    [
        Metric("JobsSeen", 1, "Count", "counter", [("ModelName", "echo"), ("Level", "Model")], ""),
        handler_time(1.0, ("ModelName", "echo")),
    ],
    ids=["undeclared", "too few dimensions"],
)
def test_a_handler_metric_that_does_not_fit_is_dropped_and_counted(metric: Metric) -> None:
    """TorchServe drops what its metrics file does not list; here one can see that it happened."""
    metrics = Metrics("box")

    metrics.update_custom("echo", [metric])

    samples = read_page(metrics)
    assert value_of(samples, "marserve_dropped_metric_values_total") == 1
    assert not [name for name, _ in samples if name in ("JobsSeen", "HandlerTime")]


def test_what_a_worker_dropped_and_a_handlers_own_prediction_time_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beside what does not fit here; a worker that says a negative number counts as one that says none."""
    metrics = Metrics("box")
    with caplog.at_level("ERROR"):
        metrics.update_custom("echo", [handler_time(1.5)], dropped=3)
        for dropped in (-7, 0):
            metrics.update_custom("echo", [Metric("PredictionTime", 1.0, "Milliseconds", "gauge", [], "")], dropped)

    assert value_of(read_page(metrics), "marserve_dropped_metric_values_total") == 5
    assert caplog.text.count("PredictionTime of model echo is measured by the server itself") == 1


@pytest.mark.parametrize(
    ("is_listed", "detects", "is_there"),
    [(False, True, True), (False, False, False), (True, True, True)],
    ids=["detected", "not listed", "listed"],
)
def test_the_time_of_predictions_is_detected_where_no_file_lists_it(
    is_listed: bool, detects: bool, is_there: bool
) -> None:
    """With its first batch, as handlers' metrics are: TorchServe's workers send it like one of those."""
    listed = {"PredictionTime": BUILT_IN.model["PredictionTime"]} if is_listed else {}
    definitions = Definitions({}, listed)
    metrics = Metrics("box", definitions=definitions, model_metrics=ModelMetrics(definitions, detects=detects))
    before = metrics.render().decode()
    metrics.register(busy_version())

    found = [read_page(metrics, "PredictionTime") for _ in range(2)]

    its = {"ModelName": "echo", "Level": "Model", "Hostname": "box"}
    assert found == [{("PredictionTime", tuple(sorted(its.items()))): 9.0} if is_there else {}] * 2
    assert ("# TYPE PredictionTime gauge" in before) is is_listed


def test_a_handler_cannot_make_series_without_end() -> None:
    """A dimension that changes with each request stops at the bound."""
    metrics = Metrics("box")

    metrics.update_custom("echo", [handler_time(1.0, ("ModelName", f"m{n}"), ("Level", "Model")) for n in range(3000)])

    samples = read_page(metrics)
    assert len([name for name, _ in samples if name == "HandlerTime"]) == 1000
    assert value_of(samples, "marserve_dropped_metric_values_total") == 2000


def test_two_models_that_measure_under_one_label_set_share_a_series() -> None:
    """A page that holds a series twice is refused by Prometheus as a whole."""
    metrics = Metrics("box")

    metrics.update_custom("echo", [handler_time(1.0)])
    metrics.update_custom("other", [handler_time(2.0)])

    assert value_of(read_page(metrics), "HandlerTime", ModelName="echo", Level="Model", Hostname="box") == 2.0


def test_system_figures_carry_the_host_and_the_device() -> None:
    """The machine's figures are handed in; a new set replaces the old one."""
    metrics = Metrics("box")
    metrics.set_system([("CPUUtilization", 99.0, None)])

    metrics.set_system([("CPUUtilization", 12.5, None), ("GPUUtilization", 40.0, "0"), ("GPUUtilization", 50.0, "1")])

    samples = read_page(metrics)
    assert value_of(samples, "CPUUtilization", Level="Host", Hostname="box") == 12.5
    assert value_of(samples, "GPUUtilization", Level="Host", DeviceId="1", Hostname="box") == 50.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_name_survives_the_page(model: str, version: str) -> None:
    """Quotes, backslashes and line ends in a label are escaped."""
    metrics = Metrics("box")
    metrics.register(VersionMetrics(model, version))

    page = metrics.render(["marserve_requests_total"]).decode()

    assert page.count("\n") == 3
    if not set(model + version) & set("\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"):  # the parser splits lines at these
        (sample,) = next(iter(text_string_to_metric_families(page))).samples
        assert sample.labels == {"model": model, "version": version}


def test_lost_log_lines_are_shown() -> None:
    """What the logs dropped is asked for at scrape time."""
    metrics = Metrics("box", dropped_lines=lambda: {"access": 3})

    assert value_of(read_page(metrics), "marserve_dropped_log_lines_total", log="access") == 3


def test_every_metric_of_torchserve_is_on_the_page() -> None:
    """Names and types are those of the inventory."""
    page = Metrics("box").render().decode().splitlines()

    for metric in inventory("metrics"):
        assert f"# TYPE {metric['name']} {metric['type']}" in page


# ------------------------------------------------------------------------------------------------ a metrics file


def listing(*front: Definition, model: Definition | None = None) -> Definitions:
    """A metrics file with these metrics."""
    return Definitions({each.name: each for each in front}, {model.name: model} if model is not None else {})


def test_only_what_the_file_lists_is_shown_and_under_its_labels() -> None:
    """TorchServe drops the rest; marserve's own metrics stay."""
    asked = ("model_name", "model_version", "Hostname")
    definition = Definition("ts_inference_requests_total", "counter", "Count", asked)
    metrics = Metrics("box", definitions=listing(definition))
    metrics.register(busy_version())

    samples = read_page(metrics)

    assert value_of(samples, definition.name, model_name="echo", model_version="default", Hostname="box") == 3
    page = metrics.render().decode()
    assert "QueueTime" not in page
    assert "PredictionTime" not in page
    assert "# TYPE marserve_requests_total counter" in page


@pytest.mark.parametrize(
    ("kind", "line"), [("counter", "{} 30.0"), ("histogram", "_count{} 3.0"), ("gauge", "{} 20.0")]
)
def test_a_time_of_the_servers_may_have_any_type(kind: str, line: str) -> None:
    """What counts cannot tell comes from the single events of versions that have a tap, and else they have none."""
    definition = Definition("QueueTime", kind, "ms", ("Level", "Hostname"))
    metrics = Metrics("box", definitions=listing(definition))
    version = VersionMetrics("m", "1")
    metrics.register(version)
    assert (version.tap is None) == (kind == "gauge")

    for waits_s in ([0.005, 0.005], [0.020]):
        version.queue_seconds.observe_all(waits_s)
        version.total_seconds.observe_all(waits_s)
        if version.tap is not None:
            version.tap.queued(waits_s, [])

    its_labels = '{Level="Host",Hostname="box"}'
    assert "QueueTime" + line.replace("{}", its_labels) in metrics.render().decode().splitlines()


def test_counts_of_answers_and_requests_may_have_any_type() -> None:
    """They are read off the counts at scrape time, and what a version had before it left."""
    answers = Definition("Requests2XX", "histogram", "Count", ("Level", "Hostname"))
    accepted = Definition("ts_inference_requests_total", "gauge", "Count", ("m", "v", "h"))
    metrics = Metrics("box", definitions=listing(answers, accepted))
    version = VersionMetrics("m", "1")
    metrics.register(version)
    metrics.responses[2] += 3
    version.requests += 2

    first, second = metrics.render().decode(), metrics.render().decode()

    assert 'Requests2XX_count{Level="Host",Hostname="box"} 3.0' in first
    assert 'ts_inference_requests_total{m="m",v="default",h="box"} 1.0' in first
    assert first == second
    metrics.remove(version)
    assert 'm="m"' not in metrics.render().decode()


def test_the_handlers_time_may_be_a_histogram() -> None:
    """Of one observation a batch."""
    definition = Definition("PredictionTime", "histogram", "ms", ("ModelName", "Level", "Hostname"))
    metrics = Metrics("box", definitions=listing(model=definition))
    version = VersionMetrics("m", "1")
    metrics.register(version)
    assert version.tap is not None

    version.tap.ran(["a", "b"], 0.0003, 0.0)

    samples = read_page(metrics)
    its = {"ModelName": "m", "Level": "Model", "Hostname": "box"}
    assert value_of(samples, "PredictionTime_count", **its) == 1
    assert value_of(samples, "PredictionTime_bucket", le="0.5", **its) == 1
    assert value_of(samples, "PredictionTime_bucket", le="0.25", **its) == 0


def test_dimensions_that_the_server_has_no_values_for_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The metric is there, as in TorchServe, and stays without samples."""
    metrics = Metrics("box", definitions=listing(Definition("QueueTime", "gauge", "ms", ("Level", "Zone", "Hostname"))))
    metrics.register(busy_version())

    assert "# TYPE QueueTime gauge" in metrics.render().decode()
    assert "\nQueueTime{" not in metrics.render().decode()
    assert "Metric QueueTime gets no values" in caplog.text


def test_a_name_that_prometheus_does_not_take_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """It would cost the whole page."""
    metrics = Metrics("box", definitions=listing(Definition("Queue Time", "gauge", "ms", ("Hostname",))))

    assert "Queue Time" not in metrics.render().decode()
    assert "Metric Queue Time is not shown" in caplog.text


@pytest.mark.parametrize(("kind", "line"), [("counter", " 3.0"), ("gauge", " 2.0"), ("histogram", "_count")])
def test_detected_metrics_are_shown_with_the_type_they_came_with(kind: str, line: str) -> None:
    """`model_metrics_auto_detect`; they go with their model."""
    metrics = Metrics("box", model_metrics=ModelMetrics(BUILT_IN, detects=True))
    metrics.register(busy_version(model := "m", "1"))
    version = metrics._versions[0].of

    for value in (1.0, 2.0):
        metrics.update_custom(model, [Metric("Width", value, "Count", kind, [("Colour", "blue")], "")])

    page = metrics.render().decode()
    assert f"# TYPE Width {kind}" in page
    assert any(each.startswith("Width") and line in each and 'Colour="blue"' in each for each in page.splitlines())
    metrics.remove(version)
    assert "Colour" not in metrics.render().decode()


def test_a_detected_name_that_prometheus_does_not_take_is_dropped() -> None:
    """And counted."""
    metrics = Metrics("box", model_metrics=ModelMetrics(BUILT_IN, detects=True))

    metrics.update_custom("m", [Metric("My Width", 1.0, "Count", "gauge", [], "")])

    assert "Width" not in metrics.render().decode()
    assert value_of(read_page(metrics), "marserve_dropped_metric_values_total") == 1


def test_a_figure_of_the_operators_program_goes_by_the_list() -> None:
    """Its own metrics as well as TorchServe's; what is not listed, or has other dimensions, is none."""
    room = Definition("RoomTemperature", "gauge", "Celsius", ("Room", "Hostname"))
    metrics = Metrics("box", definitions=listing(room, BUILT_IN.front["CPUUtilization"]))

    taken = [
        metrics.update_front(Metric(name, 21.5, "x", "", dimensions, ""))
        for name, dimensions in (
            ("RoomTemperature", [("Room", "1")]),
            ("CPUUtilization", [("Level", "Host")]),
            ("CPUUtilization", []),
            ("MemoryUsed", [("Level", "Host")]),
        )
    ]

    assert taken == [True, True, False, False]
    samples = read_page(metrics)
    assert value_of(samples, "RoomTemperature", Room="1", Hostname="box") == 21.5
    assert value_of(samples, "CPUUtilization", Level="Host", Hostname="box") == 21.5


def test_flops_are_on_the_page_once_they_are_counted() -> None:
    """Of all batches so far, those before the count too; a version of which they are not known has no line."""
    metrics = Metrics("box")
    versions = [busy_version("counted"), busy_version("unknown")]
    for version in versions:
        metrics.register(version)
    version = versions[0]
    version.flops = Flops(10.0, 100.0, 1e9, "float32", "x [n, 3]")
    version.read_gauges = lambda: Gauges(flops_utilisation=0.25)
    batches, requests = sum(version.batch_sizes.buckets), version.batch_sizes.sum

    page = read_page(metrics)

    mine = {"model": "counted", "version": "1.0"}
    assert value_of(page, "marserve_model_flops_total", **mine) == 10.0 * batches + 100.0 * requests > 0
    assert value_of(page, "marserve_model_flops_utilisation", **mine) == 0.25
    assert not [labels for name, labels in page if "flops" in name and ("model", "unknown") in labels]


def test_a_page_asks_each_pool_once_and_the_next_page_asks_again() -> None:
    """Looking at workers is what a scrape costs with many of them; what was true a page ago is not shown again."""
    metrics = Metrics("box")
    version = busy_version()
    asked = itertools.count(1)
    version.read_gauges = lambda: Gauges(
        queue_length=next(asked), workers={"ready": 1}, load_s={"W-9000-echo_1.0": 1.0}
    )
    metrics.register(version)
    mine = {"model": "echo", "version": "1.0"}

    pages = [read_page(metrics) for _ in range(3)]

    assert [value_of(page, "marserve_queue_length", **mine) for page in pages] == [1, 2, 3]
    assert value_of(read_page(metrics, "marserve_queue_length"), "marserve_queue_length", **mine) == 4
    assert not read_page(metrics, "marserve_requests_total").keys() & {"marserve_queue_length"}
    assert next(asked) == 5, "a page without gauges asks nobody"


def test_a_page_that_failed_leaves_nothing_for_the_next() -> None:
    """A pool whose gauges cannot be read; the others are asked anew."""
    metrics = Metrics("box")
    queued = [7, 8]
    versions = [busy_version("one"), busy_version("two")]
    versions[0].read_gauges = lambda: Gauges(queue_length=queued[0])
    versions[1].read_gauges = lambda: {}["broken"]  # type: ignore[return-value]
    for version in versions:
        metrics.register(version)

    with pytest.raises(KeyError, match="broken"):
        metrics.render()
    queued.pop(0)
    metrics.remove(versions[1])

    assert value_of(read_page(metrics), "marserve_queue_length", model="one", version="1.0") == 8


def test_the_page_tells_how_many_workers_serve_a_build_and_how_many_their_parent() -> None:
    """By what their handlers say at the load; a name with quotes is escaped, and nothing said is no line."""
    metrics = Metrics("box")
    for name, computing in (("one", {"onnx-int8": 2, 'a "b"': 1}), ("two", {})):
        version = busy_version(name, "1.0")
        version.read_gauges = lambda computing=computing: Gauges(computing=computing)
        metrics.register(version)

    page = read_page(metrics)

    assert value_of(page, "marserve_workers_computing", model="one", version="1.0", on="onnx-int8") == 2
    assert value_of(page, "marserve_workers_computing", model="one", version="1.0", on='a "b"') == 1
    assert 'marserve_workers_computing{model="two"' not in metrics.render().decode()


def test_the_page_tells_how_fast_the_build_is_that_serves_and_how_often_one_was_not_used() -> None:
    """The ratio by the rows of a batch; a version without a build has no line."""
    metrics = Metrics("box")
    for name, ratios in (("one", {("onnx-int8", "1"): 3.5, ("onnx-int8", "16"): 4.5}), ("two", {})):
        version = busy_version(name, "1.0")
        version.read_gauges = lambda ratios=ratios: Gauges(build_ratios=ratios)
        metrics.register(version)
    version.builds_refused["aot"] += 2

    page = read_page(metrics)

    labels = {"model": "one", "version": "1.0", "build": "onnx-int8"}
    assert value_of(page, "marserve_build_ratio", **labels, rows="16") == 4.5
    assert value_of(page, "marserve_build_checks_failed_total", model="two", version="1.0", build="aot") == 2
    assert 'marserve_build_ratio{model="two"' not in metrics.render().decode()


def test_the_whole_page_is_what_the_library_writes_of_the_same_registry() -> None:
    """With versions that were asked, gauges, handlers' metrics and the machine's, in both formats."""
    metrics = Metrics("box", model_metrics=ModelMetrics(BUILT_IN, detects=True))
    metrics.keep_examples()
    for version in (busy_version("echo", "1.0"), busy_version('od"d', "2\\\n")):
        version.read_gauges = lambda: Gauges(
            queue_length=7,
            workers={"ready": 2},
            load_s={"W-9000-echo_1.0": 3.5},
            computing={"onnx-int8": 2},
            build_ratios={("onnx-int8", "1"): 3.5},
        )
        version.processes = Processes(1.5, 1 << 20, 1 << 19)
        metrics.register(version)
        version.total_seconds.observe(0.02)
        version.total_seconds.exemplify(0.02, "6a0f")
    metrics.responses[2] += 3_000_000
    metrics.set_system([("CPUUtilization", 12.5, None), ("GPUUtilization", 40.0, "0")])
    metrics.update_custom("echo", [Metric("Spread", 0.3, "s", "histogram", [("Colour", "blue")], ""), handler_time(1)])
    metrics.render()

    assert_equal(metrics.families)
    assert b'le="0.025",stage="total"' not in metrics.render()  # labels keep the order that pages have had
    assert b'# {request_id="6a0f"} 0.02' in metrics.render(is_open=True)


def test_a_handlers_metric_whose_name_another_has_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A page on which two families claim a name is refused by Prometheus as a whole."""
    metrics = Metrics("box", model_metrics=ModelMetrics(BUILT_IN, detects=True))

    for name, kind in (("Width", "histogram"), ("Width_count", "gauge"), ("Width_count", "gauge")):
        metrics.update_custom("m", [Metric(name, 1.0, "Count", kind, [], "")])

    assert "Width_count gauge" not in metrics.render().decode()
    assert value_of(read_page(metrics), "marserve_dropped_metric_values_total") == 2
    assert caplog.text.count("has a name that another metric on the page has") == 1


@pytest.mark.parametrize("names", [("Jobs", "Jobs_total"), ("Jobs_total", "Jobs"), ("Jobs_created", "Jobs_total")])
def test_names_that_clash_in_openmetrics_alone_are_shown_in_both_formats(names: tuple[str, str]) -> None:
    """There a counter is named without `_total`, and has `_created` for itself: it is one of unknown type then."""
    metrics = Metrics("box", model_metrics=ModelMetrics(BUILT_IN, detects=True))

    for name in names:
        kind = "counter" if name.endswith("_total") else "gauge"
        metrics.update_custom("m", [Metric(name, 1.0, "Count", kind, [], "")])

    assert_equal(metrics.families)
    text, opened = metrics.render().decode(), metrics.render(is_open=True).decode()
    assert "# TYPE Jobs_total counter" in text
    assert "# TYPE Jobs_total unknown" in opened
    assert all(f'\n{name}{{Hostname="box"}} 1.0\n' in page for name in names for page in (text, opened))


def test_a_family_is_declared_once_and_only_from_the_catalogue() -> None:
    """Else the reference page would not know it."""
    metrics = Metrics("box")
    metrics.declare("marserve_downloads", lambda: {"": 1})

    with pytest.raises(ValueError, match="is on the metrics page already"):
        metrics.declare("marserve_downloads", lambda: {"": 1})
    with pytest.raises(KeyError, match="marserve_unheard_of"):
        metrics.declare("marserve_unheard_of", dict)


def test_usage_of_a_model_goes_on_when_a_version_takes_the_place_of_another() -> None:
    """Requests, milliseconds of compute, and bytes: a counter that fell would be counted twice."""
    metrics = Metrics("box")
    first, second = busy_version(version="1.0"), busy_version(version="2.0")
    first.busy_seconds, first.input_bytes, first.answer_bytes = 1.5, 100, 7
    first.inner_requests = 1
    second.busy_seconds, second.input_bytes = 0.5, 10
    metrics.register(first)
    metrics.register(second)
    before = read_page(metrics)

    metrics.remove(first)
    after = read_page(metrics)

    for samples in (before, after):
        assert value_of(samples, "marserve_usage_requests_total", model="echo") == 7
        assert value_of(samples, "marserve_usage_compute_seconds_total", model="echo") == 2
        assert value_of(samples, "marserve_usage_bytes_total", model="echo", direction="in") == 110
        assert value_of(samples, "marserve_usage_bytes_total", model="echo", direction="out") == 7
    metrics.remove(second)
    assert not [name for name, _ in read_page(metrics) if "usage" in name]
