"""A worker without a process: it speaks the real wire over a socketpair, and says what the test tells it to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

from marserve import wire
from marserve.messages import ToServer, ToWorker
from marserve.pool.worker_end.client import Peer, WorkerClient


class FakeWorker:
    """One end of a connection whose other end is a `WorkerClient`. Use it as an async context manager."""

    def __init__(self, peer: Peer, **bounds: int) -> None:
        self.client = WorkerClient(peer, **bounds)
        self._decoder = wire.worker_decoder()
        self._heard: list[tuple[ToWorker, list[bytearray]]] = []

    async def __aenter__(self) -> FakeWorker:
        ours, theirs = socket.socketpair()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self.client, sock=theirs)
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await asyncio.wait([asyncio.ensure_future(self._writer.wait_closed())])
        self.client.close()
        await asyncio.sleep(0)

    async def hear(self) -> tuple[Any, list[bytearray]]:
        """The next message of the server's, with its bodies."""
        async with asyncio.timeout(10):
            while not self._heard:
                data = await self._reader.read(65536)
                if not data:
                    raise EOFError
                self._heard += self._decoder.feed(data)
        return self._heard.pop(0)

    async def say(self, message: ToServer, bodies: Sequence[bytes] = ()) -> None:
        """Send a message."""
        await self.write(b"".join(wire.encode(message, bodies)))

    async def write(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def hang_up(self) -> None:
        """Close this end."""
        self._writer.close()
        await self._writer.wait_closed()
