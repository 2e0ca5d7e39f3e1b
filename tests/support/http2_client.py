"""A client of HTTP/2 that does what it is told, right or wrong: frames by h2, or bytes as they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, StreamEnded, StreamReset
from hyperframe.frame import GoAwayFrame

HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/house.Service/Echo"),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def head(path: str = "/house.Service/Echo", **more: str) -> list[tuple[str, str]]:
    """The header of a call; `more` has underscores in place of hyphens."""
    fields = [(name, path if name == ":path" else value) for name, value in HEAD]
    return fields + [(name.replace("_", "-"), value) for name, value in more.items()]


def framed(data: bytes, *, is_compressed: bool = False) -> bytes:
    """A message as it travels."""
    return bytes([is_compressed]) + len(data).to_bytes(4, "big") + data


class _Patient(H2Connection):
    """h2's connection, which still hears answers after a GOAWAY."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Event]]:
        event = ConnectionTerminated()
        event.error_code, event.additional_data = frame.error_code, frame.additional_data
        return [], [event]


class Http2Client:
    """One connection. `seen` are all events so far; what the server says of a call is gathered from them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.http2 = _Patient(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.seen: list[Event] = []
        self.is_closed = False
        self.acknowledges = True
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes = b"") -> None:
        """Send what h2 has made, and these bytes behind it."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(self.http2.data_to_send() + data)
            await self._writer.drain()

    async def call(self, data: bytes, path: str = "/house.Service/Echo", *, ends: bool = True, **more: str) -> int:
        """Begin a call with these bytes; returns its stream."""
        number = self.http2.get_next_available_stream_id()
        self.http2.send_headers(number, head(path, **more), end_stream=ends and not data)
        if data:
            self.http2.send_data(number, data, end_stream=ends)
        await self.send()
        return number

    async def hear(self) -> bool:
        """Take what the server sends next; False when the connection is over."""
        try:
            data = await self._reader.read(65_536)
        except ConnectionError:
            data = b""
        if not data:
            self.is_closed = True
            return False
        for event in self.http2.receive_data(data):
            self.seen.append(event)
            if isinstance(event, DataReceived) and self.acknowledges:
                self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        await self.send()
        return True

    async def until_over(self, number: int, limit_s: float = 20.0) -> None:
        """Hear until the server has ended a call, or the connection."""
        async with asyncio.timeout(limit_s):
            while not self.is_over(number) and await self.hear():
                pass

    async def until_closed(self, limit_s: float = 20.0) -> None:
        """Hear until the server closes the connection."""
        async with asyncio.timeout(limit_s):
            while await self.hear():
                pass

    def is_over(self, number: int) -> bool:
        """Whether the server has ended the call."""
        return any(isinstance(event, StreamEnded | StreamReset) and event.stream_id == number for event in self.seen)

    def fields(self, number: int) -> dict[str, str]:
        """All fields of the answer's header and trailers."""
        found: dict[str, str] = {}
        for event in self.seen:
            if getattr(event, "stream_id", None) == number and hasattr(event, "headers"):
                found |= dict(event.headers)
        return found

    def data(self, number: int) -> bytes:
        """The bytes of the answer."""
        return b"".join(
            event.data for event in self.seen if isinstance(event, DataReceived) and event.stream_id == number
        )

    def sent_away(self) -> tuple[int, bytes] | None:
        """Why the server has ended the connection: the code and the text of its GOAWAY."""
        for event in self.seen:
            if isinstance(event, ConnectionTerminated):
                return int(event.error_code), event.additional_data or b""
        return None


@contextlib.asynccontextmanager
async def http2_client(host: str, port: int, **options: Any) -> AsyncIterator[Http2Client]:
    """A connection with HTTP/2's first words said."""
    reader, writer = await asyncio.open_connection(host, port, **options)
    client = Http2Client(reader, writer)
    client.http2.initiate_connection()
    await client.send()
    try:
        yield client
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(5):
                await writer.wait_closed()
