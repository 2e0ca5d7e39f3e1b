"""Libraries that need not be installed, and what names one that is missing."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.packages import needed
from marserve_handlers.ready.trusted_pickle import load_trusted
from support.model_context import make_context


def test_a_missing_library_is_named_with_how_to_install_it() -> None:
    """As is one that the library itself misses."""
    with pytest.raises(ModelNotLoadable, match=r"The handler x needs the package never_made\. .* requirements\.txt"):
        needed("never_made", "x", "never_made")


def test_a_library_that_lacks_another_one_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is missing is named."""

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'regex'", name="regex")

    monkeypatch.setattr(importlib, "import_module", fail)

    with pytest.raises(ModelNotLoadable, match=r"needs the package x \(regex is missing\)\. .* pip install regex"):
        needed("x.y", "x", "x")


def test_no_pickle_is_opened_without_the_operators_word(tmp_path: Path) -> None:
    """A word of the archive, or anything but True, is not that."""
    context = make_context(tmp_path)
    for said in (False, None, "yes", 1):
        context.is_trusted = said  # type: ignore[assignment]
        with pytest.raises(ModelNotLoadable, match=r"m\.pkl is a pickle, which can run any code"):
            load_trusted(str(tmp_path / "m.pkl"), context, "x", "y")
