"""Server-Sent Events: what a model yields, and the bytes that a browser's `EventSource` reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from marserve_handlers.declared.items import encode_json

EVENT_STREAM: Final = "text/event-stream"

_LINES = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream. `data` is text, or anything that JSON can say.

    `event` is its name, without one `message` to a browser; `id` is what a browser sends back when it comes again.
    """

    data: Any
    event: str | None = None
    id: str | None = None

    def text(self) -> str:
        """Its data as text."""
        if isinstance(self.data, str):
            return self.data
        if isinstance(self.data, (bytes, bytearray)):
            return self.data.decode()
        return encode_json(self.data).decode()

    def frame(self) -> bytes:
        """The event's bytes. Raises ValueError for a name or an id of several lines."""
        lines = []
        for field, value in (("event", self.event), ("id", self.id)):
            if value is not None:
                if _LINES.search(value):
                    raise ValueError(f"the {field} of an event is one line of text, not {value!r}")
                lines.append(f"{field}: {value}\n")
        lines += [f"data: {line}\n" for line in _LINES.split(self.text())]
        return ("".join(lines) + "\n").encode()


# An event without data is not shown by browsers, so the last one has some.
END: Final = Event({}, event="end").frame()


def error_frame(code: int, message: str) -> bytes:
    """The last event of a stream that failed."""
    return Event({"code": code, "message": message}, event="error").frame()
