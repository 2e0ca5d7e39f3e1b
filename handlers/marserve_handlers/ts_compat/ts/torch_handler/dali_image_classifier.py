"""TorchServe's name for `DALIImageClassifier`."""

from marserve_handlers.dali import DALIImageClassifier

__all__ = ["DALIImageClassifier"]
