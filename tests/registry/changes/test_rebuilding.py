"""Another build takes a version's place over pools without processes: in which order, and what a failed one leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import Draining, NotEnoughMemory
from marserve.messages import Answer, Part, Request
from marserve.registry.catalogue.versions import Version
from marserve.registry.changes.rebuilding import NotTaken
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour, FakePool
from support.management_house import House as ManagementHouse
from support.processes import until

pytestmark = pytest.mark.anyio


class Told:
    """A receiver that keeps what it was told."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.errors: list[Any] = []

    def on_answer(self, answer: Answer) -> None:
        """The answer."""
        self.bodies.append(bytes(answer.body))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""

    def on_error(self, error: Any) -> None:
        """An error."""
        self.errors.append(error)


class House(ManagementHouse):
    """The house with a version `m`."""

    async def add(self, config: str | None = None, **registration: Any) -> Version:
        """Register it; it answers `parent`."""
        self.pools.behaviours["m"] = Behaviour(body=b"parent")
        name = write_mar(self.store / "m.mar", manifest("m", "1.0"), config=config).name
        await self.registry.register(RegisterParameters(name, **{"initial_workers": 1, **registration}))
        return self.registry.version_of("m", None)

    async def rebuild(self, old: Version, **behaviour: Any) -> Version:
        """Have the build `onnx` serve, whose workers behave so."""
        self.pools.behaviours["m"] = Behaviour(**{"body": b"build", "computes_on": "onnx", **behaviour})
        return await self.registry.rebuild(old, "/builds/1", "onnx", 123)

    def ask(self) -> Told:
        """One request."""
        told = Told()
        self.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), told)
        return told


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry whose time-outs are short; after the test it is stopped and nothing of it is left."""
    house = House(tmp_path, unregister_timeout_s=0.5)
    yield house
    await house.registry.stop()
    assert house.folders() == []
    assert house.metrics.shown == []
    assert all(pool.is_stopped for pool in house.pools.made)


async def test_the_build_serves_under_the_versions_name_and_its_parents_workers_end(house: House) -> None:
    """From the same files, with the same options, remarks and age; the ledger hears of the build's weights."""
    old = await house.add()
    house.registry.remark("m", None, ["a remark"])
    parent = house.pools.made[0]

    new = await house.rebuild(old)

    build = house.pools.made[1]
    assert house.ask().bodies == [b"build"]
    await until(lambda: parent.is_stopped, "the parent's workers have ended")
    assert (build.load.build, build.load.model_dir) == ("/builds/1", parent.load.model_dir)
    assert (build.options.weight_bytes, parent.load.build) == (123, "")
    described = house.registry.describe("m")
    assert (described["modelVersion"], described["isDefault"], described["warnings"]) == ("1.0", True, ["a remark"])
    assert new.since == old.since
    assert len(house.folders()) == 1


async def test_the_parent_takes_its_place_again(house: House) -> None:
    """Whatever its workers say that they compute on."""
    build = await house.rebuild(await house.add())

    house.pools.behaviours["m"] = Behaviour(body=b"parent")
    await house.registry.rebuild(build, "", "", 7)

    assert house.ask().bodies == [b"parent"]
    assert (house.pools.made[-1].load.build, house.pools.made[-1].options.weight_bytes) == ("", 7)


async def test_requests_that_the_parent_had_accepted_are_answered_by_it(house: House) -> None:
    """The new ones by the build: none is lost."""
    old = await house.add()
    parent = house.pools.made[0]
    parent.behaviour.holds = True
    accepted = house.ask()

    await house.rebuild(old)
    assert house.ask().bodies == [b"build"]
    assert not parent.is_stopped
    parent.held[0].answer(Answer(b"parent"))
    await until(lambda: parent.is_stopped, "the parent's workers have ended")

    assert (accepted.bodies, accepted.errors) == ([b"parent"], [])


