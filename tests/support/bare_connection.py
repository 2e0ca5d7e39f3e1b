"""One HTTP connection of the server without a socket: the test says what it reads, what is taken, and the time."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from marserve.api.byte_ledger import ByteLedger
from marserve.api.http import connection as http_connection
from marserve.api.http import exchange
from marserve.api.http.connection import HttpConnection, bind_connection
from marserve.api.http.connections import ConnectionTable
from marserve.api.http.inference import InferenceSurface
from marserve.api.http.request_head import HttpLimits
from support.fake_data_plane import FakeDataPlane
from support.http_listener import Counts, Lines, echo_app


class Wire(asyncio.Transport):
    """A transport that keeps what is written. `unsent` of it waits for the client; `end` says how it was closed."""

    def __init__(self, peer: tuple[str, int] | None = ("10.0.0.9", 4711)) -> None:
        super().__init__({"peername": peer, "sockname": ("10.0.0.1", 8080)})
        self.written = bytearray()
        self.unsent = 0
        self.is_open = True
        self.end: list[str] = []

    def write(self, data: Any) -> None:
        """Keep it."""
        self.written += data

    def get_write_buffer_size(self) -> int:
        """What waits for the client."""
        return self.unsent

    def pause_reading(self) -> None:
        """Read nothing."""
        self.is_open = False

    def resume_reading(self) -> None:
        """Read again."""
        self.is_open = True

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return "closed" in self.end or "aborted" in self.end

    def can_write_eof(self) -> bool:
        """As plain TCP."""
        return True

    def write_eof(self) -> None:
        """No more is written."""
        self.end.append("half-closed")

    def close(self) -> None:
        """Closed when all is sent."""
        self.end.append("closed")

    def abort(self) -> None:
        """Closed at once."""
        self.end.append("aborted")


class Clock:
    """A clock that goes on by `step` each time it is looked at."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step = 0.0

    def __call__(self) -> float:
        """The time."""
        self.now += self.step
        return self.now


class Bare:
    """A connection, and all that it speaks with. Made on a running event loop; `clock` is the test's to move."""

    def __init__(
        self, limits: HttpLimits | None = None, *, ledger: ByteLedger | None = None, app: Any = echo_app, **more: Any
    ) -> None:
        self.plane, self.log, self.counts, self.wire = FakeDataPlane(), Lines(), Counts(), Wire()
        limits = limits or HttpLimits()
        self.table = ConnectionTable(limits, ledger)
        protocol = bind_connection(InferenceSurface(self.plane), limits, self.log, self.counts, self.table, **more)
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", access_log=False, log_config=None)
        config.load()
        self._config, self._state, self._protocol = config, ServerState(), protocol
        self.connection: HttpConnection = self.open(self.wire)

    def open(self, wire: Wire) -> HttpConnection:
        """A further connection of the same listener."""
        connection: HttpConnection = self._protocol(self._config, self._state, {}, asyncio.get_running_loop())
        connection.connection_made(wire)
        return connection

    def say(self, data: bytes) -> bytes:
        """Have it read these bytes; returns what it writes at once."""
        written = len(self.wire.written)
        self.connection.data_received(data)
        return bytes(self.wire.written[written:])

    @property
    def statuses(self) -> list[int]:
        """Of all its answers so far, those whose bodies hold no answer in turn."""
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", self.wire.written)]


def set_clock(monkeypatch: Any) -> Clock:
    """Have connections go by a clock of the test's."""
    clock = Clock()
    monkeypatch.setattr(http_connection, "monotonic", clock)
    monkeypatch.setattr(exchange, "monotonic", clock)
    return clock


async def turn_loop(times: int = 5) -> None:
    """Let what is ready on the loop run."""
    for _ in range(times):
        await asyncio.sleep(0)
