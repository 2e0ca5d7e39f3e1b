"""Finding classes in modules and by name."""

from __future__ import annotations

from types import ModuleType

import pytest

from marserve_handlers.support.classes import import_class, list_classes_from_module


def make_module(text: str) -> ModuleType:
    """A module with that source."""
    module = ModuleType("sample_module")
    exec(text, module.__dict__)
    return module


def test_only_a_modules_own_classes_count() -> None:
    """Imported ones are left out, aliases count once, in the order of the file."""
    module = make_module("from collections import OrderedDict\nclass B: pass\nclass A(B): pass\nC = A")

    assert [found.__name__ for found in list_classes_from_module(module)] == ["B", "A"]
    assert [found.__name__ for found in list_classes_from_module(module, module.B)] == ["B", "A"]
    assert list_classes_from_module(module, dict) == []


def test_a_class_is_imported_by_its_name() -> None:
    """With or without a prefix."""
    from marserve_handlers.context import Context

    assert import_class("marserve_handlers.context.Context") is Context
    assert import_class("context.Context", "marserve_handlers") is Context


@pytest.mark.parametrize("name", ["Context", "marserve_handlers.context.Nothing", "no_such_module.X", "json.dumps"])
def test_a_name_that_is_no_class_is_an_import_error(name: str) -> None:
    """Whatever is missing."""
    with pytest.raises(ImportError):
        import_class(name)
