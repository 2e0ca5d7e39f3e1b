"""Archives on their way from an origin that misbehaves: a whole model, or none and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.reading.reader import Limits
from marserve.errors import (
    ArchiveExists,
    ArchiveNotFound,
    BadArchive,
    BadInput,
    DigestMismatch,
    DownloadFailed,
    Draining,
    VersionConflict,
)
from marserve.registry.catalogue.snapshot import read_models, write_models
from marserve.registry.changes.registering import PARALLEL_FETCHES, PARALLEL_INTAKES
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.registration import Registered, RegisterParameters
from marserve.settings.values import ModelToLoad
from marserve.store.addresses.fetch_guard import AllowedUrls
from marserve.store.fetching.cache import Cache
from marserve.store.fetching.download import DownloadOptions
from marserve.store.fetching.fetcher import Fetcher, FetchOptions
from marserve.store.sources.http import HttpOrigins
from marserve.store.sources.local import LocalStore
from support.archives import good_members, zip_of
from support.echo_archives import manifest, write_mar
from support.fault_proxy import Fault, FaultProxy, fault_proxy
from support.management_house import House as ManagementHouse
from support.range_origin import RangeOrigin, range_origin

WEIGHTS = random.Random(5).randbytes(1_500_000)
ARCHIVE = zip_of({**good_members(), "weights.dat": WEIGHTS})
# Fifty of each with `make test-long`.
TIMES = pytest.mark.parametrize("times", [12, pytest.param(50, marks=pytest.mark.long)])


class House:
    """An intake with a store, a scratch folder and a cache of their own."""

    def __init__(self, root: Path, pattern: str, *, has_cache: bool) -> None:
        self.store, self.scratch = root / "store", root / "scratch"
        self.store.mkdir()
        self.cache = Cache(root / "cache", 100_000_000) if has_cache else None
        allowed = AllowedUrls([pattern])
        web = HttpOrigins(allowed, silence_s=5.0)
        download = DownloadOptions(connections=3, first_part_bytes=200_000, attempts=2, first_pause_s=0.001)
        fetcher = Fetcher(allowed, FetchOptions(download), openers={"http": web}, cache=self.cache)
        self.intake = Intake(LocalStore(self.store), self.scratch, Limits(), fetcher=fetcher)

    def take_in(self, url: str) -> bytes:
        """Fetch and unpack; gives the weights as they lie in the folder, which is deleted again."""
        unpacked = self.intake.take_in(url, self.intake.fetch(url))
        try:
            return (unpacked.folder / "weights.dat").read_bytes()
        finally:
            unpacked.discard()

    def left(self) -> list[Path]:
        """What lies about: in the store, in the scratch folder, and half in the cache."""
        folders = [self.store, self.scratch]
        if self.cache is not None:
            folders += [self.cache.folder / "incoming", self.cache.folder / "claims"]
        return [path for folder in folders if folder.exists() for path in folder.iterdir()]


@pytest.fixture
def origin() -> Iterator[RangeOrigin]:
    """A store with an archive."""
    with range_origin() as running:
        running.put("/m.mar", ARCHIVE)
        yield running


@pytest.fixture
def proxy(origin: RangeOrigin) -> Iterator[FaultProxy]:
    """What breaks the way to it."""
    with fault_proxy(origin.url) as running:
        yield running


@TIMES
@pytest.mark.parametrize("has_cache", [False, True])
def test_downloads_cut_at_random_points_give_no_half_model(
    proxy: FaultProxy, tmp_path: Path, has_cache: bool, times: int
) -> None:
    """Cut once or for good: the model is whole or not there, and what failed left nothing (E7, the download's part)."""
    house = House(tmp_path, proxy.pattern, has_cache=has_cache)
    whole = 0
    for seed in range(times):
        dice = random.Random(seed)
        proxy.clear()
        if not seed:  # how far others come is chance; nothing ever comes of this one
            proxy.on(Fault(cut_at=0), times=float("inf"))
        for _ in range(dice.randrange(1, 4)):
            cut = Fault(cut_at=dice.randrange(len(ARCHIVE)), reset=dice.random() < 0.5)
            proxy.on(cut, begin=dice.choice([None, 0]), times=dice.choice([1, 2, float("inf")]))
        try:
            weights = house.take_in(f"{proxy.url}/m.mar?{seed}")
        except DownloadFailed:
            assert house.left() == []
            continue
        assert weights == WEIGHTS
        whole += 1
        (house.store / "m.mar").unlink()

    assert times / 10 < whole < times


@TIMES
def test_half_objects_give_no_half_model(origin: RangeOrigin, tmp_path: Path, times: int) -> None:
    """An upload that was cut is a whole object for its origin; the archive's own records tell."""
    house = House(tmp_path, origin.pattern, has_cache=True)
    for seed in range(times):
        origin.put("/m.mar", ARCHIVE[: random.Random(seed).randrange(len(ARCHIVE))])

        with pytest.raises(BadArchive):
            house.take_in(f"{origin.url}/m.mar")

        assert house.left() == []


@TIMES
def test_an_archive_that_grows_into_another_is_never_a_mixture(origin: RangeOrigin, tmp_path: Path, times: int) -> None:
    """Replaced in the middle of downloads by one with other weights: all of the one, or all of the other."""
    house = House(tmp_path, origin.pattern, has_cache=False)
    other = random.Random(6).randbytes(len(WEIGHTS))
    archives = [ARCHIVE, zip_of({**good_members(), "weights.dat": other})]
    assert len(archives[0]) == len(archives[1])
    seen = set()
    for seed in range(times):
        turns = iter(range(1_000_000))
        at = random.Random(seed).randrange(9)
        real = origin.asked

        class Counting(list[tuple[str, str, str]]):
            """Replaces the object at a request of its own choice."""

            def append(self, asked: tuple[str, str, str], at: int = at, turns: Iterator[int] = turns) -> None:
                if next(turns) == at:
                    origin.put("/m.mar", archives[1] if origin.objects["/m.mar"] == archives[0] else archives[0])
                super().append(asked)

        origin.asked = Counting()
        weights = house.take_in(f"{origin.url}/m.mar")
        origin.asked = real
        (house.store / "m.mar").unlink()
        seen.add(weights)

    assert seen <= {WEIGHTS, other}
    assert len(seen) == 2
    assert house.left() == []


def test_what_is_fetched_and_no_model_loses_its_name(origin: RangeOrigin, tmp_path: Path) -> None:
    """It may be mended and registered again."""
    house = House(tmp_path, origin.pattern, has_cache=True)
    origin.put("/m.mar", b"no archive")

    with pytest.raises(BadArchive):
        house.take_in(f"{origin.url}/m.mar")
    assert house.left() == []
    origin.put("/m.mar", ARCHIVE)

    assert house.take_in(f"{origin.url}/m.mar") == WEIGHTS


def test_digests_hold_for_names_of_the_store_and_not_for_folders(origin: RangeOrigin, tmp_path: Path) -> None:
    """As for addresses."""
    house = House(tmp_path, origin.pattern, has_cache=False)
    (house.store / "m.mar").write_bytes(ARCHIVE)
    (house.store / "folder" / "MAR-INF").mkdir(parents=True)

    with pytest.raises(DigestMismatch, match=r"m\.mar in the model store has"):
        house.take_in(f"m.mar#sha256={'0' * 64}")
    with pytest.raises(BadInput, match="names a folder"):
        house.take_in(f"folder#sha256={'0' * 64}")
    with pytest.raises(ArchiveNotFound, match="does not match any allowed"):
        house.take_in("s3://bucket/gone.mar")

    assert (house.store / "m.mar").exists()


def test_an_archive_says_how_it_is_found_again(origin: RangeOrigin, tmp_path: Path) -> None:
    """By its name in the store, or its path where it lies elsewhere."""
    house = House(tmp_path, origin.pattern, has_cache=False)
    elsewhere = tmp_path / "roots" / "m.mar"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(ARCHIVE)
    rooted = Intake(LocalStore(house.store, roots=[elsewhere.parent]), house.scratch, Limits())

    url = f"{origin.url}/m.mar?key=secret"
    fetched = house.intake.take_in(url, house.intake.fetch(url))
    below = rooted.take_in(str(elsewhere))

    assert (fetched.archive, below.archive) == ("m.mar", str(elsewhere))
    fetched.discard()
    below.discard()


@pytest.mark.anyio
async def test_a_snapshot_says_where_an_archive_is_found_again(tmp_path: Path) -> None:
    """Below a further root by its path: the next start serves it from there, in place."""
    roots = tmp_path / "roots"
    folder = roots / "team" / "echo"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(write_mar(tmp_path / "m.mar", manifest("m", "1.0"))) as archive:
        archive.extractall(folder)
    first = ManagementHouse(tmp_path / "first", roots=[roots])
    await first.registry.register(RegisterParameters(str(folder)))
    versions = read_models(write_models(first.registry.snapshot(), "x", 1))
    await first.registry.stop()

    second = ManagementHouse(tmp_path / "second", roots=[roots])
    await second.registry.restore(versions)

    assert [version.archive for version in second.registry.snapshot()] == [str(folder)]
    assert second.folders() == []
    await second.registry.stop()
    assert (folder / "MAR-INF").is_dir()


@pytest.mark.anyio
async def test_what_was_fetched_for_a_registration_that_a_stop_overtakes_is_gone(tmp_path: Path) -> None:
    """It had its name in the store and waited for its turn to be unpacked."""
    source = write_mar(tmp_path / "m.mar", manifest("m", "1.0"))
    house = ManagementHouse(tmp_path / "house", fetcher=Fetcher(AllowedUrls(["file://.*"])))
    turns = house.registry._registering._intakes
    for _ in range(PARALLEL_INTAKES):
        await turns.acquire()
    call = asyncio.create_task(house.registry.register(RegisterParameters(f"file://{source}")))
    async with asyncio.timeout(20):
        while not (house.store / "m.mar").exists():
            await asyncio.sleep(0.01)

    house.registry.refuse_new()
    for _ in range(PARALLEL_INTAKES):
        turns.release()
    with pytest.raises(Draining):
        await call

    assert list(house.store.iterdir()) == []
    await house.registry.stop()


@pytest.mark.anyio
async def test_what_the_store_has_does_not_wait_for_downloads(tmp_path: Path) -> None:
    """All turns to fetch are taken by origins that say nothing; an archive of the store needs none."""
    house = ManagementHouse(tmp_path / "house", fetcher=Fetcher(AllowedUrls(["file://.*"])))
    write_mar(house.store / "m.mar", manifest("m", "1.0"))
    turns = house.registry._registering._fetches
    for _ in range(PARALLEL_FETCHES):
        await turns.acquire()

    async with asyncio.timeout(20):
        registered = await house.registry.register(RegisterParameters("m.mar"))

    assert registered.version == "1.0"
    await house.registry.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["served", "cancelled", "left", "stopped"])
