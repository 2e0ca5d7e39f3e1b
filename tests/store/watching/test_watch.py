"""Claims of `marserve.store.watching.watch`: when a place is looked at, what hints do, and that nothing is left of a
watch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from marserve.settings.stores import NO_STORES
from marserve.store.addresses.fetch_guard import Target
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Broken, Entry, Failed
from marserve.store.watching import watch as watch_module
from marserve.store.watching.sightings import Change, Sightings
from marserve.store.watching.watch import ListedPlace, Watch, is_archive

pytestmark = pytest.mark.anyio

LIMIT_S = 10.0


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the server runs on."""
    return "asyncio"


class FakePlace:
    """A store in memory that counts what it is asked."""

    shown = "fake://bucket/models/"

    def __init__(self, **objects: str) -> None:
        self.objects = {name.replace("_", ".", 1): etag for name, etag in objects.items()}
        self.hidden: set[str] = set()
        self.lists = 0
        self.stats: list[str] = []
        self.trouble: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.is_closed = False

    def list(self) -> Iterator[Entry]:
        """All that is shown."""
        self.lists += 1
        self.gate.wait(LIMIT_S)
        if self.trouble is not None:
            raise self.trouble
        return iter([Entry(key, 1, etag) for key, etag in self.objects.items() if key not in self.hidden])

    def stat(self, key: str) -> Entry | None:
        """One of them."""
        self.stats.append(key)
        if self.trouble is not None:
            raise self.trouble
        return None if key in self.hidden or key not in self.objects else Entry(key, 1, self.objects[key])

    def close(self) -> None:
        """Let go."""
        self.is_closed = True
        self.gate.set()


class Stage:
    """A watch that runs, and what it told."""

    def __init__(self, place: FakePlace, *, interval_s: float = 3600.0, late_s: float = 60.0) -> None:
        self.place = place
        self.told: list[Change] = []
        self.watch = Watch(
            "w",
            place,
            Sightings(removal_s=0.0),
            self.told.extend,
            interval_s=interval_s,
            late_s=late_s,
            chance=lambda: 0.0,
        )

    @property
    def names(self) -> list[tuple[str, str]]:
        """Kind and key of what was told."""
        return [(change.kind, change.entry.key) for change in self.told]

    async def until(self, claim: Callable[[], bool]) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(LIMIT_S):
            while not claim():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(stage: Stage) -> AsyncIterator[Stage]:
    """Run the watch; afterwards no thread of it is left."""
    task = asyncio.create_task(stage.watch.run())
    try:
        yield stage
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert stage.place.is_closed
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("watch-", "notices-"))]


async def test_one_list_call_a_look_when_nothing_changed() -> None:
    """A place that keeps still costs one listing an interval, and nothing else."""
    async with running(Stage(FakePlace(a_mar='"1"'), interval_s=0.02)) as stage:
        await stage.until(lambda: stage.place.lists >= 5)

    assert stage.names == [("added", "a.mar")]
    assert stage.place.stats == []
    assert stage.watch.looks["done"] in (stage.place.lists, stage.place.lists - 1)


@pytest.mark.parametrize("limit_s", [3.0, pytest.param(1.0, marks=pytest.mark.long)])
async def test_five_thousand_keys_are_looked_at_within_a_second(limit_s: float) -> None:
    """By one listing. On a busy machine three seconds are allowed."""
    place = FakePlace(**{f"m{number}_mar": '"1"' for number in range(5000)})
    async with running(Stage(place)) as stage:
        await stage.until(lambda: stage.watch.looks["done"] == 1)
        begin = time.perf_counter()
        stage.watch.look_soon()
        await stage.until(lambda: stage.watch.looks["done"] == 2)
        took = time.perf_counter() - begin

    assert len(stage.told) == 5000
    assert place.lists == 2
    assert took < limit_s


