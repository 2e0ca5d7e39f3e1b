"""Planned archives as entries of a store: the same members as the archive, old ones forgotten."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from marserve.archive.writing.sources import Wishes, plan_source
from marserve.archive.writing.staging import Staging
from marserve.archive.writing.writer import write_archive
from marserve.errors import CannotArchive
from marserve.store.sources.local import LocalStore

HANDLER = "def handle(data, context):\n    return data\n"


def test_what_is_staged_is_what_an_archive_would_hold(tmp_path: Path) -> None:
    """Byte for byte, the manifest too."""
    (tmp_path / "m.py").write_text(HANDLER + "W = 'w.bin'\n")
    (tmp_path / "w.bin").write_bytes(b"w")
    plan = plan_source(f"{tmp_path}/m.py", Wishes(options={"batchSize": 2})).plan
    staging = Staging(tmp_path / "models")

    entry = staging.stage(plan)

    found = LocalStore(staging.root).find(entry)
    assert found.kind == "folder"
    staged = {str(path.relative_to(found.path)): path.read_bytes() for path in found.path.rglob("*") if path.is_file()}
    with zipfile.ZipFile(write_archive(plan, tmp_path)) as archive:
        assert staged == {name: archive.read(name) for name in archive.namelist()}


def test_an_archive_is_taken_with_its_own_name_and_version(tmp_path: Path) -> None:
    """A file or a folder; the folder itself is copied, so that nothing is written into it."""
    (tmp_path / "m.py").write_text(HANDLER)
    plan = plan_source(f"{tmp_path}/m.py", Wishes(name="shout", version="3")).plan
    staging = Staging(tmp_path / "models")
    file = write_archive(plan, tmp_path)
    folder = write_archive(plan, tmp_path, archive_format="no-archive")

    taken = [staging.take_archive(file), staging.take_archive(folder)]

    assert [each[1:] for each in taken] == [("shout", "3"), ("shout", "3")]
    for entry, _, _ in taken:
        assert (LocalStore(staging.root).find(entry).path / "m.py").read_text() == HANDLER


def test_an_archive_keeps_its_files_name_by_which_it_may_be_trusted(tmp_path: Path) -> None:
    """Not one that a list of models cannot hold, nor one that is taken."""
    (tmp_path / "m.py").write_text(HANDLER)
    made = write_archive(plan_source(f"{tmp_path}/m.py", Wishes(name="shout")).plan, tmp_path)
    odd = made.rename(tmp_path / "a, b=c.mar")
    (tmp_path / "shout-2.mar").write_bytes(odd.read_bytes())
    staging = Staging(tmp_path / "models")

    entries = [staging.take_archive(path)[0] for path in (tmp_path / "shout-2.mar", odd, tmp_path / "shout-2.mar")]

    assert entries == ["shout-2.mar", "archive-1", "archive-2"]


def test_what_is_no_archive_is_refused_in_its_own_words(tmp_path: Path) -> None:
    """The reader says what is wrong."""
    (tmp_path / "m.mar").write_bytes(b"no archive")

    with pytest.raises(CannotArchive, match="is no model archive"):
        Staging(tmp_path / "models").take_archive(tmp_path / "m.mar")


def test_old_entries_are_forgotten_but_for_the_newest_two(tmp_path: Path) -> None:
    """The one before may still answer its last requests."""
    (tmp_path / "m.py").write_text(HANDLER)
    plan = plan_source(f"{tmp_path}/m.py").plan
    staging = Staging(tmp_path / "models")
    entries = [staging.stage(plan) for _ in range(4)]

    staging.forget_old()

    assert sorted(path.name for path in staging.root.iterdir()) == entries[2:]