async def test_a_download_that_waits_for_its_place_is_listed_and_can_be_ended(
    origin: RangeOrigin, tmp_path: Path, how: str
) -> None:
    """It keeps its number when it has its place; however it ends, the place is free for the next one."""
    fetcher = Fetcher(AllowedUrls([origin.pattern]))
    house, downloads = ManagementHouse(tmp_path / "house", fetcher=fetcher), fetcher.downloads
    origin.put("/m.mar", write_mar(tmp_path / "made.mar", manifest("m", "1.0")).read_bytes())
    places = house.registry._registering._fetches
    for _ in range(PARALLEL_FETCHES):
        await places.acquire()

    # What a caller of the registry begins goes on without it; "left" ends the taking in itself.
    take_in = house.registry._registering.take_in if how == "left" else house.registry.register
    call = asyncio.create_task(take_in(RegisterParameters(f"{origin.url}/m.mar?key=secret")))
    async with asyncio.timeout(20):
        while not downloads.statuses():
            await asyncio.sleep(0)
    [waiting] = downloads.statuses()
    assert (waiting.url, waiting.name, waiting.state) == (f"{origin.url}/m.mar?…", "m.mar", "waiting")
    assert (downloads.running, origin.asked) == (0, [])
    if how == "left":
        call.cancel()
    elif how == "cancelled":
        assert downloads.cancel(waiting.id, "it was enough")
    elif how == "stopped":
        house.registry.refuse_new()
    else:
        places.release()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    if how != "served":
        places.release()

    state = {"served": "done", "cancelled": "cancelled", "stopped": "cancelled"}.get(how)
    assert [(each.id, each.state) for each in downloads.statuses()] == ([(waiting.id, state)] if state else [])
    kinds = {"cancelled": DownloadFailed, "left": asyncio.CancelledError, "stopped": Draining}
    assert isinstance(outcome, kinds.get(how, Registered))
    assert places._value == 1
    await house.registry.stop()


