"""Tests for the models of the start and their names."""

from __future__ import annotations

import pytest

from marserve.registry.intake.startup import models_to_load, name_from_file
from marserve.settings import ModelToLoad


def test_all_stands_for_the_whole_store_in_order() -> None:
    """By name, so that every start does the same."""
    assert models_to_load("all", ["b.mar", "a.mar"]) == [ModelToLoad("a.mar"), ModelToLoad("b.mar")]


def test_a_list_is_loaded_in_its_own_order() -> None:
    """Whatever else the store holds."""
    wanted = (ModelToLoad("b.mar", "one"), ModelToLoad("a.mar"))

    assert models_to_load(wanted, ["a.mar", "b.mar", "c.mar"]) == list(wanted)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("noop.mar", "noop"),
        ("https://host/folder/my-model v1.mar", "my_model_v1"),
        ("m.tar.gz", "m_tar"),
        ("folder/", "folder"),
        ("_x.mar", "_x"),
        ("https://host/m.mar?Signature=a/b.c#sha256=" + "0" * 64, "m"),
        ("m.mar#sha256=" + "0" * 64, "m"),
        ("/srv/models/team/echo.v2", "echo"),
    ],
)
def test_a_model_without_a_name_is_called_after_its_file(url: str, name: str) -> None:
    """Folder and last extension go, what is no letter, digit or underscore becomes an underscore."""
    assert name_from_file(url) == name
