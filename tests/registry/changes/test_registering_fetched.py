"""Archives that registrations fetch: when their files leave the model store again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from marserve.errors import ArchiveExists, LoadFailed, VersionConflict
from marserve.registry.catalogue.plan import Plan
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import RegisterParameters
from marserve.settings.values import ModelToLoad
from marserve.store.addresses.fetch_guard import AllowedUrls
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.fetching.fetcher import Fetcher
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour
from support.management_house import House as ManagementHouse

pytestmark = pytest.mark.anyio


class House(ManagementHouse):
    """A house that fetches from the folder `elsewhere`, with the record of an earlier one of the same root if any."""

    def __init__(self, root: Path, **options: float) -> None:
        self.elsewhere = root / "elsewhere"
        self.elsewhere.mkdir(parents=True, exist_ok=True)
        self.record = FetchedArchives(root / "state")
        fetcher = Fetcher(AllowedUrls(["file://.*"]))
        super().__init__(
            root,
            fetcher=fetcher,
            fetched_archives=self.record,
            unregister_timeout_s=0.2,
            **options,  # type: ignore[arg-type]
        )

    def address(self, name: str = "m", version: str = "1.0") -> str:
        """The address of an archive that is called after its model alone."""
        return f"file://{write_mar(self.elsewhere / f'{name}.mar', manifest(name, version))}"

    async def add(self, url: str, **parameters: object) -> None:
        """Register it, waiting for a worker."""
        await self.registry.register(RegisterParameters(url, initial_workers=1, **parameters))  # type: ignore[arg-type]

    def stored(self) -> list[str]:
        """What is in the store."""
        return sorted(path.name for path in self.store.iterdir())


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """Stopped in the end."""
    house = House(tmp_path)
    yield house
    for pool in house.pools.made:
        pool.behaviour.never_stops = False
    await house.registry.stop()


async def test_the_same_registration_works_again_after_unregistering(house: House) -> None:
    """The file goes with its version, and the address brings what lies there now."""
    await house.add(house.address())
    assert house.stored() == ["m.mar"]
    await house.registry.unregister("m")
    assert house.stored() == []

    await house.add(house.address(version="2.0"))

    assert house.registry.default_of("m") == "2.0"
    assert house.stored() == ["m.mar"]


async def test_while_a_version_uses_the_file_its_address_is_refused(house: House) -> None:
    """Whatever name is asked for; two versions from one file, one of them by the file's name, both use it."""
    url = house.address()
    await house.add(url)
    await house.add("m.mar", model_name="other")
    for name in ("m", "other"):
        with pytest.raises(ArchiveExists):
            await house.add(url, model_name="third")
        assert house.stored() == ["m.mar"]
        await house.registry.unregister(name)

    assert house.stored() == []


async def test_a_file_that_the_operator_put_there_stays(house: House) -> None:
    """Registered by its name, or put in the place of a fetched one."""
    mine = house.put("mine")
    await house.add(mine)
    await house.add(house.address())
    (house.store / "m.mar").unlink()
    write_mar(house.store / "m.mar", manifest("m", "9.0"))

    await house.registry.unregister("mine")
    await house.registry.unregister("m")

    assert house.stored() == [mine, "m.mar"] if mine < "m.mar" else ["m.mar", mine]
    with pytest.raises(ArchiveExists):
        await house.add(house.address())


async def test_an_operators_file_with_the_same_bytes_stays(house: House) -> None:
    """A copy that was moved over the fetched file is not what was fetched."""
    await house.add(house.address())
    copy = house.store / "copy"
    copy.write_bytes((house.store / "m.mar").read_bytes())
    copy.replace(house.store / "m.mar")

    await house.registry.unregister("m")

    assert house.stored() == ["m.mar"]