# ------------------------------------------------------------------------------------------- on their way


async def begin(house: ManagementHouse, how: str, url: str) -> None:
    """Ask for version 2.0 of `m` in one of the ways there are."""
    registry = house.registry
    if how == "registration":
        await registry.register(RegisterParameters(url, model_name="m"))
    elif how == "start":
        await registry.load_at_start((ModelToLoad(url, "m"),))
    elif how == "snapshot":
        [known] = registry.snapshot()
        await registry.restore([replace(known, version="2.0", archive=url)])
    elif how == "desired state":
        await registry.begin_change().prepare(RegisterParameters(url, model_name="m", version="2.0"))
    else:
        await registry.swap(SwapParameters("m", RegisterParameters(url)))


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["registration", "start", "snapshot", "desired state", "swap"])
async def test_whoever_asked_for_it_describe_tells_how_far_it_is(
    origin: RangeOrigin, proxy: FaultProxy, tmp_path: Path, how: str
) -> None:
    """And it is served by nobody before it is whole; meanwhile another archive is fetched, unpacked and loaded."""
    house = ManagementHouse(tmp_path / "house", fetcher=Fetcher(AllowedUrls([proxy.pattern])))
    await house.registry.register(RegisterParameters(house.put("m", "1.0"), initial_workers=1))
    other = write_mar(tmp_path / "other.mar", manifest("other", "1.0"))
    origin.put("/other.mar", other.read_bytes())
    proxy.on(Fault(stall_at=100_000), path="/m.mar", times=50)
    asking = asyncio.create_task(begin(house, how, f"{proxy.url}/m.mar"))
    async with asyncio.timeout(20):
        while not (told := house.registry.arriving("m")) or not told[0].get("bytes"):
            await asyncio.sleep(0.01)

    registered = await house.registry.register(RegisterParameters(f"{proxy.url}/other.mar", initial_workers=1))
    described = house.registry.describe("m")

    assert registered.workers == 1
    assert described["modelVersion"] == "1.0"
    [told] = described["arriving"]
    assert (told["state"], told["size"]) == ("downloading", len(ARCHIVE))
    assert told.get("modelVersion") == ("2.0" if how in ("snapshot", "desired state") else None)
    assert "arriving" not in house.registry.describe("other")
    house.registry.refuse_new()
    with contextlib.suppress(DownloadFailed, Draining):
        await asking
    assert "arriving" not in house.registry.describe("m")
    await house.registry.stop()
    assert house.folders() == []