async def test_a_store_that_does_not_answer_is_asked_more_seldom_and_keeps_what_is_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Failures remove nothing; they are counted, said once, and over at the first answer."""
    place = FakePlace(a_mar='"1"')
    async with running(Stage(place, interval_s=0.01)) as stage:
        await stage.until(lambda: stage.watch.looks["done"] >= 1)
        place.trouble = Broken("the connection was refused")
        with caplog.at_level(logging.INFO, "marserve.store"):
            await stage.until(lambda: stage.watch.looks["failed"] >= 4)
            described = stage.watch.describe()
            place.trouble = None
            await stage.until(lambda: stage.watch.describe()["reachable"])

    assert stage.names == [("added", "a.mar")]
    assert described["failuresInARow"] >= 4
    assert described["reachable"] is False
    assert described["lastError"]["reason"] == "the connection was refused"
    assert described["lastSuccess"] is not None
    said = [record.message for record in caplog.records]
    assert said[0] == "Watch w: fake://bucket/models/ cannot be looked at: the connection was refused"
    assert said[1].startswith("Watch w: fake://bucket/models/ answers again, after ")
    assert len(said) == 2


async def test_a_place_that_never_answered_says_so() -> None:
    """Without a first success nothing is claimed."""
    place = FakePlace()
    place.trouble = Failed("Access Denied")
    async with running(Stage(place)) as stage:
        await stage.until(lambda: stage.watch.looks["failed"] == 1)
        described = stage.watch.describe()

    assert described["reachable"] is False
    assert described["lastSuccess"] is None


async def test_a_hint_costs_one_request_and_no_listing() -> None:
    """What an event names is looked at alone."""
    place = FakePlace()
    async with running(Stage(place)) as stage:
        await stage.until(lambda: place.lists == 1)
        place.objects["new.mar"] = '"7"'
        stage.watch.hint("new.mar", etag="7")
        await stage.until(lambda: bool(stage.told))
        await stage.until(lambda: stage.watch.hints["found"] == 1)

    assert stage.names == [("added", "new.mar")]
    assert place.stats == ["new.mar"]
    assert place.lists == 1


async def test_a_replayed_hint_changes_nothing() -> None:
    """The same event ten times is one arrival."""
    place = FakePlace(a_mar='"1"')
    async with running(Stage(place)) as stage:
        await stage.until(lambda: place.lists == 1)
        for _ in range(10):
            stage.watch.hint("a.mar", etag="1")
        await stage.until(lambda: stage.watch.hints["found"] == 1)
        stage.watch.hint("a.mar", etag="1")
        await stage.until(lambda: stage.watch.hints["found"] == 2)

    assert stage.names == [("added", "a.mar")]
    assert place.stats == ["a.mar", "a.mar"]


async def test_an_object_that_appears_late_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event may come before the store shows the object, or while it still shows the old one."""
    monkeypatch.setattr(watch_module, "FIRST_HINT_RETRY_S", 0.01)
    place = FakePlace(a_mar='"1"', b_mar='"1"')
    place.hidden.add("b.mar")
    async with running(Stage(place)) as stage:
        await stage.until(lambda: place.lists == 1)
        stage.watch.hint("b.mar")
        stage.watch.hint("a.mar", etag="2")
        await stage.until(lambda: place.stats.count("a.mar") >= 3 and place.stats.count("b.mar") >= 3)
        assert stage.names == [("added", "a.mar")]
        place.hidden.clear()
        place.objects["a.mar"] = '"2"'
        await stage.until(lambda: stage.watch.hints["found"] == 2)

    assert sorted(stage.names) == [("added", "a.mar"), ("added", "b.mar"), ("replaced", "a.mar")]


