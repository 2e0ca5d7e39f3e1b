"""Judges lists of packages (requirements, environments, projects): marserve replaces those of TorchServe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from marserve.migration.findings import Finding

MAX_BYTES = 1_000_000
INSTEAD = 'install "marserve[torch,grpc,onnx,ts]" in its place; both have a command torchserve'
_BEFORE = r"(?:^\s*(?:-\s*)?|[\"'])(?:[\w\-]+::)?"
_AFTER = r"(?=\s*(?:$|[=<>!~;@\[\"',]))"
SERVER = re.compile(rf"{_BEFORE}(torchserve(?:-nightly)?){_AFTER}")
ARCHIVERS = re.compile(rf"{_BEFORE}(torch-(?:model|workflow)-archiver(?:-nightly)?){_AFTER}")


def judge_packages(file: Path, shown: str) -> Iterator[Finding]:
    """Every line that names TorchServe or its archivers."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        yield Finding("action", shown, 0, f"it cannot be read: {error.strerror}", "look at it yourself")
        return
    for line, text in enumerate(lines, 1):
        named = text.partition("#")[0]
        if server := SERVER.search(named):
            yield Finding("action", shown, line, f"asks for {server[1]}", INSTEAD)
        if archiver := ARCHIVERS.search(named):
            yield Finding("differs", shown, line, f"{archiver[1]}: marserve has this command; the line may go")
