"""Lists a folder of the web, which no request lists: what it holds is what a file in it names, such as an index.

Each address is judged before it is asked for, redirects are by `http`. Blocks; may be closed from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from marserve.errors import AddressNotAllowed
from marserve.store.addresses.fetch_guard import AllowedUrls, Target, hide_query
from marserve.store.fetching.download import DownloadOptions, download
from marserve.store.fetching.prefixes import MOST_OBJECTS, can_be_name, naming
from marserve.store.sources.source import Broken, Cancel, Denied, Entry, Failed, Missing, Opener, Source

_AT_ONCE = 8


class Wanted(Protocol):
    """Which files of a folder are wanted."""

    heads: Mapping[str, int]
    """Files that name the others, by their names, in the order they are looked for: the first that is there counts.

    The value is how many bytes one may have; 0: it names no others, and is all that is wanted.
    """

    def choose(self, names: Sequence[str]) -> Iterable[str]:
        """Those that are wanted of all names."""

    def named_in(self, head: str, data: bytes) -> Iterable[str]:
        """The names that a head of these bytes names. Raises MarserveError for what is none."""


class WebFolder:
    """A `Listing` of what a head of the folder names, and of the head."""

    def __init__(
        self, base: Target, open_at: Opener, allowed: AllowedUrls, wanted: Wanted, options: DownloadOptions
    ) -> None:
        """`base` is the folder's address, whose path ends in a slash."""
        self._base = base
        self._open_at = open_at
        self._allowed = allowed
        self._wanted = wanted
        self._options = options
        self._cancel = Cancel()
        self._lock = threading.Lock()
        self._open: set[Source] = set()

    @property
    def shown(self) -> str:
        """The address."""
        return hide_query(self._base.url)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """The entries, with `prefix` before each name. Raises SourceError, AddressNotAllowed, and what a head does."""
        head, entry, names = self._find_head()
        yield replace(entry, key=prefix + head)
        with ThreadPoolExecutor(_AT_ONCE) as looks:
            try:
                for name, found in zip(names, looks.map(self._look_at, names, itertools.repeat(head)), strict=True):
                    yield replace(found, key=prefix + name)
            except BaseException:
                self.close()  # those that still look
                raise

    def open(self, entry: Entry) -> Source:
        """The object of an entry."""
        return self._open_at(self._target_of(entry.key.rpartition("/")[2]))

    def close(self) -> None:
        """Close for good."""
        self._cancel.set()
        with self._lock:
            for source in self._open:
                source.close()

    def _target_of(self, name: str) -> Target:
        return replace(self._base, path=self._base.path + name)

    @contextmanager
    def _source_of(self, name: str) -> Iterator[Source]:
        self._cancel.check()
        target = self._target_of(name)
        self._allowed.check(target)
        with contextlib.closing(self._open_at(target)) as source:
            with self._lock:
                self._open.add(source)
            try:
                self._cancel.check()
                yield source
            finally:
                with self._lock:
                    self._open.discard(source)

    # ------------------------------------------------------------------------------------------- the head

    def _find_head(self) -> tuple[str, Entry, Sequence[str]]:
        """The first head that is there, and the names in it."""
        absent: dict[str, str] = {}
        refused = 0
        for head, most_bytes in self._wanted.heads.items():
            try:
                self._allowed.check(self._target_of(head))
            except AddressNotAllowed:
                absent[head], refused = "allowed_urls does not let it be asked for", refused + 1
                continue
            try:
                with self._source_of(head) as source, naming(head):
                    entry, data = self._read(source, most_bytes)
                    _with_size(entry)
            except (Missing, Denied) as error:
                absent[head] = str(error).removeprefix(f"{head}: ")
            else:
                return head, entry, self._names_in(head, data) if most_bytes else []
        if refused == len(absent):
            raise AddressNotAllowed(self.shown)
        raise Missing(f"none of {', '.join(f'{head} ({why})' for head, why in absent.items())} is there")

    def _read(self, source: Source, most_bytes: int) -> tuple[Entry, bytes]:
        if not most_bytes:
            return self._stat(source), b""
        options = replace(self._options, connections=1, max_bytes=min(most_bytes, self._options.max_bytes))
        with tempfile.TemporaryFile() as file:
            entry = download(source, file.fileno(), options, cancel=self._cancel).entry
            file.seek(0)
            return entry, file.read()

    def _names_in(self, head: str, data: bytes) -> Sequence[str]:
        names = sorted(set(self._wanted.named_in(head, data)))
        if len(names) > MOST_OBJECTS:
            raise Failed(f"{head} names {len(names)} files; at most {MOST_OBJECTS} are fetched")
        for name in names:
            if not can_be_name(name) or name == head:
                raise Failed(f"{head} names {name[:80]!r}, and only files that lie directly beside it are fetched")
        return names

    # ------------------------------------------------------------------------------------------- what it names

    def _look_at(self, name: str, head: str) -> Entry:
        try:
            with self._source_of(name) as source, naming(name):
                return _with_size(self._stat(source))
        except Missing as error:
            raise Missing(f"{error}, and {head} names it") from None

    def _stat(self, source: Source) -> Entry:
        """The object as it is; a failure that may pass is tried again, as downloads are."""
        pause_s = self._options.first_pause_s
        for left in reversed(range(self._options.attempts)):
            try:
                return source.stat()
            except Broken as error:
                if not left:
                    raise Failed(f"{error}, {self._options.attempts} times") from error
                if self._cancel.wait(pause_s):
                    raise Failed(self._cancel.reason) from None
                pause_s *= 2
        raise Failed("it is not asked for")


def _with_size(entry: Entry) -> Entry:
    if entry.size is None:
        raise Failed("its origin does not say how many bytes it has")
    return entry
