"""A handler that is a second's work to load: it computes, as importing a large library does, and reads its archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class BusyStart:
    """Answers `ok` to each row."""

    def initialize(self, context: Any) -> None:
        """Read the model's file and count for a while."""
        folder = Path(context.system_properties["model_dir"])
        size = sum(len(path.read_bytes()) for path in folder.iterdir() if path.is_file())
        for number in range(10_000_000):
            size ^= number

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[str]:
        """B rows in, B answers out."""
        return ["ok"] * len(rows)
