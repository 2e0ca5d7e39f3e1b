"""Tests for asking a model about itself."""

from __future__ import annotations

import asyncio

import pytest

from marserve.errors import HandlerFailed
from marserve.messages import Answer, Load
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.metadata_of_handler import ask_for_metadata
from support.fake_pool import Behaviour, FakePool

pytestmark = pytest.mark.anyio


def pool() -> FakePool:
    """A pool with a worker that leaves the answer to the test."""
    made = FakePool(PoolOptions("m", "1.0", 1, 1), Load("m", "1.0", "", "h", None, None, 1), Behaviour(metadata=None))
    made.start()
    return made


async def ask(asked: FakePool) -> asyncio.Task[Answer]:
    """Begin to ask, until the pool has the request."""
    asking = asyncio.create_task(ask_for_metadata(asked, "m", 5.0))
    while not asked.held:
        await asyncio.sleep(0)
    return asking


async def test_the_request_is_one_of_its_own_kind() -> None:
    """An empty body and the header that handlers look for; it shares no batch."""
    asked = pool()
    asking = await ask(asked)

    request = asked.held[0].request
    asked.held[0].answer(Answer(b"{}"))

    assert await asking == Answer(b"{}")
    assert request.is_describe
    assert request.server_headers == [("describe", "True")]
    assert [(part.name, part.body) for part in request.parts] == [("body", b"")]


async def test_the_handler_sees_the_clients_headers_without_its_key() -> None:
    """As TorchServe sends them; the management key would let a handler manage the server."""
    asked = pool()
    headers = [
        (b"X-Mine", b"1"),
        (b"Authorization", b"Bearer secret"),
        (b"authorization", b"other"),
        (b"Accept", b"*/*"),
    ]
    asking = asyncio.create_task(ask_for_metadata(asked, "m", 5.0, headers=headers))
    while not asked.held:
        await asyncio.sleep(0)

    request = asked.held[0].request
    asked.held[0].answer(Answer(b"{}"))
    await asking

    assert request.headers == [(b"X-Mine", b"1"), (b"Accept", b"*/*")]


async def test_what_befalls_the_request_is_raised() -> None:
    """As for any other."""
    asked = pool()
    asking = await ask(asked)

    asked.held[0].fail(HandlerFailed())

    with pytest.raises(HandlerFailed, match="Prediction failed"):
        await asking


async def test_of_a_stream_the_first_piece_counts() -> None:
    """And the rest is not waited for."""
    asked = pool()
    asking = await ask(asked)
    job = asked.held[0]

    job.receiver.on_piece(Answer(b'{"a": 1}'), last=False)
    job.receiver.on_piece(Answer(b"more"), last=True)

    assert await asking == Answer(b'{"a": 1}')
    assert job.is_cancelled


async def test_who_stops_asking_takes_the_request_back() -> None:
    """The client of the describe hung up."""
    asked = pool()
    asking = await ask(asked)
    job = asked.held[0]

    asking.cancel()
    await asyncio.wait([asking])

    assert job.is_cancelled
