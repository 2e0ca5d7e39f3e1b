"""Remembers which files of the model store the server has fetched, so that it deletes those and no others.

A file counts as fetched while it is the very file (inode and time of its last change) with the digest that it was
fetched with: one that was replaced is the operator's, also where it has the same bytes. The record is one file, written
whole or not at all, and read by the next start. It is written before the file gets its name: a crash leaves a record
without a file at worst, and never a fetched file that passes for the operator's.
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
    """What is known of a fetched file; `inode` and `modified_ns` are 0 until it has its name.

    `address` is without the query, which may hold a signature; empty where it is unknown.
    """

    sha256: str
    address: str = ""
    inode: int = 0
    modified_ns: int = 0

    def is_of(self, status: os.stat_result) -> bool:
        """Whether a file is the one that was placed; its bytes count beside that."""
        return not self.inode or (self.inode, self.modified_ns) == (status.st_ino, status.st_mtime_ns)


class FetchedArchives:
    """The record in `folder`; None keeps it for this process alone. All of it may be called from any thread."""

    def __init__(self, folder: Path | None) -> None:
        """Read what an earlier start left. Blocks."""
        self._file = None if folder is None else folder / RECORD
        self._lock = threading.Lock()
        self._files = self._read()

    def knows(self, path: Path) -> bool:
        """Whether a file of this path was fetched; it may have been replaced since."""
        return _key(path) in self._files

    def address_of(self, path: Path) -> str | None:
        """Where a file of this path was fetched from, without the query; empty for unknown, None if it was not."""
        noted = self._files.get(_key(path))
        return None if noted is None else noted.address

    def note(self, path: Path, sha256: str, address: str) -> None:
        """A file with this digest is about to get this name. Blocks.

        Where a file is there already nothing is noted: what comes cannot take its place, and the file may be the
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
        """The file that was noted has got its name: from now on it is that very file. Blocks."""
        with self._lock:
            noted = self._files.get(_key(path))
            if noted is None:
                return
            with contextlib.suppress(OSError):
                status = path.lstat()
                noted.inode, noted.modified_ns = status.st_ino, status.st_mtime_ns
            self._write()

    def delete(self, path: Path) -> bool:
        """Delete a file that was fetched, and is as it was then; says whether it did. Blocks: reads the file."""
        with self._lock:
            noted = self._files.get(_key(path))
            if noted is None:
                return False
            try:
                is_ours = _unlink_if(path, noted)
                if not is_ours:
                    log.info("%s stays: it was replaced after it was fetched", path)
            except FileNotFoundError:  # it could not be placed, or is gone already
                is_ours = False
            except OSError as error:
                log.warning("%s was fetched and cannot be deleted: %s", path, error.strerror)
                return False
            del self._files[_key(path)]
            self._write()
            return is_ours

    def _make_room(self) -> None:
        """Forget the oldest, those first whose file is gone."""
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
            # An earlier version wrote digests alone.
            read = msgspec.json.decode(read_regular(self._file, LARGEST_RECORD), type=dict[str, str | Noted])
            return {path: Noted(noted) if isinstance(noted, str) else noted for path, noted in read.items()}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read (%s): what it names is not deleted", self._file, error)
            return {}

    def _write(self) -> None:
        """Write the record; where that cannot be, this process remembers it all the same."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._file, msgspec.json.encode(self._files), is_durable=True)
        except OSError as error:
            log.warning("%s cannot be written (%s): the next start will not know", self._file, error.strerror)


def _key(path: Path) -> str:
    """The name of a file in the record, whatever folder the server is started in."""
    return os.path.abspath(path)


def _unlink_if(path: Path, noted: Noted) -> bool:
    """Delete a plain file that is the noted one; says whether it did. Raises OSError, where there is none as well."""
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
        now = path.lstat()  # another file may have got its name meanwhile
        if not os.path.samestat(before, now) or now.st_mtime_ns != before.st_mtime_ns:
            return False
    path.unlink()
    return True
