"""Fetching as a whole: cache, digests, names in the store, what is listed, and how it ends."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.errors import ArchiveExists, ArchiveNotFound, DigestMismatch, DownloadFailed, OutOfMemory
from marserve.store.addresses.fetch_guard import AllowedUrls, Target
from marserve.store.fetching.byte_ranges import MIB
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.download_list import MOST_ENDED, DownloadList
from marserve.store.fetching.fetcher import DigestRule, Fetcher, FetchOptions
from marserve.store.sources.source import Cancel, Gathered, OnProgress
from support.caches import used_bytes
from support.fault_proxy import Fault, fault_proxy
from support.range_origin import RangeOrigin, range_origin

DATA = random.Random(1).randbytes(6 * MIB)
OTHER = random.Random(2).randbytes(6 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def origin() -> Iterator[RangeOrigin]:
    """A store with one object."""
    with range_origin() as running:
        running.put("/m.mar", DATA)
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The model store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache with room."""
    return Cache(tmp_path / "cache", 100 * MIB)


def fetcher(pattern: str, cache: Cache | None = None, digests: DigestRule = "given", late_s: float = 0.0) -> Fetcher:
    """One that does not wait long before it tries again."""
    options = FetchOptions(DownloadOptions(first_pause_s=0.01), digests=digests, late_s=late_s)
    return Fetcher(AllowedUrls([pattern]), options, cache=cache)


