"""TorchServe's name for `marserve_handlers.vision`."""

from marserve_handlers.vision import VisionHandler

__all__ = ["VisionHandler"]
