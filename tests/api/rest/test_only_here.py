"""Who may manage models at an address that management shares with predictions."""

from __future__ import annotations

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from marserve.api.browsers import BrowserRules, OwnHosts
from marserve.api.rest.only_here import OnlyHere, is_here


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_here(host: str) -> None:
    """In every spelling that a socket gives."""
    assert is_here((host, 4711))


@pytest.mark.parametrize("host", ["10.0.0.7", "0.0.0.0", "fe80::1%eth0", "::ffff:10.0.0.7", "testclient", ""])
def test_everything_else_is_elsewhere(host: str) -> None:
    """What is no address, too."""
    assert not is_here((host, 4711))


def test_the_other_end_of_a_socket_file_is_here() -> None:
    """It has no address."""
    assert is_here(None)


@pytest.mark.anyio
@pytest.mark.parametrize(("host", "status"), [("10.0.0.7", 403), ("127.0.0.1", 200)])
async def test_management_is_answered_here_alone_and_the_rest_to_all(host: str, status: int) -> None:
    """The answer to others says what would open it."""
    app, management = FastAPI(), APIRouter()
    management.add_api_route("/models", lambda: {"models": []}, methods=["GET"])
    app.include_router(management)
    app.add_api_route("/ping", lambda: {"status": "Healthy"}, methods=["GET"])
    transport = httpx.ASGITransport(app=OnlyHere(app, [management]), client=(host, 4711))

    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer, wrong_method, ping = [
            await client.request(method, path)
            for method, path in (("GET", "/models"), ("PUT", "/models"), ("GET", "/ping"))
        ]

    assert (answer.status_code, ping.status_code) == (status, 200)
    if status == 403:
        assert answer.json()["type"] == "ManagementClosedException"
        assert "allow_open_management=true" in answer.json()["message"]
        assert wrong_method.status_code == 403


@pytest.mark.anyio
async def test_a_page_that_led_its_name_here_is_not_here() -> None:
    """Its requests come from this machine's browser; the rest of the address is answered to it."""
    app, management = FastAPI(), APIRouter()
    management.add_api_route("/models", lambda: {"models": []}, methods=["GET"])
    app.include_router(management)
    app.add_api_route("/ping", lambda: {"status": "Healthy"}, methods=["GET"])
    guarded = OnlyHere(app, [management], BrowserRules("http", OwnHosts(["box.lan"])))
    transport = httpx.ASGITransport(app=guarded, client=("127.0.0.1", 4711))

    async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
        answers = [
            (await client.get(path, headers={"Host": host})).status_code
            for path in ("/models", "/ping")
            for host in ("evil.example", "localhost", "box.lan")
        ]

    assert answers == [403, 200, 200, 200, 200, 200]
