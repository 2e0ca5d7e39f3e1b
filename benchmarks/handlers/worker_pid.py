"""A handler that answers every request with its worker's process id: who reads it knows who answered."""

from __future__ import annotations

import os
from typing import Any


class WorkerPid:
    """One answer a row: this process's id in digits."""

    def initialize(self, context: Any) -> None:
        """Import what the model's configuration lists under `imports`, as a real model's handler would."""
        for name in (context.model_yaml_config or {}).get("imports", []):
            __import__(name)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[bytes]:
        """B rows in, B times the process id out."""
        return [b"%d" % os.getpid()] * len(rows)
