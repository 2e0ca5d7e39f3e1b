"""TorchServe's name for the older form of a metric."""

from marserve_handlers.support.torchserve.metrics_store import Metric, MetricUnit

__all__ = ["Metric", "MetricUnit"]
