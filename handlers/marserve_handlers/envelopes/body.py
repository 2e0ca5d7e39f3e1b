"""The envelope `body`: the handler gets the values themselves instead of dicts."""

from __future__ import annotations

from typing import Any

from marserve_handlers.envelopes.base import BaseEnvelope


class BodyEnvelope(BaseEnvelope):
    """Each row becomes its `data`, or its `body` without one; answers stay as they are."""

    def parse_input(self, data: Any) -> list[Any]:
        """One value a row."""
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        """The handler's answers."""
        return data