# ------------------------------------------------------------------------------------------- written over in place


class Overwritten:
    """An address that is written over, and servers that swap to it. Builds differ in a file that nobody reads."""

    def __init__(self, root: Path, *, has_cache: bool) -> None:
        self.root, self.has_cache = root, has_cache
        self.path = root / "origin" / "m.mar"
        self.path.parent.mkdir()
        self.url = f"file://{self.path}"

    def put(self, build: str, version: str = "1.0") -> str:
        """Write another build over the address; gives its digest."""
        write_mar(self.path, manifest("m", version), config=f"description: {build}\n")
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def server(self) -> ManagementHouse:
        """A server over the same store and cache, as after a restart."""
        cache = Cache(self.root / "cache", 100_000_000) if self.has_cache else None
        return ManagementHouse(self.root / "house", fetcher=Fetcher(AllowedUrls(["file://.*"]), cache=cache))

    async def swap(self, house: ManagementHouse, **more: Any) -> str:
        """Swap to what the address has now; the version's name."""
        swapped = await house.registry.swap(SwapParameters("m", RegisterParameters(self.url), **more))
        return swapped.version


def build_of(house: ManagementHouse) -> str:
    """Which build the default version was loaded from."""
    folder = Path(house.pools.made[-1].load.model_dir)
    return (folder / "model-config.yaml").read_text().strip()


