"""Which bytes of a request are its input, and what they hold as JSON. Knows no shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from marserve_handlers.errors import BadInput
from marserve_handlers.support.shown import names_of

JSON: Final = "application/json"

# The escape of half a character beyond U+FFFF; one alone is no text, and could not be answered.
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")

_decode = msgspec.json.decode

Body = bytes | bytearray


def only_body(row: Mapping[str, Any]) -> Body | None:
    """A request's raw body, or the one value of its form; None if it has several values, or none."""
    body = row.get("body")
    if body is None:
        body = row.get("data")
    if body is None and len(row) == 1:
        body = next(iter(row.values())) or None
    return body


def what_came(row: Mapping[str, Any], content_type: str) -> str:
    """Words for a request that has no such body as was expected; `content_type` would have been right."""
    if not row:
        return "an empty request"
    if len(row) == 1 and not next(iter(row.values())):  # the text has become the name of a field
        return f"a form, which is what curl -d sends: add -H 'Content-Type: {content_type}'"
    return f"a form with {names_of(row)}"


def read_json(body: Body) -> Any:
    """The value of JSON text; `NaN` and `Infinity` are numbers. Raises BadInput with line and column."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return read_json_slowly(body)


def read_json_slowly(body: Body) -> Any:
    """As `read_json`, by Python's parser, which takes `NaN` and says where it stopped."""
    if not body.strip():
        raise BadInput("expected JSON, got an empty body")
    try:
        text = bytes(body).decode("utf-8-sig")
        value = json.loads(text)
        if _HALF.search(text):  # may be a pair of halves as well
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"the body is not JSON: byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise BadInput("the body is not JSON that can be read: it holds half of a surrogate pair") from None
    except RecursionError:
        raise BadInput("the body is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadInput(f"the body is not JSON that can be read: {error}") from None


def kind_of(value: Any) -> str:
    """What a value of JSON is, for a message."""
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")
