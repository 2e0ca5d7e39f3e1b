"""Searches of a server whose process is a stand-in: what serves afterwards, what is said, and what is left."""

from __future__ import annotations

import asyncio
import logging
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.answers.management import Optimising
from marserve.errors import ModelNotFound
from marserve.optimise.background import background as module
from marserve.optimise.background.background import Background
from marserve.optimise.background.cache import write_found
from marserve.optimise.background.order import WHOLE, Order
from marserve.registry.changes.swap import SwapParameters
from marserve.registry.intake.registration import RegisterParameters
from marserve.telemetry.happenings import Happenings
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour
from support.management_house import House as ManagementHouse

pytestmark = pytest.mark.anyio

KEY = "optimise: {candidates: [onnx]}\n"
ROW = {
    "name": "onnx",
    "passed": True,
    "whyNot": None,
    "faults": [],
    "outputs": [{"meanError": 1e-6}],
    "agreement": None,
    "ratios": [{"rows": 1, "threads": 2, "middle": 2.0, "low": 1.5, "high": 2.5}],
}
FOUND = {"winner": "onnx", "builds": [ROW]}
NOTHING = {"winner": None, "builds": [ROW]}


class Searches:
    """Stands for the process: writes what a test says, after `goes_on`."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = FOUND
        self.may_change = False
        self.why = ""
        self.error: OSError | None = None
        self.orders: list[Order] = []
        self.ended = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def run(self, order: Order, on_step: Callable[[str], None]) -> str:
        """Search."""
        self.orders.append(order)
        on_step("onnx: building")
        (Path(order.folder) / "half").write_text("half")
        try:
            await self.goes_on.wait()
        finally:
            self.ended += 1
        if self.error is not None:
            raise self.error
        if not self.why:
            if self.report["winner"]:
                (Path(order.folder) / WHOLE / "optimised").mkdir(parents=True)
                (Path(order.folder) / WHOLE / "optimised" / "model.onnx").write_bytes(b"12345")
            write_found(Path(order.folder) / WHOLE, self.report, may_change=self.may_change)
        return self.why


class House(ManagementHouse):
    """A registry with searches."""

    def __init__(self, root: Path, state: Path, share: float = 0.25) -> None:
        super().__init__(root, unregister_timeout_s=0.5)
        self.searches = Searches()
        self.state = state
        self.happenings = Happenings()
        self.machine = {"processor": "a"}
        self.now = 0.0
        self.background = Background(
            self.registry,
            self.searches,  # type: ignore[arg-type]
            state,
            self.happenings,
            share=share,
            memory_bytes=1 << 30,
            machine=lambda: self.machine,
            clock=lambda: self.now,
        )
        self.pools.behaviours["m"] = Behaviour(body=b"m", computes_on="onnx")

    async def add(self, config: str = KEY, name: str = "m", workers: int | None = 1) -> None:
        """Register a model; servers of one test have the same archive, with its times."""
        made = self.state.parent / f"{name}-{len(config)}.mar"
        if not made.exists():
            write_mar(made, manifest(name, "1.0"), config=config)
        shutil.copy(made, self.store)
        await self.registry.register(RegisterParameters(made.name, initial_workers=workers, synchronous=True))

    def standing(self, name: str = "m") -> dict[str, Any]:
        """What describe says of the search."""
        found: dict[str, Any] = self.registry.describe(name).get("optimising", {})
        return found

    async def until(self, state: str, name: str = "m") -> dict[str, Any]:
        """What describe says when it is so."""
        async with asyncio.timeout(10):
            while self.standing(name).get("state") != state:
                await asyncio.sleep(0.002)
        return self.standing(name)

    async def until_held(self) -> str:
        """What describe says that it waits for."""
        async with asyncio.timeout(10):
            while not self.standing().get("step"):
                await asyncio.sleep(0.002)
        assert self.standing()["state"] == "waits"
        return str(self.standing()["step"])

    def kept(self) -> list[str]:
        """The folders of the state folder."""
        return sorted(path.name for path in (self.state / "optimised").glob("*") if path.is_dir())

    async def close(self) -> None:
        """As a server that stops."""
        await self.background.stop()
        await self.registry.stop()


@pytest.fixture
async def houses(tmp_path: Path) -> AsyncIterator[Callable[..., House]]:
    """Makes servers of one state folder; after the test nothing half-made is left."""
    made: list[House] = []

    def make(**options: Any) -> House:
        made.append(House(tmp_path / str(len(made)), tmp_path / "state", **options))
        return made[-1]

    yield make
    for house in made:
        await house.close()
        assert house.folders() == []
        assert not [name for name in house.kept() if "making" in name]
        assert all(pool.is_stopped for pool in house.pools.made)
        assert house.searches.ended == len(house.searches.orders)


async def test_the_build_that_is_found_serves_and_is_told(
    houses: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    """In describe, the log, the report and among the happenings; the server is never without the version."""
    caplog.set_level(logging.INFO, "marserve.optimise")
    house = houses()
    house.searches.goes_on.clear()
    await house.add()
    assert (await house.until("builds"))["step"] == "onnx: building"
    assert house.registry.describe("m")["state"] == "ready"
    house.searches.goes_on.set()

    standing = await house.until("serves")

    assert standing == {
        "state": "serves",
        "build": "onnx",
        "ratios": [{"rows": 1, "threads": 2, "ratio": 2.0, "low": 1.5, "high": 2.5}],
        "meanError": 1e-6,
    }
    (key,) = house.kept()
    assert house.pools.made[-1].load.build == str(house.state / "optimised" / key)
    assert house.pools.made[-1].options.weight_bytes == 5
    assert "Model m version 1.0: onnx serves, 2.00 times as fast at 1, mean error 1e-06" in caplog.text
    assert [each.text for each in house.happenings] == [
        "the search for a faster build began beside it",
        "the build onnx took the place of its parent",
    ]
    report = house.background.report("m", None)
    assert (report.report, report.workers, report.build) == (FOUND, {"onnx": 1}, "onnx")
    order = house.searches.orders[0]
    assert (order.share, order.threads, order.within_s) == (0.25, 2, 7200.0)


async def test_the_next_start_uses_what_was_found(houses: Callable[..., House]) -> None:
    """No process searches again, also where the parent stays; another processor is another search."""
    for report in (FOUND, NOTHING):
        first = houses()
        first.searches.report = report
        first.machine = {"processor": str(report["winner"])}
        await first.add()
        state = "serves" if report["winner"] else "parent"
        before = await first.until(state)
        await first.close()

        second = houses()
        second.machine = first.machine
        await second.add()
        again = await second.until(state)

        assert again == (before | {"isCached": True} if report["winner"] else before)
        assert second.searches.orders == []

    third = houses()
    third.machine = {"processor": "other"}
    await third.add()
    await third.until("serves")
    assert len(third.searches.orders) == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"report": NOTHING}, "no build is equal and surely faster: onnx is equal and not surely faster"),
        ({"why": "the handler holds no module"}, "the search failed: the handler holds no module"),
        ({"error": OSError(28, "No space left on device")}, "the search failed: [Errno 28] No space left on device"),
        ({"report": NOTHING, "may_change": True}, "no build is equal and surely faster"),
    ],
)
async def test_where_nothing_is_found_the_parent_stays_and_the_reason_is_told(
    houses: Callable[..., House], said: dict[str, Any], why: str
) -> None:
    """What may end otherwise another time is not kept."""
    house = houses()
    for name, value in said.items():
        setattr(house.searches, name, value)

    await house.add()
    standing = await house.until("parent")

    assert standing["why"].startswith(why)
    assert len(house.pools.made) == 1
    assert len(house.kept()) == (said == {"report": NOTHING})


async def test_a_build_that_does_not_load_leaves_the_parent(houses: Callable[..., House]) -> None:
    """Its folder is free again."""
    house = houses()
    house.pools.behaviours["m"] = Behaviour(body=b"m")  # workers serve the parent in its place
    await house.add()

    standing = await house.until("parent")

    assert standing["why"].startswith("onnx is equal and faster, and was not taken: a worker that was to serve onnx")
    assert house.background._leases == {}


async def test_a_build_whose_workers_die_gives_its_place_back(houses: Callable[..., House]) -> None:
    """After the third death; the next start leaves the parent, with the reason."""
    first = houses()
    await first.add()
    await first.until("serves")
    build = first.pools.made[-1]
    for cause, state in (("killed", "serves"), ("crashed", "serves"), ("killed", "parent")):
        build.metrics.worker_deaths[cause] += 1
        first.registry.states.tell()
        await first.until(state)

    assert first.standing()["why"] == "3 workers died within an hour while the build onnx served"
    assert first.pools.made[-1].load.build == ""
    assert first.background.report("m", None).report == FOUND
    async with asyncio.timeout(5):
        while not build.is_stopped or first.background._leases:
            await asyncio.sleep(0.002)
    await first.close()

    second = houses()
    await second.add()
    assert "onnx: 3 workers died within an hour while the build onnx served" in (await second.until("parent"))["why"]
    assert second.searches.orders == []


async def _look(house: House) -> None:
    """Have the watch of a build look at its deaths, if it does."""
    house.registry.states.tell()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_deaths_that_are_far_apart_leave_the_build(houses: Callable[..., House]) -> None:
    """Two within an hour are any worker's."""
    house = houses()
    await house.add()
    await house.until("serves")
    build = house.pools.made[-1]

    for house.now in (0.0, 1000.0, 3601.0, 4700.0):
        build.metrics.worker_deaths["killed"] += 1
        await _look(house)
    assert house.standing()["state"] == "serves"

    house.now = 7000.0  # two at once, after those of 3601 and 4700
    build.metrics.worker_deaths["killed"] += 2
    house.registry.states.tell()
    assert "4 workers died within an hour" in (await house.until("parent"))["why"]


