"""What a handler sees of a value, and of requests whose clients chose the same id."""

from __future__ import annotations

import math

import pytest

from marserve.messages import Item
from marserve.worker.rows import DistinctIds, InvalidJson, decode_value

JSON = "application/json"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not JSON: it is empty"),
        (b" \n ", "the body is not JSON: it is empty"),
        (b'{"a": 1,\n "b" 2}', "the body is not JSON: Expecting ':' delimiter at line 2, column 6"),
        (b"{'a': 1}", "the body is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        (b'{"a": 1} x', "the body is not JSON: Extra data at line 1, column 10"),
        (b"data=hello", "the body is not JSON: Expecting value at line 1, column 1"),
        (b'"\xff"', "the body is not JSON: byte 1 is not UTF-8"),
        (b"[" * 100_000, "the body is not JSON: it is nested too deeply"),
        (b"1" * 10_000, "the body is not JSON: Exceeds the limit"),
    ],
)
def test_a_body_that_is_not_json_is_refused_with_the_place(body: bytes, said: str) -> None:
    """As the client's fault, in one sentence."""
    with pytest.raises(InvalidJson) as refused:
        decode_value(bytearray(body), f"{JSON}; charset=utf-8", refuses_bad_json=True)

    assert refused.value.message.startswith(said)
    assert refused.value.error_code == 400


def test_a_field_that_is_not_json_is_named() -> None:
    """A part of a form that says it is JSON."""
    with pytest.raises(InvalidJson, match=r"^pixels: the value is not JSON: it is empty"):
        decode_value(bytearray(b""), JSON, name="pixels", refuses_bad_json=True)


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        ('{"a": "\u00e4"}'.encode("utf-16"), {"a": "\u00e4"}),
        ('{"a": "\u00e4"}'.encode("utf-16-le"), {"a": "\u00e4"}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"[Infinity, -Infinity]", [math.inf, -math.inf]),
    ],
)
@pytest.mark.parametrize("refuses", [False, True])
def test_what_python_reads_as_json_passes(body: bytes, seen: object, refuses: bool) -> None:
    """A byte order mark, UTF-16, a name given twice, whose last value counts, and Infinity."""
    assert decode_value(bytearray(body), JSON, refuses_bad_json=refuses) == seen


def test_nan_passes() -> None:
    """TorchServe's clients send it."""
    assert math.isnan(decode_value(bytearray(b"NaN"), JSON, refuses_bad_json=True))


def test_a_handler_gets_the_bytes_where_they_pass() -> None:
    """As in TorchServe."""
    assert decode_value(bytearray(b"{"), JSON) == bytearray(b"{")


# ------------------------------------------------------------------------------------------- ids


def item(request_id: str, key: int = 0) -> Item:
    """A request without parts."""
    return Item(request_id, [], b"", None, key)


def ids(items: list[Item]) -> list[str]:
    """The ids that handlers see."""
    return [each.id for each in items]


def test_ids_that_the_server_made_cost_nothing() -> None:
    """The very list is passed on."""
    items = [item("a"), item("b")]

    assert DistinctIds().of(items) is items


def test_two_requests_of_one_batch_have_two_ids() -> None:
    """A handler that keeps something by the id keeps both; alone each has its client's."""
    distinct = DistinctIds()

    assert ids(distinct.of([item("a", 1), item("b"), item("a", 2)])) == ["a", "b", "a~2"]
    assert ids(distinct.of([item("a", 3)])) == ["a"]


def test_a_request_that_comes_again_with_each_step_keeps_its_id() -> None:
    """Though the one before it has ended, and while its place in the batch changes."""
    distinct = DistinctIds(most_kept=3)
    first, second = item("a", 1), item("a", 2)

    assert ids(distinct.of([first])) == ["a"]
    assert ids(distinct.of([first, second])) == ["a", "a~2"]
    assert ids(distinct.of([second])) == ["a~2"]
    assert ids(distinct.of([second, first])) == ["a~2", "a"]


def test_no_more_ids_are_kept_than_allowed() -> None:
    """The one that was not seen for longest goes first."""
    distinct = DistinctIds(most_kept=2)

    assert ids(distinct.of([item("a", 1), item("a", 2), item("a", 3)])) == ["a", "a~2", "a~3"]
    assert ids(distinct.of([item("a", 3)])) == ["a~3"]
    assert ids(distinct.of([item("a", 1)])) == ["a"]
    assert ids(distinct.of([item("b", 4), item("c", 5)])) == ["b", "c"]
    assert ids(distinct.of([item("a", 2)])) == ["a"]


def test_an_id_is_free_again_when_its_batch_has_ended() -> None:
    """Where batches run side by side."""
    distinct = DistinctIds()
    first = distinct.of([item("a", 1)], keep=True)
    second = distinct.of([item("a", 2)], keep=True)
    assert ids(first + second) == ["a", "a~2"]

    distinct.forget(first)
    distinct.forget(first)

    assert ids(distinct.of([item("a", 3)], keep=True)) == ["a"]
