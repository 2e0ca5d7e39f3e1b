"""Surveys of folders that a test writes, as `marserve migrate` makes them."""

from __future__ import annotations

from pathlib import Path

from marserve.cli.torchserve.torchserve import parser, settings_of_command
from marserve.migration.findings import Finding
from marserve.migration.judges.settings_findings import StartTrial
from marserve.migration.survey import survey

FLAGS = [flag for action in parser()._actions for flag in action.option_strings]


def look(root: Path, try_start: StartTrial = lambda settings: []) -> list[Finding]:
    """Survey a folder; a start is taken to succeed unless `try_start` says otherwise."""
    return survey(root, flags=FLAGS, read_command=settings_of_command, environment={}, try_start=try_start)


def actions(root: Path) -> dict[str, str]:
    """What needs somebody, by place."""
    return {each.place: each.what for each in look(root) if each.verdict == "action"}


def write(root: Path, files: dict[str, str]) -> None:
    """Text files below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
