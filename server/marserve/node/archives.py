"""Archives on a node, unpacked once for all of its workers and kept by their content.

    FOLDER/models/SHA256           an unpacked archive whose pickles were checked; SHA256-trusted if the operator
                                   trusts it: its pickles may hold anything
    FOLDER/models/SHA256.lock      shared by the workers' agents that use it, exclusive while it is made or deleted
    FOLDER/incoming/SHA256.…/      an archive that is being made or deleted, so that `models` never has half of one

Archives that no agent uses are deleted, longest unused first, when the folder exceeds its bound or its disk is full.
The leftovers of an agent that was killed are deleted by the next one. All functions here block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from marserve.agent_link import ArchiveRef
from marserve.archive.checkpoints.checked_files import check_archive
from marserve.archive.reading.reader import Limits, unpack
from marserve.errors import BadArchive, MarserveError, without_stop
from marserve.files.digests import FileDigests, digest_of
from marserve.files.leased_folders import Lease, LeasedFolders, bytes_below, discard, tag_as_cache
from marserve.store.addresses.fetch_guard import AllowedUrls, hide_query
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.source import Opener

log = logging.getLogger("marserve.node")

Made = TypeVar("Made")

USUAL_CACHE_BYTES = 64 << 30
LOOK_S = 0.05
# How often in a row a store is tried that gives no answer: the server has the archive as well.
ATTEMPTS = 2
FULL = (errno.ENOSPC, errno.EDQUOT)
# The error of a file system that cannot have a member's name; it would be the same on every node.
OF_THE_NAME = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EEXIST)


def usual_folder() -> Path:
    """The default folder for archives: in the user's cache; without a home, in the temporary folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marserve" / "node"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"marserve-node-{os.getuid()}"


class NodeUnfit(MarserveError):
    """This node cannot keep archives. The archive may be sound: another node may take it."""


class ArchiveChanged(MarserveError):
    """Under this name the server now has an archive other than the registered one."""


