"""Tests for folders that processes share: made once, whole or not there, and never deleted while they are in use."""

from __future__ import annotations

import fcntl
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from marserve.files import leased_folders as module
from marserve.files.leased_folders import (
    Lease,
    LeasedFolders,
    bytes_below,
    discard,
    find_stranger,
    tag_as_cache,
)


def make(folders: LeasedFolders, name: str, content: bytes = b"x" * 100) -> Lease:
    """A folder with one file, and a shared lease of it."""
    lease = folders.lease(name)
    assert lease is not None
    assert lease.is_exclusive
    staged = folders.stage(name)
    (staged / "whole").mkdir()
    (staged / "whole" / "f").write_bytes(content)
    folders.publish(staged / "whole", name)
    discard(staged)
    assert folders.share(lease)
    return lease


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path: Path) -> LeasedFolders:
    """Folders that are made beside each other."""
    return LeasedFolders(tmp_path, bytes_below, suffix=".tmp", beside=(".log",))


def test_what_is_whole_is_shared_and_what_is_missing_is_one_holders_to_make(
    folders: LeasedFolders, tmp_path: Path
) -> None:
    """As others find it: until it is made nobody else gets a lease, then all do."""
    others = LeasedFolders(tmp_path, bytes_below, suffix=".tmp")
    first = folders.lease("a")
    assert first is not None
    assert others.lease("a") is None
    first.release()

    mine, theirs = make(folders, "a"), others.lease("a")

    assert theirs is not None
    assert (mine.is_exclusive, theirs.is_exclusive) == (False, False)
    assert (theirs.folder / "f").read_bytes() == b"x" * 100
    mine.release()
    mine.release()
    theirs.release()
    assert names(tmp_path) == ["a", "a.lock"]


def test_what_was_not_made_leaves_nothing(folders: LeasedFolders, tmp_path: Path) -> None:
    """Its lock file goes as well; the next holder makes another."""
    lease = folders.lease("a")
    assert lease is not None
    staged = folders.stage("a")
    assert stat.S_IMODE(staged.stat().st_mode) == 0o700

    discard(staged)
    lease.release()

    assert names(tmp_path) == []
    make(folders, "a").release()


def test_what_is_not_whole_is_made_anew(tmp_path: Path) -> None:
    """Whatever befell the disk."""
    folders = LeasedFolders(tmp_path, bytes_below, is_whole=lambda folder: (folder / "f").exists())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rest").touch()

    make(folders, "a").release()

    assert names(tmp_path / "a") == ["f"]


CRASH = """
import os, sys
from pathlib import Path
from marserve.files.leased_folders import LeasedFolders, bytes_below
folders = LeasedFolders(Path(sys.argv[1]), bytes_below, suffix=".tmp")
lease = folders.lease("a")
(folders.stage("a") / "half").touch()
if sys.argv[2] == "child":
    os.set_inheritable(lease.descriptor, True)
    if os.fork() == 0:
        os.read(0, 1)
        os._exit(0)
os._exit(9)
"""


def test_a_crash_leaves_nothing_half_and_the_next_maker_clears_up(folders: LeasedFolders, tmp_path: Path) -> None:
    """What another process makes meanwhile is left alone."""
    subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), "alone"], check=False)
    (tmp_path / "b.x.tmp").mkdir()
    other = folders.lease("b")
    assert other is not None
    left = [name for name in names(tmp_path) if name.startswith("a.")]
    assert len(left) == 2

    lease = folders.lease("a")
    assert lease is not None
    staged = folders.stage("a")

    assert [name for name in names(tmp_path) if name.endswith(".tmp")] == [staged.name, "b.x.tmp"]
    discard(staged)
    lease.release()
    assert folders.prune(math.inf).left == []
    other.release()
    assert folders.prune(math.inf).left == ["b"]
    assert names(tmp_path) == []


