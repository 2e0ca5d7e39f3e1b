"""The place of a desired state's document: a file, or an object in a store. Everything here blocks.

Both places can be asked cheaply whether the document may have changed. Both are written by compare-and-swap: a new
document replaces only the one that it was made from; otherwise `DesiredStateMoved` is raised.
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

# The tag of a missing document; writing with it creates the document.
ABSENT = ""


class DocumentUnreadable(Unavailable):
    """The document cannot be read or written. The sentence says why."""


class DocumentMissing(DocumentUnreadable):
    """There is no document."""


@dataclass(frozen=True, slots=True)
class Found:
    """A document, and the tag of exactly this content."""

    data: bytes
    tag: str


class DocumentPlace(Protocol):
    """The place of a document."""

    @property
    def shown(self) -> str:
        """Its name for people, without secrets."""

    @property
    def can_write(self) -> bool:
        """Whether a document may be put there at all."""

    def look(self) -> str:
        """A word that changes when the document does, and costs little. Raises DocumentUnreadable."""

    def read(self) -> Found:
        """The document. Raises DocumentUnreadable, DocumentMissing if there is no document."""

    def write(self, data: bytes, tag: str) -> str:
        """Replace the document with this tag (ABSENT: create it); returns the new tag.

        Raises DesiredStateMoved, DocumentUnreadable.
        """


class FilePlace:
    """A file. A link (as in Kubernetes' mounts of ConfigMaps) is followed each time, and never replaced itself."""

    can_write = True

    def __init__(self, path: Path, shown: str | None = None) -> None:
        self._path = path
        self.shown = shown or str(path)

    def look(self) -> str:
        """The file's inode, size and time of change."""
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
        """Rename a complete new file over it, under a lock that every server takes."""
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
    """An object behind an address. `open_source` opens it anew for each request."""

    def __init__(self, open_source: Callable[[], Source], shown: str) -> None:
        self._open = open_source
        self.shown = shown
        with contextlib.closing(open_source()) as source:
            self.can_write = hasattr(source, "write")

    def look(self) -> str:
        """The object's ETag, by one request."""
        with self._source("read") as source:
            return _tag(source.stat())

    def read(self) -> Found:
        """The object; read again if it is replaced meanwhile."""
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
        """Put the object, if the present one still has this ETag, or is still missing."""
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
    """The ETag; for an origin without ETags, size and time of change."""
    return entry.etag or f"{entry.size}:{entry.modified}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
