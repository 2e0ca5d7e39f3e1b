"""The items of a batch's rows, one after the other, and the answers put together again. Pure.

A request is one item, or a JSON list of several. A row whose value does not fit gets its error in the place of an
answer; its mates are answered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from marserve_handlers.base import value_of
from marserve_handlers.errors import BadInput
from marserve_handlers.ready.options import shown


class Reader(Protocol):
    """How a handler reads what a request holds."""

    def decode(self, value: Any) -> Any:
        """A request's value, as `is_list` and `read` take it. Raises BadInput."""

    def is_list(self, value: Any) -> bool:
        """Whether the value is a list of items."""

    def read(self, value: Any, where: str) -> Any:
        """One item. `where` is its place in the request: empty, or `[2]` in a list. Raises BadInput."""


@dataclass(frozen=True)
class Item:
    """One item, the number of its row in the batch, and whether the row is a list of items."""

    value: Any
    row: int
    is_listed: bool


class Asked:
    """The items of a batch. `errors` has those of rows that hold no items."""

    def __init__(self, rows: int) -> None:
        self.items: list[Item] = []
        self.errors: dict[int, BadInput] = {}
        self.found: list[Any] = []
        """One answer for each item, once they are there."""
        self.rows = rows
        self._lists: set[int] = set()

    @classmethod
    def of(cls, rows: Sequence[Any], reader: Reader, most: int) -> Asked:
        """Read the items of each row, at most `most` of one."""
        asked = cls(len(rows))
        for number, row in enumerate(rows):
            try:
                asked._add(number, reader.decode(request_value(row)), reader, most)
            except BadInput as error:
                asked.errors[number] = error
        return asked

    def _add(self, number: int, value: Any, reader: Reader, most: int) -> None:
        if not reader.is_list(value):
            self.items.append(Item(reader.read(value, ""), number, False))
            return
        if not 1 <= len(value) <= most:
            raise BadInput(f"The list has {len(value)} items; a request may have 1 to {most}.")
        items = [Item(reader.read(each, f"[{place}]"), number, True) for place, each in enumerate(value)]
        self._lists.add(number)
        self.items += items

    def answers(self) -> list[Any]:
        """One answer for each row: its item's, a list of its items', or its error."""
        answers: list[Any] = [[] if row in self._lists else None for row in range(self.rows)]
        for item, found in zip(self.items, self.found, strict=True):
            if item.row not in self._lists:
                answers[item.row] = found
            elif isinstance(found, BaseException):
                self.errors.setdefault(item.row, as_bad_input(found))
            else:
                answers[item.row].append(found)
        for row, error in self.errors.items():
            answers[row] = error
        return answers


def as_bad_input(error: BaseException) -> BadInput:
    """The error itself if it is the client's; any other is raised, for the whole batch."""
    if isinstance(error, BadInput):
        return error
    raise error


def request_value(row: Any) -> Any:
    """A row's `data` or `body`; a form without these is an object of its fields."""
    if isinstance(row, Mapping) and row and not row.keys() & {"data", "body"}:
        return dict(row)
    return value_of(row)


def join(where: str, name: str) -> str:
    """The name of a field at a place in the request: `text`, `[2].text`."""
    return f"{where}.{name}" if where else name


def read_fields(value: Mapping[str, Any], where: str, known: Collection[str], required: str) -> None:
    """Raise BadInput for a field of an item that is not known, or where the required one is missing."""
    for name in value:
        if name not in known:
            raise BadInput(f"is not known; an item may have {', '.join(known)}", join(where, str(name)))
    if required not in value:
        raise BadInput("is missing", join(where, required))


def read_text(value: Any, field: str) -> str:
    """A text that is not blank. Raises BadInput."""
    if isinstance(value, (bytes, bytearray)):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise BadInput("expected text in UTF-8, got other bytes", field) from None
    if not isinstance(value, str):
        raise BadInput(f"expected text, got {shown(value)}", field)
    if not value.strip():
        raise BadInput("expected text, got an empty one", field)
    return value