@pytest.mark.parametrize("next_is", ["a death", "a while"])
async def test_a_parent_that_does_not_load_is_tried_again(
    houses: Callable[..., House], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, next_is: str
) -> None:
    """At a later death, and after a while; whatever else happens in the server is no reason."""
    house = houses()
    await house.add()
    await house.until("serves")
    rebuild, tries = house.registry.rebuild, 0

    async def failing(*words: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(28, "No space left on device")
        return await rebuild(*words)

    monkeypatch.setattr(house.registry, "rebuild", failing)
    house.pools.made[-1].metrics.worker_deaths["killed"] += 3
    house.registry.states.tell()
    async with asyncio.timeout(10):
        while not tries:
            await asyncio.sleep(0.002)

    await _look(house)
    assert (tries, house.standing()["state"]) == (1, "serves")
    assert "its parent cannot serve: [Errno 28] No space left on device. It is tried again in 10 minutes" in caplog.text
    if next_is == "a death":
        house.pools.made[-1].metrics.worker_deaths["killed"] += 1
    else:
        house.now += module.TRY_AGAIN_S
    house.registry.states.tell()

    assert (await house.until("parent"))["why"] == "3 workers died within an hour while the build onnx served"
    assert tries == 2


async def test_a_parent_comes_back_though_what_was_found_is_damaged_by_now(
    houses: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    """Only the note for the next start is not written, which is said."""
    house = houses()
    await house.add()
    await house.until("serves")
    (key,) = house.kept()
    (house.state / "optimised" / key / "result.json").write_bytes(b"\0" * 100)

    house.pools.made[-1].metrics.worker_deaths["killed"] += 3
    house.registry.states.tell()
    await house.until("parent")

    assert "3 workers died within an hour while the build onnx served cannot be noted: " in caplog.text


async def test_a_version_that_leaves_ends_its_search(houses: Callable[..., House]) -> None:
    """The process and what it was making; the next version waits for its turn until then."""
    house = houses()
    house.searches.goes_on.clear()
    await house.add()
    await house.until("builds")
    await house.add(name="n", config=KEY + "batchSize: 2\n")
    assert house.standing("n")["state"] == "waits"

    await house.registry.unregister("m")
    await house.until("builds", "n")

    assert (house.searches.ended, len(house.searches.orders)) == (1, 2)


async def test_a_server_that_stops_ends_its_search(houses: Callable[..., House]) -> None:
    """At once, and nothing half-made is left (the fixture looks)."""
    house = houses()
    house.searches.goes_on.clear()
    await house.add()
    await house.until("builds")

    await asyncio.wait_for(house.close(), 5)


async def test_two_versions_of_one_archive_are_searched_once(
    houses: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the first one's folder."""
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.01)
    house, other = houses(), houses()
    house.searches.goes_on.clear()
    for each in (house, other):
        await each.add()
    await house.until("builds")
    assert "another search" in await other.until_held()

    house.searches.goes_on.set()
    await house.until("serves")

    assert (await other.until("serves"))["isCached"]
    assert other.searches.orders == []


async def test_a_folder_that_was_changed_is_made_anew(houses: Callable[..., House]) -> None:
    """Native code that was not built here never runs."""
    first = houses()
    await first.add()
    await first.until("serves")
    await first.close()
    (key,) = first.kept()
    (first.state / "optimised" / key / "optimised" / "model.onnx").write_bytes(b"other")

    second = houses()
    await second.add()
    await second.until("serves")

    assert len(second.searches.orders) == 1
    assert (first.state / "optimised" / key / "optimised" / "model.onnx").read_bytes() == b"12345"


async def test_a_folder_that_was_changed_while_another_server_serves_it_is_waited_for_and_named(
    houses: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's build is not taken away; once it has ended, it is made anew."""
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.01)
    first = houses()
    await first.add()
    await first.until("serves")
    (key,) = first.kept()
    (first.state / "optimised" / key / "optimised" / "model.onnx").write_bytes(b"other")

    second = houses()
    await second.add()

    assert str(first.state / "optimised" / key) in await second.until_held()
    assert second.searches.orders == []
    await first.close()
    await second.until("serves")
    assert len(second.searches.orders) == 1


async def test_what_a_killed_server_left_is_deleted(houses: Callable[..., House], tmp_path: Path) -> None:
    """At the first search."""
    left = tmp_path / "state" / "optimised" / "key.0123456789abcdef.making"
    left.mkdir(parents=True)
    house = houses()

    await house.add()
    await house.until("serves")

    assert not left.exists()


async def test_without_the_key_nothing_is_looked_for(houses: Callable[..., House]) -> None:
    """The report says what to do; an unknown model is one."""
    house = houses()
    await house.add("batchSize: 2\n")

    assert house.standing() == {}
    report = house.background.report("m", None)
    assert (report.state, report.workers, report.report) == ("none", {"parent": 1}, None)
    assert "add optimise: {candidates: auto} to model-config.yaml" in str(report.why)
    with pytest.raises(ModelNotFound):
        house.background.report("n", None)
    assert house.searches.orders == []


@pytest.mark.parametrize(
    ("share", "config", "why"),
    [(0.0, KEY, "optimise_share is 0"), (0.25, KEY + "onCrash: fail\n", "with onCrash: fail")],
)
async def test_where_no_build_can_serve_the_reason_is_told(
    houses: Callable[..., House], share: float, config: str, why: str
) -> None:
    """And nothing runs."""
    house = houses(share=share)
    await house.add(config)

    assert why in house.standing()["why"]
    assert house.searches.orders == []


async def test_a_version_that_may_sleep_is_looked_at_once_it_always_has_workers(houses: Callable[..., House]) -> None:
    """Until then nothing is loaded for a search."""
    house = houses()
    await house.add(KEY + "minWorkers: 0\nmaxWorkers: 1\nidleTimeout: 60\n", workers=None)
    assert house.background.report("m", None).why == module.SLEEPS
    assert house.searches.orders == []

    await house.registry.scale("m", None, min_workers=1, max_workers=1, synchronous=True)

    await house.until("serves")


async def test_an_archive_that_holds_a_build_is_left_as_it_is(houses: Callable[..., House]) -> None:
    """As `marserve optimise` writes it, with the parent's configuration: its own build serves, not its parent."""
    house = houses()
    archive = write_mar(house.store / "m.mar", manifest("m", "1.0"), config=KEY)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("MAR-INF/optimised.json", "{}")
    await house.registry.register(RegisterParameters("m.mar", initial_workers=1, synchronous=True))

    assert house.standing() == {"state": "none", "why": module.HOLDS_BUILD}
    assert house.searches.orders == []


async def test_a_version_that_is_ready_before_it_serves_is_looked_at_once_it_does(
    houses: Callable[..., House],
) -> None:
    """As a swap has it; one that never comes is forgotten."""
    house = houses()
    await house.add("batchSize: 2\n")
    archive = write_mar(house.store / "m2.mar", manifest("m", "2.0"), config=KEY).name

    await house.registry.swap(SwapParameters("m", RegisterParameters(archive)))
    await house.until("serves")

    assert house.registry.describe("m")["modelVersion"] == "2.0"
    beside = await house.registry._registering.prepare(RegisterParameters(archive, initial_workers=1))
    await house.registry._registering.wait_until_ready(beside)
    assert beside in house.background._tasks
    await house.registry._registering.end(beside, drain_s=0.0)
    await asyncio.sleep(0)
    assert beside not in house.background._tasks
    assert len(house.searches.orders) == 1


async def test_workers_that_start_again_begin_no_second_search(houses: Callable[..., House]) -> None:
    """A version is looked at once."""
    house = houses()
    house.searches.report = NOTHING
    await house.add()
    await house.until("parent")

    await house.registry.scale("m", None, min_workers=2, max_workers=2, synchronous=True)

    assert len(house.searches.orders) == 1
    assert isinstance(house.registry.version_of("m", None).optimising, Optimising)
