"""TorchServe's name for the errors of metrics."""

from marserve_handlers.metrics import (
    GeneralMetricsCacheError,
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from marserve_handlers.support.metrics_file import MetricsCachePyYamlError

__all__ = [
    "GeneralMetricsCacheError",
    "MetricsCacheIOError",
    "MetricsCacheKeyError",
    "MetricsCachePyYamlError",
    "MetricsCacheTypeError",
    "MetricsCacheValueError",
]
