"""TorchServe's name for `marserve_handlers.image_segmenter`."""

from marserve_handlers.image_segmenter import ImageSegmenter

__all__ = ["ImageSegmenter"]
