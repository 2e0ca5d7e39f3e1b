"""Tests for what lies below a prefix of a store: fetched once, shared, whole or not at all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.errors import AddressNotAllowed, ArchiveNotFound, DownloadFailed
from marserve.store.addresses.fetch_guard import AllowedUrls, Target
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.source import Broken, Entry


class FakeStore:
    """A store of these objects by key; `reads` are those that were read, in order."""

    def __init__(self, **objects: bytes) -> None:
        self.objects = {key.replace("__", "/"): data for key, data in objects.items()}
        self.reads: list[str] = []
        self.broken = ""
        self.gate: threading.Event | None = None
        self.prefix = ""

    def list_at(self, target: Target) -> FakeStore:
        """Itself."""
        return self

    def entry(self, key: str) -> Entry:
        """As a listing has it."""
        data = self.objects[key]
        return Entry(key, len(data), f'"{hash(data)}"')

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Those with the prefix."""
        return (self.entry(key) for key in list(self.objects) if key.startswith(prefix))

    def open(self, entry: Entry) -> FakeObject:
        """One object."""
        return FakeObject(self, entry.key)

    def close(self) -> None:
        """Nothing."""


class FakeObject:
    """An object of it."""

    def __init__(self, store: FakeStore, key: str) -> None:
        self.store, self.key = store, key
        self.shown = self.identity = f"s3://bucket/{key}"
        self.file_name = key.rpartition("/")[2]

    def stat(self) -> Entry:
        """As it is now."""
        return self.store.entry(self.key)

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[FakeReading]:
        """Its bytes."""
        if self.store.gate is not None:
            self.store.gate.wait(10)
        if self.store.broken == self.key:
            raise Broken("the store is away")
        self.store.reads.append(self.key)
        yield FakeReading(self.stat(), begin, self.store.objects[self.key][begin:end])

    def close(self) -> None:
        """Nothing."""


class FakeReading:
    """Bytes on their way."""

    def __init__(self, entry: Entry, begin: int, data: bytes) -> None:
        self.entry, self.begin, self._data = entry, begin, data

    def __iter__(self) -> Iterator[bytes]:
        if self._data:
            yield self._data


class Wanted:
    """Those that `choose` says."""

    heads: Mapping[str, int] = {}

    def __init__(self, choose: Callable[[Sequence[str]], Iterable[str]] = lambda names: names) -> None:
        self._choose = choose

    def choose(self, names: Sequence[str]) -> Iterable[str]:
        """As it says."""
        return self._choose(names)

    def named_in(self, head: str, data: bytes) -> Iterable[str]:
        """Nothing: a store can be listed."""
        return []


_EVERYTHING = Wanted()


def _fetcher(
    store: FakeStore, cache: Cache | None = None, pattern: str = "s3://bucket/.*", most: int = 1 << 20
) -> Fetcher:
    options = FetchOptions(DownloadOptions(first_pause_s=0.01, attempts=2, max_bytes=most))
    return Fetcher(AllowedUrls(["s3://bucket/.*"]), options, cache=cache, list_at=store.list_at)


@pytest.fixture
def store() -> FakeStore:
    """A checkpoint of two files, and what lies beside it."""
    return FakeStore(w__a=b"first", w__b=b"second", w__sub__c=b"below", other=b"beside")


def test_what_lies_directly_below_is_fetched_once(store: FakeStore, tmp_path: Path) -> None:
    """By as many servers as share a cache; all of it, and nothing twice."""
    caches = [Cache(tmp_path / "cache", 1 << 20) for _ in range(2)]
    fetchers = [_fetcher(store, cache) for cache in caches]

    leases = [each.fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path / "none") for each in fetchers]

    assert store.reads == ["w/a", "w/b"]
    assert leases[0].folder == leases[1].folder
    assert {path.name: path.read_bytes() for path in leases[0].folder.iterdir()} == {"a": b"first", "b": b"second"}
    assert [each.downloads.ended["cached"] for each in fetchers] == [0, 1]
    assert not (tmp_path / "none").exists()
    for lease in leases:
        lease.release()


