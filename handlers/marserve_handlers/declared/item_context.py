"""What `predict(self, item, context)` knows of its one request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from marserve_handlers.context import Context
from marserve_handlers.declared.accept import prefers

if TYPE_CHECKING:
    from marserve_handlers.calling import ModelAnswer


def accepts(context: Context, place: int, content_type: str, usual: str) -> bool:
    """Whether the header `Accept` of a request names this content type, and does not ask for the usual one more."""
    items = context.batch_items
    if not items:
        return False
    lines = [value.decode("latin-1") for name, value in items[place].headers if name.lower() == b"accept"]
    return prefers(", ".join(lines), content_type, usual)


def is_in_vain(context: Context, place: int) -> bool:
    """Whether the client of a request has gone, or has stopped waiting."""
    deadline = context.deadline(place)
    return context.is_cancelled(place) or (deadline is not None and deadline <= time.monotonic())


class ItemContext:
    """One request: its id, its headers, when its client stops waiting; and how its answer is sent.

    `model` is the context that `load(self, context)` got.
    """

    __slots__ = ("_place", "model")

    def __init__(self, model: Context, place: int) -> None:
        self.model = model
        self._place = place

    @property
    def request_id(self) -> str | None:
        """The server's id of the request; None outside of a server."""
        return self.model.get_request_id(self._place)

    def header(self, name: str) -> str | None:
        """The request's header of that name, in any case; None without one."""
        wanted = name.lower()
        for key, value in self.model.get_all_request_header(self._place).items():
            if key.lower() == wanted and isinstance(value, str):
                return value
        return None

    @property
    def deadline(self) -> float | None:
        """When the client stops waiting, in seconds of `time.monotonic()`; None for never."""
        return self.model.deadline(self._place)

    @property
    def is_cancelled(self) -> bool:
        """Whether the client has gone, so that working on the request is in vain."""
        return self.model.is_cancelled(self._place)

    async def call(self, model: str, body: Any = b"", **how: Any) -> ModelAnswer:
        """Call another model of this server for this request, as `Context.call`."""
        return await self.model.call(model, body, idx=self._place, **how)

    def set_status(self, code: int, phrase: str = "") -> None:
        """Set the answer's status."""
        self.model.set_response_status(code, phrase, self._place)

    def set_header(self, name: str, value: str) -> None:
        """Set a header of the answer."""
        self.model.set_response_header(self._place, name, value)

    def set_content_type(self, value: str) -> None:
        """Set the answer's content type, in place of that of what `predict` returns."""
        self.model.set_response_content_type(self._place, value)
