"""Tests for digests that are computed once for each state of a file."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from marserve.files import digests as digests_module
from marserve.files.digests import MOST_KEPT, STEP_S, FileDigests, digest_of
from marserve.files.regular import NotRegular


class Clock:
    """A clock that is ahead of the system's by so many seconds."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        """The time, in seconds."""
        return time.time() + self.ahead_s


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file."""
    path = tmp_path / "m.mar"
    path.write_bytes(b"first")
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each file that was hashed."""
    seen: list[str] = []
    real = hashlib.sha256

    def count(*given: Any) -> Any:
        seen.append("")
        return real(*given)

    monkeypatch.setattr(digests_module.hashlib, "sha256", count)
    return seen


def sha256(data: bytes) -> str:
    """The digest, as the standard library computes it."""
    return hashlib.new("sha256", data).hexdigest()


def test_a_digest_is_of_a_regular_file_alone(file: Path, tmp_path: Path) -> None:
    """A named pipe in its place is refused, and not waited for."""
    os.mkfifo(tmp_path / "pipe")

    assert digest_of(file) == sha256(b"first")
    for look in (digest_of, FileDigests().of):
        with pytest.raises(NotRegular):
            look(tmp_path / "pipe")
        with pytest.raises(FileNotFoundError):
            look(tmp_path / "missing")


def test_a_file_is_hashed_once(file: Path, hashed: list[str]) -> None:
    """Also under another name: it is the same file."""
    digests = FileDigests(Clock(60.0))
    assert digests.known(file) is None

    found = [digests.of(file), digests.of(file), digests.known(file)]
    other = file.with_name("other")
    os.link(file, other)  # which changes the time of its last change
    found += [digests.of(other), digests.of(file)]

    assert found == [sha256(b"first")] * 5
    assert len(hashed) == 2


@pytest.mark.parametrize("how", ["in place", "in place, with its old time", "replaced", "cut"])
def test_a_file_that_was_changed_is_hashed_again(file: Path, how: str) -> None:
    """Though its name, size and time may be the same."""
    digests = FileDigests(Clock(60.0))
    before = file.stat()
    digests.of(file)
    while time.time_ns() <= before.st_ctime_ns + 20_000_000:  # a step of the file system's clock
        pass

    if how == "cut":
        os.truncate(file, 2)
    elif how == "replaced":
        file.with_name("new").write_bytes(b"other")
        file.with_name("new").replace(file)
    else:
        file.write_bytes(b"other")
        if how != "in place":
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert digests.known(file) is None
    assert digests.of(file) == sha256(b"fi" if how == "cut" else b"other")


@pytest.mark.parametrize(("ahead_s", "times"), [(0.0, 2), (STEP_S / 2, 2), (STEP_S * 2, 1)])
def test_a_file_that_was_changed_a_moment_ago_is_hashed_again(
    file: Path, hashed: list[str], ahead_s: float, times: int
) -> None:
    """A second change may have the same time."""
    digests = FileDigests(Clock(ahead_s))

    assert [digests.of(file), digests.of(file)] == [sha256(b"first")] * 2
    assert len(hashed) == times


def test_a_file_that_changes_while_it_is_hashed_is_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is of neither state."""
    digests = FileDigests(Clock(60.0))
    real = hashlib.sha256

    def change(*given: Any) -> Any:
        file.write_bytes(b"longer than before")
        return real(*given)

    monkeypatch.setattr(digests_module.hashlib, "sha256", change)
    digests.of(file)

    assert digests.known(file) is None


def test_what_nothing_needs_any_more_is_left(file: Path) -> None:
    """And a digest of half a file is not kept."""
    digests, is_vain = FileDigests(Clock(60.0)), threading.Event()
    is_vain.set()

    assert digests.of(file, is_vain) == ""
    assert digests.known(file) is None


def test_the_oldest_digests_are_forgotten(file: Path) -> None:
    """A server that runs for years holds no digest of every archive it saw."""
    digests = FileDigests(Clock(60.0))
    digests.of(file)

    for number in range(MOST_KEPT):
        digests._keep((number,), "x")

    assert len(digests._known) == MOST_KEPT
    assert digests.known(file) is None
