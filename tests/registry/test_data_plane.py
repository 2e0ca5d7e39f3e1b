"""Tests for a request's way in: the version that answers it, readiness, the drain; pools have no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from marserve.errors import Draining, ModelNotFound, NoWorker, QueueFull, VersionNotFound
from marserve.messages import Answer
from marserve.registry.catalogue.readiness import ModelReadiness
from marserve.registry.intake.registration import RegisterParameters
from support.echo_archives import write_mar
from support.fake_pool import Behaviour
from support.registry_house import House
from support.turns import let_all_run

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry whose time-outs are short; it is stopped after the test."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    for pool in house.pools.made:
        pool.behaviour.never_stops = False
    await house.registry.stop()


async def test_a_request_goes_to_the_version_it_names(house: House) -> None:
    """Others go to the default one."""
    await house.add()
    await house.add(version="2.0")

    assert house.send(version="2.0").answers == [Answer(b"m 2.0")]
    assert house.send().answers == [Answer(b"m 1.0")]


async def test_a_request_for_what_is_not_there_is_refused(house: House) -> None:
    """Model and version are told apart."""
    await house.add()

    with pytest.raises(ModelNotFound):
        house.send("nobody")
    with pytest.raises(VersionNotFound):
        house.send("m", "9.9")


async def test_a_refusal_names_the_version_only_where_the_client_did(house: House) -> None:
    """The pool does not know; its kind of refusal and its advice are kept."""
    await house.add(workers=0)
    await house.add("full")
    full = house.pools.of("full")
    full.behaviour.holds = True
    for _ in range(100):
        house.send("full")

    with pytest.raises(NoWorker, match=r'^Model "m" has no worker'):
        house.send()
    with pytest.raises(NoWorker, match=r'^Model "m" Version 1\.0 has no worker'):
        house.send(version="1.0")
    with pytest.raises(QueueFull) as raised:
        house.send("full", "1.0")
    assert raised.value.retry_after_s == 2.0


async def test_only_default_versions_count_for_health(house: House) -> None:
    """The contract's rule for /ping."""
    await house.add()
    await house.add(version="2.0")
    assert house.registry.data_plane.is_healthy()

    house.pools.of("m", "2.0").is_healthy = False
    assert house.registry.data_plane.is_healthy()

    house.pools.of("m").is_healthy = False
    assert not house.registry.data_plane.is_healthy()


async def test_a_model_is_ready_with_its_least_number_of_workers_and_never_without_one(house: House) -> None:
    """KServe's question."""
    await house.add(workers=0)
    assert not house.registry.data_plane.is_model_ready("m")

    await house.registry.scale("m", None, min_workers=2, max_workers=2, synchronous=True)
    assert house.registry.data_plane.is_model_ready("m")

    with pytest.raises(ModelNotFound):
        house.registry.data_plane.is_model_ready("nobody")


async def test_a_model_that_sleeps_is_ready_to_be_asked(house: House) -> None:
    """It has no worker until somebody asks; who wants none at all has a model that is not ready."""
    config = "minWorkers: 0\nmaxWorkers: 2\nidleTimeout: 60\n"
    archive = write_mar(house.store / "sleepy.mar", config=config).name
    await house.registry.register(RegisterParameters(archive))
    assert house.registry.data_plane.is_model_ready("m")

    await house.registry.scale("m", None, min_workers=0, max_workers=2, synchronous=True)
    assert house.pools.of("m").scaled[-1] == (0, 2)

    await house.registry.scale("m", None, min_workers=0, max_workers=0, synchronous=True)
    assert not house.registry.data_plane.is_model_ready("m")


async def test_a_draining_registry_answers_what_it_has_and_takes_nothing_new(house: House) -> None:
    """`drain` returns when all is answered."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    await house.add()
    told = house.send()

    house.registry.refuse_new()
    draining = asyncio.create_task(house.registry.data_plane.drain(5.0))
    await let_all_run()
    for refused in (house.send, lambda: house.send(version="1.0")):
        with pytest.raises(Draining):
            refused()
    with pytest.raises(Draining):
        await house.add("n")
    with pytest.raises(Draining):
        await house.registry.scale("m", None, min_workers=1, max_workers=1, synchronous=True)
    house.pools.of("m").held[0].answer(Answer(b"done"))

    assert await draining == 0
    assert told.answers == [Answer(b"done")]
    assert not house.registry.readiness().is_ready


async def test_a_drain_ends_with_the_last_answer_wherever_the_request_went_meanwhile(house: House) -> None:
    """It waits for its pools' word, and looks at no clock: a few turns of the loop are enough."""
    for model in "m", "n":
        house.pools.behaviours[model] = Behaviour(holds=True)
        await house.add(model)
    house.send("m")
    house.registry.refuse_new()
    draining = asyncio.create_task(house.registry.data_plane.drain(60.0))
    await let_all_run()

    house.send("n", is_inner=True)  # the workflow's next node
    house.pools.of("m").held[0].answer(Answer(b"done"))
    await let_all_run()
    assert not draining.done()
    house.pools.of("n").held[0].answer(Answer(b"done"))
    await let_all_run()

    assert draining.done()
    assert await draining == 0


async def test_a_drain_that_takes_too_long_says_how_many_are_given_up(house: House) -> None:
    """Versions that are leaving count too."""
    house.pools.behaviours["m"] = Behaviour(holds=True)
    house.pools.behaviours["n"] = Behaviour(holds=True)
    await house.add()
    await house.add("n")
    house.send(), house.send("n")
    unregistering = asyncio.create_task(house.registry.unregister("n"))
    await let_all_run()

    assert await house.registry.data_plane.drain(0.03) == 2
    await unregistering


async def test_a_version_that_cannot_answer_says_why(house: House) -> None:
    """Without workers, and while the server drains, whatever its workers are."""
    await house.add()
    await house.add("asleep", workers=0)
    plane = house.registry.data_plane

    assert plane.readiness_of("m") == ModelReadiness(True, "", 1, 1)
    assert plane.readiness_of("asleep") == ModelReadiness(False, "it is scaled to 0 workers", 0, 1)
    with pytest.raises(VersionNotFound):
        plane.readiness_of("m", "9.9")
    plane.is_draining = True
    assert plane.readiness_of("m", "1.0") == ModelReadiness(False, "the server is shutting down", 1, 1)
