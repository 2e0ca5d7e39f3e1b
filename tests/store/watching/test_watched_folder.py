"""Claims of `marserve.store.watching.watched_folder`: what lies in a folder of archives, and how changes are
noticed."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.store.sources.source import Broken, Failed
from marserve.store.watching import watched_folder
from marserve.store.watching.sightings import Change, Sightings
from marserve.store.watching.watch import Watch
from marserve.store.watching.watched_folder import FolderNotices, WatchedFolder

LIMIT_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the server runs on."""
    return "asyncio"


def put(root: Path, key: str, content: bytes = b"archive") -> Path:
    """Write a file below the root."""
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def keys(folder: WatchedFolder) -> list[str]:
    """What it lists."""
    return sorted(entry.key for entry in folder.list())


def test_archives_lie_in_the_folder_or_in_folders_of_it(tmp_path: Path) -> None:
    """Flat, by model, by model and version; a folder with a manifest is one object; all else is left out."""
    for key in (
        "flat.mar",
        "Upper.MAR",
        "digits/1.2/digits.mar",
        "digits/2.0/MAR-INF/MANIFEST.json",
        "digits/2.0/handler.py",
        "digits/digits-3.tar.gz",
        "plain/MAR-INF/MANIFEST.json",
        "plain/inner.mar",
        "a/b/c/too_deep.mar",
        ".hidden.mar",
        ".hidden/x.mar",
        "up.mar.part",
        "notes.txt",
    ):
        put(tmp_path, key)

    assert keys(WatchedFolder(tmp_path)) == [
        "Upper.MAR",
        "digits/1.2/digits.mar",
        "digits/2.0/",
        "digits/digits-3.tar.gz",
        "flat.mar",
        "plain/",
    ]


def test_every_change_of_a_file_is_another_content(tmp_path: Path) -> None:
    """Written in place, replaced by a rename, grown: each has another mark; a look alone changes nothing."""
    folder = WatchedFolder(tmp_path)
    path = put(tmp_path, "m.mar", b"one")
    marks = []

    def look() -> None:
        first, second = folder.stat("m.mar"), folder.stat("m.mar")
        assert first is not None
        assert second is not None
        assert first.etag == second.etag
        marks.append(first.etag)

    look()
    path.write_bytes(b"two")
    os.utime(path, ns=(1, time.time_ns() + 1_000_000))
    look()
    put(tmp_path, "other", b"two")
    shutil.copystat(path, tmp_path / "other")
    (tmp_path / "other").rename(path)
    look()
    path.write_bytes(b"longer")
    look()

    assert len(set(marks)) == 4


def test_a_folder_changes_with_any_file_below_it(tmp_path: Path) -> None:
    """A model that is served in place is one object."""
    folder = WatchedFolder(tmp_path)
    put(tmp_path, "m/MAR-INF/MANIFEST.json")
    before = folder.stat("m/")
    put(tmp_path, "m/weights/deep/w.bin")
    after = folder.stat("m/")

    assert before is not None
    assert after is not None
    assert before.etag != after.etag
    assert after.size == 14


def test_links_are_followed_and_dangling_ones_are_not_there(tmp_path: Path) -> None:
    """As with a store whose archives are links into a cache, or a link that is turned to another folder."""
    put(tmp_path, "cache/blob.bin")
    store = tmp_path / "store"
    store.mkdir()
    (store / "m.mar").symlink_to(tmp_path / "cache/blob.bin")
    (store / "gone.mar").symlink_to(tmp_path / "cache/none")
    (store / "loop").symlink_to(store)

    assert keys(WatchedFolder(store)) == ["loop/loop/m.mar", "loop/m.mar", "m.mar"]


def test_a_folder_that_is_not_there_is_no_empty_folder(tmp_path: Path) -> None:
    """Nothing counts as removed because a look failed."""
    with pytest.raises(Broken, match="there is no such folder"):
        WatchedFolder(tmp_path / "none").list()
    put(tmp_path, "file")
    with pytest.raises(Failed, match="it is no folder"):
        WatchedFolder(tmp_path / "file").list()


