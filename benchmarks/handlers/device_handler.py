"""`device_work.py` as a handler: marserve takes the one class of a handler's file, and the work is a class itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from device_work import DeviceWork


class DeviceWorkload:
    """The handler: one answer a row, on the worker's own device."""

    def initialize(self, context: Any) -> None:
        """Load the work that the configuration names."""
        gpu_id = context.system_properties["gpu_id"]
        device = "cpu" if gpu_id is None else f"cuda:{gpu_id}"
        self.work = DeviceWork(context.model_yaml_config["work"], Path(context.system_properties["model_dir"]), device)

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[Any]:
        """B rows in, B answers out."""
        return self.work([row["body"] for row in rows])
