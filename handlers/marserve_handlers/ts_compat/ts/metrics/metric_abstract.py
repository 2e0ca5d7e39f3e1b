"""TorchServe's name for the base of metrics."""

from marserve_handlers.metrics import CachingMetric as MetricAbstract
from marserve_handlers.support.torchserve.metrics_store import MetricUnit

__all__ = ["MetricAbstract", "MetricUnit"]
