"""Tests for ending what is done for a client that has gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from marserve.api.rest.hang_up import while_connected
from marserve.errors import BadInput, ClientGone

pytestmark = pytest.mark.anyio


class Wire:
    """What the server tells an application of its client."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.request = Request({"type": "http", "method": "GET", "headers": []}, self._messages.get)

    def hang_up(self) -> None:
        """The client goes."""
        self._messages.put_nowait({"type": "http.disconnect"})


async def test_what_is_awaited_is_returned_or_raised() -> None:
    """As without it."""

    async def succeed() -> int:
        await asyncio.sleep(0)
        return 7

    async def fail() -> None:
        raise BadInput("so it is")

    assert await while_connected(Wire().request, succeed()) == 7
    with pytest.raises(BadInput, match="so it is"):
        await while_connected(Wire().request, fail())


async def test_a_client_that_goes_ends_what_was_done_for_it() -> None:
    """Its end is waited for, so that nothing goes on in secret."""
    wire, before = Wire(), asyncio.all_tasks()
    ended = []

    async def work() -> None:
        try:
            wire.hang_up()
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ClientGone):
        await while_connected(wire.request, work())

    assert ended == [True]
    assert asyncio.all_tasks() == before


async def test_who_is_cancelled_leaves_no_task_behind() -> None:
    """The server stops in the middle."""
    wire, before = Wire(), asyncio.all_tasks()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    waiting = asyncio.create_task(while_connected(wire.request, work()))
    await begun.wait()
    waiting.cancel()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    assert asyncio.all_tasks() == before
