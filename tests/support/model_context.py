"""Contexts as a worker would make them, for tests of handlers: a folder, a manifest, a configuration, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.metrics import MetricsCache


@dataclass
class FakeItem:
    """One request of a batch as the worker's loop hands it to `begin_batch`."""

    id: str = "id-0"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    server_headers: list[tuple[str, str]] = field(default_factory=list)
    parts: list[tuple[str, str | None]] = field(default_factory=list)
    deadline: float | None = None


def make_context(
    folder: Path | str = "",
    serialized_file: str | None = None,
    model_file: str | None = None,
    config: dict[str, Any] | None = None,
    gpu_id: int | None = None,
    limit_max_image_pixels: bool = True,
) -> Context:
    """The context of a model whose archive lies unpacked in `folder`, with a metrics cache and no request yet."""
    model: dict[str, Any] = {"modelName": "m"}
    if serialized_file is not None:
        model["serializedFile"] = serialized_file
    if model_file is not None:
        model["modelFile"] = model_file
    return Context(
        "m",
        str(folder),
        {"model": model},
        4,
        gpu_id,
        "0.1.0",
        limit_max_image_pixels,
        MetricsCache(model_name="m"),
        {} if config is None else config,
    )
