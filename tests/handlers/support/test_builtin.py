"""Built-in handlers by the names that manifests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS as ARCHIVERS_HANDLERS
from marserve.registry.intake.handler_check import ALL_BUILT_IN
from marserve_handlers.support.builtin import BUILT_IN, find_built_in


def test_the_server_knows_the_same_names() -> None:
    """It may not import this package, and refuses handlers that are nowhere."""
    assert set(ALL_BUILT_IN) == set(BUILT_IN)


def test_the_archivers_take_what_the_docs_list() -> None:
    """A name of the table of built-in handlers needs no file; the base classes of others stay modules to import."""
    text = (Path(__file__).parents[3] / "docs" / "handlers.md").read_text()
    table = text.partition("## The built-in handlers")[2].partition("\n## ")[0]
    listed = [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")]

    assert sorted(listed) == sorted(ARCHIVERS_HANDLERS)
    assert set(listed) <= set(BUILT_IN)


@pytest.mark.torch
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_handler_can_be_found(name: str) -> None:
    """Its class comes back, with the methods that a worker calls."""
    pytest.importorskip("PIL.Image")
    pytest.importorskip("torch")
    found = find_built_in(name)

    assert found is not None
    assert found.__name__ == BUILT_IN[name][1]
    assert callable(found().handle)  # type: ignore[attr-defined]
    assert callable(found().initialize)  # type: ignore[attr-defined]


def test_another_name_is_none() -> None:
    """A handler of the archive's own."""
    assert find_built_in("my_handler") is None
