"""Makes small archives of an echo handler with nothing but zipfile, so that a test says every byte that matters."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

ECHO = b"def handle(data, context):\n    return [row['body'] for row in data] if data else None\n"


def manifest(name: str | None = "m", version: str | None = "1.0", **model: Any) -> dict[str, Any]:
    """A manifest as TorchServe's archiver writes it; None leaves a key out."""
    entries = {"modelName": name, "modelVersion": version, "handler": "echo.py"} | model
    return {
        "createdOn": "31/01/2026 13:44:53",
        "runtime": "python",
        "model": {key: value for key, value in entries.items() if value is not None},
        "archiverVersion": "0.12.0",
    }


def write_mar(
    path: Path, document: dict[str, Any] | None = None, *, config: str | None = None, **members: bytes
) -> Path:
    """Write a `.mar` of a manifest, the echo handler, a configuration, and members by file name (`a__py` is `a.py`)."""
    document = manifest() if document is None else document
    with zipfile.ZipFile(path, "w") as archive:
        if config is not None:
            document = {**document, "model": {**document["model"], "configFile": "model-config.yaml"}}
            archive.writestr("model-config.yaml", config)
        if document:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps(document))
        archive.writestr("echo.py", ECHO)
        for name, body in members.items():
            archive.writestr(name.replace("__", "."), body)
    return path
