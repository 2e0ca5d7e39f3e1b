"""The page of declared handlers works as it is typed: its test of a handler, and its names for those of `ts`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT, block

PAGE = "docs/declared-handlers.md"
NAMES = re.findall(r"^\| `(ts\.[\w.]+)` \| `(marserve_handlers\.[\w.]+)`", (ROOT / PAGE).read_text(), re.MULTILINE)


def test_the_test_of_the_page_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model of the page, as an author has both files in one folder."""
    (tmp_path / "sums.py").write_text(block(PAGE, "sums"))
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}

    exec(block(PAGE, "test-sums"), names)
    try:
        names["test_requests_that_run_together"]()
    finally:
        del sys.modules["sums"]


@pytest.mark.parametrize(("theirs", "ours"), NAMES)
def test_both_names_lead_to_one_object(theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class, a function, or a module with the same classes."""
    monkeypatch.syspath_prepend(str(ROOT / "handlers" / "marserve_handlers" / "ts_compat"))

    found = [_find(name) for name in (theirs, ours)]

    assert found[0] is found[1] or {each for each in vars(found[1]) if each[0].isupper()} & set(vars(found[0]))


def _find(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        return getattr(importlib.import_module(module), member)
