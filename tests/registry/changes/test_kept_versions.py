"""Versions that stay loaded for a while: when they end, and which are not kept at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marserve.registry.catalogue.versions import Version
from marserve.registry.changes.kept_versions import Keeping
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import manifest, write_mar
from support.fake_pool import FakePool
from support.management_house import House

pytestmark = pytest.mark.anyio


class Shelf:
    """Versions of a registry, and a keeping of the test's own with its clock."""

    def __init__(self, house: House, window_s: float = 60.0) -> None:
        self.house = house
        self.now = 0.0
        self.ended: list[Version] = []
        self.has_ended = asyncio.Event()
        self.keeping = Keeping(window_s, self._end, lambda: self.now)

    def _end(self, versions: list[Version]) -> None:
        self.ended += versions
        self.has_ended.set()

    async def add(self, version: str, config: str | None = None) -> Version:
        """A version that is loaded."""
        name = write_mar(self.house.store / f"m-{version}.mar", manifest("m", version), config=config).name
        await self.house.registry.register(RegisterParameters(name, initial_workers=1))
        return self.house.registry._versions.find("m", version)

    def kept(self) -> list[str]:
        """The names of what is kept."""
        return [kept.version.name for kept in self.keeping.all()]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry; after the test nothing of it is left."""
    house = House(tmp_path)
    yield house
    await house.registry.stop()
    assert house.folders() == []


def pool_of(version: Version) -> FakePool:
    """Its pool."""
    assert isinstance(version.pool, FakePool)
    return version.pool


async def test_each_has_a_window_of_its_own(house: House) -> None:
    """From when it was kept."""
    shelf = Shelf(house)
    first, second = await shelf.add("1.0"), await shelf.add("2.0")
    assert shelf.keeping.keep([first], "a") == []
    shelf.now = 30.0
    assert shelf.keeping.keep([second], "b") == []
    assert [shelf.keeping.left_s(kept) for kept in shelf.keeping.all()] == [30.0, 60.0]

    shelf.now = 60.0
    shelf.keeping.look()
    assert (shelf.kept(), shelf.ended) == (["2.0"], [first])
    shelf.now = 90.0
    shelf.keeping.look()
    assert (shelf.kept(), shelf.ended) == ([], [first, second])
    assert pool_of(first).give_up is None


async def test_the_window_ends_by_itself(house: House) -> None:
    """Nobody has to look."""
    shelf = Shelf(house, window_s=0.01)
    version = await shelf.add("1.0")
    shelf.keeping.keep([version], "a")
    shelf.now = 1.0

    await asyncio.wait_for(shelf.has_ended.wait(), 5)

    assert shelf.ended == [version]


async def test_what_is_wanted_elsewhere_ends_once(house: House) -> None:
    """By whoever needs its memory; its time is then no matter any more."""
    shelf = Shelf(house)
    version = await shelf.add("1.0")
    shelf.keeping.keep([version], "a")
    give_up = pool_of(version).give_up
    assert give_up is not None

    give_up()
    give_up()
    shelf.now = 100.0
    shelf.keeping.look()

    assert shelf.ended == [version]


async def test_what_is_taken_back_ends_no_more(house: House) -> None:
    """Unless it is put back; then by the time that it had."""
    shelf = Shelf(house)
    version = await shelf.add("1.0")
    shelf.keeping.keep([version], "a")
    found = shelf.keeping.find("m", "1.0")
    assert found is not None
    assert found.of == "a"
    assert shelf.keeping.take(found) is version
    assert pool_of(version).give_up is None
    shelf.now = 59.0
    shelf.keeping.look()
    assert shelf.ended == []

    shelf.keeping.put_back(found)
    shelf.now = 60.0
    shelf.keeping.look()

    assert shelf.ended == [version]


async def test_a_keeping_that_is_closed_keeps_nothing(house: House) -> None:
    """What it had ends; what comes, or comes back, is not kept."""
    shelf = Shelf(house)
    first, second, third = await shelf.add("1.0"), await shelf.add("2.0"), await shelf.add("3.0")
    shelf.keeping.keep([first, second], "a")
    found = shelf.keeping.find("m", "2.0")
    assert found is not None
    shelf.keeping.take(found)

    shelf.keeping.close()
    assert shelf.ended == [first]
    assert shelf.keeping.keep([third], "a") == [third]
    shelf.keeping.put_back(found)

    assert shelf.ended == [first, second]
    assert shelf.kept() == []


@pytest.mark.parametrize("why", ["no window", "crash ends the server", "no worker"])
async def test_what_is_of_no_use_is_not_kept(house: House, why: str) -> None:
    """It ends at once, as it does without a window."""
    shelf = Shelf(house, window_s=0.0 if why == "no window" else 60.0)
    version = await shelf.add("1.0", "onCrash: fail\n" if why == "crash ends the server" else None)
    if why == "no worker":
        pool_of(version)._workers.clear()

    assert shelf.keeping.keep([version], "a") == [version]

    assert shelf.kept() == []
    assert pool_of(version).give_up is None


async def test_what_cannot_answer_at_once_is_not_found(house: House) -> None:
    """It would have to load, which its own name does as well."""
    shelf = Shelf(house)
    version = await shelf.add("1.0")
    shelf.keeping.keep([version], "a")
    pool_of(version)._workers.clear()

    assert shelf.keeping.find("m", "1.0") is None
    assert shelf.keeping.find("m", "2.0") is None
    assert shelf.kept() == ["1.0"]
    shelf.keeping.close()
