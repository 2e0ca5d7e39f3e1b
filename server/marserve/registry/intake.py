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
from marserve.errors import ArchiveNotFound, MarserveError, OutOfMemory
from marserve.store.fetch_guard import hide_query, is_address
from marserve.store.http import Fetcher
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

    def __init__(
        self,
        store: LocalStore,
        scratch: Path,
        limits: Limits,
        trusted: Collection[str] = (),
        fetcher: Fetcher | None = None,
    ) -> None:
        """`fetcher` fetches addresses into the store; without one they are refused."""
        self.store = store
        self.scratch = scratch
        self._limits = limits
        self._trusted = frozenset(trusted)
        self._fetcher = fetcher

    def fetch(self, url: str) -> str | None:
        """Fetch an archive that is named by its address into the store; its name there, None for what is no address.

        Raises ArchiveNotFound when it is not allowed, ArchiveExists, DownloadFailed, OutOfMemory.
        """
        if self._fetcher is None or not is_address(url):
            return None
        if ".." in url:
            raise ArchiveNotFound(f"Relative path is not allowed in url: {hide_query(url)}")
        if self.store.root is None:
            raise ArchiveNotFound("Model store has not been configured.")
        return self._fetcher.fetch(url, self.store.root)

    def stop_fetching(self) -> None:
        """End downloads that are under way."""
        if self._fetcher is not None:
            self._fetcher.close()

    def take_in(self, url: str, fetched: str | None = None) -> Unpacked:
        """Find, unpack and check one archive; `fetched` is its name in the store if it was fetched for this.

        Raises ArchiveNotFound, BadArchive or UnsafeArchive; OutOfMemory when the disk is full, and MarserveError when
        files cannot be read or written for another reason. What was fetched and cannot be used is deleted again.
        """
        try:
            try:
                return self._take_in(fetched or url)
            except BaseException:
                if fetched is not None and self.store.root is not None:
                    (self.store.root / fetched).unlink(missing_ok=True)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(f"No space is left to save model: {hide_query(url)}") from error
            raise MarserveError(f"Failed to save model: {hide_query(url)}") from error

    def _take_in(self, url: str) -> Unpacked:
        found = self.store.find(url)
        trusted = is_trusted(found, self._trusted)
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

    def clear(self) -> None:
        """Delete the scratch folder if nothing is left in it."""
        try:
            self.scratch.rmdir()
        except OSError:
            return


def is_trusted(found: Found, trusted: Collection[str]) -> bool:
    """Whether the operator's word, names or SHA-256 digests, covers this archive. Blocks."""
    if not trusted or found.name in trusted:
        return bool(trusted)
    if found.kind == "folder":
        return False
    with found.path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() in trusted


def _read(folder: Path, *, is_private: bool, trusted: bool) -> Unpacked:
    """Check every pickle, then read what the archive says of itself."""
    findings = check_folder(folder, trusted=trusted)
    manifest = read_manifest(folder)
    config = read_model_config(folder, manifest)
    return Unpacked(folder, manifest, config, is_private, tuple(f"trusted all the same: {each}" for each in findings))
