"""Decides which of the values that handlers measure are kept, and under which definition. Knows no page and no log.

TorchServe's rules: a metric that the metrics file does not list is dropped, unless `model_metrics_auto_detect` is on,
and so is one that has another number of dimensions than its definition. What is dropped is counted, and said once for
each metric.
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
# Handlers may name metrics after anything they see.
MAX_DETECTED = 1000
_MAX_TOLD = 1000
# Characters of a value's name, unit and dimensions together, and of the ids of its requests: far above honest ones.
MAX_WORDS = 4096
MAX_IDS = 256 * 1024


class Fitting(NamedTuple):
    """A value that is kept: its definition, and the values of the dimensions in order, without the host's."""

    definition: Definition
    values: tuple[str, ...]


class ModelMetrics:
    """The metrics of handlers that are known: those listed and, with `detects`, those that were seen."""

    def __init__(self, definitions: Definitions = BUILT_IN, *, detects: bool = False) -> None:
        self.known: dict[str, Definition] = dict(definitions.model)
        self.dropped = 0
        self._front: Mapping[str, Definition] = definitions.front
        if detects and PREDICTION_TIME not in definitions.front:
            # TorchServe's workers send it like a metric of the handler's, so it is detected like one.
            self.known.setdefault(PREDICTION_TIME, BUILT_IN.model[PREDICTION_TIME]._replace(unit="Milliseconds"))
        self._detects = detects
        self._detected = 0
        self._told: set[str] = set()

    def fit(self, model: str, metric: Metric) -> Fitting | None:
        """Where a value of `model`'s handler belongs; None when it is dropped, which is counted."""
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
        """Say, once a metric, why values of it are dropped."""
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
    """Whether its words are too long to be kept; how many values wait is bounded elsewhere, but not how large."""
    words = len(metric.name) + len(metric.unit)
    for name, value in metric.dimensions:
        words += len(name) + len(value)
    return words > MAX_WORDS or len(metric.request_ids) > MAX_IDS
