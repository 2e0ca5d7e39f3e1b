"""Tests for calls of other models: what is sent, what an answer ends, what else is read meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from socket import socketpair
from typing import Any

import pytest

from marserve import wire
from marserve.messages import Called, Returned, Stop
from marserve.worker.calls import Calls
from marserve.worker.connection import Connection
from marserve_handlers.calling import CallFailed
from marserve_handlers.context import Context

pytestmark = pytest.mark.anyio


class Ends:
    """Both ends of a worker's socket."""

    def __init__(self) -> None:
        self.server, theirs = socketpair()
        self._theirs = theirs
        self.connection = Connection(theirs)
        self._decoder = wire.server_decoder()

    def hear(self) -> list[tuple[Any, list[Any]]]:
        """What the worker has sent."""
        return self._decoder.feed(self.server.recv(1 << 16))

    def say(self, message: Any, *bodies: bytes) -> None:
        """Send the worker a message."""
        for buffer in wire.encode(message, bodies):
            self.server.sendall(buffer)

    def close(self) -> None:
        """Close both."""
        self.server.close()
        self._theirs.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A socket for the test."""
    ends = Ends()
    yield ends
    ends.close()


async def test_a_body_that_no_frame_carries_is_not_sent(ends: Ends) -> None:
    """The server would end the worker for it."""
    with pytest.raises(CallFailed, match="has 11 bytes, more than 10"):
        await Calls(ends.connection, 10, reads=True).call(1, 0, "other", b"x" * 11)


async def test_a_failure_is_raised_with_its_status(ends: Ends) -> None:
    """An author who does not catch it passes it on."""
    calls = Calls(ends.connection, 100, reads=True)
    waiting = asyncio.ensure_future(calls.call(1, 0, "other", b"x"))
    await asyncio.sleep(0)
    ends.say(Returned(1, 404, [], "Model not found: other"), b"")

    with pytest.raises(CallFailed, match="Model not found: other") as caught:
        await waiting

    assert caught.value.error_code == 404


async def test_the_end_of_the_server_ends_all_calls(ends: Ends) -> None:
    """The worker's loop sees it afterwards."""
    calls = Calls(ends.connection, 100, reads=True)
    waiting = asyncio.gather(calls.call(1, 0, "a", b""), calls.call(1, 0, "b", b""), return_exceptions=True)
    await asyncio.sleep(0)
    ends.hear()
    ends.server.close()

    assert [type(each) for each in await waiting] == [EOFError, EOFError]
    with pytest.raises(EOFError):
        ends.connection.receive()


async def test_answers_come_in_any_order_and_other_messages_are_kept(ends: Ends) -> None:
    """Each ends its own call; what the server sends besides is read after the batch."""
    calls = Calls(ends.connection, 100, reads=True)
    waiting = asyncio.gather(
        calls.call(7, 2, "a", {"x": 1}), calls.call(7, 3, "b", "text", version="2.0", headers={"x-a": "1"})
    )
    await asyncio.sleep(0)

    sent = ends.hear()
    ends.say(Returned(2, 200, []), b"second")
    ends.say(Stop())
    ends.say(Returned(1, 201, [("x", "y")]), b'{"y": 2}')
    first, second = await waiting

    assert sent == [
        (Called(7, 2, 1, "a", None, "application/json"), [b'{"x": 1}']),
        (Called(7, 3, 2, "b", "2.0", "text/plain", [("x-a", "1")]), [b"text"]),
    ]
    assert (first.status, first.json(), first.headers) == (201, {"y": 2}, {"x": "y"})
    assert second.text == "second"
    assert ends.connection.receive() == [(Stop(), [])]


async def test_a_late_answer_is_dropped(ends: Ends) -> None:
    """The handler has stopped waiting."""
    calls = Calls(ends.connection, 100, reads=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await calls.call(1, 0, "other", b"")

    calls.returned(Returned(1, 200, []), b"late")


async def test_without_a_server_nothing_is_called() -> None:
    """As in a unit test of a handler, which may put a coroutine in its place."""
    context = Context("m", "", None, 1, None, "0")

    with pytest.raises(RuntimeError, match="There is no server to call"):
        await context.call("other", b"")
