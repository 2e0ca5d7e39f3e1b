"""TorchServe's name for `marserve_handlers.densenet`."""

from marserve_handlers.densenet import DenseNetHandler
from marserve_handlers.support.classes import list_classes_from_module

__all__ = ["DenseNetHandler", "list_classes_from_module"]