async def test_a_start_says_that_the_stores_file_came_from_another_address(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served all the same, as by TorchServe; the same address is no news."""
    caplog.set_level("WARNING", "marserve.registry")
    url = house.address()
    await house.registry.load_at_start((ModelToLoad(url, "first"),))
    assert house.stored() == ["m.mar"]
    other = house.elsewhere / "other" / "m.mar"
    other.parent.mkdir()
    write_mar(other, manifest("m", "2.0"))

    await house.registry.load_at_start((ModelToLoad(url, "again"),))
    assert caplog.messages == []
    await house.registry.load_at_start((ModelToLoad(f"file://{other}", "second"),))

    (said,) = caplog.messages
    assert said.startswith(f"file://{other} is not fetched: the store's m.mar is served in its place")
    assert f"which was fetched from {url}" in said
    assert house.registry.default_of("second") == "1.0"


async def test_a_registration_that_fails_leaves_nothing_in_the_store(house: House) -> None:
    """Its workers cannot load it, or its version is there already; the next one fetches anew."""
    house.pools.behaviours["m"] = Behaviour(load="fail")
    with pytest.raises(LoadFailed):
        await house.add(house.address())
    assert house.stored() == []

    house.pools.behaviours["m"] = Behaviour()
    mine = house.put("m")
    await house.add(mine)
    with pytest.raises(VersionConflict):
        await house.add(house.address())

    assert house.stored() == [mine]


async def test_a_restart_remembers_what_was_fetched(tmp_path: Path) -> None:
    """Stopping deletes nothing; what the next start restored from the file, by its name, takes it along in the end."""
    first = House(tmp_path)
    await first.add(first.address())
    snapshot = first.registry.snapshot()
    await first.registry.stop()
    assert first.stored() == ["m.mar"]

    second = House(tmp_path)
    await second.registry.restore(snapshot)
    assert second.registry.default_of("m") == "1.0"
    await second.registry.unregister("m")
    await second.registry.stop()

    assert second.stored() == []


async def test_what_a_crash_left_is_fetched_anew(tmp_path: Path) -> None:
    """Fetched and never registered, or unregistered and not deleted: no version uses it. A dry run changes nothing."""
    first = House(tmp_path)
    await first.add(first.address())
    await first.registry.stop()

    second = House(tmp_path)
    url = second.address(version="2.0")
    before = (second.store / "m.mar").read_bytes()
    await second.registry.rehearsal.register(RegisterParameters(url))
    assert (second.store / "m.mar").read_bytes() == before
    await second.add(url)
    found = second.registry.default_of("m")
    await second.registry.stop()

    assert found == "2.0"


async def test_a_version_that_a_snapshot_has_and_that_could_not_be_restored_keeps_its_file(tmp_path: Path) -> None:
    """The next start tries it again."""
    first = House(tmp_path)
    await first.add(first.address())
    snapshot = first.registry.snapshot()
    await first.registry.stop()

    second = House(tmp_path)
    odd = [replace(snapshot[0], model="odd", handler="none.py"), snapshot[0]]
    await second.registry.restore(odd)
    await second.registry.unregister("m")
    kept = second.stored()
    with pytest.raises(ArchiveExists):
        await second.add(second.address())
    await second.registry.stop()

    assert kept == ["m.mar"]


async def test_a_swap_deletes_nothing(house: House) -> None:
    """Who swaps may want to swap back."""
    await house.add(house.address())
    wish = SwapParameters("m", RegisterParameters(house.put("m", "2.0"), initial_workers=1))
    assert (await house.registry.swap(wish)).version == "2.0"

    assert "m.mar" in house.stored()


async def test_a_version_that_is_kept_for_an_undo_keeps_its_file(tmp_path: Path) -> None:
    """A desired state may have it back; what ends it deletes nothing either."""
    house = House(tmp_path, undo_window_s=60)
    await house.add(house.address())
    await house.add("m.mar", model_name="other")
    versions, keeping = house.registry._versions, house.registry.keeping
    version = versions.find("m", None)
    versions.remove(version)
    versions.leaving.discard(version)
    assert keeping.keep([version], "digest") == []

    await house.registry.unregister("other")
    assert house.stored() == ["m.mar"]
    keeping.give_up([version], "the test is over")
    await house.registry.stop()
    assert house.stored() == ["m.mar"]


async def test_two_registrations_of_one_address_at_once_are_one_and_a_refusal(house: House) -> None:
    """The second does not take the first one's file for a leftover."""
    url = house.address()
    results = await asyncio.gather(
        *(house.add(url, model_name=f"m{number}") for number in range(4)), return_exceptions=True
    )

    assert sorted(type(result).__name__ for result in results) == ["ArchiveExists"] * 3 + ["NoneType"]
    assert house.stored() == ["m.mar"]


@pytest.mark.parametrize("by_name", [False, True])
async def test_a_registration_under_way_keeps_its_file(house: House, by_name: bool) -> None:
    """From its address or by the file's name: the last version leaves meanwhile, or another call fetches the same."""
    url = house.address()
    if by_name:
        await house.add(url)
    has_come, may_go_on = asyncio.Event(), asyncio.Event()

    async def wait(plan: Plan) -> None:
        has_come.set()
        await may_go_on.wait()

    house.registry.hooks.before_pool.append(wait)
    adding = asyncio.create_task(house.add("m.mar" if by_name else url, model_name="n"))
    await has_come.wait()
    if by_name:
        await house.registry.unregister("m")
    else:
        with pytest.raises(ArchiveExists):
            async with asyncio.timeout(30):
                await house.add(url, model_name="third")
    kept = house.stored()
    may_go_on.set()
    await adding

    assert kept == house.stored() == ["m.mar"]
    await house.registry.unregister("n")
    assert house.stored() == []


async def test_a_registration_right_behind_waits_until_the_file_is_gone(house: House) -> None:
    """By address it fetches anew, however the two meet."""
    url = house.address()
    for _ in range(5):
        await house.add(url)
        _, added = await asyncio.gather(
            house.registry.unregister("m"), house.add(url, model_name="n"), return_exceptions=True
        )
        assert added is None or isinstance(added, ArchiveExists)
        if added is None:
            assert house.stored() == ["m.mar"]
            await house.registry.unregister("n")
        assert house.stored() == []


async def test_a_deletion_whose_caller_is_cancelled_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on; the next registration comes after it, and begins no second one."""
    calls, has_begun, may_go_on = 0, threading.Event(), threading.Event()
    delete = house.record.delete

    def delete_slowly(path: Path) -> bool:
        nonlocal calls
        calls += 1
        has_begun.set()
        assert may_go_on.wait(30)
        return delete(path)

    monkeypatch.setattr(house.record, "delete", delete_slowly)
    await house.add(house.put("m"))
    url = house.address()
    # Beneath the registry, which shields registrations.
    refused = asyncio.create_task(house.registry._registering.register(RegisterParameters(url)))
    assert await asyncio.to_thread(has_begun.wait, 30)
    refused.cancel()
    await asyncio.wait([refused])
    deleting = list(house.registry._registering._deleting)
    adding = asyncio.create_task(house.add(url, model_name="n"))
    await asyncio.sleep(0)
    may_go_on.set()
    await adding

    assert (deleting, calls) == (["m.mar"], 1)
    assert "m.mar" in house.stored()
    assert house.registry._registering._deleting == {}


async def test_a_start_keeps_the_file_that_it_loads(tmp_path: Path) -> None:
    """Another version from it, registered during the start, does not take it along; later the last one does."""
    first = House(tmp_path)
    await first.add(first.address())
    snapshot = first.registry.snapshot()
    await first.registry.stop()
    second = House(tmp_path)
    has_come, may_go_on = asyncio.Event(), asyncio.Event()

    async def wait(plan: Plan) -> None:
        if plan.facts.options.model == "m":
            has_come.set()
            await may_go_on.wait()

    second.registry.hooks.before_pool.append(wait)
    starting = asyncio.create_task(second.registry.restore(snapshot))
    await has_come.wait()
    await second.add("m.mar", model_name="other")
    await second.registry.unregister("other")
    kept = second.stored()
    may_go_on.set()
    await starting
    await second.registry.unregister("m")
    left = second.stored()
    await second.registry.stop()

    assert (kept, left) == (["m.mar"], [])
