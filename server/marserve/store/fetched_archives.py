"""Remembers which files of the model store the server has fetched, so that it deletes those and no others.

A file counts as fetched while it has the digest that it was fetched with: one that was replaced is the operator's.
The record is one file, written whole or not at all, and read by the next start. It is written before the file gets its
name: a crash leaves a record without a file at worst, and never a fetched file that passes for the operator's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

log = logging.getLogger("marserve.store")

MOST_REMEMBERED = 10_000
RECORD = "fetched-archives.json"
PART = f".{RECORD}.part"

OnPlace = Callable[[Path, str], None]
"""Called with a file and its SHA-256 digest, before the file gets its name in the store, by the thread that fetches."""


class FetchedArchives:
    """The record in `folder`; None keeps it for this process alone. All of it may be called from any thread."""

    def __init__(self, folder: Path | None) -> None:
        """Read what an earlier start left. Blocks."""
        self._file = None if folder is None else folder / RECORD
        self._lock = threading.Lock()
        self._digests = self._read()

    def knows(self, path: Path) -> bool:
        """Whether a file of this path was fetched; it may have been replaced since."""
        return _key(path) in self._digests

    def note(self, path: Path, sha256: str) -> None:
        """A file with this digest is about to get this name. Blocks.

        Where a file is there already nothing is noted: what comes cannot take its place, and the file may be the
        operator's.
        """
        with self._lock:
            if os.path.lexists(path):
                return
            self._digests.pop(_key(path), None)
            self._digests[_key(path)] = sha256
            self._make_room()
            self._write()

    def delete(self, path: Path) -> bool:
        """Delete a file that was fetched, and is as it was then; says whether it did. Blocks: reads the file."""
        with self._lock:
            sha256 = self._digests.get(_key(path))
            if sha256 is None:
                return False
            try:
                is_ours = _unlink_if(path, sha256)
                if not is_ours:
                    log.info("%s stays: it was replaced after it was fetched", path)
            except FileNotFoundError:  # it could not be placed, or is gone already
                is_ours = False
            except OSError as error:
                log.warning("%s was fetched and cannot be deleted: %s", path, error.strerror)
                return False
            del self._digests[_key(path)]
            self._write()
            return is_ours

    def _make_room(self) -> None:
        """Forget the oldest, those first whose file is gone."""
        if len(self._digests) <= MOST_REMEMBERED:
            return
        for path in [path for path in self._digests if not os.path.lexists(path)][:-1]:
            del self._digests[path]
        while len(self._digests) > MOST_REMEMBERED:
            path = next(iter(self._digests))
            log.warning("%s was fetched and will not be deleted: %d others were since", path, MOST_REMEMBERED)
            del self._digests[path]

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read (%s): what it names is not deleted", self._file, error)
            return {}

    def _write(self) -> None:
        """Write the record; where that cannot be, this process remembers it all the same."""
        if self._file is None:
            return
        part = self._file.with_name(PART)  # one name: the next write takes the place of what a crash left
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            with part.open("xb") as file:
                file.write(msgspec.json.encode(self._digests))
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._file)
            _sync_folder(self._file.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            log.warning("%s cannot be written (%s): the next start will not know", self._file, error.strerror)


def _sync_folder(folder: Path) -> None:
    """Have the names in it survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _key(path: Path) -> str:
    """The name of a file in the record, whatever folder the server is started in."""
    return os.path.abspath(path)


def _unlink_if(path: Path, sha256: str) -> bool:
    """Delete a plain file with this digest; says whether it did. Raises OSError, where there is none as well."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if path.is_symlink():
            return False
        raise
    before = os.fstat(descriptor)
    if not stat.S_ISREG(before.st_mode):
        os.close(descriptor)
        return False
    with os.fdopen(descriptor, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
        now = path.lstat()  # another file may have got its name meanwhile
        if not os.path.samestat(before, now) or now.st_mtime_ns != before.st_mtime_ns:
            return False
    path.unlink()
    return True
