"""Judges snapshots (`logs/config/*.cfg`): whether the store has the archives that the newest would load."""

from __future__ import annotations

from collections.abc import Iterator

from marserve.errors import BadSettings, MarserveError
from marserve.migration.findings import Finding, Spot
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
            yield Spot(layout.shown(folder)).action(f"it cannot be read: {error.strerror}", _INSTEAD)
            continue
        for stray in strays:
            spot = Spot(layout.shown(folder / stray))
            yield spot.differs("not called as snapshots are, so it is left alone")
        if newest is not None:
            yield from _judge_snapshot(newest[1], layout.shown(folder / newest[0]), layout)


def judge_models(text: str, spot: Spot, layout: Layout) -> Iterator[Finding]:
    """Findings about the model versions that the text of a `model_snapshot` names; empty if all is well."""
    try:
        versions = read_models(text)
    except MarserveError as error:
        yield spot.action(error.message.rstrip("."), _INSTEAD)
        return
    for each in versions:
        if is_address(each.archive):
            continue  # it is fetched at the start
        if each.archive not in layout.archive_names and layout.has_archives:
            yield spot.action(
                f"{each.model} {each.version} is {each.archive}, which is in no store here",
                "bring the archive, or drop the model: nothing is started without it",
            )


def _judge_snapshot(data: bytes, shown: str, layout: Layout) -> Iterator[Finding]:
    try:
        entries = {name: (text, line) for name, text, line in read_properties(data, shown)}
    except BadSettings:
        yield Spot(shown).action("it cannot be read", _INSTEAD)
        return
    for name in FOLDERS:
        named, line = entries.get(name, ("", 0))
        if named and layout.find_folder(named) is None:
            yield Spot(shown, line).action(f"{name}={named}: there is no such folder here", _INSTEAD)
    if "model_snapshot" not in entries:
        yield Spot(shown).differs("it names no models: it has no model_snapshot")
        return
    text, line = entries["model_snapshot"]
    spot = Spot(shown, line)
    found = list(judge_models(text, spot, layout))
    yield from found
    if not found:
        count = len(read_models(text))
        yield spot.works(f"a snapshot of {count} model versions; read at the next start unless a file is named")
