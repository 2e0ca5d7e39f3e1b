"""Claims of `marserve.arrivals.watches`: which watch an event is for, what can be watched, and what a state
declares."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.reading.reader import Limits
from marserve.arrivals.object_events import ObjectEvent
from marserve.arrivals.watches import FAMILIES, Declared, Policies, Watches
from marserve.desired_state.document import NewVersions
from marserve.errors import BadInput, BadSettings, WatchNotFound
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.pending_fetches import Coming
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.settings.watches import WatchedPlace
from marserve.store.addresses.fetch_guard import AllowedUrls, Target, parse_target
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.http import HttpOrigins
from marserve.store.sources.local import LocalStore
from marserve.store.sources.source import Entry, Source
from support.echo_archives import manifest, write_mar
from support.fault_proxy import Fault, fault_proxy
from support.range_origin import range_origin

pytestmark = pytest.mark.anyio
LIMIT_S = 20.0


@pytest.fixture
def anyio_backend() -> str:
    """asyncio is what the server runs on."""
    return "asyncio"


class FakeModels:
    """A registry in memory that remembers what it was given."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[str, str], str] = {}

    def source_of(self, model: str, version: str) -> str | None:
        """As the registry."""
        return self.loaded.get((model, version))

    def default_of(self, model: str) -> str | None:
        """The first version."""
        return next((version for name, version in self.loaded if name == model), None)

    async def load(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """As the registry."""
        model, version = str(unpacked.manifest.model_name), str(unpacked.manifest.model_version)
        self.loaded[model, version] = parameters.url
        return Registered(model, version, 1, "done")

    async def swap(self, parameters: RegisterParameters, unpacked: Unpacked) -> None:
        """As the registry."""
        await self.load(parameters, unpacked)

    def set_default(self, model: str, version: str) -> None:
        """Not asked for here."""

    async def unload(self, model: str, version: str) -> None:
        """As the registry."""
        del self.loaded[model, version]


class FakeListing:
    """A bucket in memory."""

    def __init__(self, target: Target) -> None:
        self.shown = target.url

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Empty."""
        return iter(())

    def open(self, entry: Entry) -> Source:
        """Not asked for here."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to end."""


class FakeLister:
    """Object stores in memory."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def list_at(self, target: Target) -> FakeListing:
        """Any bucket is there."""
        self.asked.append(target.url)
        return FakeListing(target)


def watches_of(tmp_path: Path, *allowed: str, models: FakeModels | None = None, **more: Any) -> Watches:
    """Watches of nothing yet, with a model store."""
    store = tmp_path / "store"
    store.mkdir(exist_ok=True)
    patterns = AllowedUrls(allowed or (".*",))
    return Watches(
        models=models or FakeModels(),
        intake=Intake(LocalStore(store, roots=[tmp_path]), tmp_path / "scratch", Limits()),
        fetcher=more.pop("fetcher", None) or Fetcher(patterns),
        lister=FakeLister(),
        allowed=patterns,
        model_store=store,
        interval_s=3600,
        settle_s=0.0,
        **more,
    )


def place(where: str, name: str = "w", **more: Any) -> WatchedPlace:
    """A watch that loads."""
    return WatchedPlace(name, where, "load", **more)


@contextlib.asynccontextmanager
async def running(
    watches: Watches, policies: Policies = tuple, let_go: Callable[[Declared], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """Run them; afterwards no thread is left."""
    task = asyncio.create_task(watches.run(policies, let_go))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("watch-", "notices-"))]


async def until(claim: Any) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(LIMIT_S):
        while not claim():
            await asyncio.sleep(0.005)


def came(place: str, key: str, **more: Any) -> ObjectEvent:
    """An object came."""
    return ObjectEvent("there", key, place, **more)


async def test_an_event_goes_to_the_watches_whose_place_covers_it(tmp_path: Path) -> None:
    """By store, bucket and beginning of the key; one event may be for two."""
    watches = watches_of(tmp_path)
    for name, where in (
        ("all", "s3://bucket/"),
        ("models", "s3://bucket/models/"),
        ("digits", "s3a://bucket/models/digits-"),
        ("other", "s3://other/models/"),
        ("google", "gs://bucket/models/"),
    ):
        watches.add(place(where, name))

    def of(where: str, key: str) -> list[str]:
        return [verdict.watch for verdict in watches.announce([came(where, key)]) if verdict.action == "look"]

    assert of("s3://bucket", "models/digits-2.mar") == ["all", "models", "digits"]
    assert of("s3://bucket", "models/m.mar") == ["all", "models"]
    assert of("s3://bucket", "m.mar") == ["all"]
    assert of("gs://bucket", "models/m.mar") == ["google"]
    assert of("s3://third", "models/m.mar") == []
    assert of("s3://bucket", "models/readme.txt") == []
    assert watches.describe("digits")["hints"] == {"taken": 1, "found": 0, "given_up": 0, "waiting": 1}


async def test_what_is_ignored_is_said(tmp_path: Path) -> None:
    """Foreign, no archive, late."""
    watches = watches_of(tmp_path)
    watches.add(place("s3://bucket/models/"))

    reasons = [
        verdict.reason
        for verdict in watches.announce(
            [
                came("s3://else", "models/m.mar"),
                came("s3://bucket", "models/m.txt"),
                came("s3://bucket", "models/m.mar", sequencer="02"),
                came("s3://bucket", "models/m.mar", sequencer="01"),
            ]
        )
    ]

    assert reasons == ["no watch covers it", "it is no archive by its name", "", "a newer event of it came before"]


async def test_an_event_may_name_a_watch(tmp_path: Path) -> None:
    """One that is there."""
    watches = watches_of(tmp_path)
    watches.add(place("model_store", "store"))

    (verdict,) = watches.announce([ObjectEvent("there", "", watch="store")])

    assert (verdict.action, verdict.watch) == ("look", "store")
    with pytest.raises(BadInput, match="There is no watch 'nope'; the watches are: store"):
        watches.announce([ObjectEvent("there", "", watch="nope")])
    with pytest.raises(WatchNotFound):
        watches.look("nope")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("https://host/models/", "https:// cannot be listed; folders, s3://, gs:// and az:// can"),
        ("hf://org/name/", "cannot be listed"),
        ("ftp://host/", "only http, https, file"),
        ("s3://B/", "it begins with no name that a bucket can have"),
        ("s3://other/models/", "allowed_urls does not let its archives through; add a pattern as s3://other/models/.*"),
    ],
)
async def test_what_cannot_be_watched_is_refused_with_the_way_out(tmp_path: Path, where: str, said: str) -> None:
    """Before anything is begun."""
    watches = watches_of(tmp_path, "s3://bucket/.*", "https://.*")

    with pytest.raises(BadSettings) as raised:
        watches.add(place(where))

    assert said in str(raised.value)


async def test_two_watches_of_one_name_are_refused(tmp_path: Path) -> None:
    """Events and commands call them by it."""
    watches = watches_of(tmp_path)
    watches.add(place("model_store"))

    with pytest.raises(BadSettings, match="another watch of the name w"):
        watches.add(place(str(tmp_path)))


async def test_the_model_store_s_archives_have_their_names_and_others_their_paths(tmp_path: Path) -> None:
    """As a registration would name them, so that describe, snapshots and calls agree."""
    models = FakeModels()
    watches = watches_of(tmp_path, models=models)
    watches.add(place("model_store"))
    folder = tmp_path / "store" / "m" / "2"
    folder.mkdir(parents=True)
    write_mar(tmp_path / "store" / "m.mar", manifest("m", "1.0"))
    write_mar(folder / "any.mar", manifest("n", "9"))

    async with running(watches):
        await until(lambda: len(models.loaded) == 2)

    assert models.loaded == {("m", "1.0"): "m.mar", ("m", "2"): str(folder / "any.mar")}


async def test_a_desired_state_s_watches_come_and_go_with_it(tmp_path: Path) -> None:
    """While the others go on; what cannot be watched is logged and left out."""
    models = FakeModels()
    watches = watches_of(tmp_path, "s3://bucket/.*", models=models)
    watches.add(place("s3://bucket/always/", "always"))
    declared: list[tuple[str | None, NewVersions]] = []
    store = tmp_path / "store"

    async with running(watches, lambda: list(declared)):
        await until(lambda: watches.names() == ["always"])
        declared.append(("digits", NewVersions("digits-", "load")))
        declared.append((None, NewVersions("ftp://host/x", "load")))
        await until(lambda: watches.names() == ["always", "desired-digits"])
        write_mar(store / "other.mar", manifest("other", "1.0"))
        write_mar(store / "digits-2.mar", manifest("whatever", "2.0"))
        await until(lambda: bool(models.loaded))
        declared[:] = [("digits", NewVersions("digits-", "ignore"))]
        await until(lambda: [each.spec.policy for each in watches.each()] == ["load", "ignore"])
        declared.clear()
        await until(lambda: watches.names() == ["always"])

    assert models.loaded == {("digits", "2.0"): "digits-2.mar"}


async def test_what_a_desired_state_declares_no_more_is_told_once_it_is_not_watched(tmp_path: Path) -> None:
    """What its watch let in at the last moment can be taken away then; a change of others is nothing to tell."""
    watches = watches_of(tmp_path, models=FakeModels())
    goes, stays = ("digits", NewVersions("digits-", "load")), ("m", NewVersions("m-", "load"))
    declared: list[tuple[str | None, NewVersions]] = [goes, stays]
    told: list[tuple[list[tuple[str | None, NewVersions]], list[str]]] = []

    async def let_go(gone: Declared) -> None:
        told.append((list(gone), watches.names()))

    async with running(watches, lambda: list(declared), let_go):
        await until(lambda: len(watches.names()) == 2)
        declared.remove(goes)
        await until(lambda: bool(told))

    assert told == [([goes], ["desired-m"])]


async def test_declared_prefixes_that_look_alike_are_each_watched(tmp_path: Path) -> None:
    """What no name can hold is left out of it, and then two may be one."""
    models = FakeModels()
    watches = watches_of(tmp_path, models=models)
    store = tmp_path / "store"
    declared = [(None, NewVersions("a@", "load")), (None, NewVersions("a+", "load")), (None, NewVersions("a~", "load"))]

    async with running(watches, lambda: declared):
        await until(lambda: watches.names() == ["desired-a", "desired-a-2", "desired-a-3"])
        for name in ("a@1", "a+2", "a~3"):
            write_mar(store / f"{name}.mar", manifest("m", name[-1]))
        await until(lambda: len(models.loaded) == 3)

    assert models.loaded == {("m", "1"): "a@1.mar", ("m", "2"): "a+2.mar", ("m", "3"): "a~3.mar"}


async def test_what_a_watch_fetches_is_told_as_on_its_way(tmp_path: Path) -> None:
    """For the model and version that its key says; and it is found again by its digest."""
    data = write_mar(tmp_path / "made.mar", manifest("any", "0.1"), weights__dat=b"w" * 50_000).read_bytes()
    coming = Coming()
    with range_origin() as origin, fault_proxy(origin.url) as proxy:
        origin.put("/m.mar", data)
        proxy.on(Fault(stall_at=10_000), times=1)
        web = HttpOrigins(AllowedUrls([proxy.pattern]), silence_s=0.5)
        opener = {"s3": lambda target: web(parse_target(f"{proxy.url}/m.mar"))}
        fetcher = Fetcher(AllowedUrls([".*"]), openers=opener)
        watches = watches_of(tmp_path, coming=coming, fetcher=fetcher)
        watches.add(place("s3://bucket/models/"))
        [watched] = watches.each()
        taking = asyncio.create_task(asyncio.to_thread(watched.arrivals._take_in, "digits/7/any.mar"))
        await until(lambda: any(told.get("bytes") for told in coming.of("digits")))
        [told] = coming.of("digits")
        unpacked = await taking

    assert (told["url"], told["modelVersion"]) == ("s3://bucket/models/digits/7/any.mar", "7")
    assert coming.of("digits") == []
    assert unpacked.archive == f"s3://bucket/models/digits/7/any.mar#sha256={hashlib.sha256(data).hexdigest()}"
    unpacked.discard()


async def test_each_watch_has_its_metrics(tmp_path: Path) -> None:
    """Age of the last success only once there was one."""
    watches = watches_of(tmp_path)
    watches.add(place("model_store"))
    read = dict(FAMILIES)
    assert read["marserve_watch_last_success_age_seconds"](watches) == {}

    async with running(watches):
        await until(lambda: read["marserve_watch_looks_total"](watches)["w"] >= 1)

        assert 0 <= read["marserve_watch_last_success_age_seconds"](watches)["w"] < 60
    watches.count_events("look", 3)
    assert read["marserve_events_total"](watches)["look"] == 3
    assert read["marserve_arrivals_total"](watches)["loaded"] == 0
