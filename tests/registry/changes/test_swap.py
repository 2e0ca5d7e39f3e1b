"""Tests for swaps over pools without processes: in which order things happen, and what a failed one leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import error_headers, error_status
from marserve.errors import (
    BadArchive,
    BadInput,
    Draining,
    HandlerFailed,
    LabelTaken,
    MarserveError,
    ModelNotFound,
    NotEnoughMemory,
    NoWorker,
    SwapFailed,
    SwapUnderWay,
    VersionConflict,
    VersionNotFound,
    WorkerDied,
)
from marserve.messages import Answer, Part, Request
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.plan import Plan, Unpacked
from marserve.registry.catalogue.traffic import Traffic
from marserve.registry.changes.swap import SwapOrder, SwapParameters, Swapped
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour, FakePool
from support.management_house import House as ManagementHouse

pytestmark = pytest.mark.anyio

SAMPLES = "samples:\n  - text: one\n  - text: two\n"
ORDERS: tuple[SwapOrder, ...] = ("load_first", "unload_first")


class Told:
    """A receiver that keeps what it was told."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.errors: list[MarserveError] = []

    def on_answer(self, answer: Answer) -> None:
        """The answer."""
        self.bodies.append(bytes(answer.body))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""
        self.on_answer(piece)

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self.errors.append(error)


class House(ManagementHouse):
    """The house with short ways to register, to swap and to ask."""

    def archive(self, version: str, *, config: str | None = None, file: str | None = None) -> str:
        """Put an archive of the model `m` into the store; its name there."""
        name = file or f"m-{version}.mar"
        return write_mar(self.store / name, manifest("m", version), config=config).name

    async def add(self, version: str = "1.0", *, workers: int = 1, body: bytes = b"old") -> FakePool:
        """Register a version that answers `body`; gives its pool."""
        self.pools.behaviours["m"] = Behaviour(body=body)
        await self.registry.register(RegisterParameters(self.archive(version), initial_workers=workers))
        return self.pools.made[-1]

    async def swap(
        self,
        archive: str,
        behaviour: Behaviour | None = None,
        *,
        registration: dict[str, Any] | None = None,
        **wish: Any,
    ) -> Swapped:
        """Swap for a version that behaves so; by default it answers `new`."""
        self.pools.behaviours["m"] = behaviour or Behaviour(body=b"new")
        return await self.registry.swap(
            SwapParameters("m", RegisterParameters(archive, **(registration or {})), **wish)
        )

    def ask(self, version: str | None = None) -> bytes:
        """The body that a request gets."""
        told = Told()
        self.registry.data_plane.submit("m", version, Request("id", [Part("body", b"x")]), told)
        return told.bodies[0]

    def versions(self) -> dict[str, bool]:
        """The listed versions, oldest first, and which is the default."""
        return {each["modelVersion"]: each["isDefault"] for each in self.registry.describe_all("m")}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry whose time-outs are short; after the test it is stopped and nothing of it is left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    await house.registry.stop()
    assert house.folders() == []
    assert house.metrics.shown == []
    assert all(pool.is_stopped for pool in house.pools.made)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what other tasks do."""
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------------------- well


@pytest.mark.parametrize("order", ORDERS)
async def test_a_new_version_takes_the_place_of_the_default_one(house: House, order: SwapOrder) -> None:
    """Its place in the list, its default, its workers; nothing of the old one is left."""
    old = await house.add(workers=3)

    swapped = await house.swap(house.archive("2.0"), order=order)

    assert swapped.message == 'Model "m" Version: 2.0 has taken the place of version 1.0'
    assert (swapped.version, swapped.old, swapped.order, swapped.workers) == ("2.0", "1.0", order, 3)
    assert house.versions() == {"2.0": True}
    assert house.ask() == b"new"
    assert old.is_stopped
    assert len(house.folders()) == 1
    assert [metrics.version for metrics in house.metrics.shown] == ["2.0"]


@pytest.mark.parametrize("order", ORDERS)
async def test_an_archive_of_the_same_version_takes_its_place_too(house: House, order: SwapOrder) -> None:
    """A version is itself, not its name."""
    old = await house.add()

    await house.swap(house.archive("1.0", file="other.mar"), order=order)

    assert house.versions() == {"1.0": True}
    assert house.ask() == house.ask("1.0") == b"new"
    assert house.registry.describe("m")["modelUrl"] == "other.mar"
    assert old.is_stopped
    assert len(house.folders()) == 1


async def test_the_old_version_answers_until_the_new_one_is_ready(house: House) -> None:
    """And every request from the return of the call on is the new one's."""
    await house.add()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait", body=b"new")))
    await until(lambda: len(house.pools.made) == 2)

    assert house.ask() == b"old"
    assert house.versions() == {"1.0": True}
    house.pools.made[1].finish_load()
    await swap

    assert house.ask() == b"new"


