"""Custom metrics of a handler: `context.metrics` and what its calls take and give.

Values are collected here and drained by the worker's loop once a batch; nothing is printed and nothing is summed, the
server does that. Knows no wire. Reading a metrics file is `metrics_file.py`, the older forms are `metrics_store.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from marserve_handlers.support.metric_types import (
    GeneralMetricsCacheError as GeneralMetricsCacheError,
)
from marserve_handlers.support.metric_types import (
    MetricsCacheIOError as MetricsCacheIOError,
)
from marserve_handlers.support.metric_types import (
    MetricsCacheKeyError as MetricsCacheKeyError,
)
from marserve_handlers.support.metric_types import (
    MetricsCacheTypeError as MetricsCacheTypeError,
)
from marserve_handlers.support.metric_types import (
    MetricsCacheValueError as MetricsCacheValueError,
)
from marserve_handlers.support.metric_types import (
    MetricTypes as MetricTypes,
)

logger = logging.getLogger(__name__)

# A handler that adds metrics in an endless loop must not fill the worker's memory; far above any honest batch.
MAX_VALUES_HELD = 10_000

_DEFAULT_NAMES = ["ModelName", "Level"]


class Units:
    """The short spellings of units, and what each is called on output; other words stay as they are."""

    names: dict[str, str] = {  # noqa: RUF012 - a table, never changed
        "ms": "Milliseconds",
        "s": "Seconds",
        "percent": "Percent",
        "count": "Count",
        "MB": "Megabytes",
        "GB": "Gigabytes",
        "kB": "Kilobytes",
        "B": "Bytes",
        "": "unit",
    }

    def __init__(self) -> None:
        self.units = self.names

    @classmethod
    def spell_out(cls, unit: str | None) -> str:
        """The unit as it is written on output, e.g. `Milliseconds` for `ms`."""
        return cls.names.get(unit or "", unit or "unit")


class Dimension:
    """A name and a value that a metric's value is kept under."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.value!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dimension) and (self.name, self.value) == (other.name, other.value)

    def __hash__(self) -> int:
        return hash((self.name, self.value))

    def to_dict(self) -> dict[str, str]:
        """`{"Name": …, "Value": …}`."""
        return {"Name": self.name, "Value": self.value}


class MetricValue(NamedTuple):
    """One value on its way to the server. `unit` is spelled out; `request_ids` are joined by commas."""

    name: str
    value: float
    unit: str
    kind: str
    dimensions: list[tuple[str, str]]
    request_ids: str


Record = Callable[[MetricValue], None]
Drop = Callable[[], None]


