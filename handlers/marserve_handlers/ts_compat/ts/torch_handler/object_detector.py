"""TorchServe's name for `marserve_handlers.object_detector`."""

from marserve_handlers.object_detector import ObjectDetector

__all__ = ["ObjectDetector"]
