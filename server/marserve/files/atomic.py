"""Writes files and folders whole or not at all: under a hidden name beside their place, and renamed at the end.

A file that is being written is locked, so that `sweep` can distinguish it from leftovers of a crash. All of it blocks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Final

from marserve.files.locks import is_at, lock, try_lock

log = logging.getLogger("marserve.files")

#: On file systems without locks, a file that has not changed for so long is a leftover, in seconds.
UNLOCKABLE_S: Final = 3600.0
# Earlier versions wrote snapshots under the second form.
_PART = re.compile(r"\.(?:[0-9a-f]{16}\.part|[0-9a-f]{32}\.tmp)")
# File systems without hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES})


class Part:
    """A new file in a folder, under a hidden name. Its `descriptor` is open for reading and writing.

    As a context manager it deletes the file if it got no name and was not handed over.
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
            os.close(self.descriptor)  # another process deleted it before it was locked

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def open(self) -> BufferedWriter:
        """A file object that writes into it; closing that leaves the descriptor open."""
        return open(self.descriptor, "wb", closefd=False)

    def replace(self, target: Path, *, is_durable: bool = False) -> None:
        """Replace the file at `target`; a link is replaced itself. Raises OSError.

        `is_durable`: even a power cut leaves the old or the new one whole.
        """
        if is_durable:
            os.fsync(self.descriptor)
        os.replace(self.path, target)
        if is_durable:
            _sync_folder(target.parent)

    def link(self, target: Path, *, is_durable: bool = False) -> None:
        """Give the file the name `target`. Raises FileExistsError if that is taken, and OSError.

        Without hard links it is renamed; two processes that do so at once do not notice each other.
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
        """The descriptor, which the caller has to close."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def discard(self) -> None:
        """Delete the file if it was not handed over. May be called twice; if it fails, `sweep` deletes it later."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self.hand_over())


@contextmanager
def replacing(path: Path, *, mode: int | None = None, is_durable: bool = False) -> Iterator[BufferedWriter]:
    """A file to write, which replaces `path` at the end of the block; if the block raises, nothing is changed.

    `mode` are its permissions, less the umask; None keeps those of the present file. Raises OSError.
    """
    with Part(path.parent, 0o644 if mode is None else mode) as part:
        if mode is None:
            with contextlib.suppress(OSError):
                os.fchmod(part.descriptor, stat.S_IMODE(path.stat().st_mode))
        with part.open() as file:
            yield file
        part.replace(path, is_durable=is_durable)


def replace_file(path: Path, data: bytes, *, mode: int | None = None, is_durable: bool = False) -> os.stat_result:
    """Replace a file by one with this data, as `replacing` does; returns the new file's status. Raises OSError."""
    with replacing(path, mode=mode, is_durable=is_durable) as file:
        file.write(data)
        file.flush()
        return os.fstat(file.fileno())


@contextmanager
def placing(target: Path, *, replaces_folder: bool = False) -> Iterator[Path]:
    """A hidden path beside `target`, where the block makes a file or a folder that gets the name `target` at the end.

    If the block raises, what it made is deleted. A file at `target` is replaced by a file, an empty folder by a folder;
    with `replaces_folder` any folder is, and stays when that fails. Raises OSError.
    """
    partial = target.parent / f".{target.name}.{secrets.token_hex(8)}.part"
    try:
        yield partial
        if replaces_folder and target.is_dir() and not target.is_symlink():
            _replace_folder(partial, target)
        else:
            partial.replace(target)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def _replace_folder(partial: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.old")
    target.rename(aside)
    try:
        partial.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


def sweep(folder: Path, *, unlocked_s: float = 0.0) -> None:
    """Delete files that processes left unfinished in a folder. Files that are being written stay.

    With `unlocked_s` only files that have not changed for so long: not every file system shows other machines' locks.
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
