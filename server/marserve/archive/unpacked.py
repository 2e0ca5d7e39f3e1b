"""Folders of unpacked archives, and how what was deleted from one is unpacked again.

Cleaners of temporary folders delete what is old, file by file, while a server may use it for months. Each folder is
noted with its archive, the archive's SHA-256 digest and the names in it. `restore` looks whether all names are there,
and takes those that are missing from the archive, if its digest is the same. A file that is there is left alone:
a handler may have written it.

Everything here blocks; threads may call it at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from marserve.archive.reader import MIB, Limits, unpack
from marserve.errors import BadArchive
from marserve.regular_files import open_regular

log = logging.getLogger("marserve.archive")


@dataclass(slots=True)
class _Noted:
    """What a folder was unpacked from. `names` are relative, a folder's before those in it."""

    archive: Path
    sha256: str
    limits: Limits
    names: tuple[str, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_discarded: bool = False


class UnpackedArchives:
    """The folders that a server unpacked and has not deleted yet."""

    def __init__(self) -> None:
        self._noted: dict[str, _Noted] = {}

    def unpack(self, archive: Path, folder: Path, limits: Limits) -> str:
        """Unpack an archive into a new folder and note it; returns its SHA-256 digest. Raises as `reader.unpack`.

        The digest is computed meanwhile. It is empty if the archive was replaced or changed meanwhile.
        """
        before = _identity(archive)
        digesting = _Digesting(archive)
        try:
            unpack(archive, folder, limits)
        except BaseException:
            digesting.is_vain.set()
            raise
        sha256 = digesting.wait()
        if _identity(archive) != before:
            sha256 = ""
        self._noted[str(folder)] = _Noted(archive.resolve(), sha256, limits, tuple(_names(folder)))
        return sha256

    def discard(self, folder: Path) -> None:
        """Delete a folder. May be called twice; waits for a `restore` of it."""
        noted = self._noted.pop(str(folder), None)
        if noted is None:
            shutil.rmtree(folder, ignore_errors=True)
            return
        with noted.lock:
            noted.is_discarded = True
            shutil.rmtree(folder, ignore_errors=True)

    def restore(self, folder: str) -> None:
        """Unpack again what is missing from this folder; does nothing for one that was not unpacked here.

        Raises BadArchive where that cannot be, with the reason, and OSError when reading or writing fails.
        """
        noted = self._noted.get(folder)
        if noted is None:
            return
        with noted.lock:
            if noted.is_discarded:
                return
            target = Path(folder)
            _refuse_strangers(target)
            missing = [name for name in noted.names if not os.path.lexists(os.path.join(folder, name))]
            if missing:
                _unpack_again(noted, target, missing)


class _Digesting:
    """Computes a file's digest beside the caller; after it where the system gives no thread."""

    def __init__(self, path: Path) -> None:
        self.is_vain = threading.Event()
        self._path = path
        self._found: str | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="digest", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None

    def wait(self) -> str:
        """The digest. Raises OSError when reading fails."""
        if self._thread is not None:
            self._thread.join()
        return self._found if self._found is not None else _digest(self._path)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # `wait` tries again, and raises
            self._found = _digest(self._path, self.is_vain)


def _unpack_again(noted: _Noted, folder: Path, missing: Collection[str]) -> None:
    archive, count = noted.archive, f"{len(missing)} of {len(noted.names)}"
    what = f"{count} files and folders that were unpacked from {archive.name} have been deleted from {folder}"
    _compare(noted, what)
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    again = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.again"
    try:
        unpack(archive, again, noted.limits)
        _compare(noted, what)  # it may have been replaced since it was looked at
        for name in missing:
            source, target = again / name, folder / name
            if source.is_dir():
                target.mkdir(exist_ok=True)
            else:
                source.rename(target)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    log.warning("%s, and were unpacked again; a cleaner of temporary folders should leave this one out", what)


def _compare(noted: _Noted, what: str) -> None:
    """Raise BadArchive where the archive is gone, or is not the one that was unpacked."""
    if not noted.sha256:
        raise BadArchive(
            f"{what}, and cannot be unpacked again: {noted.archive} was changed while it was unpacked. "
            "Swap the model for what is there now"
        )
    try:
        found = _digest(noted.archive)
    except OSError as error:
        raise BadArchive(
            f"{what}, and cannot be unpacked again: {noted.archive} cannot be read ({error.strerror or error}). "
            "Put the archive back, or swap the model for another one"
        ) from error
    if found != noted.sha256:
        raise BadArchive(
            f"{what}, and cannot be unpacked again: {noted.archive} has another SHA-256 digest now, {found}; it was "
            f"{noted.sha256}. Swap the model for what is there now, or put the old archive back"
        )


def _refuse_strangers(folder: Path) -> None:
    """Raise BadArchive where another user has made the folder, or the one above it, after ours was deleted.

    The names of both are no secret, and in a temporary folder everybody may make one; workers would run what is in it.
    """
    for each in (folder.parent, folder):
        try:
            found = each.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise BadArchive(
                f"The folder of the unpacked archive was deleted, and {each} is no folder of this server's user now. "
                "Delete it, or restart the server"
            )


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _digest(path: Path, is_vain: threading.Event | None = None) -> str:
    """The SHA-256 digest of a file; empty once nothing needs it."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(MIB):
            if is_vain is not None and is_vain.is_set():
                return ""
            digest.update(chunk)
    return digest.hexdigest()


def _names(folder: Path) -> list[str]:
    """What is in a folder, as relative names; a folder comes before what is in it."""
    names = []
    for where, folders, files in os.walk(folder):
        inner = os.path.relpath(where, folder)
        names += [name if inner == "." else f"{inner}/{name}" for name in (*folders, *files)]
    return names
