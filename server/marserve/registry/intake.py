"""From the word that a registration names to a folder that workers can load: found, unpacked, checked, read.

Everything here blocks and runs in a thread. Every archive gets a private folder of its own, named by 32 random hex
digits; whatever goes wrong, that folder is gone when the error reaches the caller. A folder of the store is served
where it is, and never deleted (contract 2.2).
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.manifest import Manifest, read_manifest
from marserve.archive.model_config import ModelConfig, read_model_config
from marserve.archive.pickle_check import check_folder
from marserve.archive.reader import Limits, unpack
from marserve.errors import MarserveError, OutOfMemory
from marserve.store.local import Found, LocalStore


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive that was taken in. With `is_private` its folder belongs to whoever holds this.

    `warnings` tell what was found in pickles of an archive that the operator trusts.
    """

    folder: Path
    manifest: Manifest
    config: ModelConfig
    is_private: bool = True
    warnings: tuple[str, ...] = ()

    def discard(self) -> None:
        """Delete the folder if it is private. Blocks; may be called twice."""
        if self.is_private:
            shutil.rmtree(self.folder, ignore_errors=True)


class Intake:
    """Takes archives of one store into folders below `scratch`.

    `trusted` is the operator's word: names of archives in the store, or SHA-256 digests of their files, whose pickles
    may hold anything.
    """

    def __init__(self, store: LocalStore, scratch: Path, limits: Limits, trusted: Collection[str] = ()) -> None:
        self.store = store
        self.scratch = scratch
        self._limits = limits
        self._trusted = frozenset(trusted)

    def take_in(self, url: str) -> Unpacked:
        """Find, unpack and check one archive.

        Raises ArchiveNotFound, BadArchive or UnsafeArchive; OutOfMemory when the disk is full, and MarserveError when
        files cannot be read or written for another reason.
        """
        try:
            return self._take_in(url)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(f"No space is left to save model: {url}") from error
            raise MarserveError(f"Failed to save model: {url}") from error

    def _take_in(self, url: str) -> Unpacked:
        found = self.store.find(url)
        trusted = self._is_trusted(found)
        if found.kind == "folder":
            return _read(found.path.resolve(), is_private=False, trusted=trusted)
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self.scratch / uuid.uuid4().hex
        try:
            unpack(found.path, folder, self._limits)
            return _read(folder, is_private=True, trusted=trusted)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _is_trusted(self, found: Found) -> bool:
        if not self._trusted or found.name in self._trusted:
            return bool(self._trusted)
        if found.kind == "folder":
            return False
        with found.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() in self._trusted

    def clear(self) -> None:
        """Delete the scratch folder if nothing is left in it."""
        try:
            self.scratch.rmdir()
        except OSError:
            return


def _read(folder: Path, *, is_private: bool, trusted: bool) -> Unpacked:
    """Check every pickle, then read what the archive says of itself."""
    findings = check_folder(folder, trusted=trusted)
    manifest = read_manifest(folder)
    config = read_model_config(folder, manifest)
    return Unpacked(folder, manifest, config, is_private, tuple(f"trusted all the same: {each}" for each in findings))
