"""Reading the `model_metrics` of a metrics file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from marserve_handlers.metrics import (
    MetricsCache,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricTypes,
)
from marserve_handlers.support.metrics_file import MetricsCachePyYamlError, read_model_metrics

GOOD = """
dimensions:
  - &level "Level"
model_metrics:
  counter:
    - {name: Jobs, unit: Count, dimensions: [*level]}
  histogram:
    - {name: Size, unit: B, dimensions: []}
"""


def write(folder: Path, text: str) -> str:
    """The path of a metrics file with that text."""
    path = folder / "metrics.yaml"
    path.write_text(text, "utf-8")
    return str(path)


def test_the_metrics_of_a_file_are_known(tmp_path: Path) -> None:
    """Types, units and dimension names are the file's; `initialize_cache` brings them into a cache."""
    path = write(tmp_path, GOOD)
    assert read_model_metrics(path) == [
        ("Jobs", "Count", ["Level"], MetricTypes.COUNTER),
        ("Size", "B", [], MetricTypes.HISTOGRAM),
    ]

    cache = MetricsCache(path)
    assert cache.cache == {}
    cache.initialize_cache()

    assert cache.get_metric("Jobs").dimension_names == ["Level"]
    assert cache.config_file_path == path


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("a: [", MetricsCachePyYamlError, "no YAML"),
        ("a: !!python/object:os.system {}", MetricsCachePyYamlError, "no YAML"),
        ("", MetricsCacheKeyError, "model_metrics"),
        ("ts_metrics: {}", MetricsCacheKeyError, "model_metrics"),
        ("model_metrics: [1]", MetricsCacheTypeError, "must map types"),
        ("model_metrics: {counter: {a: b}}", MetricsCacheTypeError, "a list"),
        ("model_metrics: {meter: []}", MetricsCacheKeyError, "meter"),
        ("model_metrics: {counter: [{name: x, unit: ms}]}", MetricsCacheKeyError, "lacks dimensions"),
        ("model_metrics: {counter: [{name: x, unit: ms, dimensions: a}]}", MetricsCacheTypeError, "list of names"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    """Each defect has its error."""
    with pytest.raises(error, match=words):
        read_model_metrics(write(tmp_path, text))


def test_a_missing_file_is_an_io_error(tmp_path: Path) -> None:
    """An OSError, as the name says."""
    with pytest.raises(MetricsCacheIOError, match="cannot be read"):
        read_model_metrics(str(tmp_path / "none.yaml"))


def test_the_yaml_error_is_one_of_yaml() -> None:
    """Handlers that catch yaml.YAMLError catch it."""
    assert issubclass(MetricsCachePyYamlError, yaml.YAMLError)
