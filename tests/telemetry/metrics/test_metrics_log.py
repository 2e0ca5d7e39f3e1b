"""Metrics as lines: which lines there are, in which log, how many; bounded, and the thread proven gone."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.messages import Metric
from marserve.telemetry.logs.logs import configure_logs
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.handler_metrics import ModelMetrics
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, Definitions
from marserve.telemetry.metrics.metrics_log import FRONT, LINES_AT_ONCE, MAX_EVENTS, MODEL, MetricsLog
from marserve.telemetry.metrics.page.torchserve import LEGACY_PAGE
from marserve.telemetry.metrics.server_metrics import Metrics
from support.inventory import inventory

NOW = 1717105307.5


class House:
    """Metrics of mode `log` or `legacy` without a thread."""

    def __init__(self, definitions: Definitions = BUILT_IN, *, mode: str = "log", detects: bool = False) -> None:
        self._written: list[tuple[str, str]] = []
        self.sizes: list[int] = []
        models = ModelMetrics(definitions, detects=detects)
        skips = LEGACY_PAGE if mode == "legacy" else ()
        self.log = MetricsLog(definitions.front, models.known, "box", self._write, skips)
        self.metrics = Metrics("box", definitions=definitions, model_metrics=models, mode=mode, lines=self.log)  # type: ignore[arg-type]
        self.log._responses = self.metrics.responses
        self.version = VersionMetrics("m", "1.0")
        self.metrics.register(self.version)

    def _write(self, name: str, lines: Sequence[str]) -> None:
        self.sizes.append(len(lines))
        self._written += [(name, line) for line in lines]

    def lines(self, name: str) -> list[str]:
        """What was written to this log since the last time."""
        self.log.flush(NOW)
        lines = [line for its, line in self._written if its == name]
        self._written = [(its, line) for its, line in self._written if its != name]
        return lines


@pytest.mark.parametrize("detects", [True, False])
def test_the_time_of_predictions_has_its_line_where_metrics_are_detected(detects: bool) -> None:
    """In the unit of TorchServe's workers, where the metrics file does not list it."""
    house = House(Definitions({}, {}), detects=detects)
    assert house.version.tap is not None
    house.version.tap.ran(["6a0f"], 0.08293, 0.001)

    line = (
        "PredictionTime.Milliseconds:82.93|#ModelName:m,Level:Model|#hostname:box,requestID:6a0f,timestamp:1717105307"
    )
    assert house.lines(MODEL) == ([line] if detects else [])


def test_requests_and_answers_have_a_line_each() -> None:
    """In TorchServe's form; the version is the one that was named, or the word default."""
    house = House()
    house.version.requests, house.version.named_requests = 3, 1
    house.metrics.responses[2] += 2
    house.metrics.responses[4] += 1

    lines = house.lines(FRONT)

    assert sorted(lines) == [
        "Requests2XX.Count:1.0|#Level:Host|#hostname:box,timestamp:1717105307",
        "Requests2XX.Count:1.0|#Level:Host|#hostname:box,timestamp:1717105307",
        "Requests4XX.Count:1.0|#Level:Host|#hostname:box,timestamp:1717105307",
        "ts_inference_requests_total.Count:1.0|#model_name:m,model_version:1.0|#hostname:box,timestamp:1717105307",
        "ts_inference_requests_total.Count:1.0|#model_name:m,model_version:default|#hostname:box,timestamp:1717105307",
        "ts_inference_requests_total.Count:1.0|#model_name:m,model_version:default|#hostname:box,timestamp:1717105307",
    ]
    assert house.lines(FRONT) == []


def test_times_have_a_line_a_request_or_a_batch() -> None:
    """What the server measures is in one log, the handler's time in the other, with request ids."""
    house = House()
    assert house.version.tap is not None
    house.version.tap.queued([0.0000576], [])
    house.version.tap.ran(["6a0f", "7b1e"], 0.08293, 0.0021)
    house.version.tap.answered([0.290371129], [])
    house.version.tap.loaded("W-9000-m_1.0", 4.593)

    assert sorted(house.lines(FRONT)) == sorted(
        [
            "QueueTime.Milliseconds:0.0|#Level:Host|#hostname:box,timestamp:1717105307",
            "ts_queue_latency_microseconds.Microseconds:57.6"
            "|#model_name:m,model_version:default|#hostname:box,timestamp:1717105307",
            "WorkerThreadTime.Milliseconds:2.0|#Level:Host|#hostname:box,timestamp:1717105307",
            "ts_inference_latency_microseconds.Microseconds:290371.129"
            "|#model_name:m,model_version:default|#hostname:box,timestamp:1717105307",
            "WorkerLoadTime.Milliseconds:4593.0|#WorkerName:W-9000-m_1.0,Level:Host|#hostname:box,timestamp:1717105307",
        ]
    )
    assert house.lines(MODEL) == [
        "PredictionTime.ms:82.93|#ModelName:m,Level:Model|#hostname:box,requestID:6a0f,7b1e,timestamp:1717105307"
    ]


