"""TorchServe's name for `marserve_handlers.densenet`."""

from marserve_handlers.classes import list_classes_from_module
from marserve_handlers.densenet import DenseNetHandler

__all__ = ["DenseNetHandler", "list_classes_from_module"]
