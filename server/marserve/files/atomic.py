"""Files that are there whole or not at all: written beside their place, hidden, and given their name at the end.

What is being written is locked, so that `sweep` can tell it from what a crash has left. All of it blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Final

from marserve.files.locks import is_at, lock, try_lock

log = logging.getLogger("marserve.files")

#: Where files cannot be locked, one that was written to so long ago is of no living process, in seconds.
UNLOCKABLE_S: Final = 3600.0
# The second one is of earlier versions' snapshots.
_PART = re.compile(r"\.(?:[0-9a-f]{16}\.part|[0-9a-f]{32}\.tmp)")
# File systems without hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES})


class Part:
    """A new file in a folder that has no name of its own yet. Its `descriptor` is open for reading and writing.

    As a context manager it deletes what got no name and was not handed over.
    """

    def __init__(self, folder: Path, mode: int = 0o644) -> None:
        """`mode` are its permissions, less the umask. Raises OSError."""
        while True:
            self.path = folder / f".{secrets.token_hex(8)}.part"
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    lock(self.descriptor)
                if is_at(self.path, self.descriptor):
                    return
            except BaseException:
                self.discard()
                raise
            os.close(self.descriptor)  # another process swept it up before the lock was there

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self) -> BufferedWriter:
        """A file object that writes into it; closing that leaves the descriptor open."""
        return open(self.descriptor, "wb", closefd=False)

    def replace(self, target: Path, *, is_durable: bool = False) -> None:
        """Take the place of what is at `target`, a link itself too. `is_durable`: a power cut, too, leaves one whole.

        Raises OSError.
        """
        if is_durable:
            os.fsync(self.descriptor)
        os.replace(self.path, target)
        if is_durable:
            _sync_folder(target.parent)

    def link(self, target: Path, *, is_durable: bool = False) -> None:
        """Get the name `target` beside its own. Raises FileExistsError where there is one already, and OSError.

        Without hard links it is renamed, and two that do so at once do not see each other.
        """
        if is_durable:
            os.fsync(self.descriptor)
        try:
            os.link(self.path, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            os.rename(self.path, target)
        if is_durable:
            _sync_folder(target.parent)

    def hand_over(self) -> int:
        """The descriptor, now the caller's to close."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def discard(self) -> None:
        """Delete what was not handed over. May be called twice; what cannot be deleted is left to `sweep`."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self.hand_over())


@contextmanager
def replacing(path: Path, *, mode: int | None = None, is_durable: bool = False) -> Iterator[BufferedWriter]:
    """A file to write that takes the place of `path` when the block ends; when the block raises nothing is changed.

    `mode` are its permissions, less the umask; None keeps those of the file that is there. Raises OSError.
    """
    with Part(path.parent, 0o644 if mode is None else mode) as part:
        if mode is None:
            with contextlib.suppress(OSError):
                os.fchmod(part.descriptor, stat.S_IMODE(path.stat().st_mode))
        with part.open() as file:
            yield file
        part.replace(path, is_durable=is_durable)


def replace_file(path: Path, data: bytes, *, mode: int | None = None, is_durable: bool = False) -> os.stat_result:
    """Put a file in the place of another, as `replacing` does; returns what it is. Raises OSError."""
    with replacing(path, mode=mode, is_durable=is_durable) as file:
        file.write(data)
        file.flush()
        return os.fstat(file.fileno())


def sweep(folder: Path, *, unlocked_s: float = 0.0) -> None:
    """Delete what processes that ended early have left in a folder. What is being written stays.

    With `unlocked_s` it must have been untouched for so long: another machine's lock is not seen on every file system.
    """
    for path in folder.glob(".*"):
        if _PART.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _delete_if_left(path, unlocked_s)


def _delete_if_left(path: Path, unlocked_s: float) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            if not try_lock(descriptor) or not is_at(path, descriptor):
                return
        except OSError:
            unlocked_s = UNLOCKABLE_S
        if time.time() - os.fstat(descriptor).st_mtime >= unlocked_s:
            path.unlink()
            log.info("Deleted %s, which a server that ended early left behind", path.name)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
