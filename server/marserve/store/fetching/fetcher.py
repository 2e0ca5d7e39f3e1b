"""Fetches the object of an address to this machine, complete or not at all: judged, fetched or cached, verified.

    address → may it be fetched (`fetch_guard`) → a source for its scheme → cached already (`cache`)? → `download`
            → its digest → a name in the model store

Blocks: run it in a thread. Several threads may fetch at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from marserve.errors import ArchiveExists, ArchiveNotFound, DigestMismatch, DownloadFailed, OutOfMemory
from marserve.files.atomic import Part, sweep
from marserve.files.digests import digest_of
from marserve.files.leased_folders import Lease
from marserve.store.addresses.fetch_guard import (
    STORE_SCHEMES,
    WEB_SCHEMES,
    AllowedUrls,
    Target,
    hide_query,
    is_address,
    is_store_address,
    parse_target,
)
from marserve.store.addresses.pinned_digest import BESIDE, MOST_BESIDE_BYTES, read_digest, split_digest
from marserve.store.fetching.cache import READ_ONLY, Cache, Held, put_into
from marserve.store.fetching.download import Downloaded, DownloadOptions, await_object, download
from marserve.store.fetching.download_list import Download, DownloadList
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.fetching.prefixes import Kept, ListAt, fetch_below, read_prefix
from marserve.store.fetching.web_folders import Wanted, WebFolder
from marserve.store.sources.file_source import FileOrigins
from marserve.store.sources.http import HttpOrigins
from marserve.store.sources.source import (
    Cancel,
    Entry,
    Failed,
    Gathered,
    Listing,
    Missing,
    OnProgress,
    Opener,
    Source,
    SourceError,
)

log = logging.getLogger("marserve.store")

STOPPING = "the server stops"
_FULL = (errno.ENOSPC, errno.EDQUOT)

DigestRule = Literal["given", "beside", "required"]
OnBegin = Callable[[Download], None]
"""Gets the download as soon as it is listed, from the thread that fetches."""
Gather = Callable[[Target, Cancel, OnProgress], Gathered]
"""Fetches what is a folder of files, or one of them, into a cache of its own. Raises SourceError."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How archives are fetched.

    `digests` says which digests are compared beside those in addresses: none; those of files beside archives, if there
    are any; or all archives must have one. `late_s` is how long to wait for a missing object, in seconds.
    `temporary` is the folder for archives that cannot get a name in the store; the system's folder if None.
    """

    download: DownloadOptions = field(default_factory=DownloadOptions)
    digests: DigestRule = "given"
    late_s: float = 0.0
    temporary: Path | None = None


@dataclass(slots=True)
class Fetched:
    """A fetched archive: the file at `path`, or a folder in a cache of its own. `release` it after use.

    `name` is the last part of its address. `in_store` is the name that it got in the store, or None. `address` names
    exactly this content, if that is another address than the one that was asked for.
    """

    path: Path
    name: str
    sha256: str | None
    in_store: Path | None
    _undo: contextlib.ExitStack
    is_new: bool = True
    address: str = ""

    def discard(self) -> None:
        """Remove its name from the store, because it cannot be used, and release it."""
        if self.in_store is not None and self.is_new:
            self.in_store.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Release the file, which is not read any more. May be called twice."""
        self._undo.close()


