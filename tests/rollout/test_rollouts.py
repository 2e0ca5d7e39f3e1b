"""Roll-outs over pools without processes: what is left where one ends before its version is ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import error_status
from marserve.errors import RolloutNotFound, RolloutsUnread
from marserve.registry.catalogue.traffic import Traffic
from marserve.registry.intake.registration import RegisterParameters
from marserve.rollout import rollouts as rollouts_module
from marserve.rollout.course import read_rollout
from marserve.rollout.records import Records
from marserve.rollout.rollouts import Rollouts
from marserve.telemetry.happenings import Happenings
from support.fake_pool import Behaviour
from support.management_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with one version that serves, and the archive of another."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    house.put("m", "2.0")
    await house.registry.register(RegisterParameters(house.put("m", "1.0"), initial_workers=1))
    yield house
    await house.registry.stop()
    assert house.folders() == []


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for what other tasks do."""
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


async def test_a_roll_back_is_noted_for_explanations_and_traces(house: House) -> None:
    """With the version that gives its requests back, and who gets them."""
    happenings = Happenings()
    rollouts = Rollouts(house.registry, None)
    rollouts.begin("m", read_rollout({"version": "2.0", "url": "m-2.0.mar"}))
    await until(lambda: rollouts.describe("m")["state"] == "running")
    house.pools.of("m", "2.0").metrics.happenings = happenings

    rollouts.order("m", "abort")

    (noted,) = happenings
    assert (noted.kind, noted.model, noted.version) == ("rollback", "m", "2.0")
    assert noted.text == "version 2.0 gives its requests back to 1.0"
    await rollouts.stop()


async def test_a_version_that_loads_too_late_for_its_roll_out_does_not_stay(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registration goes on when the roll-out has ended; what comes of it is taken away again."""
    monkeypatch.setattr(rollouts_module, "READY_LIMIT_S", 0.05)
    house.pools.behaviours["m"] = Behaviour(load="wait")
    rollouts = Rollouts(house.registry, None)
    rollouts.begin("m", read_rollout({"version": "2.0", "url": "m-2.0.mar"}))
    await until(lambda: rollouts.describe("m")["state"] == "rolled back")
    assert "not ready within" in rollouts.describe("m")["reason"]
    assert {ended for ended, count in rollouts.rows() if count} == {("rolled_back", "not_ready")}
    await until(lambda: any(pool.options.version == "2.0" for pool in house.pools.made))

    house.pools.of("m", "2.0").finish_load()
    await until(lambda: house.pools.of("m", "2.0").is_stopped)

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["1.0"]
    await rollouts.stop()


async def test_a_version_that_never_loads_for_its_roll_out_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its registration takes it away by itself."""
    monkeypatch.setattr(rollouts_module, "READY_LIMIT_S", 0.05)
    house.pools.behaviours["m"] = Behaviour(load="wait")
    rollouts = Rollouts(house.registry, None)
    rollouts.begin("m", read_rollout({"version": "2.0", "url": "m-2.0.mar"}))
    await until(lambda: rollouts.describe("m")["state"] == "rolled back")
    await until(lambda: any(pool.options.version == "2.0" for pool in house.pools.made))

    house.pools.of("m", "2.0").finish_load("fail")
    await until(lambda: house.pools.of("m", "2.0").is_stopped)

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["1.0"]
    await rollouts.stop()
    assert not rollouts._tasks


async def test_a_version_that_was_being_registered_when_the_server_stopped_is_the_roll_out_s_own(
    house: House, tmp_path: Path
) -> None:
    """The next start finds it among its models, goes on with it, and takes it away again where it is not to stay."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    records = Records(tmp_path / "rollouts")
    first = Rollouts(house.registry, records)
    await first.start()
    first.begin("m", read_rollout({"version": "2.0", "url": "m-2.0.mar"}))
    await until(lambda: any(pool.options.version == "2.0" for pool in house.pools.made))
    await first.stop()
    house.pools.of("m", "2.0").finish_load()
    await until(lambda: house.registry.data_plane.is_model_ready("m", "2.0"))
    await house.registry.load_at_start([])  # what a start does: from now on what is not there does not come

    second = Rollouts(house.registry, records)
    await second.start()
    await until(lambda: second.describe("m")["state"] == "running")
    assert second.describe("m")["registered"] is True
    second.order("m", "abort")
    assert {ended: count for ended, count in second.rows() if count} == {("aborted", "call"): 1}
    await until(lambda: house.pools.of("m", "2.0").is_stopped)

    assert [each["modelVersion"] for each in house.registry.describe_all("m")] == ["1.0"]
    await second.stop()


async def test_before_a_start_has_read_its_records_a_roll_out_is_not_said_to_be_missing(
    house: House, tmp_path: Path
) -> None:
    """503 with `Retry-After` and not 404; one that was begun meanwhile would be forgotten."""
    records = Records(tmp_path / "rollouts")
    read, may_read = records.read, threading.Event()

    def read_slowly() -> Any:
        may_read.wait(30)
        return read()

    records.read = read_slowly  # type: ignore[method-assign]
    rollouts = Rollouts(house.registry, records)
    starting = asyncio.create_task(rollouts.start())
    await asyncio.sleep(0)

    for ask in (
        lambda: rollouts.describe("m"),
        lambda: rollouts.describe("unknown"),
        lambda: rollouts.order("m", "abort"),
        lambda: rollouts.rehearse("m", "abort"),
        lambda: rollouts.begin("m", read_rollout({"version": "2.0"})),
        rollouts.list,
    ):
        with pytest.raises(RolloutsUnread) as refused:
            ask()
        assert (error_status(refused.value), refused.value.retry_after_s) == (503, 1.0)
    may_read.set()
    await starting

    assert rollouts.list() == []
    with pytest.raises(RolloutNotFound):
        rollouts.describe("m")
    await rollouts.stop()


async def test_a_promotion_after_a_change_by_hand_is_told_as_what_it_ends_as(house: House) -> None:
    """What somebody set stays: the order ends the roll-out as aborted, and its dry run says so."""
    await house.registry.register(RegisterParameters("m-2.0.mar", initial_workers=1))
    rollouts = Rollouts(house.registry, None)
    rollouts.begin("m", read_rollout({"version": "2.0"}))
    await until(lambda: rollouts.describe("m")["state"] == "running")
    untouched = rollouts.rehearse("m", "promote")

    # From here to the order nothing is awaited: the roll-out has not looked itself.
    house.registry.traffic.put("m", Traffic({"1.0": 1, "2.0": 1}))
    told = rollouts.rehearse("m", "promote")
    state = rollouts.describe("m")["state"]
    done = rollouts.order("m", "promote")

    assert (untouched.after["state"], state) == ("promoted", "running")
    assert (told.after["state"], told.after["share"]) == (done["state"], done["share"]) == ("aborted", 0.0)
    assert told.notes == (done["reason"],) == ("the traffic was changed by hand meanwhile",)
    await rollouts.stop()