async def test_what_calls_change_meanwhile_holds_for_the_build(house: House) -> None:
    """How many workers, and how batches are formed; before it began, too."""
    old = await house.add()
    await house.registry.scale("m", None, min_workers=2, max_workers=3, synchronous=True)
    exchange = asyncio.ensure_future(house.rebuild(old, load="wait"))
    await until(lambda: len(house.pools.made) == 2, "workers with the build begin")
    build = house.pools.made[1]
    assert build.options.min_workers == 2

    await house.registry.scale("m", None, min_workers=3, max_workers=3, synchronous=False)
    house.registry.tune("m", None, batch_size=7, max_batch_delay_s=0.5)
    build.finish_load()
    await exchange

    assert (build.options.batch_size, build.options.max_batch_delay_s, build.wanted_workers) == (7, 0.5, 3)
    assert house.registry.describe("m")["minWorkers"] == 3


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        ({"load": "fail"}, "its workers could not load it: the handler raised"),
        ({"computes_on": ""}, "a worker that was to serve onnx serves the parent"),
        ({"computes_on": "", "warnings": ["the build onnx is not used: it is off"]}, "the build onnx is not used"),
        ({"warm_up_failure": "warm-up input 0 failed"}, "warm-up input 0 failed"),
    ],
)
async def test_a_build_that_does_not_come_leaves_the_parent(house: House, behaviour: dict[str, Any], why: str) -> None:
    """With the reason, and nothing of it is left."""
    old = await house.add()

    with pytest.raises(NotTaken, match=why):
        await house.rebuild(old, **behaviour)

    assert house.ask().bodies == [b"parent"]
    assert house.registry.is_listed(old)
    assert house.pools.made[1].is_stopped
    assert len(house.folders()) == 1


async def test_a_build_that_answers_samples_in_another_shape_is_not_taken(house: House) -> None:
    """As a swap tries its new version."""
    old = await house.add("samples:\n  - text: one\n")
    house.pools.made[0].behaviour.body = b'{"a": 1}'

    with pytest.raises(NotTaken, match="sample"):
        await house.rebuild(old, body=b"[1, 2]")

    assert house.ask().bodies == [b'{"a": 1}']


async def test_without_memory_for_both_the_parent_goes_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sentence is the reason."""
    old = await house.add()

    def start(self: FakePool) -> None:
        raise NotEnoughMemory("m", "1.0", needed_bytes=9, source="estimated", could_be_had=1, budget_bytes=5)

    monkeypatch.setattr(FakePool, "start", start)
    with pytest.raises(NotTaken, match="cannot be started beside those that serve: Model m version"):
        await house.rebuild(old)
    house.pools.made[1].is_stopped = True

    assert house.ask().bodies == [b"parent"]


async def test_a_version_that_leaves_meanwhile_is_not_brought_back(house: House) -> None:
    """The build's workers end with it."""
    old = await house.add()
    exchange = asyncio.ensure_future(house.rebuild(old, load="wait"))
    await until(lambda: len(house.pools.made) == 2, "workers with the build begin")

    await house.registry.unregister("m")
    house.pools.made[1].finish_load()

    with pytest.raises(NotTaken, match="the version has left meanwhile"):
        await exchange
    assert house.pools.made[1].is_stopped


async def test_a_server_that_stops_meanwhile_ends_both(house: House) -> None:
    """The exchange is given up at once."""
    old = await house.add()
    exchange = asyncio.ensure_future(house.rebuild(old, load="wait"))
    await until(lambda: len(house.pools.made) == 2, "workers with the build begin")

    house.registry.refuse_new()

    with pytest.raises(Draining):
        await exchange


async def test_during_a_roll_out_nothing_takes_the_place_of_what_is_measured(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange waits for its end."""
    monkeypatch.setattr("marserve.registry.changes.rebuilding.LOOK_AGAIN_S", 0.01)
    old = await house.add()
    await house.registry.register(
        RegisterParameters(write_mar(house.store / "m2.mar", manifest("m", "2.0")).name, initial_workers=1)
    )
    house.registry.mirrors.watch("m", "1.0", "2.0")
    exchange = asyncio.ensure_future(house.rebuild(old))
    await asyncio.sleep(0.05)
    assert len(house.pools.made) == 2

    house.registry.mirrors.unwatch("m")
    await exchange

    assert house.pools.made[2].load.build == "/builds/1"
