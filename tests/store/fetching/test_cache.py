"""The cache: what was fetched is found again by its content, within its limit, whoever uses it and however it ends."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from marserve.files.atomic import sweep
from marserve.store.fetching.cache import Cache, Held, put_into
from marserve.store.fetching.download import Downloaded
from marserve.store.sources.source import Cancel, Entry, Failed
from support.caches import used_bytes

KIB = 1024


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache for a hundred KiB."""
    return Cache(tmp_path / "cache", 100 * KIB)


def keep(cache: Cache, identity: str, data: bytes, etag: str | None = '"1"') -> Held:
    """Have the cache keep this as if it had been fetched."""
    with cache.incoming() as incoming:
        os.pwrite(incoming.descriptor, data, 0)
        return cache.keep(incoming, identity, Downloaded(Entry("k", len(data), etag), digest_of(data)))


def digest_of(data: bytes) -> str:
    """Its SHA-256."""
    return hashlib.sha256(data).hexdigest()


def files(cache: Cache) -> list[str]:
    """All files but the lock and the tag."""
    return sorted(
        str(path.relative_to(cache.folder))
        for path in cache.folder.rglob("*")
        if path.is_file() and path.name not in ("lock", "CACHEDIR.TAG")
    )


def test_an_unchanged_object_is_found_by_its_address(cache: Cache) -> None:
    """And another ETag or length is another object."""
    keep(cache, "http://a/m.mar", b"content").release()

    held = cache.find("http://a/m.mar", Entry("k", 7, '"1"'))

    assert held is not None
    assert held.path.read_bytes() == b"content"
    assert held.sha256 == digest_of(b"content")
    held.release()
    assert cache.knows("http://a/m.mar")
    assert not cache.knows("http://b/m.mar")
    assert cache.find("http://a/m.mar", Entry("k", 7, '"2"')) is None
    assert cache.find("http://a/m.mar", Entry("k", 8, '"1"')) is None
    assert cache.find("http://a/m.mar", Entry("k", 7, None)) is None
    assert cache.find("http://b/m.mar", Entry("k", 7, '"1"')) is None


def test_the_same_content_is_kept_once(cache: Cache) -> None:
    """From whatever address it came."""
    first, second = keep(cache, "a", b"same"), keep(cache, "b", b"same")

    assert first.path == second.path
    assert used_bytes(cache) == 4
    for held in (first, second):
        held.release()
        held.release()
    assert len([name for name in files(cache) if name.startswith("blobs")]) == 1


def test_what_was_not_used_for_longest_goes_first(cache: Cache) -> None:
    """Until the new one has room; finding one is a use."""
    for name in "abc":
        keep(cache, name, name.encode() * 30 * KIB).release()
    first = cache.find_digest(digest_of(b"a" * 30 * KIB))
    assert first is not None
    first.release()

    keep(cache, "d", b"d" * 30 * KIB).release()

    assert used_bytes(cache) == 90 * KIB
    assert [cache.find_digest(digest_of(name * 30 * KIB)) is None for name in (b"b",)] == [True]
    assert not cache.knows("b")
    for name in "acd":
        assert cache.knows(name)


def test_what_is_in_use_stays(cache: Cache, tmp_path: Path) -> None:
    """Though the limit is passed; also where another server uses it."""
    held = keep(cache, "a", b"a" * 60 * KIB)
    other = Cache(tmp_path / "cache", 100 * KIB)

    keep(other, "b", b"b" * 60 * KIB).release()

    assert held.path.read_bytes() == b"a" * 60 * KIB
    assert used_bytes(cache) == 120 * KIB
    held.release()
    keep(other, "c", b"c" * KIB).release()
    assert used_bytes(cache) == 61 * KIB


