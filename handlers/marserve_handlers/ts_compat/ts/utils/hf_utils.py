"""TorchServe's name for `marserve_handlers.support.torchserve.hub`."""

from marserve_handlers.support.torchserve.hub import download_model

__all__ = ["download_model"]
