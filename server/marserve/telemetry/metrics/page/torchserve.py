"""TorchServe's families: by the definitions of its list, or of the operator's metrics file.

Most are read from the counts. What counts cannot say (a histogram of queue times) is fed update by update (`Series`).
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.measurements import HOST
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, Definitions
from marserve.telemetry.metrics.page.families import Family, Row
from marserve.telemetry.metrics.page.versions import Views
from marserve.telemetry.metrics.page.views import ModelTotals, Read
from marserve.telemetry.metrics.series import Series

log = logging.getLogger("marserve.telemetry")

# TorchServe's page in the mode `legacy`; all other metrics are lines in that mode.
LEGACY_PAGE = frozenset(
    {"ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}
)

_HELP = {
    "Requests2XX": "Answers of all listeners, by status class.",
    "Requests4XX": "Answers of all listeners, by status class.",
    "Requests5XX": "Answers of all listeners, by status class.",
    "ts_inference_requests_total": "Accepted inference requests.",
    "ts_inference_latency_microseconds": "Sum of the times to the answer, in microseconds.",
    "ts_queue_latency_microseconds": "Sum of the times in the queue, in microseconds.",
    "QueueTime": "Queue time of the last request, in milliseconds.",
    "WorkerThreadTime": "The server's own part of the last request, in ms.",
    "WorkerLoadTime": "How long the worker took to load, in milliseconds.",
    "PredictionTime": "The last batch's time in the model's handler, in ms.",
}

SYSTEM_METRICS = {
    "CPUUtilization": "Processor time in use, in percent.",
    "MemoryUsed": "Memory in use, in MiB.",
    "MemoryAvailable": "Memory that programs could still have, in MiB.",
    "MemoryUtilization": "Memory in use, in percent.",
    "DiskUsage": "Space in use on the root file system, in GiB.",
    "DiskAvailable": "Space left on the root file system, in GiB.",
    "DiskUtilization": "Space in use on the root file system, in percent.",
    "GPUMemoryUtilization": "Accelerator memory in use, in percent.",
    "GPUMemoryUsed": "Accelerator memory in use, in MiB.",
    "GPUUtilization": "Accelerator time in use, in percent.",
}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _requests(version: VersionMetrics) -> tuple[float, float]:
    return version.named_requests, version.default_requests


def _total_us(version: VersionMetrics) -> tuple[float, float]:
    return _microseconds(version.named_total_s), _microseconds(version.total_seconds.sum - version.named_total_s)


def _queue_us(version: VersionMetrics) -> tuple[float, float]:
    return _microseconds(version.named_queue_s), _microseconds(version.queue_seconds.sum - version.named_queue_s)


_CLASSES = {"Requests2XX": 2, "Requests4XX": 4, "Requests5XX": 5}
# What requests that named a version have, and those that did not.
_ASKED: Mapping[str, Callable[[VersionMetrics], tuple[float, float]]] = {
    "ts_inference_requests_total": _requests,
    "ts_inference_latency_microseconds": _total_us,
    "ts_queue_latency_microseconds": _queue_us,
}


def _of_default(read: Callable[[VersionMetrics], tuple[float, float]]) -> Read:
    return lambda version: read(version)[1]


BY_DEFAULT: Mapping[str, Read] = {name: _of_default(read) for name, read in _ASKED.items()}
"""What the totals of a model must keep of versions that went."""


class TorchServeFamilies:
    """Declares TorchServe's families, and keeps the figures of "the last request".

    `views` gives the versions on the page, `responses` counts answers by the first digit of their status, `totals` are
    those of each model. `series` takes the families that are fed, by name.
    """

    def __init__(
        self,
        hostname: str,
        views: Views,
        responses: Sequence[int],
        totals: Mapping[str, ModelTotals],
        series: dict[str, Series],
    ) -> None:
        self._hostname = hostname
        self._views = views
        self._responses = responses
        self._totals = totals
        self._series = series
        self._last_queue_s: float | None = None
        self._last_server_s: float | None = None
        self._last_handler_s: dict[str, float] = {}

    @property
    def has_handler_times(self) -> bool:
        """Whether a batch has run."""
        return bool(self._last_handler_s)

    def declare(self, definitions: Definitions) -> Iterator[Family]:
        """The families of these definitions."""
        for definition in (*definitions.front.values(), *definitions.model.values()):
            if not definition.fits_a_page:
                log.warning("Metric %s is not shown: Prometheus does not take its name or dimensions", definition.name)
                continue
            rows = self._read_from_counts(definition)
            if rows is None:
                series = self._series[definition.name] = Series(definition, self._hostname)
                rows = series.rows
            yield family_of(definition, rows)

    def detected_time(self, definition: Definition) -> Family:
        """The family of a `PredictionTime` that no list names."""
        return family_of(definition, self._prediction_time)

    def forget(self, model: str) -> None:
        """Drop what is shown of a model."""
        self._last_handler_s.pop(model, None)

    def notice_last(self) -> None:
        """Find the versions that were busy since the last scrape: they have the figures of "the last request"."""
        for view in self._views():
            version, answered = view.of, view.of.total_seconds.count
            if answered == view.seen_answers:
                continue
            view.seen_answers = answered
            queue_s, handler_s = version.queue_seconds.last, version.handler_seconds.last
            self._last_queue_s = queue_s
            self._last_server_s = max(0.0, version.total_seconds.last - queue_s - handler_s)
            self._last_handler_s[version.model] = handler_s

    def _read_from_counts(self, definition: Definition) -> Callable[[], Iterable[Row]] | None:
        """How to read a metric from the counts; None if it must be fed, or if its type or labels differ."""
        known = BUILT_IN.front.get(definition.name) or BUILT_IN.model.get(definition.name)
        if known is None or known.kind != definition.kind or len(known.dimensions) != len(definition.dimensions):
            return None
        name = definition.name
        if name in _CLASSES:
            return functools.partial(self._class, _CLASSES[name])
        if name in _ASKED:
            return functools.partial(self._by_version_asked_for, name)
        return {
            "QueueTime": lambda: self._of_last_request(self._last_queue_s),
            "WorkerThreadTime": lambda: self._of_last_request(self._last_server_s),
            "WorkerLoadTime": self._load_time,
            "PredictionTime": self._prediction_time,
        }.get(name)

    def _class(self, first_digit: int) -> list[Row]:
        # TorchServe counts everything that is neither 2xx nor 4xx as 5XX, and dashboards rely on it.
        counts = self._responses
        count = sum(counts) - counts[2] - counts[4] if first_digit == 5 else counts[first_digit]
        return [((*HOST, self._hostname), count)] if count else []

    def _by_version_asked_for(self, name: str) -> list[Row]:
        """Counts by the version that requests named, or the word `default`."""
        read = _ASKED[name]
        rows: list[Row] = []
        by_default: dict[str, float] = defaultdict(float)
        was_asked = {model for model, totals in self._totals.items() if totals.requests}
        for view in self._views():
            model, version = view.key
            named, default = read(view.of)
            if view.of.named_requests:
                rows.append(((model, version, self._hostname), named))
            if view.of.default_requests:
                was_asked.add(model)
            by_default[model] += default
        for model, living in by_default.items():
            value = self._totals[model].never_falling(name, living)
            if model in was_asked:
                rows.append(((model, "default", self._hostname), value))
        return rows

    def _of_last_request(self, seconds: float | None) -> list[Row]:
        return [] if seconds is None else [((*HOST, self._hostname), int(seconds * 1000))]

    def _load_time(self) -> Iterator[Row]:
        return (
            ((worker, *HOST, self._hostname), int(seconds * 1000))
            for view in self._views()
            for worker, seconds in view.gauges.load_s.items()
        )

    def _prediction_time(self) -> list[Row]:
        return [
            ((model, "Model", self._hostname), round(seconds * 1000, 2))
            for model, seconds in self._last_handler_s.items()
        ]


def family_of(definition: Definition, rows: Callable[[], Iterable[Row]]) -> Family:
    """The family of a definition."""
    return Family(definition.name, definition.kind, help_of(definition), definition.dimensions, rows)


def help_of(definition: Definition) -> str:
    """The sentence of a definition."""
    known = BUILT_IN.front.get(definition.name) or BUILT_IN.model.get(definition.name)
    text = _HELP.get(definition.name) or SYSTEM_METRICS.get(definition.name)
    if text is not None and known is not None and known.kind == definition.kind:
        return text
    unit = " ".join(definition.unit.replace("\\", " ").split())
    return f"TorchServe's {definition.kind} {definition.name}, in {unit}." if text else f"Measured, in {unit}."


def misfits(definitions: Definitions) -> Iterator[str]:
    """A sentence for each of the server's metrics whose dimensions in a metrics file do not fit its values."""
    for known in (*BUILT_IN.front.values(), *BUILT_IN.model.values()):
        definition = definitions.front.get(known.name) or definitions.model.get(known.name)
        if definition is not None and len(definition.dimensions) != len(known.dimensions):
            yield (
                f"Metric {known.name} gets no values: the metrics file gives it the dimensions "
                f"{list(definition.dimensions)}, and there are values for {list(known.dimensions)}"
            )
