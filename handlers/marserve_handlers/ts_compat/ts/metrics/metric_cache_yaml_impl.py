"""TorchServe's name for `MetricsCache`."""

from marserve_handlers.metrics import MetricsCache as MetricsCacheYamlImpl

__all__ = ["MetricsCacheYamlImpl"]
