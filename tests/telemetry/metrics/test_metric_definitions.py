"""Metrics files: TorchServe's built-in list, the operator's own, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, read_metrics_file
from support.inventory import inventory

FILE = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, "Host"]}
  histogram:
    - {name: QueueTime, unit: ms, dimensions: [*level, "Host"]}
model_metrics:
  gauge:
    - {name: Depth, unit: m, dimensions: [*model_name, *level]}
"""


def write(folder: Path, text: str) -> Path:
    """A metrics file of this text."""
    path = folder / "metrics.yaml"
    path.write_text(text)
    return path


def test_the_built_in_list_is_torchserves() -> None:
    """Names, types, dimensions, units and sides of the inventory, and no other metric."""
    listed = inventory("metrics")
    expected = {
        entry["name"]: Definition(entry["name"], entry["type"], entry["unit"], tuple(entry["dimensions"]))
        for entry in listed
    }
    models = {entry["name"] for entry in listed if entry["side"] == "model"}

    assert {**BUILT_IN.front, **BUILT_IN.model} == expected
    assert BUILT_IN.model.keys() == models


def test_a_file_says_which_metrics_there_are(tmp_path: Path) -> None:
    """Types and dimensions in its spelling; to those of models the host's name is added."""
    found = read_metrics_file(write(tmp_path, FILE))

    assert found.front == {
        "Requests2XX": Definition("Requests2XX", "counter", "Count", ("Level", "Host")),
        "QueueTime": Definition("QueueTime", "histogram", "ms", ("Level", "Host")),
    }
    assert found.model == {"Depth": Definition("Depth", "gauge", "m", ("ModelName", "Level", "Hostname"))}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (": [", "is no YAML"),
        ("ts_metrics: {}", "has no section model_metrics"),
        ("- a", "has no section model_metrics"),
        ("model_metrics: [a]", "no mapping under model_metrics"),
        ("model_metrics: {summary: []}", "the type 'summary'"),
        ("model_metrics: {counter: 1}", "a list of metrics"),
        ("model_metrics: {counter: [a]}", "a mapping for each metric"),
        ("model_metrics: {counter: [{name: A, unit: B}]}", "without dimensions"),
        ("model_metrics: {counter: [{dimensions: []}]}", "without name and unit"),
        ("model_metrics: {counter: [{name: A, unit: B, dimensions: L}]}", "a list of names"),
        ("model_metrics: {counter: [{name: marserve_x, unit: B, dimensions: []}]}", "the server's own"),
        (FILE + "  counter:\n    - {name: Depth, unit: m, dimensions: []}\n", "lists Depth twice"),
        (FILE.replace("name: Depth", "name: QueueTime"), "under ts_metrics and under model_metrics"),
        ("a" * (1024 * 1024 + 1), "more than"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, what: str) -> None:
    """With the file's name, what is wrong with it, and what to do."""
    path = write(tmp_path, text)

    with pytest.raises(BadSettings, match="correct the file") as error:
        read_metrics_file(path)

    assert what in str(error.value)
    assert str(path) in str(error.value)
    assert error.value.key == "metrics_config"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """TorchServe's workers would not start."""
    with pytest.raises(BadSettings, match=r"cannot be read \(No such file or directory\)"):
        read_metrics_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "dimensions", "fits"),
    [
        ("a_b:c", ("X", "Host"), True),
        ("a b", ("X", "Host"), False),
        ("a", ("X-Y", "Host"), False),
        ("a", ("__x", "Host"), False),
        ("a", ("X", "X"), False),
    ],
)
def test_what_prometheus_would_not_take_is_known(name: str, dimensions: tuple[str, ...], fits: bool) -> None:
    """One bad name would cost the whole page."""
    assert Definition(name, "gauge", "", dimensions).fits_a_page is fits
