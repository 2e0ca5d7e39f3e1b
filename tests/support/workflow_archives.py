"""Makes small workflow archives with nothing but zipfile, and the graph of three nodes that most tests run."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

#: prepare (function) → middle (model) → finish (function)
THREE_NODES = """\
models:
  timeout-ms: 5000
  middle:
    url: middle.mar
dag:
  prepare: [middle]
  middle: [finish]
"""

FUNCTIONS = """\
def prepare(data, context):
    return None if data is None else [b"p(" + bytes(row["body"]) + b")" for row in data]

def finish(data, context):
    return None if data is None else [b"f(" + bytes(row["body"]) + b")" for row in data]
"""


def war_manifest(name: str | None = "w", **workflow: Any) -> dict[str, Any]:
    """A manifest as TorchServe's workflow archiver writes it; None leaves a key out."""
    entries = {"workflowName": name, "specFile": "workflow.yaml", "handler": "nodes.py"} | workflow
    return {
        "createdOn": "31/01/2026 13:44:53",
        "archiverVersion": "0.2.15",
        "workflow": {key: value for key, value in entries.items() if value is not None},
    }


def write_war(
    path: Path,
    spec: str | None = THREE_NODES,
    functions: str | None = FUNCTIONS,
    *,
    document: dict[str, Any] | None = None,
    **members: bytes,
) -> Path:
    """Write a `.war` of a manifest (named like the file), a spec, a handler file, and further members."""
    document = war_manifest(path.stem) if document is None else document
    with zipfile.ZipFile(path, "w") as archive:
        if document:
            archive.writestr("WAR-INF/MANIFEST.json", json.dumps(document))
        if spec is not None:
            archive.writestr("workflow.yaml", spec)
        if functions is not None:
            archive.writestr("nodes.py", functions)
        for name, body in members.items():
            archive.writestr(name, body)
    return path
