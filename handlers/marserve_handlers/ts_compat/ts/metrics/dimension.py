"""TorchServe's name for `Dimension`."""

from marserve_handlers.metrics import Dimension

__all__ = ["Dimension"]
