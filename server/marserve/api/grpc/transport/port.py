"""A listening port: takes connections in, looks at their limits of time, and ends them.

It is stopped in two steps. First it takes no more clients, and asks those that it has to open no further calls; these
are answered. Then it is cut: what is still there ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import Final

from marserve.api.byte_ledger import ByteLedger
from marserve.api.grpc.transport.connection import Clients, Connection
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.stream import Method
from marserve.api.sockets import listen

BACKLOG: Final = 2048
HANDSHAKE_S: Final = 10.0
# How long what was written to a client that is cut may take to leave.
CUT_LIMIT_S: Final = 5.0


class Port:
    """A port over a bound socket."""

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, Method],
        unknown: Method,
        limits: GrpcLimits,
        ledger: ByteLedger,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._methods = methods
        self._unknown = unknown
        self._limits = limits
        self._ledger = ledger
        self._tls = tls
        self._clients = Clients()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open_calls(self) -> int:
        """How many calls of clients are not over."""
        return sum(len(connection.streams) for connection in self._clients)

    async def accept(self) -> None:
        """Take clients in from now on. Raises OSError if another has listened on the port since it was bound."""
        loop = asyncio.get_running_loop()
        listen(self._sock, BACKLOG)
        self._server = await loop.create_server(
            lambda: Connection(self._methods, self._unknown, self._limits, self._ledger, self._clients),
            sock=self._sock,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
            backlog=BACKLOG,
        )
        self._timer = loop.call_later(self._limits.sweep_s, self._sweep)

    def turn_away(self) -> None:
        """Take no more clients in, and ask those that are there to open no further calls."""
        if self._server is None:
            self._sock.close()
            return
        self._server.close()
        for connection in self._clients:
            connection.leave()

    async def cut(self) -> None:
        """End all connections, with the calls on them. What was written to them is still sent."""
        self.turn_away()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in self._clients:
            connection.cut()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_LIMIT_S):
                await self._clients.wait_until_gone()
        for connection in self._clients:
            connection.abort()

    def _sweep(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._sweep)
        now = monotonic()
        for connection in self._clients:
            connection.sweep(now)
