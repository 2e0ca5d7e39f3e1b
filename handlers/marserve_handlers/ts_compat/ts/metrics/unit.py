"""TorchServe's name for `Units`."""

from marserve_handlers.metrics import Units

__all__ = ["Units"]
