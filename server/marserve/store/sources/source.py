"""The interface of places to fetch from: objects that are read in ranges, and lists of them.

All of it blocks and is called from threads, never from the event loop; several threads may read one source at once.
A source raises one of the types of SourceError below. The type says what to do, the sentence what to show; it has no
secrets. Whether an address may be opened is decided before (`fetch_guard`).
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

if TYPE_CHECKING:  # the process that asks an object store imports this module, and little else
    from marserve.store.addresses.fetch_guard import Target


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as its origin describes it now.

    `key` is its name there (in a listing the whole key, prefix included). `size` is in bytes, None if the origin does
    not say it. `etag` changes whenever the content does: a strong ETag as the origin writes it, quotes included; with
    None it is unknown whether two reads are of the same content. `modified` is in seconds since 1970. `has_ranges`:
    reads may begin elsewhere than at 0.
    """

    key: str
    size: int | None
    etag: str | None = None
    modified: float | None = None
    has_ranges: bool = True

    def is_of(self, other: Entry) -> bool:
        """Whether both are the same content by their ETags; False without them."""
        return self.etag is not None and self.etag == other.etag and self.size == other.size


class SourceError(Exception):
    """An object could not be read. The sentence is for logs and management, and has no secrets."""


class Broken(SourceError):
    """A failure that may pass: a cut connection, a time-out, a busy origin (408, 429, 5xx). Trying again may help."""


class Replaced(SourceError):
    """The object is not the entry that was asked for; bytes that were read of that entry are useless."""


class Failed(SourceError):
    """A failure that would repeat: refused, malformed, too large, closed."""


class Missing(Failed):
    """The object is missing. It may appear later."""


class Denied(Failed):
    """The origin refuses this object (401, 403); some do so of objects that are missing."""


class Reading(Protocol):
    """Bytes of one object on their way, from one answer of its origin."""

    @property
    def entry(self) -> Entry:
        """The object of these bytes, as this answer describes it."""

    @property
    def begin(self) -> int:
        """The place of the first byte. It is 0, whatever was asked for, if the origin has no ranges."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """The bytes as they come, in pieces of at most a MiB, each valid until the next is asked for.

        Ends behind the last byte that was asked for. Raises Broken if the origin ends early or is silent for too long,
        and Failed once the source is closed.
        """


class Source(Protocol):
    """One object that can be fetched."""

    @property
    def shown(self) -> str:
        """Its address for logs, errors and descriptions, without secrets."""

    @property
    def identity(self) -> str:
        """A word that identifies the object, the same at each opening: without signatures that change.

        It may hold secrets, and is only stored as a digest.
        """

    @property
    def file_name(self) -> str:
        """The last part of its address: the archive's name in the store."""

    def stat(self) -> Entry:
        """The object as it is now; no bytes of it are fetched. Raises Missing, Failed, Broken."""

    def read(self, begin: int, end: int | None, of: Entry | None = None) -> AbstractContextManager[Reading]:
        """Read from byte `begin` to before byte `end` (None: to the end), only of the object `of`, if given.

        It sends one request; a download needs no `stat` before, as its first answer describes the object. An `end`
        beyond the object's is its end. Leaving the context early ends the read. Entering it raises Missing, Failed,
        Broken, and Replaced if the object is not `of` any more (by `Entry.is_of`, or by its size if `of` has no ETag).
        """

    def close(self) -> None:
        """Close for good, from any thread, without waiting; reads raise Failed within a second. May be called twice."""


class Listing(Protocol):
    """A place that lists its objects."""

    @property
    def shown(self) -> str:
        """Its address for logs, without secrets."""

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key begins with `prefix`, in any order, with as few requests as the origin allows.

        Raises Failed and Broken, also midway.
        """

    def open(self, entry: Entry) -> Source:
        """The object of an entry. Sends no request."""

    def close(self) -> None:
        """Close for good, as `Source.close`."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A fetched folder or file at `path`, in a cache of its own kind.

    `address` names exactly this content for ever: with a commit in the place of a branch.
    """

    path: Path
    address: str


Opener = Callable[["Target"], Source]
"""Makes the source of an address that is allowed; one for each scheme. Asks the origin nothing; raises SourceError."""


class Cancel:
    """Ends a download from another thread: sets a flag, wakes waiting threads, and runs the registered actions."""

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
        """Wait so long, or until it is cancelled; returns whether it was."""
        return self._event.wait(seconds)

    def check(self) -> None:
        """Raise Failed if it was cancelled."""
        if self._event.is_set():
            raise Failed(self.reason)

    @contextlib.contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Call `action` when it is cancelled during the block; at once if it was before."""
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
