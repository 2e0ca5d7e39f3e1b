"""How long a request's input is, by a rule of the model's configuration that the server can apply without the handler.

    body_bytes      bytes of its bodies
    header:NAME     the whole number in that header
    json:PATH       in a JSON body, the value at the dotted path: a text's or a list's length, or a number itself

If a rule cannot be applied, the length is the bodies' bytes. The same holds for JSON of more than `MAX_JSON_BYTES`,
which would hold up the event loop, and in JSON of more than `SMALL_JSON_BYTES` for a list that holds more than numbers.
Lengths only decide which requests share a batch: a wrong one costs padding, never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from marserve.messages import Request

LengthOf = Callable[[Request], int]

# No rule of the server's: the handler's own `length_of` is asked (`asked_lengths.py`).
FROM_HANDLER = "handler"

MAX_JSON_BYTES = 1 << 18
# Longer JSON is not made into objects: only the value at the end of the path is decoded.
SMALL_JSON_BYTES = 1 << 15
MAX_LENGTH = 1 << 40


def read_rule(text: str) -> LengthOf:
    """The function behind a rule. `text` is one of the three forms."""
    kind, _, name = text.partition(":")
    if kind == "header":
        return _header_rule(name.lower().encode())
    if kind == "json":
        return _json_rule(name.split("."))
    return body_bytes


def body_bytes(request: Request) -> int:
    """Bytes of all parts."""
    return sum(len(part.body) for part in request.parts)


def _header_rule(name: bytes) -> LengthOf:
    def length_of(request: Request) -> int:
        for key, value in request.headers:
            if key.lower() == name and value.isdigit() and len(value) < 13:
                return int(value)
        return body_bytes(request)

    return length_of


def _json_rule(path: list[str]) -> LengthOf:
    skip_to = _skipper(path)

    def length_of(request: Request) -> int:
        size = body_bytes(request)
        if size > MAX_JSON_BYTES or not request.parts:
            return size
        if size > SMALL_JSON_BYTES:
            return _length_of_long(skip_to, path, request.parts[0].body, size)
        try:
            value = msgspec.json.decode(request.parts[0].body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return size
        for step in path:
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return size
        if isinstance(value, str | list | dict):
            return len(value)
        if isinstance(value, int | float) and 0 <= value < MAX_LENGTH:
            return int(value)
        return size

    return length_of


def _skipper(path: list[str]) -> msgspec.json.Decoder[Any]:
    """A decoder that follows the names in `path` through nested objects and keeps the innermost value undecoded."""
    kind: Any = msgspec.Raw
    for name in reversed(path):
        kind = msgspec.defstruct("Step", [("inner", kind)], rename={"inner": name})
    return msgspec.json.Decoder(kind)


def _length_of_long(skip_to: msgspec.json.Decoder[Any], path: list[str], body: bytes | bytearray, size: int) -> int:
    """As for short JSON where the value is a text, a number or a list of numbers; else `size`."""
    try:
        value = skip_to.decode(body)
        for _ in path:
            value = value.inner
        raw = bytes(value)
        if raw[:1] == b'"':
            return len(msgspec.json.decode(raw, type=str))
        if raw[:1] == b"[":
            is_flat = raw.count(b"[") == 1 and b'"' not in raw and b"{" not in raw
            return raw.count(b",") + 1 if is_flat and raw[1:-1].strip() else size
        number = msgspec.json.decode(raw, type=float)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return size
    return int(number) if 0 <= number < MAX_LENGTH else size
