"""A client that sends the very bytes it is given, and reads answers as strictly as a proxy would."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

PATIENCE_S = 10.0


@dataclass(frozen=True)
class Response:
    """One answer. `headers` have lower-case names; `head` is what came before the body, as it came."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes
    head: bytes
    pieces: tuple[bytes, ...] = ()

    def header(self, name: str) -> str | None:
        """The value of a header that stands there once; None if it is missing."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} stands there {len(values)} times"
        return values[0] if values else None


class Cut(Exception):
    """The connection ended inside an answer."""


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.patience_s: float | None = PATIENCE_S

    async def send(self, data: bytes) -> None:
        """Send these bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, *, to_head: bool = False) -> Response:
        """Read one answer; `to_head`: the request was a HEAD. Raises Cut where it is not whole."""
        async with asyncio.timeout(self.patience_s):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
                status, reason, headers = _parse_head(head)
                named = dict(headers)
                pieces: tuple[bytes, ...] = ()
                if to_head or status < 200 or status in (204, 304):
                    body = b""
                elif named.get("transfer-encoding") == "chunked":
                    pieces = tuple([piece async for piece in self._chunks()])
                    body = b"".join(pieces)
                elif "content-length" in named:
                    body = await self.reader.readexactly(int(named["content-length"]))
                else:
                    body = await self.reader.read()
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise Cut from error
        return Response(status, reason, headers, body, head, pieces)

    async def ask(self, data: bytes) -> Response:
        """Send, then read one answer."""
        await self.send(data)
        return await self.read()

    async def read_all(self) -> list[Response]:
        """Read answers until the server closes."""
        answers = []
        while not await self.is_at_end():
            answers.append(await self.read())
        return answers

    async def read_rest(self) -> bytes:
        """Read bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def is_at_end(self) -> bool:
        """Wait for more bytes (False) or the end of the connection (True)."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                piece = await self.reader.read(1)
            except ConnectionError:
                return True
        if piece:
            # The stream has no way to look without taking; put the byte back in front.
            self.reader._buffer[:0] = piece  # type: ignore[attr-defined]
        return not piece

    def hang_up(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            piece = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            if not size:
                return
            yield piece


@asynccontextmanager
async def connect(port: int, tls: ssl.SSLContext | None = None, *, read_ahead: int = 2**16) -> AsyncIterator[RawClient]:
    """Open a connection to this machine; `read_ahead` bytes are taken from the network before anybody reads."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None, limit=read_ahead
    )
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), PATIENCE_S)


def _parse_head(head: bytes) -> tuple[int, str, list[tuple[str, str]]]:
    first, *lines = head[:-4].split(b"\r\n")
    protocol, status, reason = first.decode("latin-1").split(" ", 2)
    assert protocol == "HTTP/1.1", first
    headers = []
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(": ")
        assert colon, line
        assert "\r" not in value, line
        assert "\n" not in value, line
        headers.append((name.lower(), value))
    return int(status), reason, headers
