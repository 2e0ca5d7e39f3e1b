"""An answer that is JSON text already. On its own, so that the worker's loop can know it at no cost."""

from __future__ import annotations


class JsonAnswer:
    """JSON text for the client, which goes out as it is with the content type of JSON."""

    __slots__ = ("body",)

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"JsonAnswer({self.body!r})"