@pytest.mark.anyio
@pytest.mark.parametrize("has_cache", [False, True])
async def test_a_swap_takes_what_its_address_has_now(tmp_path: Path, has_cache: bool) -> None:
    """Under its version's name and under another; the store keeps the file that it has, registrations are refused."""
    address = Overwritten(tmp_path, has_cache=has_cache)
    house = address.server()
    first = address.put("one")
    await house.registry.register(RegisterParameters(address.url, initial_workers=1))
    kept = house.store / "m.mar"

    seen = []
    for build, version in (("two", "1.0"), ("three", "2.0"), ("four", "2.0")):
        digest = address.put(build, version)
        assert await address.swap(house) == version
        described = house.registry.describe("m")
        assert (described["modelVersion"], described["modelUrl"]) == (version, address.url)
        assert described["resolvedUrl"] == f"{address.url}#sha256={digest}"
        assert [each.archive for each in house.registry.snapshot()] == [f"{address.url}#sha256={digest}"]
        seen.append(build_of(house))

    assert seen == ["description: two", "description: three", "description: four"]
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == first
    assert [path.name for path in house.store.iterdir()] == ["m.mar"]
    with pytest.raises(ArchiveExists):
        await house.registry.register(RegisterParameters(address.url, model_name="other"))
    await house.registry.stop()
    assert house.folders() == []


@pytest.mark.anyio
async def test_a_swap_to_an_address_of_a_new_name_gives_the_archive_its_name_in_the_store(tmp_path: Path) -> None:
    """As a registration does; a digest that does not hold is refused, and what serves goes on."""
    address = Overwritten(tmp_path, has_cache=False)
    house = address.server()
    await house.registry.register(RegisterParameters(house.put("m", "1.0"), initial_workers=1))
    digest = address.put("two")

    wrong = SwapParameters("m", RegisterParameters(f"{address.url}#sha256={'0' * 64}"))
    with pytest.raises(DigestMismatch):
        await house.registry.swap(wrong)
    assert [each.archive for each in house.registry.snapshot()] == ["m-1.0.mar"]
    await address.swap(house)

    assert [each.archive for each in house.registry.snapshot()] == ["m.mar"]
    assert hashlib.sha256((house.store / "m.mar").read_bytes()).hexdigest() == digest
    await house.registry.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("changes", [False, True])
async def test_a_restart_has_the_build_that_served_or_says_that_it_cannot(
    tmp_path: Path, has_cache: bool, changes: bool
) -> None:
    """Not the older one that the store has, and no newer one: from the cache, from the address, or not at all."""
    address = Overwritten(tmp_path, has_cache=has_cache)
    first = address.server()
    address.put("one")
    await first.registry.register(RegisterParameters(address.url, initial_workers=1))
    served = address.put("two")
    await address.swap(first)
    versions = read_models(write_models(first.registry.snapshot(), "x", 1))
    await first.registry.stop()
    if changes:
        address.put("three")

    second = address.server()
    await second.registry.restore(versions)

    # What cannot be had stays in the snapshots, so that a start that finds it again has it back.
    assert [each.archive for each in second.registry.snapshot()] == [f"{address.url}#sha256={served}"]
    if changes and not has_cache:
        (failure,) = second.registry.startup_failures
        assert served in failure
        assert "m.mar" in failure
        assert second.registry.list_models().models == []
    else:
        assert second.registry.startup_failures == []
        assert build_of(second) == "description: two"
    await second.registry.stop()
    assert second.folders() == []


