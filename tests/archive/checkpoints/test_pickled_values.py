"""Tests for the values of a pickle that is never unpickled."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.archive.checkpoints.pickled_values import Built, Name, NotPlain, Pairs, read_values

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner))


def _plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {key: _plain(inner) for key, inner in value.items}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


@settings(max_examples=40, deadline=None)
@given(_VALUES, st.integers(2, 5))
def test_plain_values_are_read_as_they_were_written(value: object, protocol: int) -> None:
    """In every protocol that Python 3 writes."""
    assert _plain(read_values(pickle.dumps(value, protocol))) == value


def test_an_object_is_what_it_was_built_with() -> None:
    """Its class is a name, and is not imported."""
    built = read_values(pickle.dumps(PurePosixPath("a/b"), 4))

    assert isinstance(built, Built)
    assert isinstance(built.callee, Name)
    assert built.callee.full.endswith("PurePosixPath")
    assert built.arguments == ("a", "b")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04N",
        b"\x80\x04\x85.",  # a tuple of nothing
        b"\x80\x04h\x05.",  # a memo that has no 5
        b"\x80\x04NNs.",  # a map of nothing
        b"\x80\x04N\x8c\x01aa.",  # an append to None
        b"\x80\x04NN\x81.",  # a call of None
        pickle.dumps({1}, 4),
        pickle.dumps(OrderedDict(a=1), 0),
    ],
)
def test_what_is_not_plain_is_refused(data: bytes) -> None:
    """By one error, whatever is wrong with it."""
    with pytest.raises(NotPlain):
        read_values(data)


def test_tuples_nested_without_end_do_no_harm() -> None:
    """Python's own unpickler hashes such a key, and hashing it takes the whole stack."""
    data = b"\x80\x04}N" + b"\x85" * 60_000 + b"Ns."

    assert isinstance(read_values(data), Pairs)