def test_the_machines_figures_have_lines() -> None:
    """With the device where they belong to one."""
    house = House()

    house.metrics.set_system([("CPUUtilization", 12.5, None), ("GPUUtilization", 40.0, "1")])

    assert house.lines(FRONT) == [
        "CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1717105307",
        "GPUUtilization.Percent:40.0|#Level:Host,DeviceId:1|#hostname:box,timestamp:1717105307",
    ]


def test_what_handlers_measure_is_written_in_the_files_unit() -> None:
    """A metric that is not listed has no line; PredictionTime is the server's."""
    house = House()
    dimensions = [("ModelName", "m"), ("Level", "Model")]

    house.metrics.update_custom(
        "m",
        [
            Metric("HandlerTime", 12_345_678.0, "Milliseconds", "gauge", dimensions, "id"),
            Metric("PredictionTime", 1.0, "Milliseconds", "gauge", dimensions, "id"),
            Metric("Unlisted", 1.0, "Count", "counter", dimensions, "id"),
        ],
    )

    assert house.lines(MODEL) == [
        "HandlerTime.ms:1.2345678E7|#ModelName:m,Level:Model|#hostname:box,requestID:id,timestamp:1717105307"
    ]


@pytest.mark.parametrize("mode", ["log", "legacy"])
def test_what_is_detected_is_written_as_it_came(mode: str) -> None:
    """`model_metrics_auto_detect`: with its own unit and dimensions."""
    house = House(mode=mode, detects=True)

    house.metrics.update_custom("m", [Metric("Size", 3.5, "Megabytes", "gauge", [("Colour", "blue")], "")])

    assert house.lines(MODEL) == ["Size.Megabytes:3.5|#Colour:blue|#hostname:box,timestamp:1717105307"]


def test_in_legacy_mode_three_counters_are_on_the_page_and_the_rest_is_lines() -> None:
    """Contract 3.1; in `log` nothing is on the page."""
    house = House(mode="legacy")
    assert house.version.tap is not None
    house.version.requests = 1
    house.version.queue_seconds.observe(0.001)
    house.version.total_seconds.observe(0.002)
    house.metrics.responses[2] += 1
    house.version.tap.queued([0.001], [])
    house.version.tap.answered([0.002], [])

    page = house.metrics.render().decode()

    assert re.findall(r"# TYPE (\S+)", page) == [name for name in BUILT_IN.front if name in LEGACY_PAGE]
    assert 'ts_queue_latency_microseconds{model_name="m",model_version="default",hostname="box"} 1000.0' in page
    assert [line.split(".")[0] for line in house.lines(FRONT)] == ["QueueTime", "Requests2XX"]
    assert House(mode="log").metrics.render() == b""


def test_only_what_the_file_lists_has_lines() -> None:
    """In its unit, under its dimensions' names; values that do not fit its dimensions have none."""
    definitions = Definitions(
        {
            "Requests2XX": Definition("Requests2XX", "counter", "Things", ("L", "H")),
            "QueueTime": Definition("QueueTime", "gauge", "ms", ("H",)),
        },
        {"Other": Definition("Other", "gauge", "ms", ("H",))},
    )
    house = House(definitions)
    assert house.version.tap is not None
    house.version.requests += 1
    house.metrics.responses[2] += 1
    house.version.tap.queued([0.5], [])
    house.version.tap.ran(["id"], 0.5, 0.0)

    assert house.lines(FRONT) == ["Requests2XX.Things:1.0|#L:Host|#hostname:box,timestamp:1717105307"]
    assert house.lines(MODEL) == []


