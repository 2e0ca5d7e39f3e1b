"""Where the document of a desired state lies: a file, or an object that a store has. Everything here blocks.

Both say cheaply whether the document may have changed, and both are written by compare-and-swap: what is written takes
the place of the very document that it was made from, or `DesiredStateMoved` says that another writer was faster.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from marserve.desired_state.document import LARGEST_DOCUMENT
from marserve.errors import DesiredStateMoved, Unavailable
from marserve.files.atomic import replace_file, sweep
from marserve.files.locks import locked
from marserve.files.regular import open_regular
from marserve.store.sources.source import Entry, Missing, Replaced, Source, SourceError

MOST_READS = 3
LOCK_LIMIT_S = 30.0

# The tag of a document that is not there: what is written with it is made new.
ABSENT = ""


class DocumentUnreadable(Unavailable):
    """The document cannot be read, or not be written. The sentence says why."""


class DocumentMissing(DocumentUnreadable):
    """There is no document."""


@dataclass(frozen=True, slots=True)
class Found:
    """A document, and the tag of exactly this one."""

    data: bytes
    tag: str


class DocumentPlace(Protocol):
    """Where a document lies."""

    @property
    def shown(self) -> str:
        """Its name for people, without secrets."""

    @property
    def can_write(self) -> bool:
        """Whether a document may be put there at all."""

    def look(self) -> str:
        """Something that changes when the document does, got cheaply. Raises DocumentUnreadable."""

    def read(self) -> Found:
        """The document. Raises DocumentUnreadable, DocumentMissing if there is no document."""

    def write(self, data: bytes, tag: str) -> str:
        """Put a document in the place of the one with this tag, or (ABSENT) where there is none; gives the new one's.

        Raises DesiredStateMoved, DocumentUnreadable.
        """


class FilePlace:
    """A file. A link (as Kubernetes mounts its ConfigMaps) is followed each time, and never replaced itself."""

    can_write = True

    def __init__(self, path: Path, shown: str | None = None) -> None:
        self._path = path
        self.shown = shown or str(path)

    def look(self) -> str:
        """Which file it is, how large, and when it was written."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"

    def read(self) -> Found:
        """The file's content; its tag is the content's digest."""
        try:
            with open_regular(self._path) as file:
                data = file.read(LARGEST_DOCUMENT + 1)
        except OSError as error:
            raise self._unreadable(error) from error
        return Found(data, _digest(data))

    def write(self, data: bytes, tag: str) -> str:
        """Rename a finished file into its place, under a lock that every server takes."""
        path = self._path.resolve()
        try:
            with locked(path.parent, within_s=LOCK_LIMIT_S):
                if self._tag_now() != tag:
                    raise DesiredStateMoved(self.shown)
                sweep(path.parent)
                replace_file(path, data, is_durable=True)
        except OSError as error:
            raise DocumentUnreadable(f"{self.shown} cannot be written ({error.strerror or error})") from error
        return _digest(data)

    def _tag_now(self) -> str:
        try:
            return self.read().tag
        except DocumentMissing:
            return ABSENT

    def _unreadable(self, error: OSError) -> DocumentUnreadable:
        kind = DocumentMissing if isinstance(error, FileNotFoundError) else DocumentUnreadable
        return kind(f"{self.shown} cannot be read ({error.strerror or error})")


class ObjectPlace:
    """An object behind an address. `open_source` opens it anew for each question."""

    def __init__(self, open_source: Callable[[], Source], shown: str) -> None:
        self._open = open_source
        self.shown = shown
        with contextlib.closing(open_source()) as source:
            self.can_write = hasattr(source, "write")

    def look(self) -> str:
        """The object's ETag, by one question."""
        with self._source("read") as source:
            return _tag(source.stat())

    def read(self) -> Found:
        """The object. One that is replaced while it is read is read again."""
        with self._source("read") as source:
            for _ in range(MOST_READS):
                with contextlib.suppress(Replaced):
                    return self._read_once(source)
            raise Replaced("it is replaced all the time")

    def _read_once(self, source: Source) -> Found:
        with source.read(0, None) as reading:
            data = bytearray()
            for piece in reading:
                data += piece
                if len(data) > LARGEST_DOCUMENT:
                    break
            return Found(bytes(data), _tag(reading.entry))

    def write(self, data: bytes, tag: str) -> str:
        """Put the object, if it is still the one with this ETag, or still none."""
        with self._source("written") as source:
            writer: Any = source
            of = Entry(source.file_name, None, tag) if tag != ABSENT else None
            try:
                return _tag(writer.write(data, of, is_new=tag == ABSENT))
            except Replaced:
                raise DesiredStateMoved(self.shown) from None

    @contextlib.contextmanager
    def _source(self, what: str) -> Any:
        try:
            with contextlib.closing(self._open()) as source:
                yield source
        except SourceError as error:
            kind = DocumentMissing if isinstance(error, Missing) else DocumentUnreadable
            raise kind(f"{self.shown} cannot be {what}: {error}") from error


def _tag(entry: Entry) -> str:
    """The ETag; where an origin has none, what else tells one object from the next."""
    return entry.etag or f"{entry.size}:{entry.modified}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
