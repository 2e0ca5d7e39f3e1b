"""Finds classes: those that a module defines itself, and one by its dotted name."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """The classes that `module` defines itself, imported ones left out; with `parent_class` only its subclasses."""
    found = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    if parent_class is not None:
        found = [value for value in found if issubclass(value, parent_class)]
    return list(dict.fromkeys(found))


def import_class(class_name: str, module_prefix: str | None = None) -> type:
    """The class of that dotted name; `module_prefix` is put before it where given.

    Raises ImportError when there is no such module, or no such class in it.
    """
    full_name = f"{module_prefix}.{class_name}" if module_prefix else class_name
    module_name, _, name = full_name.rpartition(".")
    if not module_name:
        raise ImportError(f"{class_name!r} names no module; write it as module.Class.")
    found = getattr(importlib.import_module(module_name), name, None)
    if not inspect.isclass(found):
        raise ImportError(f"Module {module_name} has no class {name}.")
    return found
