"""Dry runs of calls for one version, over pools without processes: what they say, what they refuse, what they leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import (
    BadArchive,
    BadInput,
    DefaultVersionInUse,
    Draining,
    ModelNotFound,
    NotEnoughMemory,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
)
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.traffic import Traffic
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.observing.shadow_spec import ShadowSpec
from support.management_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with versions 1.0 (the default, two workers) and 2.0 of `m`. A dry run leaves all as it was."""
    house = House(tmp_path)
    for version, workers in (("1.0", 2), ("2.0", 1)):
        await house.registry.register(RegisterParameters(house.put("m", version), initial_workers=workers))
    yield house
    await house.registry.stop()
    assert house.folders() == []


class Untouched:
    """Sees that nothing changes while the block runs."""

    def __init__(self, house: House) -> None:
        self._house = house

    def _look(self) -> tuple[object, ...]:
        house = self._house
        return (
            house.registry.describe_all("m"),
            house.changes,
            len(house.pools.made),
            [pool.scaled for pool in house.pools.made],
            sorted(house.folders()),
            sorted(path.name for path in house.store.iterdir()),
        )

    def __enter__(self) -> None:
        self._before = self._look()

    def __exit__(self, *_: object) -> None:
        assert self._look() == self._before


async def test_a_registration_is_told_with_what_it_would_add(house: House) -> None:
    """Names and sizes are the archive's; the version before stays the default one."""
    url = house.put("m", "3.0")

    with Untouched(house):
        told = await house.registry.rehearsal.register(RegisterParameters(url, initial_workers=3))

    assert told.status == 'Model "m" Version: 3.0 would be registered with 3 initial workers'
    assert (told.model, told.version) == ("m", "3.0")
    assert told.before == {"versions": ["1.0", "2.0"], "defaultVersion": "1.0", "minWorkers": 0, "maxWorkers": 0}
    assert told.after == {
        "versions": ["1.0", "2.0", "3.0"],
        "defaultVersion": "1.0",
        "minWorkers": 3,
        "maxWorkers": 3,
    }
    assert told.notes == ("whether its workers can load it is not tried",)


async def test_the_first_version_of_a_model_would_be_its_default(house: House) -> None:
    """As it is when it is registered."""
    told = await house.registry.rehearsal.register(RegisterParameters(house.put("n", "1.0")))

    assert (told.before["defaultVersion"], told.after["defaultVersion"]) == (None, "1.0")


async def test_a_registration_that_would_be_refused_is(house: House) -> None:
    """A version that is there, an archive that is not, parameters that mean nothing, a handler that is nowhere."""
    rehearse = house.registry.rehearsal.register

    with Untouched(house):
        with pytest.raises(VersionConflict):
            await rehearse(RegisterParameters("m-1.0.mar"))
        with pytest.raises(BadInput):
            await rehearse(RegisterParameters("m-1.0.mar", initial_workers=-1))
    with pytest.raises(BadArchive):
        await rehearse(RegisterParameters(house.put("m", "4.0"), handler="gone.py"))
    assert len(house.folders()) == 2