def test_what_a_store_links_to_costs_nothing(cache: Cache, tmp_path: Path) -> None:
    """Deleting it would free nothing."""
    store = tmp_path / "store"
    store.mkdir()
    held = keep(cache, "a", b"a" * 60 * KIB)
    assert put_into(held, store, "m.mar") == store / "m.mar"
    held.release()

    keep(cache, "b", b"b" * 90 * KIB).release()

    assert used_bytes(cache) == 90 * KIB
    assert (store / "m.mar").samefile(held.path)
    (store / "m.mar").unlink()
    assert used_bytes(cache) == 150 * KIB
    Cache(cache.folder, 100 * KIB)
    assert used_bytes(cache) == 90 * KIB


def test_what_is_larger_than_the_cache_is_held_and_not_kept(cache: Cache) -> None:
    """It serves its purpose and goes."""
    keep(cache, "a", b"a" * KIB).release()

    held = keep(cache, "b", b"b" * 200 * KIB)

    assert held.path.stat().st_size == 200 * KIB
    held.release()
    assert not held.path.exists()
    assert used_bytes(cache) == KIB


def test_a_lock_that_another_server_keeps_is_waited_for_with_a_bound(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is stopped while it has the lock: what was fetched is used and not kept, the next server starts."""
    monkeypatch.setattr("marserve.store.fetching.cache.LOCK_LIMIT_S", 0.05)
    descriptor = os.open(cache.folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        held = keep(cache, "a", b"a" * KIB)
        Cache(cache.folder, 100 * KIB)

        assert held.path.read_bytes() == b"a" * KIB
        held.release()
        assert not held.path.exists()
        assert "are not kept in the cache: its lock has been held for 0.05 s by another process" in caplog.text
        assert "is not cleared up" in caplog.text
    finally:
        os.close(descriptor)
    assert keep(cache, "a", b"a" * KIB).path.is_relative_to(cache.folder / "blobs")


def test_a_file_that_somebody_wrote_to_is_dropped(cache: Cache, tmp_path: Path) -> None:
    """A copy over the store's link changes the one file that both are."""
    store = tmp_path / "store"
    store.mkdir()
    held = keep(cache, "a", b"content")
    put_into(held, store, "m.mar")
    held.release()

    (store / "m.mar").write_bytes(b"CONTENT")

    assert cache.find("a", Entry("k", 7, '"1"')) is None
    assert used_bytes(cache) == 0
    assert (store / "m.mar").read_bytes() == b"CONTENT"


def test_a_link_never_takes_anothers_place(cache: Cache, tmp_path: Path) -> None:
    """As a download that comes second."""
    (tmp_path / "m.mar").write_bytes(b"mine")
    held = keep(cache, "a", b"content")

    with pytest.raises(FileExistsError):
        put_into(held, tmp_path, "m.mar")

    held.release()
    assert (tmp_path / "m.mar").read_bytes() == b"mine"


def test_across_file_systems_it_is_copied(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or not at all, and never in another's place."""
    store = tmp_path / "store"
    store.mkdir()
    held = keep(cache, "a", b"content")
    real = os.link

    def link(source: Path, target: Path) -> None:
        if source == held.path:
            raise OSError(18, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "link", link)

    assert put_into(held, store, "m.mar") == store / "m.mar"
    assert not (store / "m.mar").samefile(held.path)
    with pytest.raises(FileExistsError):
        put_into(held, store, "m.mar")
    held.release()
    assert [path.name for path in store.iterdir()] == ["m.mar"]
    assert (store / "m.mar").read_bytes() == b"content"


def test_a_read_only_store_gets_no_name(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's file is used as it is."""
    held = keep(cache, "a", b"content")

    def refuse(*arguments: object, **more: object) -> int:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        patch.setattr("marserve.store.fetching.cache.Part.__init__", refuse)
        assert put_into(held, tmp_path, "m.mar") is None
    held.release()


def test_two_that_want_the_same_address_fetch_it_one_after_the_other(cache: Cache, tmp_path: Path) -> None:
    """In all processes; the second finds it kept."""
    other = Cache(tmp_path / "cache", 100 * KIB)
    inside, order = threading.Event(), []

    def second() -> None:
        with other.claim("a", Cancel()):
            order.append("second")

    with cache.claim("a", Cancel()):
        thread = threading.Thread(target=second)
        thread.start()
        with other.claim("b", Cancel()):
            inside.set()
        order.append("first")
    thread.join(10)

    assert order == ["first", "second"]
    assert inside.is_set()
    assert files(cache) == []


def test_waiting_for_another_ends_with_its_cancel(cache: Cache) -> None:
    """Also while the other goes on."""
    cancel = Cancel()
    timer = threading.Timer(0.1, cancel.set, args=("enough",))
    timer.start()

    with cache.claim("a", Cancel()), pytest.raises(Failed, match="enough"), cache.claim("a", cancel):
        raise AssertionError

    timer.join()


def test_what_was_not_kept_is_gone(cache: Cache) -> None:
    """As after an error while it was fetched."""
    with cache.incoming() as incoming:
        os.pwrite(incoming.descriptor, b"half", 0)
        assert len(files(cache)) == 1

    assert files(cache) == []


CRASH = """
import os, signal, sys
from pathlib import Path
from marserve.files.atomic import Part
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import Cancel
cache = Cache(Path(sys.argv[1]), 1 << 20)
store = Part(Path(sys.argv[2]))
with cache.claim("a", Cancel()), cache.incoming() as incoming:
    os.pwrite(incoming.descriptor, b"half", 0)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_crash_leaves_nothing_that_the_next_does_not_sweep_up(tmp_path: Path) -> None:
    """Neither in the cache nor in the store; what lives is not touched."""
    store = tmp_path / "store"
    store.mkdir()
    arguments = [sys.executable, "-c", CRASH, str(tmp_path / "cache"), str(store)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        living = Cache(tmp_path / "cache", 1 << 20)
        sweep(store)
        assert len(files(living)) == 2
        assert len(list(store.iterdir())) == 1
        process.send_signal(signal.SIGKILL)

    after = Cache(tmp_path / "cache", 1 << 20)
    sweep(store)

    assert [name for name in files(after) if name.startswith("incoming")] == []
    assert list(store.iterdir()) == []
    with after.claim("a", Cancel()):
        pass
    assert files(after) == []


def test_a_broken_index_is_no_index(cache: Cache) -> None:
    """It is fetched again, and written anew."""
    keep(cache, "a", b"content").release()
    [index] = (cache.folder / "index").iterdir()
    index.write_bytes(b"{")

    assert cache.find("a", Entry("k", 7, '"1"')) is None
    keep(cache, "a", b"content").release()
    held = cache.find("a", Entry("k", 7, '"1"'))

    assert held is not None
    held.release()


def test_many_servers_share_it(tmp_path: Path) -> None:
    """Six threads with caches of their own keep and find 40 contents in room for 10: never over, never a wrong one."""
    wrong: list[str] = []

    def serve(number: int) -> None:
        mine = Cache(tmp_path / "cache", 10 * KIB)
        for turn in range(60):
            which = (turn * 7 + number * 3) % 40
            data = bytes([which]) * KIB
            with mine.claim(str(which), Cancel()):
                held = mine.find(str(which), Entry("k", KIB, f'"{which}"')) or keep(
                    mine, str(which), data, f'"{which}"'
                )
            if held.path.read_bytes() != data:
                wrong.append(f"{number} {turn}")
            held.release()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert wrong == []
    last = Cache(tmp_path / "cache", 10 * KIB)
    assert used_bytes(last) <= 10 * KIB
    assert not [name for name in files(last) if name.startswith(("incoming", "claims"))]


def test_locks_end_with_who_holds_them(cache: Cache) -> None:
    """Releasing a held file lets it be deleted."""
    held = keep(cache, "a", b"content")
    descriptor = os.open(held.path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.release()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
