"""Tests for health over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from marserve.answers.management import Health, Probe
from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.health import health_router
from marserve.registry.intake.registration import RegisterParameters
from marserve.settings import ModelToLoad
from marserve.telemetry.loop_lag import Interval
from support.documents import document_of
from support.fake_pool import Behaviour
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with a store; stopped in the end."""
    house = House(tmp_path)
    yield house
    await house.registry.stop()


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """Who speaks to the inference listener."""
    async with client_of(house.application(management=False, inference=True)) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"])
@pytest.mark.parametrize("path", ["/ping", "/ping/", "/ping/more", "/ping/more/of/it", "/ping?x=1"])
async def test_ping_answers_any_method_and_whatever_follows(client: httpx.AsyncClient, method: str, path: str) -> None:
    """As recorded."""
    response = await client.request(method, path)

    assert (response.status_code, response.content) == (200, b'{\n  "status": "Healthy"\n}\n')
    assert response.headers["content-type"] == "application/json"


async def test_ping_answers_a_head_request(client: httpx.AsyncClient) -> None:
    """Without a body, which the connection leaves out."""
    assert (await client.head("/ping")).status_code == 200


async def test_ping_is_spelt_in_small_letters(client: httpx.AsyncClient) -> None:
    """As recorded."""
    assert (await client.get("/PING")).status_code == 404


async def test_ping_tells_of_workers_that_were_given_up(house: House, client: httpx.AsyncClient) -> None:
    """500 with a body that is no error object (contract 1.6)."""
    await house.registry.register(RegisterParameters(house.put(), initial_workers=1))
    house.pools.of("m").is_healthy = False

    response = await client.get("/ping")

    assert response.status_code == 500
    assert document_of(Health, response.content) == Health(status="Unhealthy")


async def test_the_probes_tell_the_truth_with_reasons(house: House, client: httpx.AsyncClient) -> None:
    """From the start to the end of a server."""
    house.pools.behaviours["m"] = Behaviour(load="wait")

    async def ask() -> list[tuple[int, str, int]]:
        probes = [await client.get(path) for path in ("/livez", "/readyz", "/startupz")]
        shapes = [document_of(Probe, probe.content) for probe in probes]
        return [
            (probe.status_code, shape.status, len(shape.reasons)) for probe, shape in zip(probes, shapes, strict=True)
        ]

    assert await ask() == [(200, "alive", 0), (503, "not ready", 1), (503, "starting", 1)]

    await house.registry.load_at_start((ModelToLoad(house.put()),))
    assert await ask() == [(200, "alive", 0), (503, "not ready", 1), (503, "starting", 1)]

    house.pools.of("m").finish_load()
    while not house.registry.readiness().is_started:
        await client.get("/livez")
    assert await ask() == [(200, "alive", 0), (200, "ready", 0), (200, "started", 0)]

    house.registry.begin_drain()
    assert await ask() == [(200, "alive", 0), (503, "not ready", 1), (200, "started", 0)]


async def test_the_management_listener_has_the_probes_and_no_ping(house: House) -> None:
    """Ping is TorchServe's, and stands where TorchServe has it."""
    async with client_of(house.application()) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.head("/readyz")).status_code == 503
        assert (await client.get("/ping")).status_code == 404


async def test_a_platforms_own_check_says_yes_once_every_model_of_the_start_answers(house: House) -> None:
    """Where `/ping` said it before there was one; a model that could not be registered keeps it from saying so."""
    house.pools.behaviours["m"] = Behaviour(load="wait")
    app = build_app([health_router(house.registry, platform_route="/v1/check")], title="test")
    async with client_of(app) as client:

        async def ask() -> list[int]:
            return [(await client.get(path)).status_code for path in ("/ping", "/v1/check")]

        assert await ask() == [200, 503]
        await house.registry.load_at_start((ModelToLoad(house.put()),))
        assert await ask() == [200, 503]
        house.pools.of("m").finish_load()
        while not house.registry.readiness().is_ready:
            await client.get("/livez")
        assert await ask() == [200, 200]
        answer = await client.head("/v1/check")
        assert answer.status_code == 200

        await house.registry.load_at_start((ModelToLoad("gone.mar"),))
        assert await ask() == [200, 503]


async def test_a_server_that_has_just_stood_still_is_not_alive(house: House) -> None:
    """For as long as the caller says: here while there is a stall to tell of."""
    stalls: list[Interval | None] = [Interval(1.0, 4.0), None]
    app = build_app([health_router(house.registry, last_stall=lambda: stalls.pop(0))], title="test")
    async with client_of(app) as client:
        unwell = await client.get("/livez")
        well = await client.get("/livez")

    assert (unwell.status_code, well.status_code) == (503, 200)
    said = document_of(Probe, unwell.content)
    assert said.status == "stalled"
    assert said.reasons[0].startswith("the event loop stood still for 3.0 s, ")
