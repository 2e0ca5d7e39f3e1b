"""TorchServe's name for `marserve_handlers.support.contractions`."""

from marserve_handlers.support.contractions import CONTRACTION_MAP

__all__ = ["CONTRACTION_MAP"]
