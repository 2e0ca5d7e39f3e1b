"""Keeps fetched files by their content: a folder with a size limit that several servers of one machine may share.

    blobs/DIGEST.SIZE.MTIME      a whole file; its name has the SHA-256, the bytes and the time (ns) when it came
    index/HASH                   the blob that an address with its ETag last was; JSON
    claims/HASH                  locked while a server fetches that address
    incoming/NAME                locked while it is written; an unlocked one was left by a crash, and is deleted
    lock                         held for a moment to count, add or delete blobs

All locks are the kernel's (`flock`), so a crash releases them. A blob in use has a shared lock and is never deleted.
Over the limit the least recently used blob is deleted first. A blob with a second name, a link in a model store, costs
the cache nothing, and is neither counted nor deleted. A blob whose size or time of change differs from its name was
changed by another program, and is dropped. Everything here blocks: threads call it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from marserve.files.atomic import Part, replace_file, sweep
from marserve.files.leased_folders import tag_as_cache
from marserve.files.locks import LockHeld, is_at, lock, locked, open_locked, try_lock
from marserve.files.regular import read_regular
from marserve.store.fetching.download import Downloaded
from marserve.store.sources.source import Cancel, Entry

log = logging.getLogger("marserve.store")

CLAIM_LOOK_S = 0.05
LOCK_LIMIT_S = 5.0
LARGEST_ENTRY = 64 << 10
_BLOB = re.compile(r"([0-9a-f]{64})\.([0-9]+)\.([0-9]+)")
_CROSSES = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class _Seen(msgspec.Struct):
    """The content of an address when it was last fetched."""

    etag: str
    size: int
    sha256: str


@dataclass(slots=True)
class Held:
    """A whole file that stays until `release`."""

    path: Path
    sha256: str
    size: int
    _descriptor: int
    _is_last: bool = False

    def release(self) -> None:
        """Release the file; it is deleted if the cache did not keep it. May be called twice."""
        if self._descriptor < 0:
            return
        if self._is_last:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


class Cache:
    """The cache in `folder`, of at most `max_bytes` beside the files that are being fetched."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder if it is missing. Raises OSError."""
        self.folder = folder
        self.max_bytes = max_bytes
        self._blobs, self._index = folder / "blobs", folder / "index"
        self._claims, self._incoming = folder / "claims", folder / "incoming"
        for each in (self._blobs, self._index, self._claims, self._incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        tag_as_cache(folder, "Archives that marserve fetched.")
        self._sweep()

    # ------------------------------------------------------------------------------------------- looking

    def knows(self, identity: str) -> bool:
        """Whether an object of this address was kept, so that asking the origin for its ETag may pay."""
        return self._index_of(identity).exists()

    def find(self, identity: str, entry: Entry) -> Held | None:
        """The file of an object that has not changed since it was fetched; None if it has, or is unknown."""
        if entry.etag is None:
            return None
        try:
            seen = msgspec.json.decode(read_regular(self._index_of(identity), LARGEST_ENTRY), type=_Seen)
        except (OSError, msgspec.DecodeError):
            return None
        if seen.etag != entry.etag or (entry.size is not None and entry.size != seen.size):
            return None
        return self.find_digest(seen.sha256)

    def find_digest(self, sha256: str) -> Held | None:
        """The file with this content, or None."""
        for path in self._blobs.glob(f"{sha256}.*"):
            held = _hold(path)
            if held is not None:
                with contextlib.suppress(OSError):
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                return held
        return None

    # ------------------------------------------------------------------------------------------- adding

    @contextmanager
    def claim(self, identity: str, cancel: Cancel) -> Iterator[None]:
        """Keep all other threads and processes from fetching this address. Waits; raises Failed on cancel."""
        path = self._claims / _hash(identity)
        while True:
            descriptor = open_locked(path)
            if descriptor is not None:
                break
            cancel.check()
            cancel.wait(CLAIM_LOOK_S)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def incoming(self) -> Part:
        """A new file to fetch into, for a `with` block, which deletes it if it was not kept. Raises OSError."""
        return Part(self._incoming)

    def keep(self, incoming: Part, identity: str, downloaded: Downloaded) -> Held:
        """Make a whole file part of the cache and hold it. Raises OSError.

        A file larger than the whole cache is held too, but deleted when it is released.
        """
        descriptor, size = incoming.descriptor, downloaded.entry.size or 0
        os.fsync(descriptor)
        if size > self.max_bytes:
            log.warning("%d bytes are more than download_cache_size, %d: they are not kept", size, self.max_bytes)
            return Held(incoming.path, downloaded.sha256, size, incoming.hand_over(), True)
        try:
            with self._alone():
                held = self.find_digest(downloaded.sha256)
                if held is None:
                    self._make_room(size)
                    status = os.fstat(descriptor)
                    path = self._blobs / f"{downloaded.sha256}.{size}.{status.st_mtime_ns}"
                    incoming.path.rename(path)
                    lock(descriptor, is_shared=True)
                    held = Held(path, downloaded.sha256, size, incoming.hand_over())
                if downloaded.entry.etag is not None:
                    seen = _Seen(downloaded.entry.etag, size, downloaded.sha256)
                    replace_file(self._index_of(identity), msgspec.json.encode(seen))
            return held
        except LockHeld as error:
            log.warning("%d bytes that were fetched are not kept in the cache: %s", size, error.strerror)
            return Held(incoming.path, downloaded.sha256, size, incoming.hand_over(), True)

    # ------------------------------------------------------------------------------------------- inside

    def _index_of(self, identity: str) -> Path:
        return self._index / _hash(identity)

    def _alone(self) -> AbstractContextManager[None]:
        """Lock the folder. Raises LockHeld."""
        return locked(self.folder / "lock", within_s=LOCK_LIMIT_S)

    def _list(self) -> list[_Blob]:
        """The blobs that only the cache has, least recently used first."""
        found = []
        for path in self._blobs.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if status.st_nlink == 1:
                    found.append(_Blob(path, status.st_size, status.st_atime_ns))
        return sorted(found, key=lambda blob: blob.used_ns)

    def _make_room(self, wanted: int) -> None:
        blobs = self._list()
        used = sum(blob.size for blob in blobs)
        is_changed = False
        for blob in blobs:
            if used + wanted <= self.max_bytes:
                break
            if _delete_unused(blob.path):
                log.info("The cache gives up %s, %d bytes, to make room", blob.path.name[:12], blob.size)
                used -= blob.size
                is_changed = True
        if is_changed:
            self._prune_index()

    def _prune_index(self) -> None:
        """Forget addresses whose file was deleted."""
        kept = {path.name[:64] for path in self._blobs.iterdir()}
        for path in self._index.iterdir():
            try:
                is_known = msgspec.json.decode(read_regular(path, LARGEST_ENTRY), type=_Seen).sha256 in kept
            except FileNotFoundError:
                continue
            except msgspec.DecodeError:
                is_known = False
            if not is_known and not path.name.endswith((".new", ".part")):
                path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Delete files left by crashes, and files beyond a lowered limit."""
        for path in self._incoming.iterdir():
            if _delete_unused(path):
                log.info("Deleted %s, which a server that ended early left behind", path.name)
        try:
            with self._alone():
                sweep(self._index)
                for path in self._index.glob("*.new"):  # of earlier versions
                    path.unlink(missing_ok=True)
                self._make_room(0)
        except LockHeld as error:
            log.warning("The cache in %s is not cleared up: %s", self.folder, error.strerror)


@dataclass(frozen=True, slots=True)
class _Blob:
    path: Path
    size: int
    used_ns: int


def put_into(held: Held, folder: Path, name: str) -> Path | None:
    """Give a held file a name in another folder: a link if possible, else a copy. None for a read-only folder.

    Never replaces a file: raises FileExistsError; OSError if it cannot be written.
    """
    target = folder / name
    try:
        os.link(held.path, target)
        return target
    except OSError as error:
        if error.errno not in (*_CROSSES, *READ_ONLY):
            raise
    try:
        sweep(folder)
        with Part(folder) as part:
            with held.path.open("rb") as source, part.open() as file:
                shutil.copyfileobj(source, file, 1 << 20)
            part.link(target, is_durable=True)
    except OSError as error:
        if isinstance(error, FileExistsError) or error.errno not in READ_ONLY:
            raise
        return None
    return target


def _hold(path: Path) -> Held | None:
    """Hold a blob that matches its name; drop any other."""
    found = _BLOB.fullmatch(path.name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if not try_lock(descriptor, is_shared=True) or not is_at(path, descriptor):  # it is being deleted
            os.close(descriptor)
            return None
        status = os.fstat(descriptor)
        if found is None or (status.st_size, status.st_mtime_ns) != (int(found[2]), int(found[3])):
            log.warning("%s of the cache was changed by another program; it is dropped", path.name[:12])
            path.unlink(missing_ok=True)
            os.close(descriptor)
            return None
    except BaseException:
        os.close(descriptor)
        raise
    return Held(path, found[1], status.st_size, descriptor)


def _delete_unused(path: Path) -> bool:
    """Delete a file that is not locked; returns whether it was deleted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(descriptor):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _hash(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()
