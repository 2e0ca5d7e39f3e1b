"""TorchServe's name for `marserve_handlers.support.timing`."""

from marserve_handlers.support.timing import timed

__all__ = ["timed"]
