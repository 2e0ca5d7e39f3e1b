"""What an outlet has just written: kept in memory where no file has it, and passed to followers.

The writing threads of `line_writer.py` come through here with what they write, so that logging costs nothing more. A
follower waits on the event loop, holds a bounded number of bytes, and gets no more once it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence

from marserve.telemetry.logs.line_writer import Sink
from marserve.telemetry.logs.records import LogName

# A follower whose client takes no more than this is too slow.
MAX_WAITING_BYTES = 1 << 20


class RecentLines:
    """The newest `most_bytes` of one outlet's lines. `log` is the outlet's log; None if it has all logs."""

    def __init__(self, log: LogName | None = None, most_bytes: int = 0) -> None:
        self.log = log
        self._most_bytes = most_bytes
        self._chunks: deque[bytes] = deque()
        self._bytes = 0
        self._has_forgotten = False
        self._lock = threading.Lock()
        self.followers: tuple[Follower, ...] = ()
        """Replaced as a whole, on the event loop."""

    def add(self, data: bytes) -> None:
        """Take whole lines. Called by the writing thread."""
        if self._most_bytes:
            with self._lock:
                self._chunks.append(data)
                self._bytes += len(data)
                while self._bytes > self._most_bytes and len(self._chunks) > 1:
                    self._bytes -= len(self._chunks.popleft())
                    self._has_forgotten = True
        for follower in self.followers:
            follower.take(self.log, data)

    def kept(self) -> tuple[bytes, bool]:
        """The lines that are kept, and whether these are all that were ever written."""
        with self._lock:
            return b"".join(self._chunks), not self._has_forgotten


class ShownSink:
    """A sink whose lines also go to `recent`."""

    def __init__(self, sink: Sink, recent: RecentLines) -> None:
        self._sink = sink
        self._recent = recent

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Write all of `data`."""
        self._recent.add(data)
        self._sink.write(data, give_up)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()


class Follower:
    """Lines for one client. `needles` are bytes of which one stands in every chunk that it may want."""

    def __init__(self, needles: Sequence[bytes] = (), most_bytes: int = MAX_WAITING_BYTES) -> None:
        self.is_too_slow = False
        """Whether lines were lost, as too many waited."""
        self._needles = needles
        self._most_bytes = most_bytes
        self._waiting: list[tuple[LogName | None, bytes]] = []
        self._bytes = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def take(self, log: LogName | None, data: bytes) -> None:
        """Take lines, from any thread."""
        if self._needles and not any(needle in data for needle in self._needles):
            return
        with self._lock:
            if self.is_too_slow:
                return
            if self._bytes + len(data) > self._most_bytes:
                self.is_too_slow = True
            else:
                self._waiting.append((log, data))
                self._bytes += len(data)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)

    async def next(self) -> list[tuple[LogName | None, bytes]]:
        """The chunks that have come, once there are some; none at the end, and when the follower is too slow."""
        while not self._waiting and not self._is_closed and not self.is_too_slow:
            await self._news.wait()
            self._news.clear()
        with self._lock:
            chunks, self._waiting = self._waiting, []
            self._bytes = 0
        return chunks

    def close(self) -> None:
        """End `next`. Called on the loop."""
        self._is_closed = True
        self._news.set()
