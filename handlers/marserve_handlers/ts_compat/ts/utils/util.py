"""TorchServe's name for odds and ends of handlers."""

from marserve_handlers.errors import PredictionException
from marserve_handlers.support.classes import list_classes_from_module
from marserve_handlers.support.devices.compilation import PT2Backend, check_valid_pt2_backend
from marserve_handlers.support.labels import load_label_mapping, map_class_to_label
from marserve_handlers.support.torchserve.deprecation import deprecated
from marserve_handlers.support.torchserve.yaml_config import get_yaml_config
from marserve_handlers.text import CLEANUP_REGEX

__all__ = [
    "CLEANUP_REGEX",
    "PT2Backend",
    "PredictionException",
    "check_valid_pt2_backend",
    "deprecated",
    "get_yaml_config",
    "list_classes_from_module",
    "load_label_mapping",
    "map_class_to_label",
]
