"""Tests for objects of JSON that are read entry by entry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.archive.checkpoints import json_entries
from marserve.archive.checkpoints.json_entries import MOST_OF_VALUE, TooMany, Twice, read_object, read_small, read_texts

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


def test_values_are_read_whole_whatever_their_length() -> None:
    """Short ones are tried first; longer ones are read up to what a header can have."""
    for length in (1, 500, 513, 5000, MOST_OF_VALUE - 10):
        text = json.dumps({"a": ["x" * length], "b": 1})

        assert read_object(text, 0, read_small) == (json.loads(text), len(text))


def test_an_object_of_too_many_names_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it may have are read."""
    text = json.dumps({str(number): number for number in range(5)})

    monkeypatch.setattr(json_entries, "MOST_NAMES", 5)
    assert read_object(text, 0, read_small)[0] == json.loads(text)
    monkeypatch.setattr(json_entries, "MOST_NAMES", 4)
    with pytest.raises(TooMany, match="more than 4"):
        read_object(text[:-4] + "broken", 0, read_small)
