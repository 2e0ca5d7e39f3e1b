"""How a stream of HTTP says that it breaks off, where what it carries has a place for that. Pure.

A stream that is broken off ends without its last chunk, so no client takes it for a whole one. Who reads events or
lines hears why as well: as an event of the kind `error`, or as a line of its own.
"""

from __future__ import annotations

from typing import Final

_EVENTS: Final = "text/event-stream"
_LINES: Final = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


def error_frame(content_type: str, error: bytes) -> bytes:
    """The error object `error` (JSON) as a frame of a stream of this content type; empty where it has no frames."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _EVENTS:
        data = b"".join(b"data: %b\n" % line for line in error.splitlines())
        return b"event: error\n%b\n" % data
    if kind in _LINES:
        return b" ".join(line.strip() for line in error.splitlines()) + b"\n"
    return b""