def test_another_empty_folder_in_its_place_is_not_believed(tmp_path: Path) -> None:
    """A mount that is missing shows the folder below it."""
    store = tmp_path / "store"
    put(store, "m.mar")
    folder = WatchedFolder(store)
    folder.list()
    store.rename(tmp_path / "mounted")
    store.mkdir()

    with pytest.raises(Broken, match="is something not mounted"):
        folder.list()
    store.rmdir()
    (tmp_path / "mounted").rename(store)
    assert keys(folder) == ["m.mar"]
    (store / "m.mar").unlink()
    assert keys(folder) == []


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of the finger (`/`) does not read a whole disk again and again."""
    monkeypatch.setattr(watched_folder, "MOST_FILES", 5)
    for number in range(6):
        put(tmp_path, f"{number}.mar")

    with pytest.raises(Broken, match="more than 5 files"):
        WatchedFolder(tmp_path).list()


def test_notices_end_when_they_are_closed(tmp_path: Path) -> None:
    """The thread goes, and says nothing at its end."""
    noticed, ends = threading.Event(), []
    notices = FolderNotices(tmp_path, noticed.set, ends.append)
    notices.start()

    limit = time.monotonic() + LIMIT_S
    while not noticed.is_set() and time.monotonic() < limit:
        put(tmp_path, "m.mar")
        noticed.wait(0.05)

    assert noticed.is_set()
    assert notices.close()
    assert notices.close()
    assert ends == []


def test_notices_that_cannot_be_had_say_why(tmp_path: Path) -> None:
    """A system that refuses is no reason to end."""
    ended, ends = threading.Event(), []

    def on_end(reason: str) -> None:
        ends.append(reason)
        ended.set()

    notices = FolderNotices(tmp_path / "none", lambda: None, on_end)
    notices.start()

    assert ended.wait(LIMIT_S)
    assert ends
    assert notices.close()


async def _until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not claim():
            await asyncio.sleep(0.005)


@pytest.mark.anyio
async def test_a_new_archive_is_seen_without_waiting_for_the_next_look(tmp_path: Path) -> None:
    """With an interval of an hour; also in a new folder, and when the folder itself is another one."""
    store = tmp_path / "store"
    store.mkdir()
    told: list[Change] = []
    watch = Watch("w", WatchedFolder(store), Sightings(settle_s=0.05, removal_s=0.05), told.extend, interval_s=3600.0)
    task = asyncio.create_task(watch.run())
    try:
        await _until(lambda: watch.describe()["mode"] == "notices")
        put(store, "m.mar")
        await _until(lambda: len(told) == 1)
        put(store, "digits/1.2/digits.mar")
        await _until(lambda: len(told) == 2)
        put(store, "m.mar", b"another")
        await _until(lambda: len(told) == 3)
        (store / "m.mar").unlink()
        await _until(lambda: len(told) == 4)
        # As a volume that is mounted anew, or a link that is turned.
        put(tmp_path / "next", "n.mar")
        store.rename(tmp_path / "before")
        (tmp_path / "next").rename(store)
        watch.look_soon()
        await _until(lambda: len(told) == 6)
        put(store, "late.mar")
        await _until(lambda: len(told) == 7)
    finally:
        task.cancel()
        await asyncio.wait([task])

    assert [(change.kind, change.entry.key) for change in told] == [
        ("added", "m.mar"),
        ("added", "digits/1.2/digits.mar"),
        ("replaced", "m.mar"),
        ("removed", "m.mar"),
        ("added", "n.mar"),
        ("removed", "digits/1.2/digits.mar"),
        ("added", "late.mar"),
    ]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("watch-", "notices-"))]


@pytest.mark.anyio
async def test_without_notices_the_clock_does_it(tmp_path: Path) -> None:
    """Where the system says nothing (a network file system), changes are seen at the next look."""
    told: list[Change] = []
    watch = Watch(
        "w", WatchedFolder(tmp_path), Sightings(), told.extend, interval_s=0.05, notices=False, chance=lambda: 0.5
    )
    task = asyncio.create_task(watch.run())
    try:
        await _until(lambda: watch.looks["done"] >= 1)
        put(tmp_path, "m.mar")
        await _until(lambda: len(told) == 1)
    finally:
        task.cancel()
        await asyncio.wait([task])

    assert watch.describe()["mode"] == "polling"
