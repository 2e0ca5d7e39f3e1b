"""Tests for workers' control groups, against a stand-in folder of files in place of the kernel's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from marserve.pool.launchers.cgroups import LEAST_ROOM_BYTES, WorkerCgroup, WorkerCgroups

MIB = 1 << 20


def emptied(folder: Path) -> None:
    """As the kernel does: a group's files are no obstacle to removing it."""
    for file in folder.iterdir():
        file.unlink()


def test_a_worker_gets_a_group_with_its_limit_and_some_room(tmp_path: Path) -> None:
    """Small limits get a fixed room, large ones an eighth; the kernel is to end the group as a whole."""
    groups = WorkerCgroups(tmp_path)

    small, large = groups.make("a/b-1.0-9000/0", 100 * MIB), groups.make("large", 1024 * MIB)

    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    assert small is not None
    assert large is not None
    assert (tmp_path / "a_b-1.0-9000_0/memory.max").read_text() == str(100 * MIB + LEAST_ROOM_BYTES)
    assert (tmp_path / "large/memory.max").read_text() == str(1152 * MIB)
    assert (tmp_path / "large/memory.oom.group").read_text() == "1"


def test_a_process_is_put_into_the_group_and_a_kill_in_it_is_seen(tmp_path: Path) -> None:
    """By the kernel's own count."""
    group = WorkerCgroups(tmp_path).make("w", MIB)
    assert group is not None

    assert group.add(4711)
    assert (tmp_path / "w/cgroup.procs").read_text() == "4711"
    assert not group.was_killed
    (tmp_path / "w/memory.events").write_text("oom 1\noom_kill 1\n")

    assert group.was_killed


def test_a_group_is_removed_with_its_worker(tmp_path: Path) -> None:
    """One that still holds a process stays, which the log says."""
    group = WorkerCgroups(tmp_path).make("w", MIB)
    assert group is not None

    group.remove()
    assert (tmp_path / "w").exists()
    emptied(tmp_path / "w")
    group.remove()

    assert not (tmp_path / "w").exists()


def test_a_folder_that_cannot_be_used_is_told_of_once_and_workers_run_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing one, or one that is a file."""
    with caplog.at_level(logging.WARNING):
        groups = WorkerCgroups(tmp_path / "missing")

    assert [groups.make(name, MIB) for name in "abc"] == [None] * 3
    assert len(caplog.records) == 1
    assert not WorkerCgroup(tmp_path / "missing").add(1)
    (tmp_path / "taken").touch()
    assert WorkerCgroups(tmp_path).make("taken", MIB) is None
