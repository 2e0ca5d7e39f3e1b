"""Tests for the limits on processes, threads and files: which was met, and what is too low for a start."""

from __future__ import annotations

import errno
import resource
import threading
from pathlib import Path

import pytest

from marserve.machine.limits import LEAST_FILES, explain, process_limits, too_low


def system(root: Path, groups: str, **files: str) -> Path:
    """A system whose files say this of control groups; `__` in a name stands for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("pids_", "pids.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"pids_max": "50\n", "pids_current": "50\n"}),
        ("0::/a/b\n", {"a__pids_max": "50\n", "a__pids_current": "50\n", "a__b__pids_max": "max\n"}),
        ("0::/of/the/host\n", {"pids_max": "50\n", "pids_current": "50\n"}),
        ("3:memory:/x\n8:pids:/a\n0::/\n", {"pids__a__pids_max": "50\n", "pids__a__pids_current": "50\n"}),
    ],
)
def test_the_limit_of_a_control_group_is_named(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    """Of the group itself, one above it, a container's own, or version 1's."""
    root = system(tmp_path, groups, **files)

    said = explain(BlockingIOError(errno.EAGAIN, "no"), root)

    assert said == ("the system gives no more processes or threads (pids.max of its control group is 50, 50 are there)")
    assert explain(RuntimeError("can't start new thread"), root) == said


def test_a_group_that_has_room_is_named_beside_the_users_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's other processes have cannot be read."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (70, 80))
    root = system(tmp_path, "0::/\n", pids_max="50\n", pids_current="49\n")

    said = process_limits(root)

    assert said.startswith("pids.max of its control group is 50, 49 are there; RLIMIT_NPROC of user ")
    assert said.endswith(" is 70")


def test_a_system_that_tells_nothing_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is not Linux."""
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    assert process_limits(tmp_path) == "no limit of this process is known, so it may be the machine's own"


def test_errors_of_files_and_memory_are_told_apart() -> None:
    """Any other error is not one of a limit."""
    assert "RLIMIT_NOFILE" in explain(OSError(errno.EMFILE, "many"))
    assert "fs.file-max" in explain(OSError(errno.ENFILE, "many"))
    assert "memory" in explain(OSError(errno.ENOMEM, "none"))
    assert explain(FileNotFoundError(errno.ENOENT, "gone")) == ""
    assert explain(RuntimeError("Event loop is closed")) == ""


def test_a_process_with_room_may_start() -> None:
    """And the threads that were tried have ended."""
    before = threading.active_count()

    assert too_low() == ""

    assert threading.active_count() == before


def test_too_few_files_or_threads_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number that there is and the number that is needed."""
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda limit: (LEAST_FILES - 1, LEAST_FILES))
        assert too_low().startswith(
            f"This process may open {LEAST_FILES - 1} files (RLIMIT_NOFILE), and a server needs"
        )

    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_three(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    assert too_low().startswith("This process gets 3 more threads, and a server needs 24 at least (")
    assert not any(thread.is_alive() for thread in started)
