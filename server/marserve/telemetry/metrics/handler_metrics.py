"""Decides which of the values that handlers measure are kept, and under which definition.

By TorchServe's rules a metric is dropped if the metrics file does not list it, unless `model_metrics_auto_detect` is
on, and if it has another number of dimensions than its definition. Dropped values are counted, and logged once for each
metric.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from marserve.messages import Metric
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, KINDS, Definition, Definitions

log = logging.getLogger("marserve.telemetry")

# The server measures it itself; a handler's own values of that name are dropped.
PREDICTION_TIME = "PredictionTime"
# Bounded, as handlers may name metrics after data of requests.
MAX_DETECTED = 1000
_MAX_TOLD = 1000
# The most characters of a value's name, unit and dimensions together, and of its requests' ids: far more than usual.
MAX_WORDS = 4096
MAX_IDS = 256 * 1024


class Fitting(NamedTuple):
    """A kept value: its definition, and the values of its dimensions in order, without the host's."""

    definition: Definition
    values: tuple[str, ...]


class ModelMetrics:
    """The known metrics of handlers: those listed and, with `detects`, those seen."""

    def __init__(self, definitions: Definitions = BUILT_IN, *, detects: bool = False) -> None:
        self.known: dict[str, Definition] = dict(definitions.model)
        self.dropped = 0
        self._front: Mapping[str, Definition] = definitions.front
        if detects and PREDICTION_TIME not in definitions.front:
            # TorchServe's workers send it like a handler's metric, so it is detected like one.
            self.known.setdefault(PREDICTION_TIME, BUILT_IN.model[PREDICTION_TIME]._replace(unit="Milliseconds"))
        self._detects = detects
        self._detected = 0
        self._told: set[str] = set()

    def fit(self, model: str, metric: Metric) -> Fitting | None:
        """The definition of a value of `model`'s handler; None if it is dropped, which is counted."""
        if _is_endless(metric):
            self.dropped += 1
            self.tell(model, f"{metric.name[:100]}…", f"has words of more than {MAX_WORDS} characters")
            return None
        definition = self.known.get(metric.name) or self._detect(model, metric)
        if definition is None:
            self.dropped += 1
            return None
        names = definition.dimensions[:-1]
        pairs = metric.dimensions
        if len(pairs) != len(names):
            self.dropped += 1
            self.tell(
                model,
                metric.name,
                f"has the dimensions {[name for name, _ in pairs]}, and the metrics file gives it {list(names)}",
            )
            return None
        if all(pair[0] == name for pair, name in zip(pairs, names, strict=True)):
            return Fitting(definition, tuple([value for _, value in pairs]))
        given = dict(pairs)
        if given.keys() == set(names):
            return Fitting(definition, tuple([given[name] for name in names]))
        return Fitting(definition, tuple([value for _, value in pairs]))

    def tell(self, model: str, name: str, why: str) -> None:
        """Log, once for each metric, why its values are dropped."""
        if name not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(name)
            log.error("Metric %s of model %s %s: its values are dropped (said once)", name, model, why)

    def _detect(self, model: str, metric: Metric) -> Definition | None:
        if not self._detects:
            return None
        if metric.kind not in KINDS:
            word = f"the type {metric.kind!r}" if metric.kind else "no type"
            self.tell(model, metric.name, f"has {word}, and can be detected only with counter, gauge or histogram")
            return None
        if metric.name in self._front or metric.name.startswith("marserve_") or self._detected >= MAX_DETECTED:
            return None
        names = [name for name, _ in metric.dimensions]
        definition = Definition(metric.name, metric.kind, metric.unit, (*names, "Hostname"))
        self.known[metric.name] = definition
        self._detected += 1
        return definition


def _is_endless(metric: Metric) -> bool:
    """Whether its texts are too long to be kept. The number of waiting values is bounded elsewhere, their size here."""
    words = len(metric.name) + len(metric.unit)
    for name, value in metric.dimensions:
        words += len(name) + len(value)
    return words > MAX_WORDS or len(metric.request_ids) > MAX_IDS
