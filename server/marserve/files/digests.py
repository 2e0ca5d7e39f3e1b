"""SHA-256 digests of files, computed once for each state of a file.

Hashing a gigabyte takes seconds, and several parts need the digest of one archive: an address that names it, a list of
trusted digests, the record of a folder's archive. A state is device, inode, size and the times of the last change in
nanoseconds. A file that was changed just before its digest was computed is hashed again next time: file systems count
time in steps, so another change within the same step would have the same time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from marserve.files.regular import open_regular

# The coarsest step of time in file systems that servers use.
STEP_S = 2.0
MOST_KEPT = 1000
_PIECE_BYTES = 1024 * 1024

State = tuple[int, ...]


def digest_of(path: Path) -> str:
    """The digest of a file as it is now. Blocks. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_of(found: os.stat_result) -> State:
    """The state of a file, which differs after every change."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FileDigests:
    """The known digests, for any thread. `now` is the system's clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[State, str] = {}

    def known(self, path: Path) -> str | None:
        """The digest of the file as it is now, None if it was not computed yet. Raises OSError."""
        return self._known.get(state_of(path.stat()))

    def of(self, path: Path, is_vain: threading.Event | None = None) -> str:
        """The digest of a file; empty if `is_vain` was set meanwhile. Blocks. Raises OSError."""
        with open_regular(path) as file:
            state, begun = state_of(os.fstat(file.fileno())), self._now()
            known = self._known.get(state)
            if known is not None:
                return known
            digest = hashlib.sha256()
            while piece := file.read(_PIECE_BYTES):
                if is_vain is not None and is_vain.is_set():
                    return ""
                digest.update(piece)
            if state_of(os.fstat(file.fileno())) == state and max(state[3:]) / 1e9 < begun - STEP_S:
                self._keep(state, digest.hexdigest())
            return digest.hexdigest()

    def _keep(self, state: State, digest: str) -> None:
        with self._lock:
            while len(self._known) >= MOST_KEPT:
                del self._known[next(iter(self._known))]
            self._known[state] = digest
