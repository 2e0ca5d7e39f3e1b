"""Folders of unpacked archives, and the restoring of files that were deleted from them.

Cleaners of temporary folders delete old files one by one, while a server may use them for months. Each folder is noted
with its archive, the archive's SHA-256 digest and the names in it. `restore` checks that all names are there, and takes
missing ones from the archive, if its digest is the same. A file that is there is left alone, since a handler may have
written it; one whose size or time has changed since it was unpacked is logged once.

Everything here blocks; threads may call it at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marserve.archive.reading.reader import Limits, unpack
from marserve.errors import BadArchive
from marserve.files.digests import FileDigests, state_of
from marserve.files.leased_folders import discard

log = logging.getLogger("marserve.archive")

# How many changed files a warning names.
MOST_NAMED = 5


@dataclass(slots=True)
class _Noted:
    """The origin of a folder, named `label` in messages. `names` are relative, a folder before its content.

    Each file's name has its size and the time of its last change in nanoseconds; None for folders. `logged` are the
    changed files that were logged.
    """

    archive: Path
    sha256: str
    limits: Limits
    names: dict[str, tuple[int, int] | None]
    label: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    logged: set[str] = field(default_factory=set)
    is_discarded: bool = False


class UnpackedArchives:
    """The folders that a server unpacked and has not deleted yet."""

    def __init__(self) -> None:
        self.digests = FileDigests()
        self._noted: dict[str, _Noted] = {}

    def unpack(self, archive: Path, folder: Path, limits: Limits, label: str = "") -> str:
        """Unpack an archive into a new folder and note it; returns its SHA-256 digest. Raises as `reader.unpack`.

        Messages name it by its `label`, else by the file's name. The digest is computed meanwhile; it is empty if the
        archive was replaced or changed meanwhile.
        """
        before = state_of(archive.stat())
        digesting = _Digesting(self.digests, archive)
        try:
            unpack(archive, folder, limits, label)
        except BaseException:
            digesting.is_vain.set()
            raise
        sha256 = digesting.wait()
        if state_of(archive.stat()) != before:
            sha256 = ""
        names = _look(folder, _names(folder))
        self._noted[str(folder)] = _Noted(archive.resolve(), sha256, limits, names, label or archive.name)
        return sha256

    def discard(self, folder: Path) -> None:
        """Delete a folder. May be called twice; waits for a `restore` of it."""
        noted = self._noted.pop(str(folder), None)
        if noted is None:
            _delete(folder)
            return
        with noted.lock:
            noted.is_discarded = True
            _delete(folder)

    def restore(self, folder: str) -> None:
        """Unpack files again that are missing from this folder; does nothing for one that was not unpacked here.

        Raises BadArchive, with the reason, if that is not possible, and OSError if reading or writing fails.
        """
        noted = self._noted.get(folder)
        if noted is None:
            return
        with noted.lock:
            if noted.is_discarded:
                return
            target = Path(folder)
            _refuse_strangers(target)
            found = _look(target, noted.names)
            _log_changed(noted, target, found)
            missing = [name for name in noted.names if name not in found]
            if missing:
                _unpack_again(self.digests, noted, target, missing)


class _Digesting:
    """A file's digest: known, or computed in a thread, or by `wait` if the system gives no thread."""

    def __init__(self, digests: FileDigests, path: Path) -> None:
        self.is_vain = threading.Event()
        self._digests = digests
        self._path = path
        self._found = digests.known(path)
        self._thread: threading.Thread | None = None
        if self._found is None:
            thread = threading.Thread(target=self._run, name="digest", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    def wait(self) -> str:
        """The digest. Raises OSError when reading fails."""
        if self._thread is not None:
            self._thread.join()
        return self._found if self._found is not None else self._digests.of(self._path)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # `wait` tries again, and raises
            self._found = self._digests.of(self._path, self.is_vain)


def _look(folder: Path, names: Collection[str]) -> dict[str, tuple[int, int] | None]:
    """Which of the names are there; a file with its size and the time of its last change, None for all else."""
    found: dict[str, tuple[int, int] | None] = {}
    for name in names:
        with contextlib.suppress(OSError):
            seen = os.lstat(os.path.join(folder, name))
            found[name] = (seen.st_size, seen.st_mtime_ns) if stat.S_ISREG(seen.st_mode) else None
    return found


def _log_changed(noted: _Noted, folder: Path, found: Mapping[str, tuple[int, int] | None]) -> None:
    """Warn of files that have changed since they were unpacked, once of each; not of Python's own `.pyc` files."""
    changed = [
        name
        for name, now in found.items()
        if now != noted.names[name] and name not in noted.logged and not name.endswith(".pyc")
    ]
    if not changed:
        return
    noted.logged.update(changed)
    texts = []
    for name in changed[:MOST_NAMED]:
        before, now = noted.names[name], found[name]
        sizes = f" ({before[0]} bytes then, {now[0]} now)" if before and now and before[0] != now[0] else ""
        texts.append(f"{name}{sizes}")
    if len(changed) > MOST_NAMED:
        texts.append(f"{len(changed) - MOST_NAMED} more")
    log.warning(
        "%d of %d files and folders that were unpacked from %s were changed in %s: %s. Workers that start now read "
        "what is there; swap the model, or register it again, unless its handler writes them",
        len(changed),
        len(noted.names),
        noted.label,
        folder,
        ", ".join(texts),
    )


def _unpack_again(digests: FileDigests, noted: _Noted, folder: Path, missing: Collection[str]) -> None:
    archive, count = noted.archive, f"{len(missing)} of {len(noted.names)}"
    what = f"{count} files and folders that were unpacked from {noted.label} have been deleted from {folder}"
    _compare(digests, noted, what)
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    again = folder.parent / f".{folder.name}.{secrets.token_hex(8)}.again"
    try:
        unpack(archive, again, noted.limits, noted.label)
        _compare(digests, noted, what)  # it may have been replaced since it was looked at
        for name in missing:
            source, target = again / name, folder / name
            if source.is_dir():
                target.mkdir(exist_ok=True)
            else:
                source.rename(target)
        noted.names.update(_look(folder, missing))
        noted.logged.difference_update(missing)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    log.warning("%s, and were unpacked again; a cleaner of temporary folders should leave this one out", what)


def _compare(digests: FileDigests, noted: _Noted, what: str) -> None:
    """Raise BadArchive if the archive is gone, or is not the one that was unpacked."""
    if not noted.sha256:
        raise BadArchive(
            f"{what}, and cannot be unpacked again: {noted.archive} was changed while it was unpacked. "
            "Swap the model for what is there now"
        )
    try:
        found = digests.of(noted.archive)
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


def _delete(folder: Path) -> None:
    """Delete a folder as far as that can be done. Waits, for two seconds at most, where no file can be opened."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            discard(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_strangers(folder: Path) -> None:
    """Raise BadArchive if another user has made the folder, or its parent, after ours was deleted.

    Their names are no secret, and any user may make a folder in a temporary one; workers would run its content.
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


def _names(folder: Path) -> list[str]:
    """The content of a folder as relative names; a folder comes before its content."""
    names = []
    for where, folders, files in os.walk(folder):
        inner = os.path.relpath(where, folder)
        names += [name if inner == "." else f"{inner}/{name}" for name in (*folders, *files)]
    return names
