"""TorchServe's name for `CachingMetric`."""

from marserve_handlers.metrics import CachingMetric

__all__ = ["CachingMetric"]
