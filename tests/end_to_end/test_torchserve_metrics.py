"""TorchServe's metrics on a running server: as lines and on the page, from a metrics file and from handlers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server import Server, make_archive, poll

HANDLER = """
import logging
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_type_enum import MetricTypes
from ts.service import emit_metrics

class Measurer:
    def initialize(self, context):
        context.metrics.add_counter("Begun", 1)

    def handle(self, data, context):
        metrics = context.metrics
        metrics.add_counter("Jobs", 2)
        metrics.add_counter("Jobs", -1)
        metrics.add_time("Think", 12.5)
        metrics.add_size("Size", 3.5, unit="kB")
        metrics.add_percent("Full", 42)
        metrics.add_error("Trouble", 1)
        metrics.add_metric("Colours", 7, unit="", dimensions=[Dimension("Colour", "blue")])
        metrics.add_metric("Spread", 0.3, unit="s", metric_type=MetricTypes.HISTOGRAM)
        if metrics.config_file_path:
            metrics.get_metric("Depth", MetricTypes.GAUGE).add_or_update(9, [context.model_name, "Model"])
        print("[METRICS]Printed.Count:4|#ModelName:m,Level:Model|#type:COUNTER|#hostname:h,1717105307,id")
        emit_metrics([Metric("Emitted", 5, "count", [Dimension("ModelName", "m"), Dimension("Level", "Model")], "id")])
        print("an ordinary line")
        return ["measured"] * len(data)
"""

FILE = """
dimensions:
  - &model "ModelName"
  - &level "Level"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, "Hostname"]}
  gauge:
    - {name: QueueTime, unit: Milliseconds, dimensions: [*level, "Hostname"]}
    - {name: RoomTemperature, unit: Celsius, dimensions: [Room, "Hostname"]}
model_metrics:
  counter:
    - {name: Begun, unit: Count, dimensions: [*model, *level]}
    - {name: Jobs, unit: Count, dimensions: [*model, *level]}
    - {name: Printed, unit: Count, dimensions: [*model, *level]}
    - {name: Trouble, unit: unit, dimensions: [*level]}
  gauge:
    - {name: Depth, unit: m, dimensions: [*model, *level]}
  histogram:
    - {name: PredictionTime, unit: ms, dimensions: [*model, *level]}
"""

PROGRAM = """
print("RoomTemperature.Celsius:21.5|#Room:1|#hostname:h,1717105307")
print()
print("1:2")
"""


def samples_of(page: str) -> dict[str, float]:
    """The page's samples by name, as Prometheus' parser reads them; of several of a name the last."""
    return {
        (sample.name if f"\n{sample.name}" in page else sample.name.removesuffix("_total")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def serve_one(server: Server) -> None:
    """Register the model and ask it once."""
    make_archive(server.store / "m.mar", HANDLER)
    answer = server.register("m.mar")
    assert answer.status_code == 200, answer.text
    assert server.predict("m", b"x").text == "measured"


def test_in_log_mode_what_is_measured_is_lines(tmp_path: Path) -> None:
    """In the folder of METRICS_LOCATION, in TorchServe's grammar; the page stays empty; other output is logged."""
    (tmp_path / "metrics.yaml").write_text(FILE)
    (tmp_path / "measure.py").write_text(PROGRAM)
    settings = {
        "metrics_mode": "log",
        "metrics_config": "metrics.yaml",
        "system_metrics_cmd": "measure.py",
        "log_location": str(tmp_path / "logs"),
    }
    folder = tmp_path / "elsewhere"
    with Server(tmp_path, settings=settings, environment={"METRICS_LOCATION": str(folder)}) as server:
        serve_one(server)
        for _ in poll(20, "the lines"):
            front = (folder / "ts_metrics.log").read_text().splitlines()
            model = (folder / "model_metrics.log").read_text().splitlines()
            if any("Room" in line for line in front) and any("QueueTime" in line for line in front) and len(model) >= 5:
                break
        page = server.client.get(f"{server.metrics}/metrics").text
    assert page == ""
    grammar = (
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - (\w+)\.(\w+):([-+.E\d]+)\|#([^|]*)"
        r"\|#hostname:([^,]+)(?:,requestID:([^|]+))?,timestamp:\d+"
    )
    read = {found[1]: found.groups()[1:4] for line in front + model if (found := re.fullmatch(grammar, line))}
    assert read.pop("PredictionTime")[::2] == ("ms", "ModelName:m,Level:Model")
    assert read.pop("QueueTime")[::2] == ("Milliseconds", "Level:Host")
    assert read == {
        "Requests2XX": ("Count", "1.0", "Level:Host"),
        "RoomTemperature": ("Celsius", "21.5", "Room:1"),
        "Begun": ("Count", "1.0", "ModelName:m,Level:Model"),
        "Jobs": ("Count", "2.0", "ModelName:m,Level:Model"),
        "Trouble": ("unit", "1.0", "Level:Error"),
        "Depth": ("m", "9.0", "ModelName:m,Level:Model"),
        "Printed": ("Count", "4.0", "ModelName:m,Level:Model"),
    }
    log = (tmp_path / "logs" / "model_log.log").read_text()
    assert "an ordinary line" in log
    assert "[METRICS]" not in log


