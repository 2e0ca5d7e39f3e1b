"""Tests for files that are there whole or not at all: after errors, after crashes, and beside other writers."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marserve.files import atomic as module
from marserve.files import locks
from marserve.files.atomic import Part, placing, replace_file, replacing, sweep


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


def refuse(number: int) -> object:
    """A call of the system that fails so."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_takes_the_place_of_another_and_keeps_its_permissions(tmp_path: Path) -> None:
    """A new one has the usual ones or those asked for; what is returned is the new file."""
    path = tmp_path / "f"
    before = os.umask(0o027)
    try:
        replace_file(path, b"first")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        second = replace_file(path, b"second")
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
        assert os.path.samestat(second, path.stat())
        replace_file(path, b"third", mode=0o600)
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (second.st_size, path.read_bytes(), names(tmp_path)) == (6, b"third", ["f"])


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """Another user may have put it there, to have a secret written elsewhere."""
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "f").symlink_to("theirs")

    replace_file(tmp_path / "f", b"secret", mode=0o600)

    assert not (tmp_path / "f").is_symlink()
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_an_error_while_it_is_written_changes_nothing(tmp_path: Path) -> None:
    """Also where bytes are out already; the descriptor is closed."""
    path = tmp_path / "f"
    path.write_bytes(b"first")
    before = len(os.listdir("/proc/self/fd"))

    def fail() -> bytes:
        raise RuntimeError

    with pytest.raises(RuntimeError), replacing(path) as file:
        file.writelines(b"x" * 100_000 if number else fail() for number in (1, 0))

    assert (names(tmp_path), path.read_bytes()) == (["f"], b"first")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whichever step meets it."""
    path = tmp_path / "f"
    path.write_bytes(b"first")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, b"second", is_durable=True)

    assert (names(tmp_path), path.read_bytes()) == (["f"], b"first")


def test_what_can_be_neither_kept_nor_deleted_is_said_by_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fail for one reason, such as a disk that became read-only; what is left is swept up later."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse(errno.EROFS))
        patch.setattr(os, "unlink", refuse(errno.EACCES))
        with pytest.raises(OSError, match="Read-only"):
            replace_file(tmp_path / "f", b"second")
    assert len(names(tmp_path)) == 1

    sweep(tmp_path)

    assert names(tmp_path) == []


def test_a_durable_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the name is before the call returns."""
    steps: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size}")
        real_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        steps.append("name")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)

    replace_file(tmp_path / "f", b"12345", is_durable=True)
    replace_file(tmp_path / "f", b"12345")

    assert steps == ["file of 5", "name", "folder", "name"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_name_never_takes_anothers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Mounted buckets have no hard links."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    for content in (b"first", b"second"):
        with Part(tmp_path, 0o600) as part:
            with part.open() as file:
                file.write(content)
            if content == b"first":
                part.link(tmp_path / "f", is_durable=True)
            else:
                with pytest.raises(FileExistsError):
                    part.link(tmp_path / "f")

    assert (names(tmp_path), (tmp_path / "f").read_bytes()) == (["f"], b"first")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600


def test_another_failure_to_get_a_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming would be no better."""
    monkeypatch.setattr(os, "link", refuse(errno.EIO))

    with Part(tmp_path) as part, pytest.raises(OSError, match="Input/output"):
        part.link(tmp_path / "f")

    assert names(tmp_path) == []


def test_what_was_handed_over_stays(tmp_path: Path) -> None:
    """It is the taker's to close and to delete."""
    with Part(tmp_path) as part:
        descriptor = part.hand_over()

    assert os.path.samestat(part.path.stat(), os.fstat(descriptor))
    os.close(descriptor)


WRITE = """
import os, signal, sys
from pathlib import Path
from marserve.files import atomic

def stop(source, target):
    print(source, flush=True)
    sys.stdin.read()

os.replace = stop
atomic.replace_file(Path(sys.argv[1]) / "f", b"half")
"""


def test_what_a_crash_has_left_is_swept_up_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    """However long that takes; with an age, nothing that is younger."""
    (tmp_path / "f").write_bytes(b"first")
    words = [sys.executable, "-c", WRITE, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        part = Path(process.stdout.readline().strip())
        os.utime(part, (1e9, 1e9))
        sweep(tmp_path)
        assert part.exists()
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "f").read_bytes() == b"first"

    now = time.time()
    os.utime(part, (now, now))
    sweep(tmp_path, unlocked_s=60.0)
    assert part.exists()
    os.utime(part, (now - 61, now - 61))
    sweep(tmp_path, unlocked_s=60.0)

    assert names(tmp_path) == ["f"]


def test_only_files_with_our_names_are_swept_up(tmp_path: Path) -> None:
    """Those of earlier versions too; a folder, a link and a pipe with such a name are none of ours."""
    ours = [f".{'a' * 16}.part", f".{'a' * 32}.tmp"]
    others = ["f", ".hidden.part", ".mine.tmp", f".{'A' * 16}.part", f"{'a' * 16}.part"]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    (tmp_path / f".{'b' * 16}.part").mkdir()
    (tmp_path / f".{'c' * 16}.part").symlink_to("f")
    before = names(tmp_path)

    sweep(tmp_path)

    assert set(before) - set(names(tmp_path)) == set(ours)


def test_where_there_are_no_locks_only_what_is_old_is_swept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none; files are replaced there all the same."""
    monkeypatch.setattr(locks.fcntl, "flock", refuse(errno.ENOLCK))
    old, new = (tmp_path / f".{letter * 16}.part" for letter in "ab")
    for path in (old, new):
        path.touch()
    os.utime(old, (1e9, 1e9))

    sweep(tmp_path)
    replace_file(tmp_path / "f", b"whole")

    assert names(tmp_path) == [new.name, "f"]


def test_a_file_that_is_swept_up_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may come between the two."""
    swept: list[str] = []
    real = module.lock

    def sweep_first(descriptor: int) -> None:
        if not swept:
            swept.extend(names(tmp_path))
            sweep(tmp_path)
        real(descriptor)

    monkeypatch.setattr(module, "lock", sweep_first)

    with Part(tmp_path) as part:
        assert [part.path.name] == names(tmp_path)
        assert part.path.name not in swept


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    """It takes the place of an empty folder, and of one with files only when that is asked for."""
    target = tmp_path / "m"
    target.mkdir()

    for text, replaces_folder in (("1", False), ("2", True)):
        with placing(target, replaces_folder=replaces_folder) as partial:
            partial.mkdir()
            (partial / "f").write_text(text)
            assert not (target / "f").exists() or (target / "f").read_text() != text
        assert (target / "f").read_text() == text
    with pytest.raises(OSError, match="not empty"), placing(target) as partial:
        partial.mkdir()

    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (target / "f").read_text() == "2"


def test_an_error_leaves_the_folder_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the block, or when the new one cannot get its name after the old one was moved aside."""
    target = tmp_path / "m"
    target.mkdir()
    (target / "f").write_text("old")

    def fail_half_way() -> None:
        with placing(target, replaces_folder=True) as partial:
            partial.mkdir()
            (partial / "f").write_text("new")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        fail_half_way()
    rename = Path.rename

    def refuse_new(path: Path, to: Path) -> Path:
        if path.name.endswith(".part"):
            raise OSError("no room")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="no room"), placing(target, replaces_folder=True) as partial:
        partial.mkdir()

    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (target / "f").read_text() == "old"
