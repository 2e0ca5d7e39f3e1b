"""From the URL or name of a registration to a folder that workers can load: finds, unpacks, checks and reads archives.

Everything here blocks and runs in a thread. Every archive gets a private folder of its own, named by 32 random hex
digits; after any error that folder is deleted before the caller gets the error. A folder of the store is served where
it is, and never deleted (contract 2.2).
"""

from __future__ import annotations

import errno
import shutil
import threading
import uuid
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from marserve.agent_link import ArchiveRef
from marserve.archive.checkpoints.checked_files import check_archive
from marserve.archive.contents.declaration import read_declaration
from marserve.archive.contents.manifest import read_manifest
from marserve.archive.contents.model_config import read_model_config
from marserve.archive.reading.reader import Limits, unpack
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.errors import (
    AddressNotAllowed,
    BadArchive,
    BadInput,
    DigestMismatch,
    MarserveError,
    OutOfMemory,
    TrustedByName,
)
from marserve.files.digests import FileDigests
from marserve.files.leased_folders import Lease
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.checkpoints.found import Named, find_checkpoint
from marserve.store.addresses.fetch_guard import hide_query, is_address, parse_target
from marserve.store.addresses.pinned_digest import split_digest
from marserve.store.fetching.download_list import Download
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.fetching.fetcher import Fetched, Fetcher, OnBegin
from marserve.store.fetching.web_folders import Wanted
from marserve.store.sources.local import Found, LocalStore, look_at

# How often an archive that changes meanwhile is unpacked.
UNPACK_ATTEMPTS = 5


