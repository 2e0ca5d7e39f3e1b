"""Reads files of this machine as sources: `file://` addresses whose real path is allowed."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marserve.store.addresses.fetch_guard import AllowedUrls, Target
from marserve.store.sources.source import Entry, Failed, Missing, Replaced

CHUNK_BYTES = 1 << 20


class FileOrigins:
    """Opens sources of file addresses. The target of a link must be allowed as well."""

    def __init__(self, allowed: AllowedUrls) -> None:
        self._allowed = allowed

    def __call__(self, target: Target) -> FileSource:
        """The file at an allowed address. Raises ArchiveNotFound if its real path is not allowed."""
        real = Path(target.path).resolve()
        self._allowed.check(Target("file", "", 0, str(real), ""))
        return FileSource(target, real)


class FileSource:
    """One file. It is read as one stream, as ranges have no advantage here."""

    def __init__(self, target: Target, path: Path) -> None:
        self._target = target
        self._path = path
        self._closing = threading.Event()

    @property
    def shown(self) -> str:
        """The address."""
        return self._target.url

    @property
    def identity(self) -> str:
        """The real path."""
        return f"file://{self._path}"

    @property
    def file_name(self) -> str:
        """The last part of the address, which may be a link's name."""
        return self._target.file_name

    def close(self) -> None:
        """End all reads."""
        self._closing.set()

    def stat(self) -> Entry:
        """The file as it is now. Raises Missing and Failed."""
        descriptor = self._open()
        try:
            return self._entry(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[FileReading]:
        """As `Source.read`, but always to the end of the file; `end` is ignored."""
        descriptor = self._open()
        try:
            entry = self._entry(descriptor)
            if of is not None and not entry.is_of(of):
                raise Replaced("it was replaced while it was fetched")
            yield FileReading(self, descriptor, entry, begin)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        try:
            # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise Missing("there is no such file") from None
        except OSError as error:
            raise Failed(f"it cannot be opened: {error.strerror}") from error

    def _entry(self, descriptor: int) -> Entry:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Failed("it is no file")
        return entry_of(str(self._path), status)

    def check(self) -> None:
        """Raise Failed once it is closed."""
        if self._closing.is_set():
            raise Failed("it was given up")


class FileReading:
    """The bytes of a file from `begin` on. A file that changes meanwhile is noticed at its end."""

    def __init__(self, source: FileSource, descriptor: int, entry: Entry, begin: int) -> None:
        self.entry = entry
        self.begin = begin
        self._source = source
        self._descriptor = descriptor

    def __iter__(self) -> Iterator[memoryview]:
        """As `Reading.__iter__`."""
        view = memoryview(bytearray(CHUNK_BYTES))
        at = self.begin
        while count := os.preadv(self._descriptor, [view], at):
            self._source.check()
            at += count
            yield view[:count]
        if not entry_of(self.entry.key, os.fstat(self._descriptor)).is_of(self.entry):
            raise Replaced("it was written to while it was fetched")


def entry_of(key: str, status: os.stat_result) -> Entry:
    """The entry of a file's status; the ETag is made of its inode, size and time of change."""
    etag = f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'
    return Entry(key, status.st_size, etag, status.st_mtime, has_ranges=False)