class Fetcher:
    """Fetches archives that the operator allows.

    `openers` make sources by scheme; those of http, https and file are built in. `gathers` fetch folders.
    Without a `cache` only files with a name in the store are kept.
    """

    def __init__(
        self,
        allowed: AllowedUrls,
        options: FetchOptions | None = None,
        *,
        openers: Mapping[str, Opener] | None = None,
        gathers: Mapping[str, Gather] | None = None,
        cache: Cache | None = None,
        downloads: DownloadList | None = None,
        list_at: ListAt | None = None,
    ) -> None:
        """`list_at` lists what lies below a prefix; without it no address of one is fetched."""
        web = HttpOrigins(allowed)
        self.downloads = downloads or DownloadList()
        self._allowed = allowed
        self._options = options or FetchOptions()
        self._openers: dict[str, Opener] = {"http": web, "https": web, "file": FileOrigins(allowed), **(openers or {})}
        self._gathers = dict(gathers or {})
        self._cache = cache
        self._list_at = list_at
        self._closing = threading.Event()
        self._placed: dict[str, int] = {}

    def close(self) -> None:
        """End downloads under way, also those that wait for a silent origin. Returns at once."""
        self._closing.set()
        self.downloads.cancel_all(STOPPING)

    def fetch_address(
        self,
        url: str,
        store: Path | None,
        *,
        on_begin: OnBegin | None = None,
        places: FetchedArchives | None = None,
        is_only_a_look: bool = False,
    ) -> Fetched | None:
        """Fetch the archive of a registration's `url`; None for a name in the store.

        With `is_only_a_look` it gets no name in the store, but the same errors are raised.

        Raises as `fetch`; ArchiveNotFound, in TorchServe's words, for an address with `..`, and without a store.
        """
        if not self.is_for(url):
            return None
        if ".." in url:
            raise ArchiveNotFound(f"Relative path is not allowed in url: {hide_query(url)}")
        if store is None:
            raise ArchiveNotFound("Model store has not been configured.")
        return self.fetch(url, store, on_begin=on_begin, places=places, is_only_a_look=is_only_a_look)

    def is_for(self, url: str) -> bool:
        """Whether a registration's `url` is an address, not a name in the store."""
        return is_address(url)

    def fetch(
        self,
        url: str,
        store: Path | None,
        *,
        late_s: float | None = None,
        on_begin: OnBegin | None = None,
        places: FetchedArchives | None = None,
        is_only_a_look: bool = False,
    ) -> Fetched:
        """Fetch an archive, and give it the last part of its path as its name in `store` (None: no name).

        In a read-only store it gets no name. A file of the store is never replaced; it is used if the address has its
        digest. `late_s` takes the place of the options'. With `is_only_a_look` the store stays as it is.

        Raises ArchiveNotFound (not allowed, not a URL that can be fetched), ArchiveExists (the store has a file of that
        name), DigestMismatch, DownloadFailed with the error as its cause, OutOfMemory if the disk is full. Nothing is
        left after an error.
        """
        plain, digest = split_digest(url)
        target = parse_target(plain)
        self._allowed.check(target)
        name = target.file_name
        if store is not None and target.scheme not in self._gathers and (store / name).exists():
            return self._existing(store / name, url, digest)
        if is_only_a_look:
            store = None
        with self.downloads.under_way(hide_query(plain), name) as listed:
            if on_begin is not None:
                on_begin(listed)
            if self._closing.is_set():
                listed.cancel.set(STOPPING)
            with self._as_typed(url):
                listed.cancel.check()
                late_s = self._options.late_s if late_s is None else late_s
                fetched = self._fetch(target, digest, store, listed, late_s, places)
        how = "was kept from before" if listed.status(0.0).fromCache else "fetched"
        log.info("%s from %s: %s", name, hide_query(plain), how)
        if fetched.in_store is not None and fetched.is_new:
            with contextlib.suppress(OSError):
                self._placed[name] = fetched.in_store.stat().st_ino
        return fetched

    def fetch_below(self, address: str, wanted: Wanted, otherwise: Path) -> Lease:
        """Fetch what is `wanted` of what lies below the address of a prefix, unless this machine has it.

        The folder is shared by all servers with this cache; without a cache it lies in `otherwise`. It stays until the
        lease is released. Raises ArchiveNotFound, DownloadFailed with the error as its cause, OutOfMemory, and what
        `wanted` raises for a file that names others.
        """
        prefix = read_prefix(address, self._allowed)
        options, list_at = self._options.download, self._list_at
        if prefix.base.scheme in WEB_SCHEMES:
            open_at = self._openers[prefix.base.scheme]

            def list_at(base: Target) -> Listing:
                return WebFolder(base, open_at, self._allowed, wanted, options)

        if list_at is None:
            raise DownloadFailed(prefix.shown, reason="nothing here lists a store", is_told=True, what="checkpoint")
        kept = Kept(otherwise)
        if self._cache is not None:
            kept = Kept(self._cache.folder / "folders", self._cache.max_bytes)
        with self.downloads.under_way(prefix.shown, prefix.shown.rstrip("/").rpartition("/")[2]) as listed:
            if self._closing.is_set():
                listed.cancel.set(STOPPING)
            with self._as_typed(address, what="checkpoint"):
                lease = fetch_below(prefix, list_at, self._allowed, wanted.choose, kept, options, listed)
        how = "was kept from before" if listed.status(0.0).fromCache else "fetched"
        log.info("%s: %s", prefix.shown, how)
        return lease

    def look(self, url: str, store: Path) -> Entry | None:
        """The object that `fetch` would fetch into `store`, as its origin describes it; None if the store has it.

        Fetches only a digest beside it. Raises as `fetch`, as far as that can be foreseen.
        """
        plain, digest = split_digest(url)
        target = parse_target(plain)
        self._allowed.check(target)
        if (store / target.file_name).exists():
            self._existing(store / target.file_name, url, digest)
            return None
        with self._as_typed(url):
            opener = self._openers.get(target.scheme)
            if opener is None:
                raise Failed(f"nothing here reads {target.scheme}://")
            if digest is None:
                self._digest_beside(target, opener, Cancel(), 0.0)
            with contextlib.closing(opener(target)) as source:
                return source.stat()

    def has_placed(self, path: Path) -> bool:
        """Whether this object itself gave this file its name in a store."""
        try:
            return self._placed.get(path.name) == path.stat().st_ino
        except OSError:
            return False

    @contextmanager
    def _as_typed(self, url: str, what: str = "archive") -> Iterator[None]:
        """Turn errors of fetching into the types that callers know; `what` is fetched."""
        shown = hide_query(split_digest(url)[0])
        try:
            yield
        except FileExistsError as error:
            raise ArchiveExists(Path(str(error.filename2 or error.filename)).name) from None
        except OSError as error:
            if error.errno in _FULL:
                raise OutOfMemory(f"No space is left to save model: {shown}") from error
            log.warning("%s could not be fetched: %s", shown, error)
            raise DownloadFailed(shown, reason=error.strerror or type(error).__name__, what=what) from error
        except SourceError as error:
            log.warning("%s could not be fetched: %s", shown, error)
            # TorchServe knows no such addresses and no checkpoints, so it has no words for this error.
            is_told = is_store_address(shown) or what != "archive"
            raise DownloadFailed(shown, reason=str(error), is_told=is_told, what=what) from error
        except DigestMismatch as error:
            log.warning("%s", error)
            raise

    # ------------------------------------------------------------------------------------------- one

    def _existing(self, path: Path, url: str, digest: str | None) -> Fetched:
        """The file of the store with that name, if it has the digest."""
        if digest is None or not path.is_file():
            raise ArchiveExists(path.name)
        found = digest_of(path)
        if found != digest:
            raise DigestMismatch(hide_query(split_digest(url)[0]), digest, found, f"{path.name} in the model store")
        log.info("%s is not fetched: the store has it, with that digest", hide_query(url))
        return Fetched(path, path.name, digest, path, contextlib.ExitStack(), is_new=False)

    def _fetch(
        self,
        target: Target,
        digest: str | None,
        store: Path | None,
        listed: Download,
        late_s: float,
        places: FetchedArchives | None,
    ) -> Fetched:
        gather = self._gathers.get(target.scheme)
        if gather is not None:
            if digest is not None:
                raise Failed(f"what {target.scheme}:// names is pinned by its revision; leave out what follows the #")
            found = gather(target, listed.cancel, listed.progress)
            return Fetched(found.path, target.file_name, None, None, contextlib.ExitStack(), address=found.address)
        opener = self._openers.get(target.scheme)
        if opener is None:
            raise Failed(f"nothing here reads {target.scheme}://")
        digest = digest or self._digest_beside(target, opener, listed.cancel, late_s)
        with contextlib.closing(opener(target)) as source, contextlib.ExitStack() as undo:
            if self._cache is not None:
                held = self._through_cache(self._cache, source, digest, listed, late_s)
            else:
                held = self._alone(source, digest, store, listed, late_s)
            undo.callback(held.release)
            if store is not None and places is not None:
                places.note(store / target.file_name, held.sha256, hide_query(target.url))
            placed = None if store is None else put_into(held, store, target.file_name)
            if placed is not None and places is not None:
                places.placed(placed)
            if store is not None and placed is None:
                log.info("%s gets no name in the model store, which is read-only", target.file_name)
            address = target.url if target.scheme in STORE_SCHEMES else ""
            if placed is not None and self._cache is None:
                held.release()
                return Fetched(placed, target.file_name, held.sha256, placed, contextlib.ExitStack(), address=address)
            return Fetched(held.path, target.file_name, held.sha256, placed, undo.pop_all(), address=address)

    def _digest_beside(self, target: Target, opener: Opener, cancel: Cancel, late_s: float) -> str | None:
        """The digest in the file beside the archive, if the settings ask for it. Raises SourceError."""
        if self._options.digests == "given":
            return None
        beside = replace(target, path=target.path + BESIDE)
        self._allowed.check(beside)
        source = opener(beside)
        options = DownloadOptions(connections=1, max_bytes=MOST_BESIDE_BYTES)
        wait_s = late_s if self._options.digests == "required" else 0.0
        with contextlib.closing(source), tempfile.TemporaryFile() as file, cancel.calling(source.close):
            try:
                await_object(source, wait_s, cancel, lambda: download(source, file.fileno(), options, cancel=cancel))
            except Missing:
                if self._options.digests == "required":
                    raise Failed(
                        f"archive_digests=required, and neither its address has a digest nor is {BESIDE} beside it"
                    ) from None
                return None
            file.seek(0)
            found = read_digest(file.read().decode(errors="replace"), target.file_name)
        if found is None:
            raise Failed(f"the {BESIDE} file beside it has no SHA-256 digest for {target.file_name}")
        return found

    def _through_cache(self, cache: Cache, source: Source, digest: str | None, listed: Download, late_s: float) -> Held:
        """The object from the cache, fetched into it if it is not there."""
        held = cache.find_digest(digest) if digest is not None else None
        if held is None:
            with cache.claim(source.identity, listed.cancel):
                held = self._found(cache, source, digest, listed)
                if held is None:
                    with cache.incoming() as incoming:
                        downloaded = self._download(source, incoming.descriptor, digest, listed, late_s)
                        return cache.keep(incoming, source.identity, downloaded)
        listed.found(held.size)
        return held

    def _found(self, cache: Cache, source: Source, digest: str | None, listed: Download) -> Held | None:
        """The cached object of this address, if its origin says that it is unchanged."""
        if digest is not None:
            return cache.find_digest(digest)  # another download may have fetched it meanwhile
        if not cache.knows(source.identity):
            return None
        try:
            with listed.cancel.calling(source.close):
                return cache.find(source.identity, source.stat())
        except SourceError as error:
            listed.cancel.check()
            log.info("%s: %s; whether it has changed is unknown", source.shown, error)
            return None

    def _alone(self, source: Source, digest: str | None, store: Path | None, listed: Download, late_s: float) -> Held:
        """Fetch without a cache, into a file in the store's folder or a temporary one; deleted when released."""
        with _part(store, self._options.temporary) as incoming:
            downloaded = self._download(source, incoming.descriptor, digest, listed, late_s)
            os.fsync(incoming.descriptor)
            size = downloaded.entry.size or 0
            return Held(incoming.path, downloaded.sha256, size, incoming.hand_over(), True)

    def _download(
        self, source: Source, descriptor: int, digest: str | None, listed: Download, late_s: float
    ) -> Downloaded:
        options = self._options.download

        def once() -> Downloaded:
            return download(
                source,
                descriptor,
                options,
                cancel=listed.cancel,
                on_progress=listed.progress,
                is_vouched=digest is not None,
            )

        downloaded = await_object(source, late_s, listed.cancel, once)
        if digest is not None and downloaded.sha256 != digest:
            raise DigestMismatch(source.shown, digest, downloaded.sha256)
        return downloaded


def _part(folder: Path | None, temporary: Path | None) -> Part:
    """A new file to fetch into: in the folder if that is writable, else among temporary files."""
    if folder is not None:
        try:
            sweep(folder)
            return Part(folder)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
    temporary = temporary or Path(tempfile.gettempdir())
    temporary.mkdir(parents=True, exist_ok=True)
    sweep(temporary)
    return Part(temporary)