@contextmanager
def read_only(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be written to the store, also by who may write everywhere."""
    real: Callable[..., int] = os.open
    link = os.link

    def refuse(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT and Path(path).is_relative_to(store):
            raise OSError(30, "Read-only file system")
        return real(path, flags, mode, dir_fd=dir_fd)

    def refuse_link(source: Path, target: Path) -> None:
        if Path(target).is_relative_to(store):
            raise OSError(30, "Read-only file system")
        link(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "link", refuse_link)
        yield


# ------------------------------------------------------------------------------------------- cache


def test_what_is_kept_is_linked_and_not_copied(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """The store's file is the cache's."""
    fetched = fetcher(origin.pattern, cache).fetch(f"{origin.url}/m.mar", store)

    assert fetched.in_store == store / "m.mar"
    assert fetched.path.samefile(store / "m.mar")
    fetched.release()
    assert (store / "m.mar").read_bytes() == DATA


def test_an_unchanged_object_is_not_fetched_again(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """One question for its ETag, by whichever server, and with another signature in its address."""
    fetcher(origin.pattern, cache).fetch(f"{origin.url}/m.mar?Signature=a&Expires=1&v=7", store).release()
    (store / "m.mar").unlink()
    origin.asked.clear()

    other = fetcher(origin.pattern, Cache(cache.folder, cache.max_bytes))
    other.fetch(f"{origin.url}/m.mar?Signature=b&Expires=2&v=7", store).release()

    assert [asked_range for _, _, asked_range in origin.asked] == ["bytes=0-0"]
    assert (store / "m.mar").read_bytes() == DATA
    assert [status.fromCache for status in other.downloads.statuses()] == [True]
    assert other.downloads.ended == {"cached": 1, "fetched": 0, "failed": 0, "cancelled": 0}
    assert other.downloads.bytes == 0


def test_a_changed_object_is_fetched_again(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """Its ETag is another one."""
    fetching = fetcher(origin.pattern, cache)
    fetching.fetch(f"{origin.url}/m.mar", store).release()
    (store / "m.mar").unlink()
    origin.put("/m.mar", OTHER)

    fetching.fetch(f"{origin.url}/m.mar", store).release()

    assert (store / "m.mar").read_bytes() == OTHER


def test_with_a_digest_what_is_kept_needs_no_origin(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """Wherever it came from."""
    fetching = Fetcher(AllowedUrls([origin.pattern, "https://gone.invalid/.*"]), cache=cache)
    fetching.fetch(f"{origin.url}/m.mar", store).release()
    origin.asked.clear()

    fetched = fetching.fetch(f"https://gone.invalid/n.mar#sha256={SHA256}", store)

    assert (store / "n.mar").read_bytes() == DATA
    assert origin.asked == []
    fetched.release()


def test_an_origin_that_cannot_be_asked_is_fetched_from_as_ever(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """A question that failed is no answer: what was kept may be old."""
    with fault_proxy(origin.url) as proxy:
        fetching = fetcher(proxy.pattern, cache)
        fetching.fetch(f"{proxy.url}/m.mar", store).release()
        (store / "m.mar").unlink()
        proxy.on(Fault(status=500), times=1)

        fetching.fetch(f"{proxy.url}/m.mar", store).release()
        (store / "m.mar").unlink()
        proxy.on(Fault(status=500), times=float("inf"))
        with pytest.raises(DownloadFailed):
            fetching.fetch(f"{proxy.url}/m.mar", store)

    assert list(store.iterdir()) == []


def test_two_that_want_the_same_fetch_it_once(origin: RangeOrigin, tmp_path: Path, cache: Cache) -> None:
    """The second waits for the first, and finds it kept."""
    stores = [tmp_path / name for name in "abcd"]
    errors: list[BaseException] = []

    def fetch(store: Path) -> None:
        store.mkdir()
        try:
            fetcher(origin.pattern, Cache(cache.folder, cache.max_bytes)).fetch(f"{origin.url}/m.mar", store).release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fetch, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert errors == []
    assert {(store / "m.mar").stat().st_ino for store in stores} == {(stores[0] / "m.mar").stat().st_ino}
    whole = [each for _, _, each in origin.asked if each.startswith("bytes=0-") and each != "bytes=0-0"]
    assert len(whole) == 1


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_read_only_store_gets_no_name(
    origin: RangeOrigin, store: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, has_cache: bool
) -> None:
    """The archive is served from where it was fetched to; without a cache that is gone when it was read."""
    with read_only(store, monkeypatch):
        fetched = fetcher(origin.pattern, cache if has_cache else None).fetch(f"{origin.url}/m.mar", store)

    assert fetched.in_store is None
    assert fetched.path.read_bytes() == DATA
    fetched.release()
    assert list(store.iterdir()) == []
    assert fetched.path.exists() is has_cache


def test_what_cannot_be_used_loses_its_name(origin: RangeOrigin, store: Path, cache: Cache) -> None:
    """And only what was put there for it."""
    fetching = fetcher(origin.pattern, cache)
    fetching.fetch(f"{origin.url}/m.mar", store).discard()
    assert list(store.iterdir()) == []

    fetching.fetch(f"{origin.url}/m.mar", store).release()
    fetching.fetch(f"{origin.url}/m.mar#sha256={SHA256}", store).discard()
    assert [path.name for path in store.iterdir()] == ["m.mar"]


def test_a_full_disk_is_told_as_such(origin: RangeOrigin, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a failure of the origin."""

    def full(descriptor: int, begin: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(OutOfMemory, match="No space is left"):
        fetcher(origin.pattern).fetch(f"{origin.url}/m.mar", store)

    assert list(store.iterdir()) == []


# ------------------------------------------------------------------------------------------- digests


@pytest.mark.parametrize("has_cache", [True, False])
def test_what_is_not_its_digest_is_not_kept(origin: RangeOrigin, store: Path, cache: Cache, has_cache: bool) -> None:
    """Neither in the store nor in the cache; the error has both digests."""
    wrong = "0" * 64

    with pytest.raises(DigestMismatch) as mismatch:
        fetcher(origin.pattern, cache if has_cache else None).fetch(
            f"{origin.url}/m.mar?key=secret#sha256={wrong}", store
        )

    assert SHA256 in str(mismatch.value)
    assert wrong in str(mismatch.value)
    assert "secret" not in str(mismatch.value)
    assert list(store.iterdir()) == []
    assert used_bytes(cache) == 0


def test_a_corrupt_download_is_found_by_its_digest(origin: RangeOrigin, store: Path) -> None:
    """One byte of six million."""
    with fault_proxy(origin.url) as proxy:
        proxy.on(Fault(corrupt_at=3_000_000), times=1)
        fetching = fetcher(proxy.pattern)

        with pytest.raises(DigestMismatch):
            fetching.fetch(f"{proxy.url}/m.mar#sha256={SHA256}", store)
        fetching.fetch(f"{proxy.url}/m.mar#sha256={SHA256}", store)

    assert (store / "m.mar").read_bytes() == DATA


def test_the_stores_file_is_taken_where_it_has_the_digest(origin: RangeOrigin, store: Path) -> None:
    """Without one TorchServe's refusal stays; with another one it says so."""
    fetching = fetcher(origin.pattern)
    fetching.fetch(f"{origin.url}/m.mar", store).release()
    origin.asked.clear()

    assert fetching.fetch(f"{origin.url}/m.mar#sha256={SHA256}", store).path == store / "m.mar"
    with pytest.raises(ArchiveExists):
        fetching.fetch(f"{origin.url}/m.mar", store)
    with pytest.raises(DigestMismatch, match=r"m\.mar in the model store has the SHA-256 digest"):
        fetching.fetch(f"{origin.url}/m.mar#sha256={'0' * 64}", store)

    assert origin.asked == []
    assert (store / "m.mar").read_bytes() == DATA


def test_the_digest_beside_an_archive_counts_where_the_operator_says_so(origin: RangeOrigin, store: Path) -> None:
    """It must be the archive's, and where one is required there must be one."""
    given, beside, required = (fetcher(origin.pattern, digests=rule) for rule in ("given", "beside", "required"))
    with pytest.raises(DownloadFailed) as failed:
        required.fetch(f"{origin.url}/m.mar", store)
    assert "archive_digests=required" in failed.value.reason
    beside.fetch(f"{origin.url}/m.mar", store).discard()
    required.fetch(f"{origin.url}/m.mar#sha256={SHA256}", store).discard()

    origin.put("/m.mar.sha256", f"{SHA256}  m.mar\n".encode())
    for each in (beside, required):
        each.fetch(f"{origin.url}/m.mar", store).discard()

    origin.put("/m.mar.sha256", f"{'0' * 64}  m.mar\n".encode())
    for each in (beside, required):
        with pytest.raises(DigestMismatch):
            each.fetch(f"{origin.url}/m.mar", store)
    given.fetch(f"{origin.url}/m.mar", store).discard()

    origin.put("/m.mar.sha256", b"<html>" * 100)
    with pytest.raises(DownloadFailed) as failed:
        beside.fetch(f"{origin.url}/m.mar", store)
    assert "no SHA-256 digest for m.mar" in failed.value.reason
    origin.put("/m.mar.sha256", bytes(1_000_000))
    with pytest.raises(DownloadFailed):
        beside.fetch(f"{origin.url}/m.mar", store)
    assert list(store.iterdir()) == []


def test_the_digest_beside_is_fetched_only_where_it_is_allowed(origin: RangeOrigin, store: Path) -> None:
    """It is an address like every other."""
    with pytest.raises(ArchiveNotFound, match=r"m\.mar\.sha256 does not match any allowed"):
        fetcher(origin.pattern + r"\.mar", digests="beside").fetch(f"{origin.url}/m.mar", store)

    assert origin.asked == []


# ------------------------------------------------------------------------------------------- late, listed, ended


def test_what_appears_late_is_waited_for(origin: RangeOrigin, store: Path) -> None:
    """As long as the operator says, or whoever asks."""
    with fault_proxy(origin.url) as proxy:
        proxy.on(Fault(status=404), times=2)
        fetcher(proxy.pattern, late_s=30.0).fetch(f"{proxy.url}/m.mar", store).discard()
        proxy.on(Fault(status=404), times=2)
        fetcher(proxy.pattern).fetch(f"{proxy.url}/m.mar", store, late_s=30.0).discard()
        proxy.on(Fault(status=404), times=2)
        with pytest.raises(DownloadFailed):
            fetcher(proxy.pattern).fetch(f"{proxy.url}/m.mar", store)


def test_downloads_are_listed_while_they_are_under_way_and_after(origin: RangeOrigin, store: Path) -> None:
    """How far they are, why they failed, and nothing of what their address keeps secret."""
    with fault_proxy(origin.url) as proxy:
        proxy.on(Fault(stall_at=1_000_000), begin=0)
        fetching = fetcher(proxy.pattern)
        errors: list[str] = []

        def fetch() -> None:
            try:
                fetching.fetch(f"{proxy.url}/m.mar?X-Amz-Signature=secret", store)
            except DownloadFailed as error:
                errors.append(error.reason)

        thread = threading.Thread(target=fetch)
        thread.start()
        arrived = threading.Event()
        while not arrived.wait(0.01):
            for status in fetching.downloads.statuses():
                if status.bytes >= 1_000_000:
                    arrived.set()
        assert (status.state, status.size, status.name) == ("downloading", len(DATA), "m.mar")
        assert fetching.downloads.running == 1
        assert fetching.downloads.cancel(status.id, "it was cancelled")
        thread.join(10)

        assert errors == ["it was cancelled"]
        [status] = fetching.downloads.statuses()
        assert (status.state, status.reason) == ("cancelled", "it was cancelled")
        assert "secret" not in str(fetching.downloads.statuses())
        assert not fetching.downloads.cancel(status.id, "again")
        assert fetching.downloads.bytes >= 1_000_000
        assert list(store.iterdir()) == []


def test_a_fetcher_that_is_closed_fetches_nothing(origin: RangeOrigin, store: Path) -> None:
    """What comes after the end of the server."""
    fetching = fetcher(origin.pattern)
    fetching.close()

    with pytest.raises(DownloadFailed) as failed:
        fetching.fetch(f"{origin.url}/m.mar", store)

    assert failed.value.reason == "the server stops"
    assert origin.asked == []


def test_the_list_keeps_the_last_that_ended() -> None:
    """It does not grow for ever."""
    downloads = DownloadList()
    for number in range(2 * MOST_ENDED):
        with downloads.under_way(f"http://a/{number}", "m") as download:
            download.progress(1, 1)

    statuses = downloads.statuses()

    assert [status.id for status in statuses] == list(range(MOST_ENDED + 1, 2 * MOST_ENDED + 1))
    assert downloads.ended["fetched"] == downloads.bytes == 2 * MOST_ENDED


# ------------------------------------------------------------------------------------------- what is an address


def test_an_object_store_is_asked_for_what_a_pattern_allows_and_the_rest_is_refused(store: Path) -> None:
    """A refused address names no file of the store, although one has the name of its last part."""
    (store / "m.mar").write_bytes(b"local")
    folder = store.parent / "hub"
    folder.mkdir()
    asked: list[str] = []

    def gather(target: Target, cancel: Cancel, on_progress: OnProgress) -> Gathered:
        asked.append(target.url)
        on_progress(5, 5)
        return Gathered(folder, "hf://org/name@" + "a" * 40)

    fetching = Fetcher(AllowedUrls(["hf://org/.*"]), gathers={"hf": gather})

    for refused in ("s3://bucket/m.mar", "gcs://bucket/m.mar", "adl://container/m.mar", "hf://other/name@main"):
        with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
            fetching.fetch_address(refused, store)
    assert fetching.fetch_address("m.mar", store) is None
    assert fetching.fetch_address("ftp://host/m.mar", store) is None
    fetched = fetching.fetch_address("hf://org/name@main", store)
    assert fetched is not None
    assert (fetched.path, fetched.in_store) == (folder, None)
    assert fetched.address == "hf://org/name@" + "a" * 40
    assert asked == ["hf://org/name@main"]
    with pytest.raises(DownloadFailed):
        fetching.fetch_address(f"hf://org/name@main#sha256={SHA256}", store)
    with pytest.raises(ArchiveNotFound, match="Relative path"):
        fetching.fetch_address("http://a/../m.mar", store)
    with pytest.raises(ArchiveNotFound, match="has not been configured"):
        fetching.fetch_address("http://a/m.mar", None)


def test_a_scheme_without_a_reader_is_a_failure(store: Path) -> None:
    """With a sentence."""
    with pytest.raises(DownloadFailed) as failed:
        Fetcher(AllowedUrls([".*"])).fetch("s3://bucket/m.mar", store)

    assert failed.value.reason == "nothing here reads s3://"