class NodeArchives:
    """The archives in `folder`, of at most `max_bytes` and what is in use."""

    def __init__(
        self, folder: Path, max_bytes: int = USUAL_CACHE_BYTES, openers: Mapping[str, Opener] | None = None
    ) -> None:
        """`openers` open addresses of object stores. Makes the folders where they are missing. Raises NodeUnfit."""
        self._folder, self._models, self._incoming = folder, folder / "models", folder / "incoming"
        self._max_bytes = max_bytes
        self._openers = dict(openers or {})
        self._digests = FileDigests()
        self._kept = LeasedFolders(self._models, bytes_below, staging=self._incoming)
        try:
            self._with_room(self._make_folders)
        except OSError as error:
            raise self._unfit(error) from error

    def _make_folders(self) -> None:
        for each in (self._models, self._incoming):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        tag_as_cache(self._folder, "Models that marserve unpacked.")

    def prepare(self, ref: ArchiveRef, receive: Callable[[Path], None], stop: threading.Event | None = None) -> Lease:
        """A lease of the unpacked archive: from this folder if it is there, else from the nearest place that has it.

        The places are the path that the server names (a volume that both see), the address it came from, and last the
        server itself: `receive` writes a file. An archive from any of them is only used if it has the digest.

        Raises ArchiveChanged, BadArchive, UnsafeArchive, NodeUnfit where files cannot be written, what `receive`
        raises, and MarserveError on `stop`.
        """
        name = f"{ref.sha256}-trusted" if ref.is_trusted else ref.sha256
        try:
            lease = self._lease(ref, name, receive, stop or threading.Event())
        except OSError as error:
            raise self._unfit(error, ref.name) from error
        try:
            self._prune(self._max_bytes)
        except OSError as error:
            log.warning("unused archives in %s could not be looked for: %s", self._folder, error)
        return lease

    def _lease(self, ref: ArchiveRef, name: str, receive: Callable[[Path], None], stop: threading.Event) -> Lease:
        """A lease of the archive, which is made where it is missing. Waits."""
        while True:
            lease = self._with_room(lambda: self._kept.lease(name))
            if lease is None:
                if stop.wait(LOOK_S):
                    raise MarserveError("The archive is not prepared: the server has gone.")
                continue
            if not lease.is_exclusive:
                return lease
            try:
                self._with_room(lambda: self._make(ref, name, receive, stop))
                if self._kept.share(lease):
                    return lease
            except BaseException:
                lease.release()
                raise
            log.info("%s was deleted as soon as it was made: once more", name)

    def _unfit(self, error: OSError, name: str = "an archive") -> NodeUnfit:
        if error.errno in FULL:
            what = f"{name} does not fit: the disk of {self._folder} is full, and no archive there is unused. Free some"
            return NodeUnfit(f"{what} space, or name a folder on another disk with ray_cache.")
        what = f"{name} cannot be kept: {self._folder} cannot be used ({error.strerror or error})"
        return NodeUnfit(
            f"{without_stop(what)}. Let the user that Ray runs as write there, or name another folder with ray_cache."
        )

    # ------------------------------------------------------------------------------------------- making

    def _with_room(self, make: Callable[[], Made]) -> Made:
        """Call `make`; on a full disk, delete all unused archives and call it once more."""
        try:
            return make()
        except OSError as error:
            if error.errno not in FULL or not self._prune(0):
                raise
            return make()

    def _make(self, ref: ArchiveRef, name: str, receive: Callable[[Path], None], stop: threading.Event) -> None:
        limits = Limits()
        if ref.max_entries and ref.max_total_bytes:
            limits = Limits(max_entries=ref.max_entries, max_total_bytes=ref.max_total_bytes)
        making = self._kept.stage(name)
        try:
            unpacked = making / "unpacked"
            with self._archive(ref, receive, making) as path:
                _unpack(path, unpacked, limits, ref.name)
            for finding in check_archive(unpacked, trusted=ref.is_trusted, is_stopped=stop.is_set):
                log.warning("%s: trusted all the same: %s", ref.name, finding)
            self._kept.publish(unpacked, name)
        finally:
            discard(making)
        log.info("%s was unpacked: %s", ref.name, ref.sha256)

    @contextlib.contextmanager
    def _archive(self, ref: ArchiveRef, receive: Callable[[Path], None], making: Path) -> Iterator[Path]:
        """The archive's file, for as long as the block lasts. A file that is made here is below `making`."""
        if ref.path and self._is(Path(ref.path), ref.sha256):
            yield Path(ref.path)
            if not self._is(Path(ref.path), ref.sha256):
                raise ArchiveChanged(
                    f"{ref.name} was replaced at {ref.path} while it was unpacked from there: its SHA-256 digest is no "
                    f"more {ref.sha256}. Swap the model for what is there now, or put the old archive back."
                )
            return
        if ref.address:
            try:
                options = FetchOptions(DownloadOptions(attempts=ATTEMPTS), temporary=making)
                fetcher = Fetcher(AllowedUrls([exactly(ref.address)]), options, openers=self._openers)
                fetched = fetcher.fetch(f"{ref.address}#sha256={ref.sha256}", None)
            except (MarserveError, OSError) as error:
                log.warning("%s is asked of the server, for it was not fetched: %s", hide_query(ref.address), error)
            else:
                try:
                    yield fetched.path
                finally:
                    fetched.release()
                return
        path = making / "archive"
        receive(path)
        found = digest_of(path)
        if found != ref.sha256:
            raise ArchiveChanged(
                f"{ref.name} has changed on the server since it was registered: its SHA-256 digest is {found}, and was "
                f"{ref.sha256}. Swap the model for what is there now, or put the old archive back."
            )
        yield path

    def _is(self, path: Path, sha256: str) -> bool:
        """Whether `path` is a file that can be read here and has this digest."""
        try:
            return self._digests.of(path) == sha256
        except (OSError, ValueError):
            return False

    def _prune(self, most_bytes: int) -> bool:
        """Delete what is not in use until the rest is within the bound; returns whether anything was deleted."""
        pruned = self._kept.prune(most_bytes)
        for name in pruned.unused:
            log.info("%s is deleted from the node's cache: it is not in use", name)
        return bool(pruned.unused or pruned.left)


def exactly(address: str) -> str:
    """A pattern of `allowed_urls` that this address matches, and no other."""
    return re.escape(address)


def _unpack(path: Path, target: Path, limits: Limits, name: str) -> None:
    """Unpack it. A file name that no disk can have is the archive's fault. Raises OSError and BadArchive."""
    try:
        unpack(path, target, limits)
    except OSError as error:
        if error.errno not in OF_THE_NAME:
            raise
        member = Path(error.filename or "").name
        raise BadArchive(
            f"{name} cannot be unpacked: {error.strerror}, for the member {member!r}. Give it another name in the "
            "archive."
        ) from error
