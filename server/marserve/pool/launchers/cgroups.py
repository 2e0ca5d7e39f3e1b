"""A control group (cgroup v2) for each worker, in a folder that the operator handed over: the kernel's memory limit.

It counts what a process limit does not: shared memory, page cache, child processes. When it is reached the kernel ends
the whole group and counts that in `memory.events`, which makes the cause certain. Knows only a worker's name and
process id. If a group cannot be made or written the worker runs without one, and the log says so once.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from marserve.pool.worker_end.memory import count_oom_kills

log = logging.getLogger("marserve.pool")

# Room for the interpreter and the page cache, which the limit of a worker's own memory leaves out.
LEAST_ROOM_BYTES = 64 << 20


class WorkerCgroup:
    """One worker's group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> bool:
        """Put a process into the group, and with it the processes that it starts from now on. False if refused."""
        try:
            (self._folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            log.warning("worker %d could not be put into its control group: %s", pid, error)
            return False
        return True

    @property
    def was_killed(self) -> bool:
        """Whether the kernel killed this group for want of memory."""
        try:
            return count_oom_kills((self._folder / "memory.events").read_text()) > 0
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the group; one that still has processes is left behind."""
        try:
            self._folder.rmdir()
        except OSError as error:
            log.warning("control group %s could not be removed: %s", self._folder.name, error)


class WorkerCgroups:
    """Groups below `root`, which must be a cgroup v2 folder that the server may write and that holds no process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_usable = True
        try:
            (root / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            self._give_up(error)

    def make(self, name: str, limit_bytes: int) -> WorkerCgroup | None:
        """A new group whose processes may hold `limit_bytes` and some room; None if it cannot be made."""
        if not self._is_usable:
            return None
        folder = self._root / re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        try:
            folder.mkdir(exist_ok=True)
            (folder / "memory.max").write_text(str(limit_bytes + max(LEAST_ROOM_BYTES, limit_bytes // 8)))
            (folder / "memory.oom.group").write_text("1")
        except OSError as error:
            self._give_up(error)
            return None
        return WorkerCgroup(folder)

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        log.warning("workers run without control groups: %s cannot be used: %s", self._root, error)
