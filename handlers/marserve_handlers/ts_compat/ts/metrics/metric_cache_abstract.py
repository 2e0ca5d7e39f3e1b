"""TorchServe's name for the base of metrics caches."""

from marserve_handlers.metrics import MetricsCache as MetricCacheAbstract

__all__ = ["MetricCacheAbstract"]
