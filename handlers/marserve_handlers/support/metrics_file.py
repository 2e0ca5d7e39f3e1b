"""Reads the `model_metrics` of a metrics file. Knows nothing of values; YAML is needed only by callers of this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from marserve_handlers.support.metric_types import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricTypes,
)


class MetricsCachePyYamlError(yaml.YAMLError):
    """The metrics file is no YAML."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class MetricDefinition(NamedTuple):
    """One metric of the file."""

    name: str
    unit: str
    dimension_names: list[str]
    type: MetricTypes


def read_model_metrics(config_file_path: str) -> list[MetricDefinition]:
    """The metrics under `model_metrics`, in the order of the file.

    Raises MetricsCacheIOError (no such file), MetricsCachePyYamlError (no YAML), MetricsCacheKeyError (no
    `model_metrics`, an unknown type, or an entry without `name`, `unit` or `dimensions`), MetricsCacheTypeError (an
    entry of the wrong shape).
    """
    try:
        with open(config_file_path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except OSError as error:
        raise MetricsCacheIOError(f"The metrics file cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise MetricsCachePyYamlError(f"The metrics file is no YAML: {error}") from error
    if not isinstance(document, dict) or not document.get("model_metrics"):
        raise MetricsCacheKeyError("The metrics file has no section 'model_metrics'.")
    return list(_definitions(document["model_metrics"]))


def _definitions(section: Any) -> Iterator[MetricDefinition]:
    if not isinstance(section, dict):
        raise MetricsCacheTypeError("'model_metrics' must map types (counter, gauge, histogram) to lists of metrics.")
    for word, entries in section.items():
        try:
            metric_type = MetricTypes(word)
        except ValueError:
            raise MetricsCacheKeyError(
                f"'model_metrics' has the type {word!r}; it must be counter, gauge or histogram."
            ) from None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise MetricsCacheTypeError(f"'model_metrics' must hold a list of metrics under {word!r}.")
        for entry in entries:
            missing = [key for key in ("name", "unit", "dimensions") if key not in entry]
            if missing:
                raise MetricsCacheKeyError(f"A {word} of 'model_metrics' lacks {', '.join(missing)}: {entry}")
            names = entry["dimensions"]
            if not isinstance(names, list):
                raise MetricsCacheTypeError(f"The dimensions of metric {entry['name']} must be a list of names.")
            yield MetricDefinition(str(entry["name"]), str(entry["unit"]), [str(name) for name in names], metric_type)
