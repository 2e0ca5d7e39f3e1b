"""Remembers which files of the model store the server has fetched, so that it deletes those and no others.

A file counts as fetched while its inode, its time of change and its digest are those of the fetch. A file that replaced
it belongs to the operator, even with the same bytes. The record is one file, written whole or not at all, and read by
the next start. It is written before the file gets its name: a crash may leave a record without a file, but never a
fetched file without a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from pathlib import Path

import msgspec

from marserve.files.atomic import replace_file, sweep
from marserve.files.regular import read_regular

log = logging.getLogger("marserve.store")

MOST_REMEMBERED = 10_000
RECORD = "fetched-archives.json"
LARGEST_RECORD = 64 << 20


class Noted(msgspec.Struct):
    """The record of a fetched file; `inode` and `modified_ns` are 0 until it has its name.

    `address` is without the query, which may hold a signature; empty if unknown.
    """

    sha256: str
    address: str = ""
    inode: int = 0
    modified_ns: int = 0

    def is_of(self, status: os.stat_result) -> bool:
        """Whether a file is the one that was placed, by inode and time; its digest is compared elsewhere."""
        return not self.inode or (self.inode, self.modified_ns) == (status.st_ino, status.st_mtime_ns)


class FetchedArchives:
    """The record in `folder`; with None it is only in memory. All methods may be called from any thread."""

    def __init__(self, folder: Path | None) -> None:
        """Read the record of an earlier start. Blocks."""
        self._file = None if folder is None else folder / RECORD
        self._lock = threading.Lock()
        self._files = self._read()

    def knows(self, path: Path) -> bool:
        """Whether a file of this path was fetched; it may have been replaced since."""
        return _key(path) in self._files

    def address_of(self, path: Path) -> str | None:
        """The address, without its query, that a file of this path was fetched from; empty if unknown.

        None if it was not fetched.
        """
        noted = self._files.get(_key(path))
        return None if noted is None else noted.address

    def note(self, path: Path, sha256: str, address: str) -> None:
        """Record that a file with this digest is about to get this name. Blocks.

        If there is such a file already, nothing is recorded: a fetched file never replaces it, and it may be the
        operator's.
        """
        with self._lock:
            if os.path.lexists(path):
                return
            self._files.pop(_key(path), None)
            self._files[_key(path)] = Noted(sha256, address)
            self._make_room()
            self._write()

    def placed(self, path: Path) -> None:
        """Record the inode and the time of a noted file that has got its name. Blocks."""
        with self._lock:
            noted = self._files.get(_key(path))
            if noted is None:
                return
            with contextlib.suppress(OSError):
                status = path.lstat()
                noted.inode, noted.modified_ns = status.st_ino, status.st_mtime_ns
            self._write()

    def delete(self, path: Path) -> bool:
        """Delete a file that was fetched and has not changed since; returns whether it did. Reads the file; blocks."""
        with self._lock:
            noted = self._files.get(_key(path))
            if noted is None:
                return False
            try:
                is_ours = _unlink_if(path, noted)
                if not is_ours:
                    log.info("%s stays: it was replaced after it was fetched", path)
            except FileNotFoundError:  # it was not placed, or is deleted already
                is_ours = False
            except OSError as error:
                log.warning("%s was fetched and cannot be deleted: %s", path, error.strerror)
                return False
            del self._files[_key(path)]
            self._write()
            return is_ours

    def forget(self, path: Path) -> None:
        """Another file has this name now, which is never deleted. Blocks."""
        with self._lock:
            if self._files.pop(_key(path), None) is not None:
                self._write()

    def _make_room(self) -> None:
        """Forget the oldest records, first of all those whose file was deleted."""
        if len(self._files) <= MOST_REMEMBERED:
            return
        for path in [path for path in self._files if not os.path.lexists(path)][:-1]:
            del self._files[path]
        while len(self._files) > MOST_REMEMBERED:
            path = next(iter(self._files))
            log.warning("%s was fetched and will not be deleted: %d others were since", path, MOST_REMEMBERED)
            del self._files[path]

    def _read(self) -> dict[str, Noted]:
        if self._file is None:
            return {}
        sweep(self._file.parent)
        try:
            # An earlier version of the server wrote only digests.
            read = msgspec.json.decode(read_regular(self._file, LARGEST_RECORD), type=dict[str, str | Noted])
            return {path: Noted(noted) if isinstance(noted, str) else noted for path, noted in read.items()}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read (%s): what it names is not deleted", self._file, error)
            return {}

    def _write(self) -> None:
        """Write the record; if that fails, it is still in memory."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, msgspec.json.encode(self._files), is_durable=True)
        except OSError as error:
            log.warning("%s cannot be written (%s): the next start will not know", self._file, error.strerror)


def _key(path: Path) -> str:
    """The name of a file in the record, the same for any folder that the server is started in."""
    return os.path.abspath(path)


def _unlink_if(path: Path, noted: Noted) -> bool:
    """Delete a plain file that is the noted one; returns whether it did. Raises OSError, also for a missing file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            return False
        raise
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode) or not noted.is_of(before):
        os.close(descriptor)
        return False
    with os.fdopen(descriptor, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != noted.sha256:
            return False
        now = path.lstat()  # another file may have got this name meanwhile
        if not os.path.samestat(before, now) or now.st_mtime_ns != before.st_mtime_ns:
            return False
    path.unlink()
    return True
