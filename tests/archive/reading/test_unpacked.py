"""Tests for folders of unpacked archives, and for what was deleted from them."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

from marserve.archive.reading import unpacked as unpacked_module
from marserve.archive.reading.reader import Limits
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.errors import BadArchive

MEMBERS = {"handler.py": b"import extra", "weights/a.bin": b"a" * 100, "weights/deep/b.bin": b"b", "empty/": b""}


class House:
    """One archive, and the folder that it was unpacked to."""

    def __init__(self, tmp_path: Path) -> None:
        self.archive = tmp_path / "m.mar"
        self.write(MEMBERS)
        self.folder = tmp_path / "scratch" / "f"
        self.folder.parent.mkdir()
        self.archives = UnpackedArchives()
        self.sha256 = self.archives.unpack(self.archive, self.folder, Limits())
        self.whole = self.seen()

    def write(self, members: dict[str, bytes]) -> None:
        """Write the archive anew, beside the old one and then over it, as a copy does."""
        with zipfile.ZipFile(self.archive.with_suffix(".new"), "w") as archive:
            for name, body in members.items():
                archive.writestr(zipfile.ZipInfo(name), body)
        self.archive.with_suffix(".new").replace(self.archive)

    def seen(self) -> dict[str, bytes | None]:
        """What is in the folder."""
        return {
            str(each.relative_to(self.folder)): None if each.is_dir() else each.read_bytes()
            for each in self.folder.rglob("*")
        }

    def restore(self) -> None:
        """As before a start."""
        self.archives.restore(str(self.folder))


@pytest.fixture
def house(tmp_path: Path) -> House:
    """An archive that was unpacked."""
    return House(tmp_path)


def test_the_digest_is_that_of_the_archive(house: House) -> None:
    """What is compared later is the file's SHA-256 digest."""
    assert house.sha256 == hashlib.sha256(house.archive.read_bytes()).hexdigest()


@pytest.mark.parametrize("gone", [".", "..", "weights", "handler.py", "weights/deep/b.bin", "empty"])
def test_what_was_deleted_is_unpacked_again(house: House, gone: str) -> None:
    """All of it, one folder, one file: a cleaner deletes them singly; nothing else is left behind."""
    path = house.folder / gone
    path.unlink() if path.is_file() else shutil.rmtree(path.resolve())

    house.restore()

    assert house.seen() == house.whole
    assert list(house.folder.parent.iterdir()) == [house.folder]


def test_a_whole_folder_costs_no_look_at_the_archive(house: House) -> None:
    """The archive may be gone long ago; what a handler wrote into its folder, also over the archive's files, stays."""
    house.archive.unlink()
    (house.folder / "handler.py").write_text("its own")
    (house.folder / "cache").write_text("its own")

    house.restore()

    assert (house.folder / "handler.py").read_text() == (house.folder / "cache").read_text() == "its own"


def test_a_file_that_was_changed_in_place_is_told_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """By its size or its time; new files, what Python compiles and what was unpacked again are no change."""
    house.write({**MEMBERS, "m.pyc": b"", "z.bin": b"z"})
    folder = house.folder.with_name("g")
    house.archives.unpack(house.archive, folder, Limits())
    os.truncate(folder / "weights/a.bin", 7)
    os.utime(folder / "handler.py", ns=(1, 1))
    (folder / "m.pyc").write_bytes(b"compiled")
    (folder / "new").write_bytes(b"new")
    (folder / "z.bin").unlink()

    for _ in range(2):
        house.archives.restore(str(folder))

    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[0] for text in told] == [
        f"2 of 8 files and folders that were unpacked from m.mar were changed in {folder}",
        f"1 of 8 files and folders that were unpacked from m.mar have been deleted from {folder}, and were unpacked "
        "again; a cleaner of temporary folders should leave this one out",
    ]
    assert "weights/a.bin (100 bytes then, 7 now)" in told[0]
    assert "handler.py, " in told[0] or "handler.py. " in told[0]