def test_on_the_page_what_is_measured_has_the_files_types(tmp_path: Path) -> None:
    """Counters add up, gauges hold the last value, histograms observe; what is not listed is dropped."""
    (tmp_path / "metrics.yaml").write_text(FILE)
    with Server(tmp_path, settings={"metrics_config": "metrics.yaml", "disable_system_metrics": "true"}) as server:
        serve_one(server)
        server.predict("m", b"x")
        for _ in poll(20, "the second batch's values"):
            page = server.client.get(f"{server.metrics}/metrics").text
            samples = samples_of(page)
            if samples.get("Printed") == 8:
                break
    assert (samples["Begun"], samples["Jobs"], samples["Depth"], samples["PredictionTime_count"]) == (1, 4, 9, 2)
    assert 'Begun{ModelName="m",Level="Model",' in page
    # Seven a request: a counter's negative value, and six metrics that the file does not list.
    assert samples["marserve_dropped_metric_values_total"] == 14
    assert "Think" not in page
    assert "HandlerTime" not in page


def test_metrics_that_no_list_names_are_detected_where_that_is_asked_for(tmp_path: Path) -> None:
    """Each with the type of its call, what handlers print included; the page is one that Prometheus takes."""
    settings = {"model_metrics_auto_detect": "true", "metric_time_interval": "1"}
    with Server(tmp_path, settings=settings) as server:
        serve_one(server)
        for _ in poll(20, "all of them"):
            page = server.client.get(f"{server.metrics}/metrics").text
            if "\nPrinted{" in page and "\nEmitted{" in page and "\nCPUUtilization{" in page:
                break
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", page))
    detected = {
        "Begun": "counter",
        "Jobs": "counter",
        "Think": "gauge",
        "Size": "gauge",
        "Full": "gauge",
        "Trouble": "counter",
        "Spread": "histogram",
        "Printed": "counter",
        "Emitted": "gauge",
    }
    assert detected.items() <= types.items()
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("the rest needs promtool (Debian's package prometheus)")
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode in (0, 3), checked.stderr  # 3: TorchServe's names are not as Prometheus advises
    assert "marserve_" not in checked.stdout + checked.stderr


@pytest.mark.parametrize("text", [None, "ts_metrics: {}"], ids=["missing", "without models"])
def test_a_server_with_a_bad_metrics_file_does_not_start(tmp_path: Path, text: str | None) -> None:
    """One that measures nothing would be noticed by nobody."""
    if text is not None:
        (tmp_path / "metrics.yaml").write_text(text)
    server = Server(tmp_path, settings={"metrics_config": "metrics.yaml"})
    try:
        with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*marserve did not start: metrics_config is"):
            server.start()
    finally:
        server.stop(check=False)
        server.client.close()
