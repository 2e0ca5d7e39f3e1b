"""TorchServe's name for `marserve_handlers.image_classifier`."""

from marserve_handlers.image_classifier import ImageClassifier

__all__ = ["ImageClassifier"]
