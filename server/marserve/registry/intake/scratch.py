"""A server's own folder for extracted archives; removes the folders of servers that were killed before they cleaned up.

Each folder holds a file that its server keeps locked as long as it lives; the kernel releases the lock however the
server ends. A folder whose lock is free belongs to no server, and the next server that starts removes it.
The folder itself has a shared lock: systemd's cleaner of temporary folders leaves a locked folder and all below it,
however old.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from marserve.files.locks import lock, try_lock

log = logging.getLogger("marserve.registry")

PREFIX = "marserve-"
LOCK = "server.lock"


class Scratch:
    """A private folder below `parent` (None: the system's temporary folder). `remove()` deletes it."""

    def __init__(self, parent: Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        lock(self._lock)
        self._mark = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # without such locks the cleaner cannot ask for them either
            lock(self._mark, is_shared=True)

    def remove(self) -> None:
        """Delete the folder and what is in it. May be called twice."""
        with contextlib.suppress(OSError):
            _delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._mark)
            self._lock = self._mark = -1


def _delete(folder: Path) -> bool:
    """Delete what can be deleted, the lock last; False if something stays, with the lock.

    Whatever stays, because a process was killed here too, a later start finds by the lock.
    """
    others = [path for path in folder.iterdir() if path.name != LOCK]
    for path in others:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if any(path.exists() for path in others):
        return False
    shutil.rmtree(folder)
    return True


def remove_orphans(parent: Path | None) -> list[Path]:
    """Delete the folders below `parent` whose servers have ended; returns them. Blocks, so not for the event loop."""
    removed = []
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another kind of folder, another user's, or just being deleted
            continue
        try:
            with contextlib.suppress(OSError):
                if try_lock(descriptor) and _delete(folder):  # without the lock: its server lives
                    removed.append(folder)
        finally:
            os.close(descriptor)
    if removed:
        log.info("removed %d folders that servers left when they were killed", len(removed))
    return removed
