"""A handler that gives each request its own bytes back: what is left is the server's work."""

from __future__ import annotations

from typing import Any


class Echo:
    """One answer a row: the row's body."""

    def initialize(self, context: Any) -> None:
        """Nothing to load."""

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """B rows in, B bodies out."""
        return [bytes(row["body"]) for row in rows]
