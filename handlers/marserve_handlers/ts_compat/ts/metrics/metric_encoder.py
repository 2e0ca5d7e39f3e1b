"""TorchServe's name for the JSON of metrics."""

from marserve_handlers.support.torchserve.metrics_store import MetricEncoder

__all__ = ["MetricEncoder"]
