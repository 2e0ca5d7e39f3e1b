"""Takes uploaded archives into the model store: whole, checked as any archive, or not at all.

    its name → is it there already → bytes into a hidden file of the store → its digest → unpacked and checked, on trial
            → its name, by a link

A file of the store is never changed: one with the same content is the answer, one with other content refuses the
upload, unless it is to be replaced and no version uses it. An upload registers nothing.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from marserve.archive.reading.member_names import split_name
from marserve.errors import (
    ArchiveInUse,
    ArchiveNotAsSaid,
    BadName,
    BodyTooLarge,
    Draining,
    MarserveError,
    OtherArchiveThere,
    OutOfMemory,
    StoreNotWritable,
    TooManyUploads,
    UnsafeArchive,
    without_stop,
)
from marserve.files.atomic import Part, sweep
from marserve.names import escaped, name_fault
from marserve.registry.intake.intake import Intake
from marserve.store.sources.local import ARCHIVE_ENDINGS

log = logging.getLogger("marserve.registry")

# How many are taken at once, and how many of them are checked at once.
MOST_AT_ONCE: Final = 4
MOST_CHECKED_AT_ONCE: Final = 2
# Bytes are written and hashed in pieces of at least this length, each by a thread.
PIECE_BYTES: Final = 1 << 20
LONGEST_NAME_BYTES: Final = 200

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR})

T = TypeVar("T")


class Uploaded(NamedTuple):
    """An archive that is in the store. `is_new` is false if it was there with the same content."""

    name: str
    sha256: str
    size_bytes: int
    is_new: bool


class Wish(NamedTuple):
    """How a file is uploaded: its length and digest where the client says them, and what may be done with it."""

    length: int | None = None
    sha256: str | None = None
    replaces: bool = False
    is_dry_run: bool = False


def check_archive_name(name: str) -> None:
    """Raise BadName for what no archive in the store may newly be called."""
    if "/" in name:
        raise _bad_name(name, "it is a path, and a name has no slash")
    try:
        split_name(name, max_bytes=LONGEST_NAME_BYTES)
    except UnsafeArchive as error:
        raise _bad_name(name, error.reason) from None
    if name.startswith("."):
        raise _bad_name(name, "it is hidden, as it begins with a dot")
    if ".." in name:
        raise _bad_name(name, "no registration finds a name with '..'")
    if "\ufffd" in name:  # two names would become one
        raise _bad_name(name, "it is not UTF-8")
    if fault := name_fault("archive", name):
        raise BadName(f"{fault[0].upper()}{fault[1:]}; choose another.")
    if not name.lower().endswith(ARCHIVE_ENDINGS):
        raise _bad_name(name, f"an archive's name ends in {', '.join(ARCHIVE_ENDINGS[:-1])} or {ARCHIVE_ENDINGS[-1]}")


def _bad_name(name: str, why: str) -> BadName:
    return BadName(f"The archive cannot be called '{escaped(name[:LONGEST_NAME_BYTES])}': {without_stop(why)}.")


class Uploads:
    """Takes uploads of up to `most_bytes` into the store of `intake`. `is_used` tells whether a version uses a file.

    All methods are called on the event loop.
    """

    def __init__(self, intake: Intake, is_used: Callable[[str], bool], most_bytes: int) -> None:
        self._intake = intake
        self._is_used = is_used
        self._most_bytes = most_bytes
        self._under_way = 0
        self._checking = asyncio.Semaphore(MOST_CHECKED_AT_ONCE)
        self._reading: set[asyncio.Future[bytes | None]] = set()
        self._checked: set[_Upload] = set()
        self._leaving: list[asyncio.Future[None]] = []
        self._is_stopped = False

    def stop(self) -> None:
        """End the uploads under way, and refuse those that come later.

        Unpacking a large archive may outlast the server, so the file of one that is checked loses its name at once.
        """
        self._is_stopped = True
        for reading in self._reading:
            reading.cancel()
        self._leaving = [asyncio.ensure_future(asyncio.to_thread(upload.unname)) for upload in self._checked]

    async def sweep(self) -> None:
        """Delete what a server that ended early has left of uploads."""
        if self._intake.store.root is not None:
            await asyncio.to_thread(sweep, self._intake.store.root)

    async def take(self, name: str, chunks: AsyncIterator[bytes], wish: Wish) -> Uploaded:
        """Take one archive in. `chunks` raises if the client goes; whatever is raised, nothing of the file is left.

        Raises BadName, TooManyUploads, Draining, StoreNotWritable, BodyTooLarge, OtherArchiveThere, ArchiveInUse,
        ArchiveNotAsSaid, OutOfMemory if the disk is full, and what `Intake.judge` raises.
        """
        check_archive_name(name)
        self._intake.check_is_not_trusted(name)
        if self._is_stopped:
            raise Draining
        if self._under_way >= MOST_AT_ONCE:
            raise TooManyUploads(MOST_AT_ONCE)
        if wish.length is not None and wish.length > self._most_bytes:
            raise BodyTooLarge(self._most_bytes, "max_upload_size")
        self._under_way += 1
        upload = _Upload(self._intake, name, wish)
        try:
            return await self._take(upload, chunks)
        finally:
            self._under_way -= 1
            await _in_thread(upload.discard)

    async def _take(self, upload: _Upload, chunks: AsyncIterator[bytes]) -> Uploaded:
        known = await _in_thread(upload.begin)
        if known is not None:
            return known
        buffer, total = bytearray(), 0
        while (chunk := await self._next(chunks)) is not None:
            total += len(chunk)
            if total > self._most_bytes:
                raise BodyTooLarge(self._most_bytes, "max_upload_size")
            buffer += chunk
            if len(buffer) >= PIECE_BYTES:
                await _in_thread(upload.write, buffer)
                buffer = bytearray()
        await _in_thread(upload.write, buffer)
        async with self._checking:
            if self._is_stopped:
                raise Draining
            self._checked.add(upload)
            try:
                await _in_thread(upload.check)
            finally:
                self._checked.discard(upload)
        if self._is_stopped:
            raise Draining
        # Nothing between this and the link: a version that begins to use the file meanwhile keeps the content it read.
        may_replace = upload.wish.replaces and not self._is_used(upload.name)
        uploaded = await _in_thread(upload.place, may_replace)
        if uploaded.is_new and not upload.wish.is_dry_run:
            log.info("%s was uploaded: %d bytes, SHA-256 %s", uploaded.name, uploaded.size_bytes, uploaded.sha256)
        return uploaded

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """The next bytes; None at the end. Raises Draining when the server stops meanwhile."""
        if self._is_stopped:
            raise Draining
        reading = asyncio.ensure_future(_next_of(chunks))
        self._reading.add(reading)
        try:
            return await reading
        except asyncio.CancelledError:
            if self._is_stopped:
                raise Draining from None
            raise
        finally:
            self._reading.discard(reading)


async def _next_of(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking call. If the caller is cancelled, its thread is waited for: it uses the upload's file."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


class _Upload:
    """One upload. Its methods block, and are called one after the other; `discard` comes last in any case."""

    def __init__(self, intake: Intake, name: str, wish: Wish) -> None:
        self.name, self.wish = name, wish
        self._intake = intake
        self._part: Part | None = None
        self._digest = hashlib.sha256()
        self._size = 0

    def begin(self) -> Uploaded | None:
        """Look for what would refuse the file unread, and open a hidden file for it.

        Returns the archive of the store if it has the digest that the client says.
        """
        store = self._store()
        with _as_typed(self.name):
            target = store / self.name
            if os.path.lexists(target):
                if self.wish.sha256 is not None:
                    found = self._found(target)
                    if found == self.wish.sha256:
                        return Uploaded(self.name, found, target.stat().st_size, is_new=False)
                if not self.wish.replaces and not self._could_be(target):
                    raise OtherArchiveThere(self.name)
            if self.wish.length is not None and self.wish.length > shutil.disk_usage(store).free:
                raise OutOfMemory(f"No space is left to save model: {self.name}")
            sweep(store)
            self._part = Part(store)
        return None

    def write(self, piece: bytes | bytearray) -> None:
        """Add bytes to the file."""
        assert self._part is not None
        with _as_typed(self.name):
            self._digest.update(piece)
            self._size += len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(self._part.descriptor, view) :]

    def check(self) -> None:
        """Check the digest, and the archive as a registration would. One that the store has is not checked again."""
        assert self._part is not None
        sha256 = self._digest.hexdigest()
        if self.wish.sha256 is not None and sha256 != self.wish.sha256:
            raise ArchiveNotAsSaid(self.name, self.wish.sha256, sha256)
        target = self._part.path.with_name(self.name)
        with _as_typed(self.name):
            if os.path.lexists(target) and (self._found(target) == sha256 or not self.wish.replaces):
                return  # `place` answers
        self._intake.judge(self._part.path, self.name, sha256)

    def place(self, may_replace: bool) -> Uploaded:
        """Give the file its name in the store; `may_replace` the file that has it."""
        assert self._part is not None
        sha256, target = self._digest.hexdigest(), self._part.path.with_name(self.name)
        uploaded = Uploaded(self.name, sha256, self._size, is_new=True)
        with _as_typed(self.name):
            if not self.wish.is_dry_run:
                with suppress(FileExistsError):
                    self._part.link(target, is_durable=True)
                    self._intake.forget_fetched(self.name)
                    return uploaded
            if not os.path.lexists(target):
                return uploaded
            if self._found(target) == sha256:
                return uploaded._replace(is_new=False)
            if not self.wish.replaces:
                raise OtherArchiveThere(self.name)
            if not may_replace or not target.is_file():
                raise ArchiveInUse(self.name)
            if not self.wish.is_dry_run:
                self._part.replace(target, is_durable=True)
                self._intake.forget_fetched(self.name)
        return uploaded

    def unname(self) -> None:
        """Delete the hidden file while a thread may still read it."""
        assert self._part is not None
        with suppress(OSError):
            self._part.path.unlink()

    def discard(self) -> None:
        """Delete the hidden file. A file that has its name in the store keeps that."""
        if self._part is not None:
            self._part.discard()

    def _store(self) -> Path:
        store = self._intake.store.root
        if store is None:
            raise StoreNotWritable("this server has no model store; name one with --model-store or model_store")
        return store

    def _found(self, target: Path) -> str:
        """The digest of the store's file; empty for what is no file: a folder, a pipe, a link that leads nowhere."""
        return self._intake.digest_of(target) if target.is_file() else ""

    def _could_be(self, target: Path) -> bool:
        """Whether the store's entry could be what comes, by what is known of that."""
        if not target.is_file() or self.wish.sha256 is not None:  # another digest, or there was an answer
            return False
        return self.wish.length is None or self.wish.length == target.stat().st_size


@contextmanager
def _as_typed(name: str) -> Iterator[None]:
    """Turn errors of the file system into those that callers know."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise OutOfMemory(f"No space is left to save model: {name}") from error
        if error.errno in _CLOSED:
            reason = error.strerror or type(error).__name__
            raise StoreNotWritable(f"its model store cannot be written to ({reason})") from error
        raise MarserveError(f"Failed to save model: {name}") from error
