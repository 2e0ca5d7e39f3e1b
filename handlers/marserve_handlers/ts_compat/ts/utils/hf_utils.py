"""TorchServe's name for `marserve_handlers.hub`."""

from marserve_handlers.hub import download_model

__all__ = ["download_model"]
