"""The older forms of metrics that handlers in the wild still import: `Metric`, `MetricsStore`, `emit_metrics`.

They stand beside `context.metrics` and do not feed it: `emit_metrics` writes TorchServe's `[METRICS]` lines
to the log, where the server reads them as it does any line of that form.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterable
from typing import Any

from marserve_handlers.metrics import Dimension, MetricTypes, Units, ids_of

logger = logging.getLogger(__name__)

MetricUnit = Units()

HOST_DIMENSION = [Dimension("Level", "Host")]
"""The dimensions of figures of the machine."""

PREDICTION_METRIC = "PredictionTime"
"""The name of the timing that the worker takes of every batch."""


class Metric:
    """One number with a name; `update` adds to a counter and replaces anything else."""

    def __init__(
        self,
        name: str,
        value: float,
        unit: str,
        dimensions: list[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.unit = Units.spell_out(unit)
        self.metric_method = metric_method
        self.value = value
        self.dimensions = dimensions
        self.request_id = request_id

    def update(self, value: float) -> None:
        """Add `value` if this is a counter (`metric_method="counter"`), else take it in place of the old one."""
        if self.metric_method == "counter":
            self.value += value
        else:
            self.value = value

    def reset(self) -> None:
        """Back to 0."""
        self.value = 0

    def __str__(self) -> str:
        dimensions = ",".join(map(str, self.dimensions))
        kind = (MetricTypes.COUNTER if self.metric_method == "counter" else MetricTypes.GAUGE).name
        ids = "" if self.request_id is None else f",{self.request_id}"
        return (
            f"{self.name}.{self.unit}:{self.value}|#{dimensions}|#type:{kind}"
            f"|#hostname:{socket.gethostname()},{int(time.time())}{ids}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The metric as a plain dict, with host name and the time in whole seconds."""
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": [dimension.to_dict() for dimension in self.dimensions],
            "Timestamp": int(time.time()),
            "HostName": socket.gethostname(),
            "RequestId": self.request_id,
        }


class MetricEncoder(json.JSONEncoder):
    """Writes `Metric` and `Dimension` as JSON."""

    def default(self, obj: Any) -> Any:
        """Objects that have `to_dict` become that dict."""
        if isinstance(obj, (Metric, Dimension)):
            return obj.to_dict()
        return super().default(obj)


class MetricsStore:
    """Metrics of one batch, kept by name and request until `store` is emitted."""

    def __init__(self, request_ids: dict[int, str] | None, model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids = request_ids
        self.model_name = model_name
        self.cache: dict[tuple[str, str, str, str], Metric] = {}

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        """Add to a counter."""
        self._add_or_update(name, value, self._get_req(idx), "count", "counter", dimensions)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        """Set a time in `ms` or `s`; another unit raises ValueError."""
        if unit not in ("ms", "s"):
            raise ValueError(f"The unit of time {name} is {unit!r}; it must be 'ms' or 's'.")
        self._add_or_update(name, value, self._get_req(idx), unit, None, dimensions)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: list[Dimension] | None = None,
    ) -> None:
        """Set a size in `MB`, `kB`, `GB` or `B`; another unit raises ValueError."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise ValueError(f"The unit of size {name} is {unit!r}; it must be 'MB', 'kB', 'GB' or 'B'.")
        self._add_or_update(name, value, self._get_req(idx), unit, None, dimensions)

    def add_percent(
        self, name: str, value: float, idx: int | None = None, dimensions: list[Dimension] | None = None
    ) -> None:
        """Set a share in percent."""
        self._add_or_update(name, value, self._get_req(idx), "percent", None, dimensions)

    def add_error(self, name: str, value: float, dimensions: list[Dimension] | None = None) -> None:
        """Set an error's value, for no request."""
        self._add_or_update(name, value, None, "", None, dimensions)

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: list[Dimension] | None = None,
    ) -> None:
        """Set a value of any unit."""
        self._add_or_update(name, value, self._get_req(idx), unit, None, dimensions)

    def _get_req(self, idx: int | None) -> str | None:
        """The id of request `idx`; all ids joined by commas without one; None without ids."""
        return ids_of(self.request_ids, idx)

    def _add_or_update(
        self,
        name: str,
        value: float,
        req_id: str | None,
        unit: str,
        metrics_method: str | None = None,
        dimensions: list[Dimension] | None = None,
    ) -> None:
        own = list(dimensions or [])
        if req_id is None:
            own.append(Dimension("Level", "Error"))
        else:
            own += [Dimension("ModelName", self.model_name), Dimension("Level", "Model")]
        key = (name, unit, req_id or "", ",".join(map(str, own)))
        known = self.cache.get(key)
        if known is not None:
            known.update(value)
            return
        metric = self.cache[key] = Metric(name, value, unit, own, req_id, metrics_method)
        self.store.append(metric)


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Write each metric to the log, as a line that begins with `[METRICS]`."""
    for metric in metrics:
        logger.info("[METRICS]%s", metric)
