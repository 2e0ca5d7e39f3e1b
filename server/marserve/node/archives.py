"""Archives on a node, unpacked once for all of its workers and kept by their content.

    FOLDER/models/SHA256           an unpacked archive, whose pickles were checked; SHA256-trusted where the operator
                                   trusts it, for there they may hold anything
    FOLDER/models/SHA256.lock      shared by whoever serves from it, exclusive while it is made or deleted
    FOLDER/incoming/…              an archive on its way

What nobody uses is deleted, longest unused first, when the folder holds more than it may. Everything here blocks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.pickle_check import check_folder
from marserve.archive.reader import Limits, unpack
from marserve.errors import DigestMismatch, MarserveError
from marserve.link import ArchiveRef
from marserve.store.fetch_guard import AllowedUrls, hide_query
from marserve.store.fetcher import Fetcher, FetchOptions

log = logging.getLogger("marserve.node")

USUAL_CACHE_BYTES = 64 << 30
LOOK_S = 0.05


def usual_folder() -> Path:
    """Where archives are kept unless somebody says otherwise: in the user's cache; without a home in `/tmp`'s like."""
    import tempfile

    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marserve" / "node"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"marserve-node-{os.getuid()}"


@dataclass(slots=True)
class Prepared:
    """An unpacked archive that stays until `release`."""

    folder: Path
    _lock: int

    def release(self) -> None:
        """Nobody here serves from it any more. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class NodeArchives:
    """The archives in `folder`, of at most `max_bytes` and what is in use."""

    def __init__(self, folder: Path, max_bytes: int = USUAL_CACHE_BYTES) -> None:
        """Makes the folders where they are missing. Raises OSError."""
        self._models, self._incoming = folder / "models", folder / "incoming"
        self._max_bytes = max_bytes
        for each in (self._models, self._incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), (folder / "CACHEDIR.TAG").open("x") as tag:
            tag.write("Signature: 8a477f597d28d172789f06886806bc55\n# Models that marserve unpacked.\n")

    def prepare(
        self, ref: ArchiveRef, receive: Callable[[Path], None], stop: threading.Event | None = None
    ) -> Prepared:
        """The archive, unpacked: what is there already, or from where it can be had, the nearest first.

        That is the path that the server names (a volume that both see), the address it came from, and last the server
        itself: `receive` writes a file. Whatever it was, it is only used when it has the digest.

        Raises DigestMismatch, BadArchive, UnsafeArchive, OSError, what `receive` raises, and MarserveError on `stop`.
        """
        name = f"{ref.sha256}-trusted" if ref.is_trusted else ref.sha256
        folder = self._models / name
        lock = self._lock(name, stop or threading.Event())
        try:
            if not folder.is_dir():
                self._make(ref, folder, receive)
            os.utime(folder)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except BaseException:
            os.close(lock)
            raise
        self._prune()
        return Prepared(folder, lock)

    def _lock(self, name: str, stop: threading.Event) -> int:
        """A shared lock on what is there; an exclusive one on what is still to be made. Waits."""
        folder, path = self._models / name, self._models / f"{name}.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                wish = fcntl.LOCK_SH if folder.is_dir() else fcntl.LOCK_EX
                fcntl.flock(descriptor, wish | fcntl.LOCK_NB)
                if folder.is_dir() or wish == fcntl.LOCK_EX:
                    return descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if stop.wait(LOOK_S):
                raise MarserveError("The archive is not prepared: the server has gone.")

    def _make(self, ref: ArchiveRef, folder: Path, receive: Callable[[Path], None]) -> None:
        limits = Limits()
        if ref.max_entries and ref.max_total_bytes:
            limits = Limits(max_entries=ref.max_entries, max_total_bytes=ref.max_total_bytes)
        with self._archive(ref, receive, limits.max_total_bytes) as path:
            unpack(path, folder, limits)
        try:
            for finding in check_folder(folder, trusted=ref.is_trusted):
                log.warning("%s: trusted all the same: %s", ref.name, finding)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        log.info("%s was unpacked: %s", ref.name, ref.sha256)

    @contextlib.contextmanager
    def _archive(self, ref: ArchiveRef, receive: Callable[[Path], None], max_bytes: int) -> Iterator[Path]:
        """The archive's file, for as long as the block lasts."""
        path = Path(ref.path) if ref.path else None
        if path is not None and path.is_file() and _digest(path) == ref.sha256:
            yield path
            return
        if ref.address:
            try:
                fetcher = Fetcher(AllowedUrls([exactly(ref.address)]), FetchOptions(temporary=self._incoming))
                fetched = fetcher.fetch(f"{ref.address}#sha256={ref.sha256}", None)
            except (MarserveError, OSError) as error:
                log.warning("%s is asked of the server, for it was not fetched: %s", hide_query(ref.address), error)
            else:
                try:
                    yield fetched.path
                finally:
                    fetched.release()
                return
        path = self._incoming / secrets.token_hex(8)
        try:
            receive(path)
            found = _digest(path)
            if found != ref.sha256:
                raise DigestMismatch(ref.name, ref.sha256, found, "what the server sent")
            yield path
        finally:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------- room

    def _prune(self) -> None:
        """Delete what nobody uses, longest unused first, until the rest is within the bound."""
        sizes = {folder: _size(folder) for folder in self._models.iterdir() if folder.is_dir()}
        total = sum(sizes.values())
        for folder in sorted(sizes, key=_when_used):
            if total <= self._max_bytes:
                return
            if self._delete(folder):
                total -= sizes[folder]
                log.info("%s is deleted from the node's cache: nobody uses it", folder.name)

    def _delete(self, folder: Path) -> bool:
        descriptor = os.open(self._models / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            shutil.rmtree(folder, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)


def exactly(address: str) -> str:
    """A pattern of `allowed_urls` that this address matches, and no other."""
    import re

    return re.escape(address)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _when_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