async def test_what_the_old_version_had_accepted_it_answers(house: House) -> None:
    """The swap is not over before."""
    old = await house.add()
    old.behaviour.holds = True
    told = Told()
    house.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), told)
    swap = asyncio.create_task(house.swap(house.archive("2.0")))
    await until(lambda: bool(old.stops))
    assert not swap.done()
    assert house.ask() == b"new"

    old.held[0].answer(Answer(b"late"))
    await swap

    assert told.bodies == [b"late"]
    assert old.stops == [0.2]


async def test_unloading_first_has_the_memory_before_it_is_needed(house: House) -> None:
    """Nobody is asked for room, and no worker is started, before the old version has ended."""
    asked: list[bool] = []
    old = await house.add()

    async def admit(plan: Plan) -> None:
        asked.append(old.is_stopped and not house.pools.made[-1].is_started)

    house.registry.hooks.before_pool.append(admit)
    await house.swap(house.archive("2.0"), order="unload_first")

    assert asked == [True]


async def test_without_memory_for_two_the_refusal_names_the_other_order(house: House) -> None:
    """Before a worker is started; the version that serves has not noticed."""
    await house.add()

    async def refuse(plan: Plan) -> None:
        raise NotEnoughMemory(
            "m", "2.0", needed_bytes=5 << 20, source="declared", could_be_had=1 << 20, budget_bytes=8 << 20
        )

    house.registry.hooks.before_pool.append(refuse)
    with pytest.raises(SwapFailed, match=r"With order=unload_first it would load where version 1\.0 is now") as raised:
        await house.swap(house.archive("2.0"))

    assert error_status(raised.value) == 507
    assert (house.ask(), house.versions(), len(house.folders()), len(house.pools.made)) == (b"old", {"1.0": True}, 1, 1)
    with pytest.raises(NotEnoughMemory):  # nor is there room where the old one was: it comes back
        await house.swap(house.archive("2.0"), Behaviour(body=b"old"), order="unload_first")
    assert (house.ask(), house.versions(), len(house.folders())) == (b"old", {"1.0": True}, 1)


async def test_unloading_first_answers_honestly_in_between(house: House) -> None:
    """503 while the old one ends."""
    old = await house.add()
    old.behaviour.holds = True
    house.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), Told())
    swap = asyncio.create_task(house.swap(house.archive("2.0"), order="unload_first"))
    await until(lambda: bool(old.stops))

    with pytest.raises(NoWorker):
        house.ask()

    old.held[0].answer(Answer(b"late"))
    await swap
    assert house.ask() == b"new"


async def test_the_name_of_a_version_that_may_come_back_is_not_given_away(house: House) -> None:
    """Unloaded first, it is off the list while the new one loads; that fails, and it is there again as it was."""
    await house.add("v1")
    behaviour = Behaviour(load="wait")
    swap = asyncio.create_task(house.swap(house.archive("v2"), behaviour, order="unload_first"))
    await until(lambda: len(house.pools.made) == 2 and house.pools.made[1].is_started)

    with pytest.raises(VersionConflict, match="v1 is already registered"):
        await house.registry.register(RegisterParameters("m-v1.mar"))
    with pytest.raises(LabelTaken):
        house.registry.traffic.put_label("m", "v1", "v2")
    house.pools.behaviours["m"] = Behaviour(body=b"old")
    house.pools.made[1].finish_load("fail")
    with pytest.raises(SwapFailed):
        await swap

    assert house.versions() == {"v1": True}
    assert house.ask() == b"old"
    assert house.registry.traffic.put_label("m", "v2", "v1") == {"version": "v1"}