async def test_an_object_that_never_appears_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for an announced object is bounded, and its end is said."""
    monkeypatch.setattr(watch_module, "FIRST_HINT_RETRY_S", 0.01)
    async with running(Stage(FakePlace(), late_s=0.05)) as stage:
        await stage.until(lambda: stage.place.lists == 1)
        stage.watch.hint("never.mar")
        await stage.until(lambda: stage.watch.hints["given_up"] == 1)
        asked = len(stage.place.stats)

    assert stage.told == []
    assert asked >= 2
    assert "an event said that never.mar came; the store did not show it in time" in caplog.text


async def test_a_removal_is_seen_for_ourselves() -> None:
    """An event that lies about a removal removes nothing."""
    place = FakePlace(a_mar='"1"', b_mar='"1"')
    async with running(Stage(place, late_s=0.0)) as stage:
        await stage.until(lambda: place.lists == 1)
        del place.objects["b.mar"]
        stage.watch.hint("a.mar", "gone")
        stage.watch.hint("b.mar", "gone")
        await stage.until(lambda: len(stage.told) == 3)
        await stage.until(lambda: not stage.watch.describe()["hints"]["waiting"])

    assert stage.names[2:] == [("removed", "b.mar")]


async def test_a_flood_of_hints_is_one_listing_and_is_bounded() -> None:
    """A thousand events at once are not a thousand requests, and more than that not more memory."""
    place = FakePlace()
    async with running(Stage(place)) as stage:
        await stage.until(lambda: place.lists == 1)
        for number in range(5000):
            stage.watch.hint(f"{number}.mar")
        assert stage.watch.describe()["hints"]["waiting"] == watch_module.MOST_HINTS
        await stage.until(lambda: place.lists == 2)

    assert place.stats == []


async def test_a_look_that_hangs_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that never answers holds one thread, counts as unreachable, and does not keep the server from ending."""
    monkeypatch.setattr(watch_module, "LOOK_LIMIT_S", 0.05)
    place = FakePlace()
    place.gate.clear()
    async with running(Stage(place, interval_s=0.01)) as stage:
        await stage.until(lambda: stage.watch.looks["failed"] >= 3)

        assert place.lists == 1
        assert len([thread for thread in threading.enumerate() if thread.name == "watch-w"]) == 1


async def test_what_a_look_finds_that_comes_too_late_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as known from then on, so no later look would tell it."""
    monkeypatch.setattr(watch_module, "LOOK_LIMIT_S", 0.05)
    place = FakePlace(a_mar='"1"')
    place.gate.clear()
    async with running(Stage(place, interval_s=0.01)) as stage:
        await stage.until(lambda: stage.watch.looks["failed"] >= 1)
        assert stage.told == []

        place.gate.set()
        await stage.until(lambda: stage.watch.looks["done"] >= 1)

    assert stage.names == [("added", "a.mar")]
    assert stage.watch.changes["added"] == 1


@pytest.mark.parametrize("turns", range(5))
async def test_a_watch_that_is_woken_and_cancelled_in_one_moment_ends(turns: int) -> None:
    """However many turns of the loop lie between the two: a cancel that is lost keeps the server from stopping."""
    stage = Stage(FakePlace(a_mar="1"))
    task = asyncio.create_task(stage.watch.run())
    await stage.until(lambda: stage.watch.looks["done"] == 1)

    stage.watch.look_soon()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()

    done, _ = await asyncio.wait([task], timeout=LIMIT_S)
    assert done


async def test_the_thread_of_a_look_before_the_last_is_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it has handed its result over, and has not ended when the next look begins."""
    work, first_may_end = watch_module._work, threading.Event()
    monkeypatch.setattr(watch_module, "_work", lambda *arguments: (work(*arguments), first_may_end.wait(LIMIT_S)))
    async with running(Stage(FakePlace(a_mar="1"))) as stage:
        await stage.until(lambda: stage.watch.looks["done"] == 1)
        monkeypatch.setattr(watch_module, "_work", work)
        stage.watch.hint("a.mar")
        await stage.until(lambda: stage.watch.hints["found"] == 1)
        asyncio.get_running_loop().call_later(0.05, first_may_end.set)


async def test_a_defect_in_a_look_does_not_end_the_watch() -> None:
    """Whatever a listing raises, the next look is made."""
    place = FakePlace()
    place.trouble = ZeroDivisionError("a defect")
    async with running(Stage(place, interval_s=0.01)) as stage:
        await stage.until(lambda: stage.watch.looks["failed"] >= 2)
        place.trouble = None
        await stage.until(lambda: stage.watch.looks["done"] >= 1)