class Intake:
    """Takes archives of one store into folders below `scratch`.

    `trusted` are names of archives in the store, or SHA-256 digests of their files, whose pickles may hold anything, by
    the operator's settings.
    """

    def __init__(
        self,
        store: LocalStore,
        scratch: Path,
        limits: Limits,
        trusted: Collection[str] = (),
        fetcher: Fetcher | None = None,
        fetched_archives: FetchedArchives | None = None,
        archives: UnpackedArchives | None = None,
    ) -> None:
        """`fetcher` fetches addresses into the store; without one they are refused. `archives` records folders.

        `fetched_archives` remembers fetched files, so that they can be deleted again; without it they stay.
        """
        self.store = store
        self.scratch = scratch
        self._limits = limits
        self._trusted = frozenset(trusted)
        self._fetcher = fetcher
        self._fetched_archives = fetched_archives
        self._archives = archives or UnpackedArchives()
        self._is_stopped = threading.Event()

    def fetches(self, url: str) -> bool:
        """Whether it is an address, which `fetch` would fetch or refuse."""
        return self._fetcher is not None and self._fetcher.is_for(url)

    def queued(self, url: str) -> AbstractContextManager[Download]:
        """List the address as a download that waits for its place, while the block runs."""
        assert self._fetcher is not None
        return self._fetcher.downloads.queued(hide_query(split_digest(url)[0]))

    def fetch(self, url: str, on_begin: OnBegin | None = None) -> Fetched | None:
        """Fetch an archive by its address; None for a name that is not an address. `take_in` releases the result.

        `on_begin` gets the download. Raises ArchiveNotFound if the address is not allowed, ArchiveExists,
        DownloadFailed, DigestMismatch, OutOfMemory.
        """
        if self._fetcher is None:
            return None
        return self._fetcher.fetch_address(url, self.store.root, on_begin=on_begin, places=self._fetched_archives)

    def fetch_aside(self, url: str, on_begin: OnBegin | None = None) -> Fetched:
        """As `fetch` for an address, but it gets no name in the store; a file of its name there stays as it is.

        The returned address has the digest, so a later start loads exactly this content, or refuses another one.
        Raises as `fetch`, except ArchiveExists.
        """
        assert self._fetcher is not None
        return pinned(self._fetcher.fetch(url, None, on_begin=on_begin), url)

    def fetch_for_a_look(self, url: str, on_begin: OnBegin | None = None) -> Fetched | None:
        """As `fetch`, with the same errors, but the store stays as it is."""
        if self._fetcher is None:
            return None
        return self._fetcher.fetch_address(url, self.store.root, on_begin=on_begin, is_only_a_look=True)

    def has_fetched(self, name: str) -> bool:
        """Whether the store's file of this name was fetched; such a file is deleted when no version uses it."""
        root, fetched = self.store.root, self._fetched_archives
        return root is not None and fetched is not None and fetched.knows(root / name)

    def other_address_of(self, name: str, url: str) -> str | None:
        """The address that the store's file of this name was fetched from; None if it is unknown, or is `url`."""
        root, fetched = self.store.root, self._fetched_archives
        if root is None or fetched is None:
            return None
        asked = hide_query(parse_target(split_digest(url)[0]).url)
        address = fetched.address_of(root / name)
        return address if address and address != asked else None

    def delete_fetched(self, name: str) -> bool:
        """Delete the store's file of this name if it was fetched and has not changed since; returns whether. Blocks."""
        root, fetched = self.store.root, self._fetched_archives
        return root is not None and fetched is not None and fetched.delete(root / name)

    def stop_taking_in(self) -> None:
        """End downloads and checks of archives, those under way and those that begin later."""
        self._is_stopped.set()
        if self._fetcher is not None:
            self._fetcher.close()

    def take_in(self, url: str, fetched: Fetched | None = None, checkpoint: str | None = None) -> Unpacked:
        """Find, unpack and check one archive; `fetched` is the file that was fetched for it, and is released.

        A `checkpoint` takes the place of the one that the archive names.

        Raises ArchiveNotFound, DigestMismatch, BadArchive or UnsafeArchive; Draining after `stop_taking_in`;
        OutOfMemory when the disk is full, and MarserveError when files cannot be read or written for another reason.
        A fetched file that cannot be used is deleted again.
        """
        try:
            try:
                unpacked = self._take_in(url, fetched, checkpoint)
            except BaseException:
                if fetched is not None:
                    fetched.discard()
                raise
            if fetched is None:
                return unpacked
            fetched.release()
            return replace(unpacked, placed=fetched.in_store if fetched.is_new else None)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(f"No space is left to save model: {hide_query(url)}") from error
            raise MarserveError(f"Failed to save model: {hide_query(url)}") from error

    def _take_in(self, url: str, fetched: Fetched | None, checkpoint: str | None) -> Unpacked:
        found, digest, archive = self._find(url, fetched)
        if digest is not None:
            compare_digest(found, digest, url, self._archives.digests)
        if found.kind == "folder":
            trusted = is_trusted(found, self._trusted)
            folder = found.path.resolve()
            return self._read(folder, is_private=False, trusted=trusted, archive=archive, checkpoint=checkpoint)
        self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = self.scratch / uuid.uuid4().hex
        try:
            wanted = digest if fetched is None else fetched.sha256
            label = found.path.name if fetched is None else fetched.name
            sha256 = unpack_as(self._archives, found, folder, self._limits, wanted, url, label)
            trusted = is_trusted(found, self._trusted, sha256)
            unpacked = self._read(folder, is_private=True, trusted=trusted, archive=archive, checkpoint=checkpoint)
            unpacked = replace(unpacked, archives=self._archives)
            return self._with_origin(unpacked, found, url, sha256, label, is_trusted=trusted)
        except BaseException:
            self._archives.discard(folder)
            raise

    def _with_origin(
        self, unpacked: Unpacked, found: Found, url: str, sha256: str, label: str, *, is_trusted: bool
    ) -> Unpacked:
        plain = split_digest(url)[0]
        ref = ArchiveRef(
            sha256,
            label,
            path=str(found.path.resolve()),
            address=plain if is_address(plain) else "",
            is_trusted=is_trusted,
            max_entries=self._limits.max_entries,
            max_total_bytes=self._limits.max_total_bytes,
        )
        return replace(unpacked, origin=ref)

    def _find(self, url: str, fetched: Fetched | None) -> tuple[Found, str | None, str]:
        """The archive, the digest that is still to be compared, and the name or URL by which it is found again."""
        if fetched is not None:
            in_store = fetched.in_store
            if in_store is not None:
                return look_at(fetched.path, fetched.name), None, in_store.name
            # It has no name in the store, so the operator's settings can only trust it by its digest.
            address = fetched.address or hide_query(url).removesuffix("?…")
            return look_at(fetched.path, str(fetched.path)), None, address
        plain, digest = split_digest(url)
        found = self.store.find(plain)
        return found, digest, found.name

    def judge(self, file: Path, label: str, sha256: str) -> None:
        """Unpack and check an archive that is not in the store yet, as `take_in` does, and keep nothing of it.

        Errors name it by its `label`. Raises BadArchive or UnsafeArchive, Draining after `stop_taking_in`, OutOfMemory
        when the disk is full, and MarserveError when files cannot be read or written for another reason.
        """
        folder = self.scratch / uuid.uuid4().hex
        try:
            self.scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
            unpack(file, folder, self._limits, label)
            is_trusted_file = sha256 in self._trusted
            read = self._read(folder, is_private=True, trusted=is_trusted_file, archive=label)
            if read.checkpoint is not None:
                read.checkpoint.release()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(f"No space is left to save model: {label}") from error
            raise MarserveError(f"Failed to save model: {label}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def check_is_not_trusted(self, name: str) -> None:
        """Raise TrustedByName if the operator's settings trust whatever has this name in the store."""
        if name in self._trusted:
            raise TrustedByName(name)

    def digest_of(self, file: Path) -> str:
        """The SHA-256 digest of a file, which is remembered. Blocks. Raises OSError."""
        return self._archives.digests.of(file)

    def forget_fetched(self, name: str) -> None:
        """The store's file of this name was put there by a client, so it is not deleted as a fetched one. Blocks."""
        if self.store.root is not None and self._fetched_archives is not None:
            self._fetched_archives.forget(self.store.root / name)

    def _read(
        self, folder: Path, *, is_private: bool, trusted: bool, archive: str, checkpoint: str | None = None
    ) -> Unpacked:
        """Check every pickle, then read the manifest, the model's configuration and the checkpoint: it, or the one that
        is given in its place, names that."""
        is_stopped = self._is_stopped.is_set
        findings = check_archive(folder, trusted=trusted, is_stopped=is_stopped)
        manifest = read_manifest(folder)
        config = read_model_config(folder, manifest)
        warnings = tuple(f"trusted all the same: {each}" for each in findings)
        declared = read_declaration(folder)
        found, named = None, config.options.checkpoint if checkpoint is None else checkpoint
        if named is not None:  # last: it has to be released
            found = find_checkpoint(
                Named(named, "model's configuration" if checkpoint is None else "desired state"),
                folder,
                manifest,
                self.store,
                is_private=is_private,
                is_stopped=is_stopped,
                fetch=self._fetch_below,
            )
        return Unpacked(
            folder,
            manifest,
            config,
            is_private,
            warnings,
            archive,
            declared=declared,
            is_trusted=trusted,
            checkpoint=found,
        )

    def _fetch_below(self, address: str, wanted: Wanted) -> Lease:
        if self._fetcher is None:
            raise AddressNotAllowed(hide_query(address))
        return self._fetcher.fetch_below(address, wanted, self.scratch.with_name("checkpoints"))

    def clear(self) -> None:
        """Delete the scratch folder if nothing is left in it."""
        try:
            self.scratch.rmdir()
        except OSError:
            return


def pinned(fetched: Fetched, url: str) -> Fetched:
    """Add the digest to the address of a file that was fetched without a name in the store, to find this content again.

    `url` is the address that was fetched.
    """
    if fetched.sha256 is not None:
        plain = fetched.address or hide_query(split_digest(url)[0]).removesuffix("?…")
        fetched.address = f"{plain}#sha256={fetched.sha256}"
    return fetched


def is_trusted(found: Found, trusted: Collection[str], sha256: str = "") -> bool:
    """Whether the operator trusts an archive: by its name, or by the digest of the unpacked file."""
    return found.name in trusted or (bool(sha256) and sha256 in trusted)


def compare_digest(found: Found, digest: str, url: str, digests: FileDigests) -> None:
    """Raise DigestMismatch if an archive has another digest; BadInput for a folder, which has no digest."""
    if found.kind == "folder":
        raise BadInput(f"{hide_query(url)} names a folder, which has no SHA-256 digest; leave out what follows its #.")
    actual = digests.of(found.path)
    if actual != digest:
        raise _mismatch(found.path.name, digest, actual, url)


def unpack_as(
    archives: UnpackedArchives, found: Found, folder: Path, limits: Limits, wanted: str | None, url: str, label: str
) -> str:
    """Unpack an archive, which must have the digest `wanted`, if any; returns its digest.

    The file may have been replaced since its digest was compared. If only its time of change moved, as when another
    server links the file, the digest of the unpacked content is not known, and it is unpacked again. Raises
    DigestMismatch, BadArchive, and what `UnpackedArchives.unpack` raises; the caller deletes the folder.
    """
    for _ in range(UNPACK_ATTEMPTS):
        sha256 = archives.unpack(found.path, folder, limits, label)
        if wanted is None or sha256 == wanted:
            return sha256
        if sha256:
            raise _mismatch(label, wanted, sha256, url)
        archives.discard(folder)
    raise BadArchive(f"{label} was changed each time it was unpacked; register it again when it is written whole.")


def _mismatch(label: str, digest: str, actual: str, url: str) -> DigestMismatch:
    return DigestMismatch(hide_query(split_digest(url)[0]), digest, actual, f"{label} in the model store")