async def test_the_setting_says_the_order_where_the_call_does_not(tmp_path: Path) -> None:
    """And the answer says which it was."""
    house = House(tmp_path, swap_order="unload_first")
    await house.add()

    assert (await house.swap(house.archive("2.0"))).order == "unload_first"
    assert (await house.swap(house.archive("3.0"), order="load_first")).order == "load_first"
    await house.registry.stop()


async def test_weights_and_labels_are_the_new_version_s(house: House) -> None:
    """They belong to the place."""
    await house.add("1.0")
    await house.add("2.0")
    house.registry.traffic.put("m", Traffic({"1.0": 90, "2.0": 10}))
    house.registry.traffic.put_label("m", "canary", "2.0")

    await house.swap(house.archive("3.0"), version="2.0")

    assert house.versions() == {"1.0": True, "3.0": False}
    assert house.registry.traffic.describe("m") == {"weights": {"1.0": 90, "3.0": 10}}
    assert house.registry.traffic.labels("m") == {"canary": {"version": "3.0"}}
    assert house.ask("canary") == b"new"


async def test_an_old_version_can_be_kept_to_go_back_to(house: House) -> None:
    """Its default, weight and labels are the new one's."""
    await house.add()
    house.registry.traffic.put_label("m", "stable", "1.0")

    swapped = await house.swap(house.archive("2.0"), keeps_old=True)

    assert swapped.message.endswith("has taken the place of version 1.0, which stays registered")
    assert house.versions() == {"1.0": False, "2.0": True}
    assert (house.ask(), house.ask("stable"), house.ask("1.0")) == (b"new", b"new", b"old")


@pytest.mark.parametrize("name", ["1.0", "3.0"])
@pytest.mark.parametrize("order", ORDERS)
async def test_what_a_watched_version_cannot_run_is_answered_by_what_took_the_other_ones_place(
    house: House, order: SwapOrder, name: str
) -> None:
    """A request that was sent before the swap, whose worker dies after it: never handed to the pool that has gone."""
    await house.add("1.0")
    tried = await house.add("2.0")
    tried.behaviour.holds, tried.behaviour.body = True, None
    house.registry.traffic.put("m", Traffic({"1.0": 0, "2.0": 1}))
    house.registry.mirrors.watch("m", "1.0", "2.0")
    told = Told()
    house.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), told)

    await house.swap(house.archive(name, file="next.mar"), version="1.0", order=order)
    tried.held[0].fail(WorkerDied("crash"))

    assert (told.bodies, told.errors) == ([b"new"], [])


async def test_a_watched_version_that_nobody_is_left_beside_tells_its_own_error(house: House) -> None:
    """It is not asked a second time itself."""
    await house.add("1.0")
    tried = await house.add("2.0")
    tried.behaviour.holds, tried.behaviour.body = True, None
    house.registry.traffic.put("m", Traffic({"1.0": 0, "2.0": 1}))
    house.registry.mirrors.watch("m", "1.0", "2.0")
    told = Told()
    house.registry.data_plane.submit("m", None, Request("id", [Part("body", b"x")]), told)
    arms = {values[:3] for values, _ in house.registry.mirrors.arm_rows()}
    assert arms == {("m", "1.0", "baseline"), ("m", "2.0", "candidate")}
    house.registry.set_default("m", "2.0")
    await house.registry.unregister("m", "1.0", force=True)

    tried.held[0].fail(WorkerDied("crash"))

    assert (told.bodies, [type(error) for error in told.errors]) == ([], [WorkerDied])
    assert tried.held == []


async def test_bounds_of_workers_stay_as_they_were_scaled(house: House) -> None:
    """Who swaps wants another archive, not another size; unless it says so."""
    await house.add(workers=1)
    await house.registry.scale("m", None, min_workers=2, max_workers=5, synchronous=True)

    await house.swap(house.archive("2.0"))
    described = house.registry.describe("m")
    assert (described["minWorkers"], described["maxWorkers"]) == (2, 5)

    await house.swap(house.archive("3.0"), registration={"initial_workers": 4})
    described = house.registry.describe("m")
    assert (described["minWorkers"], described["maxWorkers"]) == (4, 4)


async def test_a_dry_run_says_what_would_be_and_leaves_nothing(house: House) -> None:
    """It has looked at the archive."""
    await house.add()

    swapped = await house.swap(house.archive("2.0"), dry_run=True)

    assert swapped.message == 'Model "m" Version: 2.0 would take the place of version 1.0'
    assert "it has no samples" in swapped.notes[0]
    assert (house.versions(), len(house.folders()), len(house.pools.made)) == ({"1.0": True}, 1, 1)


