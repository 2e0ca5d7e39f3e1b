"""Items of rows, and answers put together again."""

from __future__ import annotations

from typing import Any

import pytest

from marserve_handlers.errors import BadInput
from marserve_handlers.ready.items import Asked, as_bad_input, read_fields, read_text


class Texts:
    """Reads texts; decodes nothing."""

    def decode(self, value: Any) -> Any:
        """The value."""
        return value

    def is_list(self, value: Any) -> bool:
        """Any list."""
        return isinstance(value, list)

    def read(self, value: Any, where: str) -> str:
        """A text, or the field `text` of an object."""
        return read_text(value.get("text") if isinstance(value, dict) else value, where or "text")


def ask(*rows: Any, most: int = 3) -> Asked:
    """The items of these rows."""
    return Asked.of(rows, Texts(), most)


def answered(asked: Asked) -> list[Any]:
    """The answers where each item's is its text in capitals; an error of a row as its message."""
    asked.found = [item.value.upper() for item in asked.items]
    return [answer.message if isinstance(answer, BadInput) else answer for answer in asked.answers()]


def test_a_row_that_does_not_fit_fails_alone() -> None:
    """Of a list the whole request; its mates are answered."""
    asked = ask({"body": "a"}, {"body": 3}, {"body": ["b", None]}, {"body": ["c"]}, {"body": []}, {"data": ["d"] * 4})

    assert answered(asked) == [
        "A",
        "text: expected text, got 3",
        "[1]: expected text, got None",
        ["C"],
        "The list has 0 items; a request may have 1 to 3.",
        "The list has 4 items; a request may have 1 to 3.",
    ]
    assert [item.value for item in asked.items] == ["a", "c"]


def test_an_answer_that_is_an_error_fails_its_request_alone() -> None:
    """Of one item, or of one in a list."""
    asked = ask({"body": "a"}, {"body": ["b", "c"]}, {"body": "d"})
    error = BadInput("too long", "text")
    asked.found = [error, 1, error, 2]

    assert asked.answers() == [error, error, 2]
    with pytest.raises(RuntimeError):
        as_bad_input(RuntimeError())


def test_a_row_is_its_body_its_data_or_a_form() -> None:
    """Bytes are text in UTF-8; a form without `data` is an object of its fields."""
    assert answered(ask({"body": "ä".encode()}, {"data": bytearray(b"b")}, {"text": b"c"}, "d")) == ["Ä", "B", "C", "D"]


def test_fields_that_are_not_known_or_missing_are_named() -> None:
    """With their place in the request."""
    read_fields({"text": 1}, "", ("text", "pair"), "text")
    with pytest.raises(BadInput, match=r"\[2\]\.txt: is not known; an item may have text, pair"):
        read_fields({"txt": 1}, "[2]", ("text", "pair"), "text")
    with pytest.raises(BadInput, match="text: is missing"):
        read_fields({"pair": 1}, "", ("text", "pair"), "text")
