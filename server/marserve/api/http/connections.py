"""The open connections of one or more listeners: their number is bounded, and once a second each checks its limits.

The table has the ledger of the bytes that connections hold (`api/byte_ledger.py`).

One sweep replaces a timer per connection. Each connection knows its own limits; the table only calls `check`. The owner
of the table calls `start` and `stop`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.api.errors import TooManyConnections
from marserve.api.http.request_head import HttpLimits

SWEEP_EVERY_S = 1.0


# A protocol: `HttpConnection` is built upon this table.
class Connection(Protocol):
    """A connection, as the table sees it."""

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being made or not yet taken whole."""

    def check(self, now: float) -> None:
        """Close, or refuse what is being sent, if a time limit has passed at `now` (monotonic seconds)."""


class ConnectionTable:
    """The open connections of the listeners that share the table."""

    def __init__(self, limits: HttpLimits, ledger: ByteLedger | None = None) -> None:
        """Without a `ledger` the bytes held have no bound."""
        self.limits = limits
        self.ledger = ledger or ByteLedger(UNBOUNDED)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_room = False
        self._connections: set[Connection] = set()
        self._addresses: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection, address: str | None) -> None:
        """Take in a new connection; `address` is the client's, None over a Unix socket.

        Raises TooManyConnections when the table, or the client's address, has as many as it may.
        """
        limits = self.limits
        if len(self._connections) >= limits.connections:
            raise TooManyConnections("the server", limits.connections)
        if address is not None:
            held = self._addresses.get(address, 0)
            if held >= limits.connections_per_address:
                raise TooManyConnections("your address", limits.connections_per_address)
            self._addresses[address] = held + 1
        self._connections.add(connection)

    def leave(self, connection: Connection, address: str | None) -> None:
        """Forget a connection. Does nothing for one that was not admitted."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        if address is not None:
            held = self._addresses[address] - 1
            if held:
                self._addresses[address] = held
            else:
                del self._addresses[address]

    @property
    def answering(self) -> int:
        """How many connections have an answer that is being made or not yet taken whole."""
        return sum(connection.is_answering for connection in self._connections)

    def sweep(self, now: float) -> None:
        """Let every connection check its time limits."""
        for connection in list(self._connections):
            connection.check(now)
        self.ledger.turn(now)

    def start(self) -> None:
        """Begin to sweep once a second on the running event loop, and to serve waiting bodies when there is room."""
        if self._timer is None:
            self._loop = asyncio.get_running_loop()
            self._timer = self._loop.call_later(SWEEP_EVERY_S, self._tick)
            self.ledger.on_room = self._look_soon

    def stop(self) -> None:
        """Stop sweeping."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop = None

    def _look_soon(self) -> None:
        """Have the loop check soon whether a waiting body has room. Any thread may call it."""
        if self._loop is not None and not self._has_room:
            self._has_room = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._has_room = False
        self.ledger.turn(time.monotonic())

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._tick)
        self.sweep(time.monotonic())