@pytest.mark.parametrize("order", ORDERS)
async def test_a_dry_run_tells_versions_and_workers_as_the_swap_leaves_them(house: House, order: SwapOrder) -> None:
    """What is and what would be, as it is then."""
    await house.add(workers=3)
    await house.add("0.9", workers=1)
    archive = house.archive("2.0")

    told = (await house.swap(archive, dry_run=True, order=order)).rehearsed
    assert told is not None
    assert told.before == {"versions": ["1.0", "0.9"], "defaultVersion": "1.0", "minWorkers": 3, "maxWorkers": 3}
    await house.swap(archive, order=order)

    described = house.registry.describe("m")
    assert told.after == {
        "versions": list(house.versions()),
        "defaultVersion": described["modelVersion"],
        "minWorkers": described["minWorkers"],
        "maxWorkers": described["maxWorkers"],
    }
    assert "whether its workers can load it is not tried" in told.notes


async def test_a_dry_run_that_keeps_the_old_version_tells_both(house: House) -> None:
    """The new one is the default, for the old one was."""
    await house.add()

    told = (await house.swap(house.archive("2.0"), dry_run=True, keeps_old=True)).rehearsed

    assert told is not None
    assert (told.after["versions"], told.after["defaultVersion"]) == (["1.0", "2.0"], "2.0")


@pytest.mark.parametrize("order", ORDERS)
async def test_a_dry_run_is_refused_where_there_is_no_memory(house: House, order: SwapOrder) -> None:
    """Loading first both have to fit; unloading first the old one has gone before. The refusal is the swap's."""
    asked: list[tuple[str, int | None, int, str | None]] = []
    more = 7

    def foresee(
        options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None
    ) -> Mapping[str, Any]:
        asked.append((options.version, before, workers, leaving.version if leaving is not None else None))
        if more > 7:
            raise NotEnoughMemory("m", "2.0", needed_bytes=9, source="estimated", could_be_had=1, budget_bytes=5)
        return {"moreBytes": more, "source": "estimated"}

    await house.add(workers=2)
    house.registry.hooks.memory = foresee
    archive = house.archive("2.0")
    told = (await house.swap(archive, dry_run=True, order=order)).rehearsed
    more = 8
    with pytest.raises(SwapFailed if order == "load_first" else NotEnoughMemory) as raised:
        await house.swap(archive, dry_run=True, order=order)

    assert told is not None
    assert told.memory["moreBytes"] == 7
    assert asked == [("2.0", None, 2, "1.0" if order == "unload_first" else None)] * 2
    assert error_status(raised.value) == 507
    assert ("With order=unload_first" in str(raised.value)) == (order == "load_first")
    assert (house.versions(), len(house.folders()), len(house.pools.made)) == ({"1.0": True}, 1, 1)


