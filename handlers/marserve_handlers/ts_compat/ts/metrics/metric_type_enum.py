"""TorchServe's name for `MetricTypes`."""

from marserve_handlers.metrics import MetricTypes

__all__ = ["MetricTypes"]
