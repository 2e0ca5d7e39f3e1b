"""The whole survey of one folder: every piece judged, and what only the pieces together can tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from marserve.errors import BadSettings
from marserve.migration.archive_findings import judge_archive
from marserve.migration.findings import Finding, in_order
from marserve.migration.layout import Layout, find_layout
from marserve.migration.script_findings import judge_script
from marserve.migration.settings_findings import judge_settings
from marserve.migration.snapshot_findings import judge_snapshot
from marserve.settings.load import read_properties


def survey(root: Path, *, flags: Collection[str], environment: Mapping[str, str]) -> list[Finding]:
    """Look at a TorchServe installation's folder; nothing of it is run or changed.

    `flags` are the flags of `torchserve` here. Raises NotADirectoryError where there is no such folder.
    """
    layout = find_layout(root)
    findings: list[Finding] = []
    installs = False
    allowed_urls: list[str] = []
    for file in layout.configs:
        findings += judge_settings(file, layout, environment)
        installs = installs or _says(file, "install_py_dep_per_model")
        allowed_urls += _allowed_urls(file)
    for file in layout.archives:
        findings += judge_archive(file, layout.shown(file), installs_requirements=installs, allowed_urls=allowed_urls)
    for file in layout.scripts:
        findings += judge_script(file, layout, flags)
    for file in layout.snapshots:
        findings += judge_snapshot(file, layout)
    findings += _judge_together(layout)
    return in_order(dict.fromkeys(findings))


def _judge_together(layout: Layout) -> Iterator[Finding]:
    if layout.cut_short:
        yield Finding("action", ".", 0, "there are more files than were looked at", "survey its parts one by one")
    if not layout.configs and not layout.archives and not layout.scripts:
        yield Finding(
            *(
                "action",
                ".",
                0,
                "nothing of a TorchServe installation was found: no settings, archives or start scripts",
            ),
            "name the folder that holds config.properties or the model store",
        )


def _says(file: Path, name: str) -> bool:
    return any(text.strip().lower() == "true" for text in _values(file, name))


def _allowed_urls(file: Path) -> list[str]:
    """The patterns of `allowed_urls` that are any; others are found with the settings."""
    patterns = [part.strip() for text in _values(file, "allowed_urls") for part in text.split(",") if part.strip()]
    return [pattern for pattern in patterns if _is_pattern(pattern)]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _values(file: Path, name: str) -> list[str]:
    """What a file of settings gives a key."""
    try:
        return [text for key, text, _ in read_properties(file.read_bytes(), file.name) if key == name]
    except (OSError, BadSettings):
        return []