def test_a_known_digest_is_not_computed_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that an address names by its digest is hashed once, before it is unpacked."""
    os.utime(house.archive, ns=(1, 1))
    house.archives.digests._now = lambda: time.time() + 3600
    sha256 = house.archives.digests.of(house.archive)
    monkeypatch.setattr(hashlib, "sha256", None)

    assert house.archives.unpack(house.archive, house.folder.with_name("g"), Limits()) == sha256


def test_the_same_archive_copied_again_is_used(house: House) -> None:
    """Its digest counts, neither its inode nor its time."""
    house.write(MEMBERS)
    shutil.rmtree(house.folder)

    house.restore()

    assert house.seen() == house.whole


def test_another_archive_in_its_place_is_refused_by_name(house: House) -> None:
    """The model would change by itself."""
    house.write({**MEMBERS, "handler.py": b"other"})
    (house.folder / "handler.py").unlink()

    with pytest.raises(BadArchive, match=rf"1 of 6 files .* {house.archive} has another SHA-256 digest now"):
        house.restore()

    assert not (house.folder / "handler.py").exists()


def test_an_archive_that_is_gone_is_refused_by_name(house: House) -> None:
    """And is used once it is back."""
    away = house.archive.rename(house.archive.with_suffix(".away"))
    shutil.rmtree(house.folder)

    with pytest.raises(BadArchive, match=rf"{house.archive} cannot be read \(No such file or directory\)"):
        house.restore()
    away.rename(house.archive)
    house.restore()

    assert house.seen() == house.whole


def test_an_archive_that_was_replaced_while_it_was_unpacked_again_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is compared before and after; nothing of it reaches the folder."""
    real = unpacked_module.unpack

    def replace_first(archive: Path, target: Path, limits: Limits, label: str = "") -> None:
        house.write({**MEMBERS, "handler.py": b"other"})
        real(archive, target, limits, label)

    monkeypatch.setattr(unpacked_module, "unpack", replace_first)
    (house.folder / "handler.py").unlink()

    with pytest.raises(BadArchive, match="another SHA-256 digest"):
        house.restore()

    assert not (house.folder / "handler.py").exists()
    assert list(house.folder.parent.iterdir()) == [house.folder]


def test_an_archive_that_was_replaced_while_it_was_unpacked_first_has_no_digest(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known which of the two was unpacked, so neither is unpacked again."""
    real = unpacked_module.unpack

    def replace_after(archive: Path, target: Path, limits: Limits, label: str = "") -> None:
        real(archive, target, limits, label)
        house.write({**MEMBERS, "handler.py": b"other"})

    monkeypatch.setattr(unpacked_module, "unpack", replace_after)
    other = house.folder.with_name("g")

    assert house.archives.unpack(house.archive, other, Limits()) == ""
    shutil.rmtree(other)
    with pytest.raises(BadArchive, match="was changed while it was unpacked"):
        house.archives.restore(str(other))


def test_a_discarded_folder_stays_deleted(house: House) -> None:
    """A start that comes too late unpacks nothing; folders that were not unpacked here are not looked at."""
    house.archives.discard(house.folder)
    house.archives.discard(house.folder)

    house.restore()
    house.archives.restore("/nowhere")

    assert not house.folder.exists()


def test_a_folder_is_deleted_as_soon_as_files_can_be_opened_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting opens folders: a server at its limit of files would leave it."""
    tries: list[str] = []
    delete = shutil.rmtree

    def rmtree(folder: str | Path, ignore_errors: bool = False) -> None:
        tries.append(str(folder))
        if len(tries) > 2:
            delete(folder, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EMFILE, "Too many open files", str(folder))

    monkeypatch.setattr(shutil, "rmtree", rmtree)

    house.archives.discard(house.folder)

    assert not house.folder.exists()
    assert len(tries) == 3


def test_discarding_waits_for_a_restoration(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is unpacked again would be left behind."""
    real, began, may_end = unpacked_module.unpack, threading.Event(), threading.Event()

    def wait(archive: Path, target: Path, limits: Limits, label: str = "") -> None:
        began.set()
        assert may_end.wait(10)
        real(archive, target, limits, label)

    monkeypatch.setattr(unpacked_module, "unpack", wait)
    shutil.rmtree(house.folder)
    restoring = threading.Thread(target=house.restore)
    restoring.start()
    assert began.wait(10)
    discarding = threading.Thread(target=house.archives.discard, args=(house.folder,))
    discarding.start()
    may_end.set()
    restoring.join(10)
    discarding.join(10)

    assert list(house.folder.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["another user's", "a link"])
def test_a_folder_that_another_user_made_in_its_place_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is no secret and the temporary folder is everybody's; what is in it must not be run."""
    if kind == "a link":
        away = house.folder.rename(house.folder.parent.parent / "away")
        house.folder.symlink_to(away)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: house.folder.stat().st_uid + 1)

    with pytest.raises(BadArchive, match="is no folder of this server's user now"):
        house.restore()


def test_without_a_thread_the_digest_is_computed_all_the_same(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of threads fails no registration."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert house.archives.unpack(house.archive, house.folder.with_name("g"), Limits()) == house.sha256
