"""Calls of other models that a handler waits for: each is sent to the server, and its answer comes as a message.

A worker that runs one batch at a time does not read while its handler runs. So the loop of the handler's coroutine
reads here, and keeps what is not an answer for later. A concurrent worker's own loop reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from marserve.messages import Called, Returned
from marserve.worker.connection import Connection
from marserve_handlers.calling import CallFailed, ModelAnswer, body_of

if TYPE_CHECKING:
    import asyncio

# How many calls one worker may wait for at a time.
MOST_CALLS = 1000


class Calls:
    """The calls that one worker waits for. With `reads` it reads the connection itself while there are any."""

    def __init__(self, connection: Connection, most_bytes: int, *, reads: bool) -> None:
        self._connection = connection
        self._most_bytes = most_bytes
        self._reads = reads
        self._last = 0
        self._waiting: dict[int, asyncio.Future[ModelAnswer]] = {}

    async def call(
        self,
        number: int,
        position: int,
        model: str,
        body: Any,
        content_type: str | None = None,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ModelAnswer:
        """Call a model on behalf of item `position` of batch `number`. Raises CallFailed, and EOFError at the end."""
        import asyncio  # here for a quicker start: few workers need asyncio

        data, content_type = body_of(body, content_type)
        if len(data) > self._most_bytes:
            raise CallFailed(f"The request to {model} has {len(data)} bytes, more than {self._most_bytes}.", 413)
        if len(self._waiting) >= MOST_CALLS:
            raise CallFailed(f"This worker waits for {MOST_CALLS} calls of other models already.", 503)
        self._last += 1
        loop, place = asyncio.get_running_loop(), self._last
        future: asyncio.Future[ModelAnswer] = loop.create_future()
        self._waiting[place] = future
        given = [(name, value) for name, value in (headers or {}).items()]
        self._connection.send(Called(number, position, place, model, version, content_type, given), [data])
        if self._reads and len(self._waiting) == 1:
            loop.add_reader(self._connection.fileno(), self._read)
        try:
            return await future
        finally:
            del self._waiting[place]
            if self._reads and not self._waiting:
                loop.remove_reader(self._connection.fileno())

    def leave_reading(self) -> None:
        """Another thread reads the connection from now on, and hands answers to `returned_elsewhere`."""
        self._reads = False

    def returned_elsewhere(self, message: Returned, body: bytes | bytearray) -> None:
        """As `returned`, from another thread than that of the handler's loop."""
        future = self._waiting.get(message.call)
        if future is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: the handler has stopped waiting
            future.get_loop().call_soon_threadsafe(self.returned, message, body)

    def returned(self, message: Returned, body: bytes | bytearray) -> None:
        """The server has the answer to a call; it is dropped if the handler has stopped waiting."""
        future = self._waiting.get(message.call)
        if future is None or future.done():
            return
        if message.failure:
            future.set_exception(CallFailed(message.failure, message.status))
        else:
            future.set_result(ModelAnswer(bytes(body), message.status, dict(message.headers)))

    def _read(self) -> None:
        try:
            messages = self._connection.receive_some()
        except Exception as error:  # the server is gone; the worker's loop will see that, too
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            return
        for message, bodies in messages:
            if type(message) is Returned:
                self.returned(message, bodies[0] if bodies else b"")
            else:
                self._connection.keep(message, bodies)
