"""TorchServe's name for the older form of the metrics cache."""

from marserve_handlers.metrics_store import MetricsStore

__all__ = ["MetricsStore"]
