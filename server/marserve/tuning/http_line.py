"""Requests over HTTP/1.1: one connection for each that is under way, kept for the next one."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httptools

from marserve.tuning.load import CONNECT_S, Line, Reason, Tally
from marserve.tuning.payloads import Payload

KEPT_EXAMPLE: Final = 2000


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where requests go: a host and port, or a socket's file; the path, and further headers."""

    path: str
    host: str = "localhost"
    port: int = 80
    socket: str = ""
    tls: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def head(self, payload: Payload) -> bytes:
        """The head of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"POST {self.path} HTTP/1.1", f"host: {host}:{self.port}", f"content-length: {len(payload.body)}"]
        if payload.content_type:
            lines.append(f"content-type: {payload.content_type}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def line(self, payloads: Sequence[Payload], timeout_s: float) -> HttpLine:
        """Connections that send these."""
        return HttpLine(self, payloads, timeout_s)


class HttpLine(Line):
    """The connections to one target. They are kept between loads."""

    def __init__(self, target: HttpTarget, payloads: Sequence[Payload], timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._requests = [target.head(payload) + payload.body for payload in payloads]
        self._free: list[_Connection] = []

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def ask(self, number: int, due: float | None, tally: Tally) -> None:
        """See `Line.ask`."""
        request = self._requests[number % len(self._requests)]
        tally.sent += 1
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._free.pop() if self._free else None
                if connection is None or connection.is_lost:
                    connection = await self._connect()
                begun = time.perf_counter() if due is None else due
                answer = await connection.ask(request)
            took_s = time.perf_counter() - begun
        except TimeoutError:
            tally.fail(Reason(None, f"no answer within {self._timeout_s:g} s"), "")
        except (OSError, ssl.SSLError) as error:
            tally.fail(Reason(None, _said(error)), str(error))
        except httptools.HttpParserError as error:
            tally.fail(Reason(None, "no HTTP"), str(error))
        else:
            if answer.is_success:
                tally.answer(took_s)
            else:
                tally.fail(Reason(answer.status, reason_of(answer)), answer.text)
            if answer.keeps_alive:
                self._free.append(connection)
                connection = None
        finally:
            if connection is not None:
                connection.close()

    async def _connect(self) -> _Connection:
        loop, target = asyncio.get_running_loop(), self._target
        with_tls: dict[str, Any] = {"ssl": target.tls, "server_hostname": target.host} if target.tls else {}
        async with asyncio.timeout(min(CONNECT_S, self._timeout_s)):
            if target.socket:
                _, made = await loop.create_unix_connection(_Connection, target.socket)
            else:
                _, made = await loop.create_connection(_Connection, target.host, target.port, **with_tls)
        return made


class Answer(NamedTuple):
    """An answer: of its body only what an example shows."""

    status: int
    cause: str
    body: bytes
    keeps_alive: bool

    @property
    def is_success(self) -> bool:
        """Whether a model answered; a redirect, as of a proxy that wants a login, is none."""
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        """The beginning of the body, as far as it is text."""
        return self.body.decode("utf-8", "replace")


class _Connection(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._waits: asyncio.Future[Answer] | None = None
        self._body = b""
        self._cause = ""
        self.is_lost = False

    async def ask(self, request: bytes) -> Answer:
        """Send a request and await its whole answer. Raises ConnectionError, HttpParserError."""
        if self.is_lost:
            raise ConnectionResetError("the connection broke")
        self._body, self._cause = b"", ""
        self._waits = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waits
        finally:
            self._waits = None

    def close(self) -> None:
        """Close it at once."""
        self._transport.abort()

    # ------------------------------------------------------------------------------------------- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        self.is_lost = True
        self._fail(ConnectionResetError("the connection broke"))

    def _fail(self, error: Exception) -> None:
        if self._waits is not None and not self._waits.done():
            self._waits.set_exception(error)

    # ------------------------------------------------------------------------------------------- of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if name.lower() == b"x-marserve-cause":
            self._cause = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """A piece of the body: its beginning is kept where it may say why a request failed."""
        if self._parser.get_status_code() >= 300 and len(self._body) < KEPT_EXAMPLE:
            self._body += body[: KEPT_EXAMPLE - len(self._body)]

    def on_message_complete(self) -> None:
        """The answer is whole; those of 1xx come before it."""
        status = self._parser.get_status_code()
        if status >= 200 and self._waits is not None and not self._waits.done():
            self._waits.set_result(Answer(status, self._cause, self._body, self._parser.should_keep_alive()))


def reason_of(answer: Answer) -> str:
    """A failed answer's reason in a few words: its cause, else the type of its error object."""
    if answer.cause:
        return answer.cause
    try:
        kind = json.loads(answer.body)["type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "a redirect" if 300 <= answer.status < 400 else "no reason given"
    return str(kind)[:80]


def _said(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return "the connection broke"
    return (error.strerror or type(error).__name__)[:80]
