"""Answers that the worker's loop knows by their class. On their own, so that it can do so at no cost."""

from __future__ import annotations


class JsonAnswer:
    """JSON text for the client, which goes out as it is with the content type of JSON."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"JsonAnswer({self.body!r})"


class FailedEvent(bytes):
    """The last event of a stream that failed, as its bytes; `error` is what was raised, for the settings to expose.

    Its data is one line with a JSON object.
    """

    error: BaseException

    @classmethod
    def of(cls, frame: bytes, error: BaseException) -> FailedEvent:
        """The event with this frame."""
        event = cls(frame)
        event.error = error
        return event
