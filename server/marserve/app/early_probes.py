"""Answers probes while a slow vendor's tool delays the start.

`/livez` is 200, so that an orchestrator does not kill a server that is starting; all other paths are 503. The addresses
are released before the listeners bind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from functools import partial
from types import TracebackType

from marserve.api.sockets import listen
from marserve.app.building.cannot_start import cannot_bind
from marserve.app.listeners import HANDSHAKE_S, bind
from marserve.settings import Address, Settings, apis_by_address

# A probe's request is short and arrives at once.
HEAD_BYTES, HEAD_S = 8192, 5.0
# The most connections of an address at a time; others are closed at once.
MOST_CONNECTIONS = 64
END_S = 1.0


class EarlyProbes:
    """Use it as a context. Raises CannotStart for an address that is taken."""

    def __init__(self, settings: Settings, tls: ssl.SSLContext | None, reason: str) -> None:
        self._settings, self._tls = settings, tls
        self._alive = _answer(200, "OK", "alive", [])
        self._starting = _answer(503, "Service Unavailable", "not ready", [reason], "Retry-After: 1\r\n")
        self._servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._open: Counter[Address] = Counter()
        self._reading: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> EarlyProbes:
        """Bind every address of the server and answer probes."""
        try:
            for address, names in apis_by_address(self._settings):
                try:
                    sock = bind(address)
                    try:
                        listen(sock, MOST_CONNECTIONS)
                    except OSError:
                        sock.close()
                        raise
                except OSError as error:
                    raise cannot_bind(address, error, *(f"{name.lower()}_address" for name in names)) from error
                start = asyncio.start_unix_server if address.scheme == "unix" else asyncio.start_server
                # TLS begins later, so that a connection counts from its beginning, handshake included.
                server = await start(partial(self._accept, address), sock=sock, limit=HEAD_BYTES)
                self._servers.append(server)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Release the addresses, and wait for open requests: cancelled with the loop they would log a traceback."""
        self._close()
        if self._reading:
            await asyncio.wait(self._reading, timeout=END_S)

    def _close(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open[address] >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open[address] += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer, self._tls if address.is_tls else None))
        self._reading.add(task)
        task.add_done_callback(partial(self._end, address))

    def _end(self, address: Address, task: asyncio.Task[None]) -> None:
        self._open[address] -= 1
        self._reading.discard(task)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext | None
    ) -> None:
        try:
            if tls is not None:
                await writer.start_tls(tls, ssl_handshake_timeout=HANDSHAKE_S)
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            target = head.split(b" ", 2)[1].partition(b"?")[0] if head.count(b" ") > 1 else b""
            writer.write(self._alive if target == b"/livez" else self._starting)
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            return
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()


def _answer(code: int, phrase: str, status: str, reasons: list[str], headers: str = "") -> bytes:
    body = json.dumps({"status": status, "reasons": reasons}, indent=2).encode()
    head = (
        f"HTTP/1.1 {code} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + body