@pytest.mark.anyio
@pytest.mark.parametrize("has_cache", [False, True])
async def test_a_dry_run_of_a_swap_leaves_the_store_as_it_is(tmp_path: Path, has_cache: bool) -> None:
    """It looks at what the address has, and gives it no name; the swap itself does."""
    address = Overwritten(tmp_path, has_cache=has_cache)
    house = address.server()
    house.put("m", "1.0")
    await house.registry.register(RegisterParameters("m-1.0.mar", initial_workers=1))
    address.put("two", "2.0")

    assert await address.swap(house, dry_run=True) == "2.0"
    assert [path.name for path in house.store.iterdir()] == ["m-1.0.mar"]
    told = await house.registry.rehearsal.register(RegisterParameters(address.url, freshness="now"))
    assert (told.model, told.version) == ("m", "2.0")
    assert [path.name for path in house.store.iterdir()] == ["m-1.0.mar"]
    await address.swap(house)
    assert sorted(path.name for path in house.store.iterdir()) == ["m-1.0.mar", "m.mar"]
    await house.registry.stop()
    assert house.folders() == []


@pytest.mark.anyio
async def test_a_registration_that_is_tried_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    """It is refused where the store has the name, as the registration is; and nothing of it is left."""
    address = Overwritten(tmp_path, has_cache=False)
    house = address.server()
    address.put("one")
    rehearse = house.registry.rehearsal.register

    told = await rehearse(RegisterParameters(address.url))
    left = list(house.store.iterdir()), house.folders()
    await house.registry.register(RegisterParameters(address.url, model_name="other"))
    with pytest.raises(ArchiveExists):
        await rehearse(RegisterParameters(address.url))

    assert (told.model, told.version, left) == ("m", "1.0", ([], []))
    await house.registry.stop()


@pytest.mark.anyio
async def test_what_was_looked_into_for_a_change_is_fetched_once(tmp_path: Path) -> None:
    """The change takes what lies unpacked, and only for the very version; what nobody takes is deleted."""
    address = Overwritten(tmp_path, has_cache=False)
    house = address.server()
    address.put("one")
    async with house.registry.looking_into(RegisterParameters(address.url)) as (model, version):
        assert (model, version, len(house.folders())) == ("m", "1.0", 1)
        address.path.unlink()  # a second fetch would fail
        change = house.registry.begin_change()
        wanted = RegisterParameters(address.url, model_name=model, version=version, initial_workers=1)
        prepared = await change.prepare(wanted)
        assert len(house.folders()) == 1
    assert prepared.name == "1.0"
    await change.abandon()
    assert house.folders() == []

    (house.store / "m.mar").unlink()
    address.put("two")
    async with house.registry.looking_into(RegisterParameters(address.url)):
        pass
    assert house.folders() == []
    await house.registry.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("handler", [None, "gone.py"])
async def test_a_change_that_is_refused_leaves_no_file_in_the_store(tmp_path: Path, handler: str | None) -> None:
    """Whether the archive is refused or what was to be done with it, loaded or not; what was there before stays."""
    address = Overwritten(tmp_path, has_cache=False)
    house = address.server()
    digest = address.put("one")
    asked = RegisterParameters(address.url, handler=handler)

    async def change() -> None:
        async with house.registry.looking_into(asked) as (model, version):
            begun = house.registry.begin_change()
            await begun.prepare(replace(asked, model_name=model, version=version, initial_workers=1))
            await begun.abandon()
            raise VersionConflict(model, version)

    with pytest.raises(BadArchive if handler else VersionConflict):
        await change()

    assert (list(house.store.iterdir()), house.folders()) == ([], [])
    await house.registry.register(RegisterParameters(address.url))
    with contextlib.suppress(BadArchive, VersionConflict):
        async with house.registry.looking_into(replace(asked, url=f"{address.url}#sha256={digest}")):
            raise VersionConflict("m", "1.0")
    assert [path.name for path in house.store.iterdir()] == ["m.mar"]
    await house.registry.stop()
