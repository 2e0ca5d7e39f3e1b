"""TorchServe's name for the older form of the metrics cache."""

from marserve_handlers.support.torchserve.metrics_store import MetricsStore

__all__ = ["MetricsStore"]
