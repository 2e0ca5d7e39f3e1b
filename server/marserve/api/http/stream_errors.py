"""The last frame of a stream over HTTP that breaks off, or that ends by an event of its handler's failure. Pure.

A stream that breaks off ends without its last chunk, so no client takes it for a whole one. A stream of events or lines
also says why, in an event of the kind `error` or in a line of its own.
"""

from __future__ import annotations

from typing import Final

import msgspec

from marserve.api.errors import ErrorRules, exposed
from marserve.errors import Thrown

_EVENTS: Final = "text/event-stream"
_LINE_END: Final = b"}\n\n"  # of a JSON object that is an event's data
_LINES: Final = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


def error_frame(content_type: str, error: bytes) -> bytes:
    """The error object `error` (JSON) as a frame of a stream of this content type; empty if the type has no frames."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _EVENTS:
        data = b"".join(b"data: %b\n" % line for line in error.splitlines())
        return b"event: error\n%b\n" % data
    if kind in _LINES:
        return b" ".join(line.strip() for line in error.splitlines()) + b"\n"
    return b""


def with_exception(frame: bytes | bytearray, thrown: Thrown, rules: ErrorRules) -> bytes:
    """A handler's last event, whose data is one line with a JSON object, with `exception` as a body has it.

    As it is if the rules expose nothing.
    """
    if rules.exposes == "off" or not frame.endswith(_LINE_END):
        return bytes(frame)
    exception = msgspec.json.encode(exposed(thrown, rules))
    return b'%b,"exception":%b%b' % (bytes(frame[: -len(_LINE_END)]), exception, _LINE_END)
