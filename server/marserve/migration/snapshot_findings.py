"""Judges a snapshot (`logs/config/*.cfg`): whether what it would load is in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marserve.errors import BadSettings
from marserve.migration.findings import Finding
from marserve.migration.layout import Layout
from marserve.settings.load import read_properties


def judge_snapshot(file: Path, layout: Layout) -> Iterator[Finding]:
    """Every model version that a snapshot names."""
    shown = layout.shown(file)
    try:
        entries = {name: (text, line) for name, text, line in read_properties(file.read_bytes(), shown)}
    except (OSError, BadSettings):
        yield Finding("action", shown, 0, "it cannot be read", "delete it, or start with --ncs")
        return
    if "model_snapshot" not in entries:
        yield Finding("differs", shown, 0, "it is no snapshot: it has no model_snapshot")
        return
    text, line = entries["model_snapshot"]
    try:
        models = _models(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        yield Finding(
            "action", shown, line, "model_snapshot is no JSON that names models", "delete it, or start with --ncs"
        )
        return
    archives = {path.name for path in layout.archives} | {path.parent.name for path in layout.archives}
    missing = False
    for model, version, archive in models:
        if archive and Path(archive).name not in archives and layout.find_folder(archive) is None:
            missing = True
            yield Finding(
                *("action", shown, line, f"{model} {version} is {archive}, which is in no store here"),
                "bring the archive, or delete the snapshot (it is read at the next start unless --ncs is given)",
            )
    if not missing:
        yield Finding("works", shown, line, f"a snapshot of {len(models)} model versions; it is read at the next start")


def _models(snapshot: Any) -> list[tuple[str, str, str]]:
    return [
        (model, version, str(entry.get("marName") or ""))
        for model, versions in snapshot["models"].items()
        for version, entry in versions.items()
    ]
