"""The last frame of a stream over HTTP that breaks off. Pure.

A stream that breaks off ends without its last chunk, so no client takes it for a whole one. A stream of events or lines
also says why, in an event of the kind `error` or in a line of its own.
"""

from __future__ import annotations

from typing import Final

_EVENTS: Final = "text/event-stream"
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
