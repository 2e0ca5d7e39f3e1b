"""Tests for HEAD on routes that only know GET."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.responses import JSONResponse, Response, StreamingResponse

from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.rest.application import build_app
from support.management_house import client_of

pytestmark = pytest.mark.anyio

OWN = ErrorRules(as_recorded=False)


def application(rules: ErrorRules, ended: asyncio.Event | None = None) -> Any:
    """A listener with one route of each kind."""
    router = APIRouter()

    @router.get("/things/{name}")
    async def get(name: str) -> Response:
        return JSONResponse({"name": name}, headers={"x-own": "yes"})

    @router.get("/follow")
    async def follow() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"line"
                    await asyncio.sleep(0.001)
            finally:
                if ended is not None:
                    ended.set()

        return StreamingResponse(pieces())

    @router.head("/own")
    async def head() -> Response:
        return Response(headers={"x-own": "head"})

    @router.get("/own")
    async def own() -> Response:
        return Response(headers={"x-own": "get"})

    @router.post("/post")
    async def post() -> Response:
        return Response()

    @router.get("/token")
    async def renew() -> Response:
        return Response()

    return build_app([router], title="test", error_rules=rules)


async def test_head_is_answered_as_get_without_the_body() -> None:
    """Status and headers are the same, and so is a 404."""
    async with client_of(application(OWN)) as client:
        got, head, missing = await client.get("/things/a"), await client.head("/things/a"), await client.head("/no")

    assert (head.status_code, head.content) == (200, b"")
    assert dict(head.headers) == dict(got.headers)
    assert missing.status_code == 404


async def test_a_stream_without_end_is_not_begun_for_its_headers() -> None:
    """It is cancelled after them."""
    ended = asyncio.Event()
    async with client_of(application(OWN, ended)) as client:
        head = await asyncio.wait_for(client.head("/follow"), 10)

    assert (head.status_code, head.content) == (200, b"")
    assert ended.is_set()


async def test_a_route_of_its_own_and_one_that_changes_something_stay_as_they_are() -> None:
    """And so does a route that only takes another method."""
    async with client_of(application(OWN)) as client:
        own = await client.head("/own")
        refused = [(await client.head(path)).status_code for path in ("/post", "/token")]
        allowed = (await client.delete("/things/a")).headers["allow"]

    assert own.headers["x-own"] == "head"
    assert refused == [405, 405]
    assert allowed == "GET, HEAD"


async def test_as_recorded_head_is_not_allowed() -> None:
    """TorchServe has no such routes."""
    async with client_of(application(AS_RECORDED)) as client:
        assert (await client.head("/things/a")).status_code == 405
