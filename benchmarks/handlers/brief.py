"""A handler that answers every request with two bytes, however large it was."""

from __future__ import annotations

from typing import Any


class Brief:
    """Answers `ok` to each row."""

    def initialize(self, context: Any) -> None:
        """Nothing to load."""

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """B rows in, B times `ok` out. Looks at both ends of each body, so that it has to be there."""
        return [b"ok" if row["body"][0] == row["body"][-1] else b"no" for row in rows]
