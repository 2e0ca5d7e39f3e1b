"""What can be fetched from, behind one small interface: objects that are read in ranges, and lists of them.

All of it blocks and is called from threads, never from the event loop; one source is read by several threads at once.
What a source raises is one of the three kinds of trouble below: whoever reads knows from the type what to do, and from
the sentence what to say. Sentences carry no secrets. What may be opened at all is judged before (`fetch_guard`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

OnProgress = Callable[[int, int | None], None]

if TYPE_CHECKING:  # the process that asks an object store imports this, and little else
    from marserve.store.addresses.fetch_guard import Target


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as its origin describes it now.

    `key` is its name there (of a listing: the whole key, prefix included). `size` is in bytes, None where the origin
    does not say it. `etag` changes whenever the content does: a strong ETag as the origin writes it, quotes included;
    None where there is none, then nothing tells that two reads are of the same thing. `modified` is in seconds since
    1970. `has_ranges`: reads may begin elsewhere than at 0.
    """

    key: str
    size: int | None
    etag: str | None = None
    modified: float | None = None
    has_ranges: bool = True

    def is_of(self, other: Entry) -> bool:
        """Whether both are the same content, as far as origins tell. Without ETags that is never known."""
        return self.etag is not None and self.etag == other.etag and self.size == other.size


class SourceError(Exception):
    """Something could not be read. The sentence is for logs and management, and free of secrets."""


class Broken(SourceError):
    """Not this time: a cut connection, a time-out, a busy origin (408, 429, 5xx). Trying again may help."""


class Replaced(SourceError):
    """The object is another one than the entry that was asked for: what was read of that is worth nothing."""


class Failed(SourceError):
    """Trying again would not help: refused, malformed, too large, closed."""


class Missing(Failed):
    """There is no such object. It may be one that appears late."""


class Reading(Protocol):
    """Bytes of one object on their way, from one answer of its origin."""

    @property
    def entry(self) -> Entry:
        """The object that these bytes are of, as this answer describes it."""

    @property
    def begin(self) -> int:
        """Where the first byte belongs. Not what was asked for, but 0, where the origin has no ranges."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The bytes as they come, in pieces of at most a MiB, each valid until the next is asked for.

        Ends behind the last byte that was asked for. Raises Broken where the origin ends early or is silent for too
        long, and Failed once the source is closed.
        """


class Source(Protocol):
    """One object that can be fetched."""

    @property
    def shown(self) -> str:
        """Its address for logs, errors and descriptions, without secrets."""

    @property
    def identity(self) -> str:
        """What tells it from every other object, the same at each opening: without signatures that change.

        May hold secrets; it is only stored as a digest.
        """

    @property
    def file_name(self) -> str:
        """The last part of its address: what the archive is called in the store."""

    def stat(self) -> Entry:
        """The object as it is now; no bytes of it are fetched. Raises Missing, Failed, Broken."""

    def read(self, begin: int, end: int | None, of: Entry | None = None) -> AbstractContextManager[Reading]:
        """Read from byte `begin` to before byte `end` (None: all that follows), of `of` and nothing else.

        One request of the origin; a download needs no `stat` before, its first answer describes the object. An `end`
        beyond the object's is its end. The context ends the read early when it is left early. Raises on entering it
        Missing, Failed, Broken, and Replaced when `of` is given and the object is another one by now (`Entry.is_of`,
        where `of` has an ETag; by its size alone where it has none).
        """

    def close(self) -> None:
        """End for good, from any thread and without waiting: who reads gets Failed within a second. Twice is fine."""


class Listing(Protocol):
    """A place that holds objects and tells which."""

    @property
    def shown(self) -> str:
        """Its address for logs, without secrets."""

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key begins with `prefix`, in no promised order, as few requests as the origin allows.

        Raises Failed and Broken, also midway.
        """

    def open(self, entry: Entry) -> Source:
        """The object of an entry. Asks the origin nothing."""

    def close(self) -> None:
        """End for good, as `Source.close`."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was fetched and lies in a cache of its own kind: a folder, or a file, at `path`.

    `address` is what names exactly this, also later: with a commit in the place of a branch.
    """

    path: Path
    address: str


Opener = Callable[["Target"], Source]
"""Makes the source of an address that is allowed; one for each scheme. Asks the origin nothing; raises SourceError."""


class Cancel:
    """Ends a download from another thread: sets a flag, wakes who waits, and runs what was left with it."""

    def __init__(self) -> None:
        self.reason = "it was given up"
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []

    def set(self, reason: str | None = None) -> None:
        """Cancel. May be called twice, from any thread; the first reason stays."""
        with self._lock:
            if self._event.is_set():
                return
            self.reason = reason or self.reason
            self._event.set()
            actions = list(self._actions)
        for action in actions:
            action()

    @property
    def is_set(self) -> bool:
        """Whether it was cancelled."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until it is cancelled; says which."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise Failed if it was cancelled."""
        if self._event.is_set():
            raise Failed(self.reason)

    @contextlib.contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Have `action` called when it is cancelled meanwhile; at once if it was."""
        with self._lock:
            is_set = self._event.is_set()
            self._actions.append(action)
        if is_set:
            action()
        try:
            yield
        finally:
            with self._lock:
                self._actions.remove(action)
