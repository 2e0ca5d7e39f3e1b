"""Judges lists of packages (requirements, environments, projects): marserve replaces those of TorchServe."""

from __future__ import annotations

import re
from collections.abc import Iterator

from marserve.migration.findings import Finding, Spot

INSTEAD = 'install "marserve[torch,grpc,onnx,ts]" in its place; both have a command torchserve'
_BEFORE = r"(?:^\s*(?:-\s*)?|[\"'])(?:[\w\-]+::)?"
_AFTER = r"(?=\s*(?:$|[=<>!~;@\[\"',]))"
SERVER = re.compile(rf"{_BEFORE}(torchserve(?:-nightly)?){_AFTER}")
ARCHIVERS = re.compile(rf"{_BEFORE}(torch-(?:model|workflow)-archiver(?:-nightly)?){_AFTER}")


def judge_packages(text: str, shown: str) -> Iterator[Finding]:
    """Every line that names TorchServe or its archivers."""
    for number, line in enumerate(text.splitlines(), 1):
        named = line.partition("#")[0]
        if server := SERVER.search(named):
            yield Spot(shown, number).action(f"asks for {server[1]}", INSTEAD)
        if archiver := ARCHIVERS.search(named):
            yield Spot(shown, number).differs(f"{archiver[1]}: marserve has this command; the line may go")
