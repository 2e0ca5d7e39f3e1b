"""TorchServe's name for `marserve_handlers.text_classifier`."""

from marserve_handlers.text_classifier import TextClassifier

__all__ = ["TextClassifier"]
