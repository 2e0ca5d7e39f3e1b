"""TorchServe's name for `marserve_handlers.timing`."""

from marserve_handlers.timing import timed

__all__ = ["timed"]
