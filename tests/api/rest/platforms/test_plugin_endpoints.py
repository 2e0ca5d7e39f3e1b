"""Endpoints of plug-ins on a listener: what they are told, what becomes of their answers, and who may call them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.api.rest.application import build_app
from marserve.api.rest.description import describe_once
from marserve.api.rest.pages.router import pages_router
from marserve.api.rest.platforms.health import health_router
from marserve.api.rest.platforms.plugin_endpoints import check_patterns, endpoint_router
from marserve.errors import BadSettings
from marserve.machine.threads import DaemonThreads
from marserve.plugins import EndpointAccess, EndpointAnswer, EndpointCall, InstalledEndpoint, Listener
from marserve.registry.intake.registration import RegisterParameters
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


class Told:
    """An endpoint that keeps what it was told and answers as a test says."""

    listener: Listener = "management"
    access: EndpointAccess = "management"

    def __init__(self, make: Callable[[EndpointCall], Any], pattern: str = "reports") -> None:
        self.pattern = pattern
        self.calls: list[EndpointCall] = []
        self._make = make

    def answer(self, call: EndpointCall) -> EndpointAnswer:
        """Answer in a thread."""
        self.calls.append(call)
        answer: EndpointAnswer = self._make(call)
        return answer


class Waiting(Told):
    """One that runs on the loop, and never answers where a test says so."""

    async def answer(self, call: EndpointCall) -> EndpointAnswer:  # type: ignore[override]
        """Answer on the loop."""
        if self._make is None:
            await asyncio.Event().wait()
        return super().answer(call)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry; stopped in the end."""
    house = House(tmp_path)
    yield house
    await house.registry.stop()


async def ask(house: House, endpoint: Told, method: str = "GET", path: str = "/reports", **more: Any) -> httpx.Response:
    """One request to a listener with the endpoint in front of the probes."""
    router = endpoint_router(InstalledEndpoint(endpoint, "the plug-in x"), house.registry, answer_s=more.pop("s", 30.0))
    app = build_app([router, health_router(house.registry, has_ping=True)], title="test")
    async with client_of(app) as client:
        return await client.request(method, path, **more)


@pytest.mark.parametrize("kind", [Told, Waiting], ids=["thread", "loop"])
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
async def test_an_endpoint_is_told_the_whole_request(house: House, kind: type[Told], method: str) -> None:
    """And its answer goes out as it is, status and headers with it."""
    await house.registry.register(RegisterParameters(house.put("m"), initial_workers=1))
    endpoint = kind(
        lambda call: EndpointAnswer(
            f"{call.models.names()} {call.models.is_ready('m')} {call.models.describe('m')['modelVersion']}",
            status=201,
            content_type="text/plain",
            headers={"x-report": "yes", "content-length": "9999"},
        )
    )

    answer = await ask(house, endpoint, method, "/reports/a/b?x=1&x=2", content=b"body", headers={"X-Mine": "1"})

    (call,) = endpoint.calls
    assert (call.method, call.path, list(call.query), call.body) == (
        method,
        "/reports/a/b",
        [("x", "1"), ("x", "2")],
        b"body",
    )
    assert call.headers["x-mine"] == "1"
    assert (answer.status_code, answer.text, answer.headers["x-report"]) == (201, "['m'] True 1.0", "yes")
    assert answer.headers["content-type"] == "text/plain"


async def test_a_model_that_is_not_there_is_answered_as_everywhere(house: House) -> None:
    """What the models' view raises may pass through."""
    answer = await ask(house, Told(lambda call: call.models.describe("nobody")))

    assert (answer.status_code, answer.json()["type"]) == (404, "ModelNotFoundException")


def fail(call: EndpointCall) -> EndpointAnswer:
    """An author's mistake."""
    raise KeyError("/srv/secret")


@pytest.mark.parametrize(
    "make",
    [
        fail,
        lambda call: None,
        lambda call: {"a": 1},
        lambda call: EndpointAnswer("x", status=99),
        lambda call: EndpointAnswer("x", headers={"x": "a\r\nset-cookie: b"}),
        lambda call: EndpointAnswer("x", headers={"a b": "c"}),
        lambda call: EndpointAnswer("x", content_type="text/plain\r\nx: y"),
        lambda call: EndpointAnswer(17),  # type: ignore[arg-type]
    ],
)
async def test_a_mistake_of_the_author_is_500_without_a_word_of_it(
    house: House, make: Callable[[EndpointCall], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The log says more, with the plug-in's name."""
    answer = await ask(house, Told(make))

    assert answer.status_code == 500
    assert answer.json() == {"code": 500, "type": "InternalServerException", "message": "/reports failed."}
    assert any("the plug-in x" in record.getMessage() for record in caplog.records)


async def test_one_that_does_not_answer_is_given_up(house: House) -> None:
    """Its client is told in time."""
    answer = await ask(house, Waiting(None), s=0.05)  # type: ignore[arg-type]

    assert answer.status_code == 503


async def test_a_call_in_a_thread_is_not_among_those_that_the_end_gives_up(house: House) -> None:
    """It has the time that any call of an endpoint has, however long it waits for another server."""
    threads = DaemonThreads(1, "blocking")
    seen: list[dict[int, float]] = []

    def look(call: EndpointCall) -> EndpointAnswer:
        seen.append(threads.calls())
        return EndpointAnswer(b"done")

    asyncio.get_running_loop().set_default_executor(threads)
    answer = await ask(house, Told(look))

    assert (answer.status_code, answer.content) == (200, b"done")
    assert seen == [{}]


async def test_ping_may_be_replaced(house: House) -> None:
    """As TorchServe's plug-ins could."""
    answer = await ask(house, Told(lambda call: EndpointAnswer("mine"), "ping"), path="/ping")

    assert answer.text == "mine"


@pytest.mark.parametrize("pattern", ["models", "predictions", "invocations", "readyz", "v2", "wfpredict"])
async def test_nothing_else_of_the_servers_may(house: House, pattern: str) -> None:
    """Two endpoints for one pattern stop the server."""
    installed = InstalledEndpoint(Told(fail, pattern), "the plug-in x")

    with pytest.raises(BadSettings, match=f"the plug-in x wants to answer /{pattern}, which the server answers itself"):
        check_patterns(installed, [health_router(house.registry, has_ping=True)])


async def test_other_patterns_may_be_added(house: House) -> None:
    """Also beside `/ping` and the pages."""
    routers = [health_router(house.registry, has_ping=True), pages_router({}, describe_once())]
    for pattern in ("reports", "ping", "docs", "openapi.json"):
        check_patterns(InstalledEndpoint(Told(fail, pattern), "x"), routers)
