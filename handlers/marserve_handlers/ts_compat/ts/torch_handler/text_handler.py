"""TorchServe's name for `marserve_handlers.text`."""

from marserve_handlers.text import CONTRACTIONS_PATTERN, TextHandler

__all__ = ["CONTRACTIONS_PATTERN", "TextHandler"]
