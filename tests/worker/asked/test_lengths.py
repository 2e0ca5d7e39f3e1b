"""Tests for what a worker does when it is asked how long items are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from marserve.messages import AskLengths, Item, Load, pack_head
from marserve.worker.asked.lengths import read_lengths
from marserve.worker.load import LoadedModel
from support.model_context import make_context

LOAD = Load("m", "1.0", "", "h.py", None, None, 4)


def model_of(length_of: Callable[[dict[str, Any]], Any]) -> LoadedModel:
    """A model that is asked for nothing but lengths."""
    return LoadedModel(lambda rows, context: rows, make_context(), LOAD, length_of)


def ask(
    length_of: Callable[[dict[str, Any]], Any], *bodies: bytes, kind: str | None = None, limit_s: float = 10.0
) -> list[int]:
    """The lengths of these bodies."""
    items = [Item("id", [("body", kind)], pack_head([], []), None) for _ in bodies]
    return read_lengths(
        model_of(length_of), AskLengths(7, items, limit_s), [bytearray(body) for body in bodies]
    ).lengths


def test_each_item_is_given_as_the_handler_sees_it() -> None:
    """JSON is decoded; the rows come one by one and in order."""
    seen: list[dict[str, Any]] = []

    def length_of(row: dict[str, Any]) -> int:
        seen.append(row)
        return len(row["body"]["text"])

    lengths = ask(length_of, b'{"text": "abc"}', b'{"text": "a"}', kind="application/json")

    assert lengths == [3, 1]
    assert seen == [{"body": {"text": "abc"}}, {"body": {"text": "a"}}]


def test_the_answer_names_the_batch_and_what_it_took() -> None:
    """Seconds inside the author's code."""
    items = [Item("id", [("body", None)], pack_head([], []), None)]

    told = read_lengths(model_of(lambda row: 5), AskLengths(7, items, 1.0), [bytearray(b"x")])

    assert (told.number, told.lengths) == (7, [5])
    assert 0 <= told.seconds < 1.0


def test_when_the_time_is_up_the_rest_is_not_asked() -> None:
    """One is, at least."""
    assert ask(lambda row: 1, b"a", b"b", b"c", limit_s=0.0) == [1]


@pytest.mark.parametrize("said", [-1, 1.5, "7", None, True, float("nan"), float("inf"), 1 << 41, [3]])
def test_what_is_no_length_is_a_failure_of_that_item_alone(said: object) -> None:
    """Whole numbers from 0 on are lengths."""
    assert ask(lambda row: said if row["body"] == b"odd" else 3, b"a", b"odd", b"b") == [3, -1, 3]


def test_numbers_of_numeric_libraries_are_lengths() -> None:
    """And whole floats."""
    assert ask(lambda row: numpy.int64(9) if row["body"] == b"a" else 4.0, b"a", b"b") == [9, 4]


def test_the_first_failure_is_told_with_its_traceback_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A model log is not for one line an item."""

    def length_of(row: dict[str, Any]) -> int:
        raise KeyError("text")

    with caplog.at_level(logging.WARNING):
        assert ask(length_of, b"a", b"b", b"c") == [-1, -1, -1]

    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None


def test_a_handler_that_ends_the_process_ends_it() -> None:
    """As in a batch."""

    def length_of(row: dict[str, Any]) -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        ask(length_of, b"a")