def test_a_version_that_leaves_has_all_its_lines() -> None:
    """What came before it was removed counts; nothing is kept of it."""
    house = House()
    house.version.requests = 2
    house.metrics.remove(house.version)

    assert len(house.lines(FRONT)) == 2
    house.version.requests = 5
    assert house.lines(FRONT) == []


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_version_that_comes_back_has_a_line_for_each_request_once(is_flushed: bool) -> None:
    """Whether or not somebody looked in between."""
    house = House()
    house.version.requests = 2
    house.metrics.remove(house.version)
    lines = house.lines(FRONT) if is_flushed else []
    house.metrics.register(house.version)
    house.version.requests = 5

    lines = [*lines, *house.lines(FRONT)]
    house.version.requests = 6
    assert len(lines) == 5
    assert len(house.lines(FRONT)) == 1


def test_many_lines_are_handed_over_in_small_parts() -> None:
    """A writer bounds how many records wait, so none may be long."""
    house = House()
    house.metrics.responses[2] = 100

    assert len(house.lines(FRONT)) == 100
    assert max(house.sizes) == LINES_AT_ONCE


def test_too_much_is_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """The event loop never waits for lines."""
    house = House()
    assert house.version.tap is not None
    for _ in range(MAX_EVENTS + 7):
        house.version.tap.loaded("W", 1.0)

    assert len(house.lines(FRONT)) == MAX_EVENTS
    assert house.log.lost == 7
    assert "7 events came faster" in caplog.text


def test_the_thread_writes_what_waits_and_ends() -> None:
    """Closing needs no second flush, and one that was never started can be closed."""
    house = House()
    assert house.version.tap is not None
    house.log.start(house.metrics.responses)
    house.version.tap.loaded("W", 1.0)

    house.log.close()

    assert [line.split(".")[0] for _, line in house._written] == ["WorkerLoadTime"]
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics-lines"]
    House().log.close()


# ------------------------------------------------------------------------------------------------------ the files


def test_the_log_files_are_those_of_torchserve(tmp_path: Path) -> None:
    """All of them are there from the start, in every mode."""
    names = inventory("log_files")

    for has_metrics in (True, False):
        folder = tmp_path / str(has_metrics)
        configure_logs(folder=folder, to_stdout=False, has_metrics=has_metrics).close()
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("format", ["text", "json"])
def test_lines_go_to_their_own_files_and_to_standard_output(tmp_path: Path, format: str) -> None:
    """In the file behind the time alone, on standard output in the long form, as TorchServe; or as JSON."""
    read_end, write_end = os.pipe()
    logs = configure_logs(
        folder=tmp_path / "logs",
        metrics_folder=tmp_path / "metrics",
        format=format,  # type: ignore[arg-type]
        has_metrics=True,
        stdout=write_end,
    )

    logs.write_metrics(FRONT, ["A.Count:1.0|#", "B.Count:1.0|#"])
    logs.write_metrics(MODEL, ['C.Count:1.0|#Quote:"'])
    logs.close()

    os.close(write_end)
    with open(read_end, "rb") as pipe:
        printed = pipe.read().decode().splitlines()
    front = (tmp_path / "metrics" / "ts_metrics.log").read_text().splitlines()
    model = (tmp_path / "metrics" / "model_metrics.log").read_text().splitlines()
    assert not (tmp_path / "logs" / "ts_metrics.log").exists()
    assert (len(front), len(model), len(printed)) == (2, 1, 3)
    if format == "json":
        said = json.loads(front[1])
        assert (said["logger"], said["message"]) == (FRONT, "B.Count:1.0|#")
        assert json.loads(model[0])["message"] == 'C.Count:1.0|#Quote:"'
        return
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{stamp} - B\.Count:1\.0\|#", front[1])
    assert re.fullmatch(rf"{stamp} - C\.Count:1\.0\|#Quote:\"", model[0])
    assert re.fullmatch(rf"{stamp} \[INFO \] metrics TS_METRICS - A\.Count:1\.0\|#", printed[0])


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """With its key; where no line will be written it does not matter."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "metrics"

    with pytest.raises(BadSettings, match="metrics_location or METRICS_LOCATION"):
        configure_logs(folder=tmp_path / "logs", metrics_folder=folder, to_stdout=False, has_metrics=True)

    configure_logs(folder=tmp_path / "logs", metrics_folder=folder, to_stdout=False).close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("log-")]
