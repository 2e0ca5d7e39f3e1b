"""The keys of ready handlers in a model's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.options import (
    check_labels,
    count_or_all,
    flag,
    names,
    read_options,
    text,
    whole,
    word,
)

KEYS = (
    word("task", ("one", "two"), "one"),
    whole("length", 5, most=9),
    count_or_all("top_k", 1),
    flag("wide"),
    names("labels"),
    text("model", "a folder"),
)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("fast", "handler of the model's configuration is 'fast'; it must be a map."),
        ({"taks": "one"}, "handler.taks of the model's configuration is not known: x has the keys task, length, top_k"),
        ({"task": "three"}, "handler.task of the model's configuration is 'three'; it must be one of one, two."),
        ({"length": 0}, "handler.length of the model's configuration is 0; it must be a whole number from 1 to 9."),
        ({"length": 10}, "handler.length of the model's configuration is 10; it must be"),
        ({"length": True}, "handler.length of the model's configuration is True; it must be"),
        ({"length": None}, "handler.length of the model's configuration is None; it must be"),
        ({"top_k": "some"}, "handler.top_k of the model's configuration is 'some'; it must be a whole number, 1 or"),
        ({"wide": 1}, "handler.wide of the model's configuration is 1; it must be true or false."),
        ({"labels": ["a", "a"]}, "handler.labels of the model's configuration is ['a', 'a']; it must be a list of"),
        ({"labels": []}, "handler.labels of the model's configuration is []; it must be a list of different texts."),
        ({"model": ""}, "handler.model of the model's configuration is ''; it must be a folder."),
        ({"max_items": 5000}, "handler.max_items of the model's configuration is 5000; it must be a whole number from"),
        ({"labels": "x" * 200}, f"handler.labels of the model's configuration is '{'x' * 78}…; it must be"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(section: Any, message: str) -> None:
    """An error of the load; a key that is nearly right is shown."""
    with pytest.raises(ModelNotLoadable) as caught:
        read_options(section, "x", KEYS)

    assert str(caught.value).startswith(message)
    assert ("Did you mean task?" in str(caught.value)) == ("taks" in str(section))


def test_every_key_has_a_value() -> None:
    """Its default where the configuration does not have it, and where there is no section at all."""
    usual = {"task": "one", "length": 5, "top_k": 1, "wide": None, "labels": None, "model": None}

    assert read_options(None, "x", KEYS) == {**usual, "max_items": 64, "profile": False}
    assert read_options({"top_k": "all", "wide": False}, "x", KEYS) == {
        **usual,
        "top_k": "all",
        "wide": False,
        "max_items": 64,
        "profile": False,
    }


def test_there_is_one_label_for_each_class() -> None:
    """Or none at all."""
    check_labels(None, 3)
    check_labels(["a", "b"], 2)
    with pytest.raises(ModelNotLoadable, match=r"must be a list of 3 texts, one for each class of the model"):
        check_labels(["a", "b"], 3)