async def test_too_many_archives_are_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: what does not fit is not half known."""
    monkeypatch.setattr(watch_module, "MOST_ARCHIVES", 3)
    place = FakePlace(a_mar='"1"', b_mar='"1"', c_mar='"1"', d_mar='"1"')
    async with running(Stage(place)) as stage:
        await stage.until(lambda: stage.watch.looks["failed"] == 1)

    assert stage.told == []
    assert "more than 3 archives" in stage.watch.describe()["lastError"]["reason"]


class FakeListing:
    """A listing with whole keys, as stores have it."""

    shown = "s3://bucket/models/"

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.prefixes: list[str] = []

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Keys with the prefix."""
        self.prefixes.append(prefix)
        return iter([Entry(key, 1, '"1"') for key in self.keys if key.startswith(prefix)])

    def open(self, entry: Entry):  # type: ignore[no-untyped-def]
        """Not asked for here."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""


async def test_keys_of_a_store_lose_the_prefix_and_only_archives_count() -> None:
    """One listing; what is no archive, hidden, or the prefix itself is left out."""
    listing = FakeListing(
        ["models/", "models/a.mar", "models/b/1.2/b.mar", "models/read.me", "models/.tmp/c.mar", "other/d.mar"]
    )

    keys = [entry.key for entry in ListedPlace(listing, "models/").list()]

    assert keys == ["a.mar", "b/1.2/b.mar"]
    assert listing.prefixes == ["models/"]


async def test_a_prefix_may_end_in_the_middle_of_a_name() -> None:
    """Then the names stay whole."""
    listing = FakeListing(["models/digits-1.mar", "models/digits-2.mar", "models/other.mar"])

    keys = [entry.key for entry in ListedPlace(listing, "models/digits-").list()]

    assert keys == ["digits-1.mar", "digits-2.mar"]


@pytest.mark.parametrize(
    ("key", "counts"),
    [
        ("a.mar", True),
        ("A.MAR", True),
        ("x/y/a.tar.gz", True),
        ("a.tgz", True),
        ("a.mar.part", False),
        (".a.mar", False),
        ("x/.upload/a.mar", False),
        ("a.txt", False),
        ("", False),
    ],
)
async def test_archives_are_known_by_their_ending(key: str, counts: bool) -> None:
    """Somebody's work in progress is none."""
    assert is_archive(key) is counts


def page_of(keys: list[str], after: int) -> bytes:
    """One page of a listing as S3 writes it."""
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>10</Size></Contents>'
        for key in keys[after : after + 1000]
    )
    end = after + 1000
    more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < len(keys) else ""
    return (
        f"<ListBucketResult><Name>bucket</Name><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{rows}"
        "</ListBucketResult>"
    ).encode()


@pytest.fixture
def long_bucket() -> Iterator[tuple[str, list[str]]]:
    """An S3 whose only bucket has 5,000 archives; its address, and the requests that came."""
    keys = [f"models/m{number:04}/1/m.mar" for number in range(5000)]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            after = parse_qs(urlsplit(self.path).query).get("continuation-token", ["0"])[0]
            body = page_of(keys, int(after))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("limit_s", [3.0, pytest.param(1.0, marks=pytest.mark.long)])
async def test_a_bucket_of_five_thousand_archives_is_looked_at_within_a_second(
    long_bucket: tuple[str, list[str]], limit_s: float
) -> None:
    """Through the library for object stores: one listing, which S3 gives in five pages, and no request a key."""
    pytest.importorskip("obstore")
    url, asked = long_bucket
    environment = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    target = Target("s3", "bucket", 0, "/models/", "")
    place = ListedPlace(ObjectStores(NO_STORES, environment).list_at(target), "models/")
    told: list[Change] = []
    watch = Watch("w", place, Sightings(), told.extend, interval_s=3600.0)
    task = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while watch.looks["done"] < 1:
                await asyncio.sleep(0.005)
            watch.look_soon()
            while watch.looks["done"] < 2:
                await asyncio.sleep(0.005)
        took = watch.describe()["lastLookSeconds"]
    finally:
        task.cancel()
        await asyncio.wait([task])

    assert len(told) == 5000
    assert len(asked) == 10
    assert took < limit_s
