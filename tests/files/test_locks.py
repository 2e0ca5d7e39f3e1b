"""Tests for locks on files: who excludes whom, what ends with its process, and that no lock is one of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.files import locks as module
from marserve.files.locks import LockHeld, is_at, lock, locked, open_locked, try_lock

HOLD = """
import sys
from pathlib import Path
from marserve.files.locks import open_locked
assert open_locked(Path(sys.argv[1])) is not None
print("has it", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process_has(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock of a file until it is killed."""
    words = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


def test_a_lock_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    """Until then nothing else gets it, and waiting for it has a bound."""
    path = tmp_path / "lock"
    with another_process_has(path) as process:
        assert open_locked(path) is None
        assert open_locked(path, is_shared=True) is None
        with pytest.raises(LockHeld, match=r"held for 0\.01 s by another process") as held, locked(path, within_s=0.01):
            pytest.fail("it was had twice")
        assert held.value.filename == str(path)
        process.kill()
        process.wait()

        with locked(path, within_s=0.0):
            assert open_locked(path) is None
    descriptor = open_locked(path)

    assert descriptor is not None
    os.close(descriptor)


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    """One that is exchanged for the other kind is that kind from then on."""
    path = tmp_path / "lock"
    first, second = open_locked(path, is_shared=True), open_locked(path, is_shared=True)
    assert first is not None
    assert second is not None

    assert not try_lock(first)
    lock(first, is_shared=True)
    os.close(second)
    assert try_lock(first)
    assert open_locked(path, is_shared=True) is None
    lock(first, is_shared=True)
    third = open_locked(path, is_shared=True)

    assert third is not None
    os.close(first)
    os.close(third)


@pytest.mark.parametrize("is_another_there", [False, True])
def test_the_lock_of_a_file_whose_name_was_deleted_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_another_there: bool
) -> None:
    """Between the opening and the lock another process may delete it, and a third one make it anew."""
    path = tmp_path / "lock"
    real = try_lock

    def delete_first(descriptor: int, *, is_shared: bool = False) -> bool:
        path.unlink()
        if is_another_there:
            path.touch()
        return real(descriptor, is_shared=is_shared)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "try_lock", delete_first)
        assert open_locked(path) is None

    assert len(os.listdir("/proc/self/fd")) == before
    descriptor = open_locked(path)
    assert descriptor is not None
    assert is_at(path, descriptor)
    os.close(descriptor)


def test_a_folder_is_locked_itself(tmp_path: Path) -> None:
    """Without a file in it, as it was made."""
    with locked(tmp_path, within_s=0.0):
        with pytest.raises(LockHeld), locked(tmp_path, within_s=0.0):
            pytest.fail("it was had twice")
        assert list(tmp_path.iterdir()) == []
    with locked(tmp_path, within_s=0.0):
        pass


def test_where_there_are_no_locks_that_is_said_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="No locks available"):
        open_locked(tmp_path / "lock")
    with pytest.raises(OSError, match="No locks available"), locked(tmp_path, within_s=1.0):
        pytest.fail("it is not locked")

    assert len(os.listdir("/proc/self/fd")) == before