async def test_memory_is_asked_about_and_not_promised(house: House) -> None:
    """The answer, or the refusal, of whoever counts it; a new version has no workers yet, a listed one has some."""
    asked: list[tuple[str, int | None, int]] = []

    def foresee(
        options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> Mapping[str, Any]:
        asked.append((options.version, before, workers))
        if workers > 3:
            raise NotEnoughMemory(
                options.model, options.version, needed_bytes=9, source="estimated", could_be_had=1, budget_bytes=5
            )
        return {"moreBytes": 7, "source": "estimated", "othersMakeRoom": True}

    house.registry.hooks.memory = foresee
    rehearsal = house.registry.rehearsal
    registered = await rehearsal.register(RegisterParameters(house.put("m", "3.0"), initial_workers=3))
    scaled = rehearsal.scale("m", None, min_workers=3, max_workers=3)
    fewer = rehearsal.scale("m", None, min_workers=1, max_workers=1)
    with Untouched(house), pytest.raises(NotEnoughMemory):
        rehearsal.scale("m", "2.0", min_workers=4, max_workers=4)

    assert asked == [("3.0", None, 3), ("1.0", 2, 3), ("2.0", 1, 4)]
    assert registered.memory["moreBytes"] == scaled.memory["moreBytes"] == 7
    assert "other models would make room, and it would wait until they have" in registered.notes
    assert fewer.memory == {}


async def test_scaling_is_told_with_the_workers_that_there_would_be(house: House) -> None:
    """As many as the bounds leave of those that are there."""
    with Untouched(house):
        more = house.registry.rehearsal.scale("m", None, min_workers=3, max_workers=5)
        none = house.registry.rehearsal.scale("m", "2.0", min_workers=0, max_workers=0)
        with pytest.raises(BadInput):
            house.registry.rehearsal.scale("m", None, min_workers=3, max_workers=2)
        with pytest.raises(VersionNotFound):
            house.registry.rehearsal.scale("m", "9.0", min_workers=1, max_workers=1)

    assert more.before == {"minWorkers": 2, "maxWorkers": 2, "workers": 2}
    assert more.after == {"minWorkers": 3, "maxWorkers": 5, "workers": 3}
    assert (none.after["workers"], none.notes) == (0, ("it has no worker then, and its requests are refused",))


@pytest.mark.parametrize("bounds", [(0, 0), (1, 1), (3, 3), (1, 4), (0, 3), (5, 9)])
async def test_what_scaling_would_do_it_does(house: House, bounds: tuple[int, int]) -> None:
    """The bounds and the number of workers afterwards are those that were told."""
    told = house.registry.rehearsal.scale("m", None, min_workers=bounds[0], max_workers=bounds[1])

    await house.registry.scale("m", None, min_workers=bounds[0], max_workers=bounds[1], synchronous=True)

    described = house.registry.describe("m")
    assert told.after == {
        "minWorkers": described["minWorkers"],
        "maxWorkers": described["maxWorkers"],
        "workers": len(described["workers"]),
    }


async def test_another_default_is_told_with_whether_it_can_answer(house: House) -> None:
    """And with weights that decide in its place."""
    rehearse = house.registry.rehearsal.set_default
    ready = rehearse("m", "2.0")
    house.pools.of("m", "2.0").scale(0, 0)
    house.registry.traffic.put("m", Traffic({"1.0": 1}))

    with Untouched(house):
        odd = rehearse("m", "2.0")
        with pytest.raises(VersionNotFound):
            rehearse("m", "9.0")
        with pytest.raises(ModelNotFound):
            rehearse("n", "1.0")

    assert (ready.before, ready.after, ready.notes) == ({"defaultVersion": "1.0"}, {"defaultVersion": "2.0"}, ())
    assert [note.split(":")[0] for note in odd.notes] == [
        "requests that name no version go by weights until these are deleted",
        "version 2.0 has no worker that has loaded it",
    ]


async def test_unregistering_is_told_with_all_that_ends_with_a_version(house: House) -> None:
    """Its weight, its labels and its shadow; what is refused is refused alike."""
    rehearse = house.registry.rehearsal.unregister
    house.registry.mirrors.put("m", ShadowSpec("2.0"))
    house.registry.traffic.put("m", Traffic({"1.0": 3, "2.0": 1}))
    house.registry.traffic.put_label("m", "canary", "2.0")

    with Untouched(house):
        with pytest.raises(DefaultVersionInUse):
            rehearse("m")
        with pytest.raises(VersionInUse):
            rehearse("m", "2.0")
        with pytest.raises(VersionNotFound):
            rehearse("m", "canary", force=True)
        told = rehearse("m", "2.0", force=True)

    assert told.before == {"versions": ["1.0", "2.0"], "defaultVersion": "1.0", "labels": ["canary"]}
    assert told.after == {"versions": ["1.0"], "defaultVersion": "1.0", "labels": []}
    assert told.notes == (
        "the shadow of the model would end: it mirrors to version 2.0",
        "its weight of 1 would go to the others",
    )


async def test_a_model_s_last_version_is_told_as_such(house: House) -> None:
    """Nobody answers for the model afterwards."""
    await house.registry.unregister("m", "2.0")

    told = house.registry.rehearsal.unregister("m")

    assert told.after == {"versions": [], "defaultVersion": None, "labels": []}
    assert told.notes == ("it is the model's last version: requests for the model would be refused",)


async def test_batches_are_told_as_they_would_be_formed(house: House) -> None:
    """What is not given stays; delays are in milliseconds."""
    with Untouched(house):
        told = house.registry.rehearsal.tune("m", None, batch_size=8, max_batch_delay_s=None)
        with pytest.raises(BadInput):
            house.registry.rehearsal.tune("m", None, batch_size=0, max_batch_delay_s=None)

    assert told.before == {"batchSize": 1, "maxBatchDelay": 100}
    assert told.after == {"batchSize": 8, "maxBatchDelay": 100}


async def test_a_server_that_stops_would_refuse(house: House) -> None:
    """As it refuses the call itself."""
    house.registry.refuse_new()

    with pytest.raises(Draining):
        await house.registry.rehearsal.register(RegisterParameters("m-1.0.mar"))
    with pytest.raises(Draining):
        house.registry.rehearsal.scale("m", None, min_workers=1, max_workers=1)