class CachingMetric:
    """A metric known by name, unit, type and the names of its dimensions; values are added one at a time."""

    def __init__(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
        *,
        record: Record | None = None,
        drop: Drop | None = None,
        is_configured: bool = True,
    ) -> None:
        """`record` takes the values; without it they are only checked. `is_configured`: not made on the fly.

        `drop` is called for each value that cannot be taken.
        """
        self.metric_name = metric_name
        self.unit = unit
        self.dimension_names = list(dimension_names or [])
        self.metric_type = metric_type
        self.is_configured = is_configured
        self._record = record
        self._drop = drop

    def __str__(self) -> str:
        return (
            f"name: {self.metric_name}, unit: {self.unit}, "
            f"dimension names: {self.dimension_names}, type: {self.metric_type}"
        )

    def add_or_update(self, value: float, dimension_values: Sequence[Any] = (), request_id: str = "") -> None:
        """Add a value; for each dimension name one value, in order.

        A value that is no number, a counter's negative value and a wrong number of dimension values are logged, and
        nothing is added.
        """
        if len(dimension_values) != len(self.dimension_names):
            logger.error(
                "Metric %s has dimensions %s, but the values are %s; the value is not counted",
                self.metric_name,
                self.dimension_names,
                list(dimension_values),
            )
            self._note_dropped()
            return
        self.add_pairs(value, list(zip(self.dimension_names, map(str, dimension_values), strict=True)), request_id)

    def update(self, value: float, request_id: str = "", dimensions: Sequence[Dimension] = ()) -> None:
        """The older form: a value with its dimensions, whose names become the metric's."""
        self.dimension_names = [dimension.name for dimension in dimensions]
        self.add_or_update(value, [dimension.value for dimension in dimensions], request_id)

    def emit_metrics(self, request_id: str, value: float, dimension_string: str) -> None:
        """Add a value whose dimensions are written as `name:value,name:value`."""
        pairs = [part.split(":", 1) for part in dimension_string.split(",") if ":" in part]
        self.add_pairs(value, [(name, rest) for name, rest in pairs], request_id)

    def add_under(self, dimensions: Sequence[Dimension], value: float, request_id: str) -> None:
        """Add a value under named dimensions.

        A configured metric's values go by name where the names are its own, else by position, and as many as it has;
        a metric made on the fly takes any dimensions.
        """
        names = self.dimension_names
        if self.is_configured and [dimension.name for dimension in dimensions] != names:
            by_name = {dimension.name: dimension.value for dimension in dimensions}
            is_ours = by_name.keys() == set(names)
            self.add_or_update(value, [by_name[name] for name in names] if is_ours else [*by_name.values()], request_id)
            return
        self.add_pairs(value, [(dimension.name, str(dimension.value)) for dimension in dimensions], request_id)

    def add_pairs(self, value: float, dimensions: list[tuple[str, str]], request_id: str) -> None:
        """Add a value under (name, value) pairs, whatever the metric's own dimensions are."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            logger.error("Metric %s takes numbers, not %.100r; the value is not counted", self.metric_name, value)
            self._note_dropped()
            return
        if number < 0 and self.metric_type is MetricTypes.COUNTER:
            logger.error("Counter %s only grows; the value %s is not counted", self.metric_name, value)
            self._note_dropped()
            return
        if self._record is not None:
            self._record(
                MetricValue(
                    self.metric_name,
                    number,
                    Units.spell_out(self.unit),
                    self.metric_type.value,
                    dimensions,
                    request_id or "",
                )
            )

    def _note_dropped(self) -> None:
        if self._drop is not None:
            self._drop()


_NO_METRICS: dict[str, CachingMetric] = {}


class MetricsCache:
    """The metrics that a model knows, and the values added since the last drain.

    `MetricsCache()` knows the two ready-made timings, `HandlerTime` and `PredictionTime`; with a metrics file,
    `initialize_cache` reads its `model_metrics`. Metrics that a handler names first are made on the fly.

    `dropped` counts the values that could not be taken; the worker's loop reports it to the server and sets it to 0.
    """

    def __init__(self, config_file_path: str | None = None, *, model_name: str = "") -> None:
        self.config_file_path = config_file_path
        self.model_name = model_name
        self.request_ids: Mapping[int, str] | None = None
        self.cache: dict[MetricTypes, dict[str, CachingMetric]] = {}
        self.store: list[MetricValue] = []
        self.dropped = 0
        self._is_overfull = False
        if config_file_path is None:
            self.initialize_cache()

    def initialize_cache(self) -> None:
        """Learn the metrics of the metrics file, or the ready-made ones without a file.

        Raises MetricsCacheIOError, MetricsCachePyYamlError, MetricsCacheKeyError or MetricsCacheTypeError when the
        file cannot be used; see `metrics_file.read_model_metrics`.
        """
        if self.config_file_path is None:
            for name in ("HandlerTime", "PredictionTime"):
                self.add_metric_to_cache(name, "ms", ["ModelName", "Level"], MetricTypes.GAUGE)
            return
        from marserve_handlers.support.metrics_file import read_model_metrics

        for metric in read_model_metrics(self.config_file_path):
            self.add_metric_to_cache(metric.name, metric.unit, metric.dimension_names, metric.type)

    # ------------------------------------------------------------------------------------------- for the handler

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        """Add a value to metric `name` of any unit, for request `idx` or for the whole batch.

        `dimensions` is not changed; the default ones are added to a copy. Raises MetricsCacheTypeError for an
        argument of the wrong type.
        """
        self._add(name, value, unit, idx, dimensions, metric_type)

    def add_counter(
        self, name: str, value: float, idx: int | None = None, dimensions: Sequence[Dimension] = ()
    ) -> None:
        """Add to a counter; negative values are refused with a line in the log."""
        self._add(name, value, "Count", idx, dimensions, MetricTypes.COUNTER)

    def add_time(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Add a time in `ms` or `s`; another unit raises MetricsCacheValueError."""
        if unit not in ("ms", "s"):
            raise MetricsCacheValueError(f"The unit of time {name} is {unit!r}; it must be 'ms' or 's'.")
        self._add(name, value, unit, idx, dimensions, metric_type)

    def add_size(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Add a size in `MB`, `kB`, `GB` or `B`; another unit raises MetricsCacheValueError, a ValueError."""
        if unit not in ("MB", "kB", "GB", "B"):
            raise MetricsCacheValueError(f"The unit of size {name} is {unit!r}; it must be 'MB', 'kB', 'GB' or 'B'.")
        self._add(name, value, unit, idx, dimensions, metric_type)

    def add_percent(
        self,
        name: str,
        value: float,
        idx: int | None = None,
        dimensions: Sequence[Dimension] = (),
        metric_type: MetricTypes = MetricTypes.GAUGE,
    ) -> None:
        """Add a share in percent, 0 to 100."""
        self._add(name, value, "percent", idx, dimensions, metric_type)

    def add_error(self, name: str, value: float, dimensions: Sequence[Dimension] = ()) -> None:
        """Count errors; kept under `Level:Error` and no model."""
        own = list(dimensions)
        if not any(dimension.name == "Level" for dimension in own):
            own.append(Dimension("Level", "Error"))
        self._check(name, "", own, MetricTypes.COUNTER)
        self._get_or_make(name, "", own, MetricTypes.COUNTER).add_under(own, value, self._ids_of(None) or "")

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """Make a metric known without adding a value; one of the same name and type is replaced, with a warning."""
        self._check(metric_name, unit, dimension_names, metric_type)
        of_type = self.cache.setdefault(metric_type, {})
        if metric_name in of_type:
            logger.warning("Metric %s of type %s was known already and is replaced", metric_name, metric_type.value)
        metric = CachingMetric(
            metric_name, unit, dimension_names, metric_type, record=self._keep, drop=self._note_dropped
        )
        of_type[metric_name] = metric
        return metric

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> CachingMetric:
        """The metric of that name and type. Raises MetricsCacheKeyError for an unknown one."""
        self._check_type(metric_name, str, "The name of a metric")
        self._check_type(metric_type, MetricTypes, "The type of a metric")
        metric = self.cache.get(metric_type, {}).get(metric_name)
        if metric is None:
            raise MetricsCacheKeyError(f"There is no metric {metric_name} of type {metric_type.value}.")
        return metric

    def set_request_ids(self, request_ids: dict[int, str] | None) -> None:
        """Say which requests are running: their ids by index in the batch."""
        self.request_ids = request_ids

    def cache_keys(self) -> Iterable[MetricTypes]:
        """The types of which metrics are known."""
        return self.cache.keys()

    # ------------------------------------------------------------------------------------- for the worker's loop

    def drain(self) -> list[MetricValue]:
        """Take the values added since the last drain, in order. Another thread may add some meanwhile."""
        values = self.store[:]
        if values:
            del self.store[: len(values)]
            self._is_overfull = False
        return values

    # ------------------------------------------------------------------------------------------------------- own

    def _add(
        self,
        name: str,
        value: float,
        unit: str,
        idx: int | None,
        dimensions: Sequence[Dimension],
        metric_type: MetricTypes,
    ) -> None:
        ids = self._ids_of(idx) or ""
        if not dimensions:
            # The short way of what every batch adds: a known metric with the default dimensions, in their order.
            known = self.cache.get(metric_type, _NO_METRICS).get(name)
            if known is not None and known.dimension_names == _DEFAULT_NAMES:
                known.add_pairs(value, [("ModelName", self.model_name), ("Level", "Model")], ids)
                return
        self._check(name, unit, dimensions, metric_type)
        own = self._with_defaults(dimensions)
        self._get_or_make(name, unit, own, metric_type).add_under(own, value, ids)

    def _ids_of(self, idx: int | None) -> str | None:
        """The id of request `idx`, all ids joined by commas without one, None where no request is running."""
        return ids_of(self.request_ids, idx)

    def _with_defaults(self, dimensions: Sequence[Dimension]) -> list[Dimension]:
        """A copy with `ModelName` and `Level:Model` added where absent, in `initialize` as in a request."""
        own = list(dimensions)
        names = {dimension.name for dimension in own}
        if "ModelName" not in names:
            own.append(Dimension("ModelName", self.model_name))
        if "Level" not in names:
            own.append(Dimension("Level", "Model"))
        return own

    def _get_or_make(
        self, name: str, unit: str, dimensions: Sequence[Dimension], metric_type: MetricTypes
    ) -> CachingMetric:
        of_type = self.cache.setdefault(metric_type, {})
        metric = of_type.get(name)
        if metric is None:
            names = [dimension.name for dimension in dimensions]
            metric = of_type[name] = CachingMetric(
                name,
                unit,
                names,
                metric_type,
                record=self._keep,
                drop=self._note_dropped,
                is_configured=False,
            )
        return metric

    def _keep(self, value: MetricValue) -> None:
        if len(self.store) < MAX_VALUES_HELD:
            self.store.append(value)
            return
        self._note_dropped()
        if not self._is_overfull:
            self._is_overfull = True
            logger.error("More than %d metric values in one batch; the rest is not counted", MAX_VALUES_HELD)

    def _note_dropped(self) -> None:
        self.dropped += 1

    def _check(self, name: Any, unit: Any, dimensions: Any, metric_type: Any) -> None:
        self._check_type(name, str, "The name of a metric")
        self._check_type(unit, str, f"The unit of metric {name}")
        self._check_type(dimensions, (list, tuple), f"The dimensions of metric {name}")
        self._check_type(metric_type, MetricTypes, f"The type of metric {name}")

    @staticmethod
    def _check_type(variable: Any, expected_type: type | tuple[type, ...], helper_text: str) -> None:
        if not isinstance(variable, expected_type):
            kinds = expected_type if isinstance(expected_type, tuple) else (expected_type,)
            words = " or ".join(kind.__name__ for kind in kinds)
            raise MetricsCacheTypeError(f"{helper_text} is {variable!r}; it must be a {words}.")


def ids_of(request_ids: Mapping[int, str] | None, idx: int | None) -> str | None:
    """The id of request `idx`, all ids joined by commas without one, None where no request is running."""
    if not request_ids:
        return None
    if idx is not None and idx in request_ids:
        return request_ids[idx]
    return ",".join(request_ids.values())