def test_two_that_want_it_at_once_wait_for_one_download(store: FakeStore, tmp_path: Path) -> None:
    """The second finds it whole."""
    store.gate = threading.Event()
    cache, found = Cache(tmp_path / "cache", 1 << 20), []

    def fetch() -> None:
        found.append(_fetcher(store, cache).fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.gate.set()
    for thread in threads:
        thread.join(20)

    assert len(found) == 3
    assert store.reads == ["w/a", "w/b"]
    for lease in found:
        lease.release()


def test_another_content_is_another_folder(store: FakeStore, tmp_path: Path) -> None:
    """Of which the older one stays as long as it is used."""
    cache = Cache(tmp_path / "cache", 8)
    fetcher = _fetcher(store, cache)
    first = fetcher.fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)
    store.objects["w/a"] = b"other"

    second = fetcher.fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)

    assert (first.folder / "a").read_bytes() == b"first"
    assert (second.folder / "a").read_bytes() == b"other"
    first.release()
    second.release()
    store.objects["w/a"] = b"third"
    fetcher.fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path).release()
    assert not first.folder.exists()


def test_only_what_is_wanted_is_fetched(store: FakeStore, tmp_path: Path) -> None:
    """A prefix often holds the same weights in another format."""
    lease = _fetcher(store).fetch_below("s3://bucket/w/", Wanted(lambda names: ["b", "missing"]), tmp_path / "own")

    assert [path.name for path in lease.folder.iterdir()] == ["b"]
    assert lease.folder.is_relative_to(tmp_path / "own")
    lease.release()


def test_after_a_failure_nothing_is_left(store: FakeStore, tmp_path: Path) -> None:
    """And the next try fetches all of it."""
    store.broken = "w/b"
    cache = Cache(tmp_path / "cache", 1 << 20)
    with pytest.raises(DownloadFailed, match="the store is away"):
        _fetcher(store, cache).fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)
    left = list((tmp_path / "cache" / "folders").iterdir())
    store.broken = ""

    lease = _fetcher(store, cache).fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)

    assert left == []
    assert (lease.folder / "b").read_bytes() == b"second"
    lease.release()


def test_a_stop_ends_it(store: FakeStore, tmp_path: Path) -> None:
    """Also one that waits for another's."""
    fetcher = _fetcher(store)
    fetcher.close()

    with pytest.raises(DownloadFailed, match="the server stops"):
        fetcher.fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("s3://elsewhere/w/", AddressNotAllowed, "elsewhere"),
        ("file:///etc/", ArchiveNotFound, "what lies below file:// is not fetched"),
        ("hf://org/name/", ArchiveNotFound, "https://HUB/ORGANISATION/NAME/resolve/REVISION/ names the same files"),
        ("ftp://bucket/w/", ArchiveNotFound, "only http, https"),
        ("s3://bucket/../w/", ArchiveNotFound, "through `.` or `..`"),
        ("s3://bucket/w/?versionId=3/", ArchiveNotFound, "is refused"),
        ("s3://bucket/w?versionId=3/", ArchiveNotFound, "the address of a prefix has no version or query"),
        ("s3://bucket/gone/", DownloadFailed, "no object lies directly below it"),
    ],
)
def test_what_cannot_be_fetched_is_refused(
    store: FakeStore, tmp_path: Path, address: str, error: type[Exception], words: str
) -> None:
    """Before anything is asked, as far as the address shows it."""
    with pytest.raises(error, match=words):
        _fetcher(store).fetch_below(address, _EVERYTHING, tmp_path)
    assert store.reads == []


def test_bounds_and_what_is_replaced_meanwhile(store: FakeStore, tmp_path: Path) -> None:
    """More bytes than archives may have; none of the wanted; another content than was listed."""
    with pytest.raises(DownloadFailed, match="has 11 bytes; at most 10 are fetched"):
        _fetcher(store, most=10).fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)
    with pytest.raises(DownloadFailed, match="of 2 objects below it none is of a checkpoint"):
        _fetcher(store).fetch_below("s3://bucket/w/", Wanted(lambda names: []), tmp_path)
    listed = store.entry("w/a")
    store.entry = lambda key: listed if key == "w/a" else Entry(key, 6, '"b"')  # type: ignore[method-assign]
    opened = store.open

    def replaced(entry: Entry) -> FakeObject:
        source = opened(entry)
        source.stat = lambda: Entry(entry.key, 5, '"another"')  # type: ignore[method-assign]
        return source

    store.open = replaced  # type: ignore[method-assign]
    with pytest.raises(DownloadFailed, match="a was replaced while it was fetched"):
        _fetcher(store).fetch_below("s3://bucket/w/", _EVERYTHING, tmp_path)
    with contextlib.suppress(FileNotFoundError):
        assert list(tmp_path.glob("*.part")) == []
