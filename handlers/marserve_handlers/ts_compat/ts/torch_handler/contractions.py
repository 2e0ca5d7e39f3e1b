"""TorchServe's name for `marserve_handlers.contractions`."""

from marserve_handlers.contractions import CONTRACTION_MAP

__all__ = ["CONTRACTION_MAP"]
