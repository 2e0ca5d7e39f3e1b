"""The rows that a handler gets for items, and a context for calls that no client waits for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from marserve.messages import Item
from marserve_handlers.context import Context

Row = dict[str, Any]

log = logging.getLogger("marserve.worker")


def decode_value(body: bytearray, content_type: str) -> Any:
    """What a handler sees of a value with this content type (contract §1.3)."""
    essence = content_type.partition(";")[0]
    if essence == "application/json":
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
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
