"""Judges snapshots (`logs/config/*.cfg`): whether the store has the archives that the newest would load."""

from __future__ import annotations

from collections.abc import Iterator

from marserve.errors import BadSettings, MarserveError
from marserve.migration.findings import Finding
from marserve.migration.judges.script_findings import FOLDERS
from marserve.migration.layout import Layout
from marserve.registry.catalogue.snapshot import read_models
from marserve.settings.load import read_properties
from marserve.settings.snapshot_files import FolderSnapshots
from marserve.store.addresses.fetch_guard import is_address

_INSTEAD = "delete it, or start with --ncs"


def judge_snapshots(layout: Layout) -> Iterator[Finding]:
    """Findings about the newest snapshot of each folder, and about the others there."""
    for folder in sorted({file.parent for file in layout.snapshots}):
        snapshots = FolderSnapshots(folder)
        try:
            newest, strays = snapshots.newest(), snapshots.strays()
        except OSError as error:
            yield Finding("action", layout.shown(folder), 0, f"it cannot be read: {error.strerror}", _INSTEAD)
            continue
        for stray in strays:
            yield Finding(
                "differs", layout.shown(folder / stray), 0, "not called as snapshots are, so it is left alone"
            )
        if newest is not None:
            yield from _judge_snapshot(newest[1], layout.shown(folder / newest[0]), layout)


def judge_models(text: str, shown: str, line: int, layout: Layout) -> Iterator[Finding]:
    """Findings about the model versions that the text of a `model_snapshot` names; empty if all is well."""
    try:
        versions = read_models(text)
    except MarserveError as error:
        yield Finding("action", shown, line, error.message.rstrip("."), _INSTEAD)
        return
    for each in versions:
        if is_address(each.archive):
            continue  # it is fetched at the start
        if each.archive not in layout.archive_names and layout.has_archives:
            yield Finding(
                *("action", shown, line, f"{each.model} {each.version} is {each.archive}, which is in no store here"),
                "bring the archive, or drop the model: nothing is started without it",
            )


def _judge_snapshot(data: bytes, shown: str, layout: Layout) -> Iterator[Finding]:
    try:
        entries = {name: (text, line) for name, text, line in read_properties(data, shown)}
    except BadSettings:
        yield Finding("action", shown, 0, "it cannot be read", _INSTEAD)
        return
    for name in FOLDERS:
        named, line = entries.get(name, ("", 0))
        if named and layout.find_folder(named) is None:
            yield Finding("action", shown, line, f"{name}={named}: there is no such folder here", _INSTEAD)
    if "model_snapshot" not in entries:
        yield Finding("differs", shown, 0, "it names no models: it has no model_snapshot")
        return
    text, line = entries["model_snapshot"]
    found = list(judge_models(text, shown, line, layout))
    yield from found
    if not found:
        said = f"a snapshot of {len(read_models(text))} model versions; read at the next start unless a file is named"
        yield Finding("works", shown, line, said)
