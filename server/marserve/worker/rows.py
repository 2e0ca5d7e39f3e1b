"""The rows and ids that a handler gets for items, and a context for calls that no client waits for."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import msgspec

from marserve.messages import PART_MARK, Item
from marserve_handlers.context import Context
from marserve_handlers.errors import BadInput

Row = dict[str, Any]

log = logging.getLogger("marserve.worker")


class InvalidJson(BadInput):
    """A value of type application/json is not JSON. `field` is the value's name, None for the body."""

    def __init__(self, field: str | None, error: Exception) -> None:
        what = "the body" if field is None else "the value"
        super().__init__(f"{what} is not JSON: {_what_is_wrong(error)}", field)


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "it is empty"
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not {error.encoding.upper()}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)  # a number of thousands of digits


def decode_value(body: bytearray, content_type: str, *, name: str = "body", refuses_bad_json: bool = False) -> Any:
    """What a handler sees of a value with this content type (contract §1.3).

    Raises InvalidJson, with `refuses_bad_json`, for a value of type application/json that does not parse.
    """
    essence = content_type.partition(";")[0]
    if essence == "application/json":
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            if refuses_bad_json:
                raise InvalidJson(None if name == "body" else name, error) from None
            log.warning("a body of type application/json is not JSON (%s); the handler gets its bytes", error)
            return body
    if essence.startswith("text"):
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body


def rows_of(items: Sequence[Item], bodies: Sequence[bytearray], decode_input: bool) -> list[Row]:
    """The rows that a handler gets for these items."""
    rows: list[Row] = []
    at = 0
    for item in items:
        row: Row = {}
        for name, content_type in item.parts:
            body = bodies[at]
            row[name] = decode_value(body, content_type) if content_type and decode_input else body
            at += 1
        rows.append(row)
    return rows


def begin_unwatched(context: Context, items: Sequence[Item]) -> None:
    """Point the context at items without clients: pieces are dropped, and no item is ever cancelled."""
    context.begin_batch(items)
    context.send_pieces = lambda pieces: None
    context.ask_cancelled = lambda index: False


class DistinctIds:
    """Tells requests apart whose clients chose the same id, for handlers that keep something by `get_request_id`.

    The first of them has the id as it is, and each further one `ID~N`, which no client can choose. Requests whose id
    the server made are passed on untouched.

    `most_kept`: how many ids stay in use from one call of `of` to the next; without `keep` no others do.
    """

    def __init__(self, *, most_kept: int = 0) -> None:
        self._most_kept = most_kept
        self._names: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._whose: dict[str, tuple[str, int]] = {}
        self._number = count(2)

    def of(self, items: list[Item], *, keep: bool = False) -> list[Item]:
        """The same items, each with an id that no other one in use has. `keep`: in use until `forget`."""
        if not any(item.key for item in items):
            return items
        named = [self._of(item) if item.key else item for item in items]
        if not keep:
            while len(self._names) > self._most_kept:
                del self._whose[self._names.popitem(last=False)[1]]
        return named

    def forget(self, named: Iterable[Item]) -> None:
        """These items, which `of` returned, are no longer in use."""
        for item in named:
            if item.key and item.id in self._whose:
                del self._names[self._whose.pop(item.id)]

    def _of(self, item: Item) -> Item:
        which = (item.id, item.key)
        name = self._names.get(which)
        if name is None:
            name = item.id if item.id not in self._whose else f"{item.id}{PART_MARK}{next(self._number)}"
            self._names[which] = name
            self._whose[name] = which
        else:
            self._names.move_to_end(which)
        return item if name == item.id else msgspec.structs.replace(item, id=name)
