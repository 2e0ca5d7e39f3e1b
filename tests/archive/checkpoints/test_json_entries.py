"""Tests for objects of JSON that are read entry by entry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.archive.checkpoints.json_entries import MOST_OF_VALUE, Twice, read_object, read_small, read_texts

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _VALUES), st.sampled_from([None, 1]), st.booleans())
def test_an_object_is_read_as_the_standard_library_reads_it(value: Any, indent: int | None, is_ascii: bool) -> None:
    """With its spaces and escapes, and its end."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)

    assert read_object(text + "rest", 0, read_small) == (value, len(text))


@given(st.dictionaries(st.text(), st.text()))
def test_a_map_of_texts_is_read(value: dict[str, str]) -> None:
    """However long."""
    text = json.dumps(value)

    assert read_texts("", text, 0) == (value, len(text))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a"', '{"a":}', '{"a":1', '{"a":1,}', '{"a" 1}', "{1:1}", "{'a':1}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    """Wherever it breaks off."""
    with pytest.raises(ValueError, match=r"."):
        read_object(text, 0, read_small)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}'])
def test_a_name_that_stands_twice_is_refused(text: str) -> None:
    """At the top and below."""
    with pytest.raises(Twice, match=r"^a$"):
        read_object(text, 0, read_small)


def test_a_value_that_no_header_has_is_not_read_to_its_end() -> None:
    """A list of millions held the interpreter for ten seconds, and took gigabytes."""
    with pytest.raises(ValueError, match=r"."):
        read_object('{"a": [' + "0," * MOST_OF_VALUE + "0]}", 0, read_small)
