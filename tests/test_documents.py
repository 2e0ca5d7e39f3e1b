"""Documents of archives on their way to a worker: what comes out is what went in."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from marserve.documents import pack, unpack

ZONES = st.none() | st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(max_size=20)
    | st.dates()
    | st.datetimes(timezones=ZONES).map(lambda moment: moment.replace(fold=0))  # which no text says
)
KEYS = SCALARS | st.tuples(SCALARS, SCALARS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


def carried(value: Any) -> Any:
    """What a worker gets of a value."""
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(pack(value))))


def with_types(value: Any) -> Any:
    """The value with the type of each of its parts: 1, 1.0 and True are equal, and so are two names of one moment."""
    if isinstance(value, dict):
        return [(with_types(key), with_types(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(with_types, value)]
    if isinstance(value, set):
        return {repr(with_types(each)) for each in value}
    return type(value), repr(value)


@given(VALUES)
def test_every_value_of_yaml_and_json_comes_out_as_it_went_in(value: Any) -> None:
    """With its type, in its order, wherever it stands."""
    assert with_types(carried(value)) == with_types(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024-05-06", date(2024, 5, 6)),
        ("2024-05-06T07:08:09Z", datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)),
        ("2024-05-06 07:08:09.5", datetime(2024, 5, 6, 7, 8, 9, 500000)),
        ("2001-12-14t21:59:43.10-05:00", datetime(2001, 12, 14, 21, 59, 43, 100000, timezone(timedelta(hours=-5)))),
        ("!!set {a, b}", {"a", "b"}),
        ("!!pairs [a: 1, a: 2]", [("a", 1), ("a", 2)]),
        ("!!binary aGVsbG8=", b"hello"),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ('"\\ud800"', "\ud800"),
        ("{1: a, ~: b, 2024-05-06: c}", {1: "a", None: "b", date(2024, 5, 6): "c"}),
    ],
)
def test_what_yaml_reads_is_what_a_handler_gets(text: str, value: Any) -> None:
    """TorchServe's workers read the file themselves, so that no value is lost there."""
    read = yaml.safe_load(text)
    assert with_types(read) == with_types(value)

    assert with_types(carried({"key": read})) == with_types({"key": value})


def test_plain_documents_stay_as_they_are() -> None:
    """Nearly all of them; a message then shows what the archive says."""
    document = {"a": [1, 2.5, "text", None, True, {"b": "ü"}], "c": {}}

    assert pack(document) == document