def test_a_child_that_outlives_its_server_keeps_the_lease(folders: LeasedFolders, tmp_path: Path) -> None:
    """An installation may still write; others wait until it has ended."""
    words = [sys.executable, "-c", CRASH, str(tmp_path), "child"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 9
        assert folders.lease("a") is None
        assert folders.prune(0).left == []
        assert process.stdin is not None
        process.stdin.write(b".")
    while (lease := folders.lease("a")) is None:
        pass

    assert lease.is_exclusive
    lease.release()


def test_the_longest_unused_go_first_and_what_is_used_stays(folders: LeasedFolders, tmp_path: Path) -> None:
    """Only as many as must; what is said beside a folder goes with it."""
    leases = {name: make(folders, name) for name in "abcd"}
    for age, name in enumerate("dabc"):
        (tmp_path / f"{name}.log").touch()
        os.utime(tmp_path / f"{name}.lock", (1000 + age, 1000 + age))
    for name in "abc":
        leases[name].release()

    assert folders.prune(400).unused == []
    assert folders.prune(399).unused == ["a"]
    assert folders.prune(0).unused == ["b", "c"]

    assert names(tmp_path) == ["d", "d.lock", "d.log"]
    leases["d"].release()


def test_a_lease_is_a_use(folders: LeasedFolders, tmp_path: Path) -> None:
    """What was made first and used last stays."""
    for name in "ab":
        make(folders, name).release()
        os.utime(tmp_path / f"{name}.lock", (1000, 1000))
    again = folders.lease("a")
    assert again is not None
    again.release()

    assert folders.prune(100).unused == ["b"]


def test_what_is_no_such_folder_is_left_alone(tmp_path: Path) -> None:
    """However little there may be."""
    (tmp_path / "staging").mkdir()
    folders = LeasedFolders(
        tmp_path, lambda folder: None if folder.name == "staging" else 1, staging=tmp_path / "staging"
    )
    make(folders, "a").release()
    (tmp_path / "notes.txt").touch()

    assert folders.prune(0).unused == ["a"]

    assert names(tmp_path) == ["notes.txt", "staging"]
    assert names(tmp_path / "staging") == []


def test_what_is_deleted_before_it_is_shared_is_told(folders: LeasedFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanging a lock ends it for a moment; the lease has ended then, and its maker asks again."""
    lease = folders.lease("a")
    assert lease is not None
    staged = folders.stage("a")
    folders.publish(staged, "a")
    real = module.try_lock

    def late(descriptor: int, *, is_shared: bool) -> bool:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # what the kernel does first
        assert LeasedFolders(folders.folder, bytes_below, suffix=".tmp").prune(-1).unused == ["a"]
        return real(descriptor, is_shared=is_shared)

    monkeypatch.setattr(module, "try_lock", late)

    assert not folders.share(lease)
    assert lease.descriptor < 0
    again = folders.lease("a")
    assert again is not None
    assert again.is_exclusive
    again.release()


def test_a_disk_without_room_for_a_lock_deletes_nothing(
    folders: LeasedFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asking for a lease says so."""
    (tmp_path / "a").mkdir()

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "open", full)

    assert folders.prune(-1).unused == []
    with pytest.raises(OSError, match="No space left"):
        folders.lease("a")


def test_a_folder_that_others_may_write_is_said_to_be_strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would run what they put there; what root put there is not strange."""
    assert find_stranger(tmp_path) is None
    assert find_stranger(tmp_path / "missing") is None
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    if os.stat(tmp_path).st_uid:
        assert find_stranger(tmp_path) == "it belongs to another user"
    tmp_path.chmod(0o707)

    assert find_stranger(tmp_path) == "others on this machine may write there"


def test_a_cache_is_tagged_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without room leaves no empty tag, which would stay so for good."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            tag_as_cache(tmp_path, "Things.")
    assert names(tmp_path) == []

    tag_as_cache(tmp_path, "Things.")
    tag_as_cache(tmp_path, "Other things.")

    assert (tmp_path / "CACHEDIR.TAG").read_text() == "Signature: 8a477f597d28d172789f06886806bc55\n# Things.\n"