async def test_a_dry_run_keeps_no_swap_from_beginning(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it looks at its archive; nor does a swap that is under way keep it from looking."""
    await house.add()
    registering = house.registry._registering
    take_in, looks, goes_on = registering.take_in, asyncio.Event(), asyncio.Event()

    async def slow_look(parameters: RegisterParameters, **how: bool) -> Unpacked:
        if how.get("is_look"):
            looks.set()
            await goes_on.wait()
        return await take_in(parameters, **how)

    monkeypatch.setattr(registering, "take_in", slow_look)
    dry = asyncio.create_task(house.swap(house.archive("3.0"), dry_run=True))
    await looks.wait()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait", body=b"new")))
    await until(lambda: swap.done() or len(house.pools.made) == 2)
    goes_on.set()

    assert (await dry).rehearsed is not None
    house.pools.made[1].finish_load()
    assert (await swap).version == "2.0"


# ------------------------------------------------------------------------------------------- trials


@pytest.mark.parametrize("order", ORDERS)
async def test_a_version_that_answers_its_samples_as_before_is_taken(house: House, order: SwapOrder) -> None:
    """Other values are fine."""
    await house.add(body=b'{"label": "cat", "score": 0.5}')

    new = Behaviour(body=b'{"label": "dog", "score": 1}', warnings=["warm-up as slow as ever, says the handler"])
    swapped = await house.swap(house.archive("2.0", config=SAMPLES), new, order=order)

    assert swapped.notes == ()
    assert house.ask() == b'{"label": "dog", "score": 1}'
    # Samples are nobody's requests.
    assert [pool.metrics.client_requests for pool in house.pools.made] == [0, 1]
    assert [pool.metrics.inner_requests for pool in house.pools.made] == [2, 2]


BAD: list[tuple[Behaviour, str, str]] = [
    (Behaviour(load="fail"), "its workers could not load it", "load_failed"),
    (Behaviour(load="memory"), "its workers could not load it", "out_of_memory"),
    (Behaviour(load="missing"), "its workers could not load it", "missing_module"),
    (Behaviour(warm_up_failure="warm-up with sample 0 failed"), "warm-up with sample 0 failed", "warm_up"),
    (Behaviour(fails=HandlerFailed("Prediction failed")), "sample 0 was not answered: Prediction failed", "handler"),
    (Behaviour(body=b'["cat"]'), "the answer to sample 0 has another shape than before: $ is a list", "other_shape"),
    (Behaviour(body=b"cat!"), "the answer to sample 0 has another shape than before: it is no JSON", "other_shape"),
    (Behaviour(body=b'{"label": 7}', report={"passed": False}), "batches of its samples are not", "batch_check"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("behaviour", "why", "cause"), BAD)
@pytest.mark.parametrize("name", ["2.0", "1.0"])
async def test_a_bad_version_is_not_taken_and_leaves_nothing(
    house: House, order: SwapOrder, behaviour: Behaviour, why: str, cause: str, name: str
) -> None:
    """The one before answers (again), with its weight, its labels and its workers; the error names the cause."""
    old = Behaviour(body=b'{"label": 3}')
    house.pools.behaviours["m"] = old
    await house.registry.register(RegisterParameters(house.archive("1.0"), initial_workers=2))
    house.registry.traffic.put("m", Traffic({"1.0": 1}))
    house.registry.traffic.put_label("m", "stable", "1.0")
    made = house.pools.made
    config = SAMPLES + "batchSize: 4\n"
    archive = house.archive(name, config=config, file="new.mar")

    class Turns(dict[str, Behaviour]):
        """The new version's pool is bad; what is made after it is the old one's again."""

        def setdefault(self, key: str, default: Behaviour | None = None) -> Behaviour:
            return behaviour if len(made) == 1 else old

    house.pools.behaviours = Turns()
    with pytest.raises(SwapFailed) as raised:
        await house.registry.swap(SwapParameters("m", RegisterParameters(archive), order=order))

    head = f"Version {name} of model m was not taken, version 1.0 goes on answering: "
    assert raised.value.message.startswith(head + why)
    assert error_status(raised.value) == (507 if cause == "out_of_memory" else 500)
    assert ("x-marserve-cause", cause) in error_headers(raised.value)
    assert house.ask() == house.ask("stable") == b'{"label": 3}'
    assert house.versions() == {"1.0": True}
    assert house.registry.traffic.describe("m") == {"weights": {"1.0": 1}}
    assert house.registry.describe("m")["modelUrl"] == "m-1.0.mar"
    assert len(house.registry.describe("m")["workers"]) == 2
    assert len(house.folders()) == 1
    assert len(house.metrics.shown) == 1
    assert [pool.is_stopped for pool in made] == ([False, True] if order == "load_first" else [True, True, False])


async def test_a_version_without_samples_is_taken_with_a_note(house: House) -> None:
    """There is nothing to try it with."""
    await house.add()

    swapped = await house.swap(house.archive("2.0"), Behaviour(fails=HandlerFailed()))

    assert "it has no samples" in swapped.notes[0]


async def test_a_trial_can_be_left_out(house: House) -> None:
    """By who knows better."""
    await house.add(body=b"{}")

    swapped = await house.swap(house.archive("2.0", config=SAMPLES), Behaviour(body=b"[]"), checks=False)

    assert swapped.notes == ()
    assert house.ask() == b"[]"


async def test_what_the_old_version_cannot_answer_is_not_compared(house: House) -> None:
    """The new one may be the mended one."""
    old = await house.add()
    old.behaviour.fails = HandlerFailed()

    await house.swap(house.archive("2.0", config=SAMPLES), Behaviour(body=b"{}"))

    assert house.ask() == b"{}"


# ------------------------------------------------------------------------------------------- refusals


async def refused(house: House, swap: Awaitable[Swapped], kind: type[MarserveError], words: str = "") -> None:
    """See that a swap is refused, and that it leaves nothing."""
    before = house.versions(), len(house.folders()), len(house.pools.made)
    with pytest.raises(kind) as raised:
        await swap
    assert words in raised.value.message
    assert (house.versions(), len(house.folders()), len(house.pools.made)) == before
    assert house.ask() == b"old"


async def test_what_cannot_be_swapped_is_refused_before_a_worker_starts(house: House) -> None:
    """Each with its sentence."""
    await house.add("1.0")
    await house.add("2.0")
    house.registry.traffic.put_label("m", "next", "1.0")
    three = house.archive("3.0")
    (house.store / "broken.mar").write_bytes(b"PK\x05\x06 no archive")

    await refused(house, house.swap(three, version="7.0"), VersionNotFound, "Model version: 7.0 does not exist")
    await refused(house, house.swap(three, version="next"), VersionNotFound)
    await refused(house, house.swap(house.archive("2.0"), version="1.0"), VersionConflict, "2.0 is already registered")
    await refused(house, house.swap(house.archive("next"), version="1.0"), LabelTaken)
    await refused(house, house.swap(house.archive("1.0"), keeps_old=True), BadInput, "keep_old cannot be done")
    wish = {"keeps_old": True, "order": "unload_first"}
    await refused(house, house.swap(three, **wish), BadInput, "contradict each other")
    await refused(house, house.swap("broken.mar"), BadArchive)
    no_workers = house.swap(three, registration={"initial_workers": 0})
    await refused(house, no_workers, BadInput, "initial_workers must be 1 or more")
    with pytest.raises(ModelNotFound):
        await house.registry.swap(SwapParameters("nobody", RegisterParameters(three)))


async def test_one_swap_of_a_model_at_a_time(house: House) -> None:
    """The second is told so, and can come again."""
    await house.add()
    first = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait", body=b"new")))
    await until(lambda: len(house.pools.made) == 2)

    with pytest.raises(SwapUnderWay) as raised:
        await house.swap(house.archive("3.0"))
    assert error_status(raised.value) == 409

    house.pools.made[1].finish_load()
    await first
    await house.swap(house.archive("3.0"))
    assert house.versions() == {"3.0": True}


async def test_a_version_that_goes_during_its_swap_ends_the_swap(house: House) -> None:
    """Nobody is left to go on, and nothing of the new one either."""
    await house.add()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait")))
    await until(lambda: len(house.pools.made) == 2)

    await house.registry.unregister("m")
    house.pools.made[1].finish_load()

    with pytest.raises(MarserveError):
        await swap
    assert house.folders() == []


async def test_a_name_that_is_taken_during_a_swap_ends_the_swap(house: House) -> None:
    """Who came first has it."""
    await house.add()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait")))
    await until(lambda: len(house.pools.made) == 2)

    await house.add("2.0", body=b"other")
    house.pools.made[1].finish_load()

    with pytest.raises(VersionConflict):
        await swap
    assert (house.ask(), house.ask("2.0")) == (b"old", b"other")


async def test_a_client_that_hangs_up_stops_no_swap(house: House) -> None:
    """It goes on to its end."""
    await house.add()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait", body=b"new")))
    await until(lambda: len(house.pools.made) == 2)
    swap.cancel()
    await asyncio.gather(swap, return_exceptions=True)

    house.pools.made[1].finish_load()

    await until(lambda: house.ask() == b"new")


@pytest.mark.parametrize("order", ORDERS)
async def test_a_server_that_stops_in_the_middle_leaves_nothing(tmp_path: Path, order: SwapOrder) -> None:
    """No folder, no pool, no name."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    await house.add()
    swap = asyncio.create_task(house.swap(house.archive("2.0"), Behaviour(load="wait"), order=order))
    await until(lambda: len(house.pools.made) == 2 and house.pools.made[1].is_started)

    await house.registry.stop()

    with pytest.raises((SwapFailed, Draining)):
        await swap
    assert house.folders() == []
    assert all(pool.is_stopped for pool in house.pools.made)
    assert house.metrics.shown == []
