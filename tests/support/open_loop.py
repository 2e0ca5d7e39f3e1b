"""An open-loop client: requests leave when they are due, whatever became of those before them.

Time counts from when a request was due, not from when it was sent: a server that stalls is charged for everyone it kept
waiting, and so is this client when it falls behind. Every request is accounted for: `Outcome.status` is 0 for one that
got no whole answer. Answers must have a length, as all of marserve's that are no streams have.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import select
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: (\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: when it is due, in seconds from the start, what it is called, and its bytes."""

    due_s: float
    name: str
    request: bytes


@dataclass(slots=True)
class Outcome:
    """What came of a shot. Times in seconds from the start; `ended_s` is inf and `status` 0 without an answer.

    `is_refused`: nothing was sent, as the connection was refused, or closed before this client came to send.
    `closes`: the answer said `Connection: close`.
    """

    shot: Shot
    sent_s: float = math.inf
    ended_s: float = math.inf
    status: int = 0
    retry_after: int | None = None
    body: bytes = b""
    is_refused: bool = False
    closes: bool = False

    @property
    def latency_s(self) -> float:
        """From when it was due to the last byte of its answer."""
        return self.ended_s - self.shot.due_s

    @property
    def exchange_s(self) -> float:
        """From when it was sent: what the server alone took, where this client fell behind."""
        return self.ended_s - self.sent_s


class OpenLoop:
    """Fires shots at one port of this machine, over as many connections as are needed at a time."""

    def __init__(self, port: int, *, patience_s: float = 30.0) -> None:
        self._port = port
        self._patience_s = patience_s
        self._free: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._open = 0
        self._rest = asyncio.Event()
        self.started_at = math.inf  # on the monotonic clock, from when `fire` has begun
        self.ends_s = math.inf  # what is due from then on is not sent and has no outcome; may be set meanwhile

    async def fire(self, shots: Iterable[Shot]) -> list[Outcome]:
        """Send every shot when it is due, wait for all answers; outcomes come in order of their due times."""
        loop = asyncio.get_running_loop()
        outcomes = [Outcome(shot) for shot in sorted(shots, key=lambda shot: shot.due_s)]
        connecting: set[asyncio.Task[None]] = set()
        start = self.started_at = loop.time() + 0.05
        try:
            for number, outcome in enumerate(outcomes):
                # Answers are read between two shots that are late as well: their connections are free again.
                await asyncio.sleep(max(0.0, start + outcome.shot.due_s - loop.time()))
                if outcome.shot.due_s >= self.ends_s:
                    del outcomes[number:]
                    break
                self._open += 1
                if (connection := self._take_free()) is not None:
                    connection.send(outcome, start)
                else:
                    task = asyncio.create_task(self._connect_and_send(outcome, start))
                    connecting.add(task)
                    task.add_done_callback(connecting.discard)
            async with asyncio.timeout(self._patience_s):
                while self._open:
                    self._rest.clear()
                    await self._rest.wait()
        except TimeoutError:
            pass  # what has no answer by now has status 0
        finally:
            for task in connecting:
                task.cancel()
            for connection in list(self._all):
                connection.close()
            self._free.clear()
            await asyncio.sleep(0)
        return outcomes

    def _take_free(self) -> _Connection | None:
        """A connection on which nothing is under way, and which the server has not closed."""
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed_by_server:
                return connection
        return None

    async def _connect_and_send(self, outcome: Outcome, start: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
        except OSError as error:
            outcome.is_refused = isinstance(error, ConnectionRefusedError)
            self.done()
            return
        if made.is_closed_by_server:
            outcome.is_refused = True
            self.done()
            return
        made.send(outcome, start)

    def opened(self, connection: _Connection) -> None:
        """A connection is there."""
        self._all.add(connection)

    def freed(self, connection: _Connection) -> None:
        """A connection may be used again."""
        self._free.append(connection)

    def lost(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._all.discard(connection)
        if connection in self._free:
            self._free.remove(connection)

    def done(self) -> None:
        """A shot has its outcome."""
        self._open -= 1
        if not self._open:
            self._rest.set()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, owner: OpenLoop) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._outcome: Outcome | None = None
        self._start = 0.0
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast("asyncio.Transport", transport)
        self._owner.opened(self)

    def send(self, outcome: Outcome, start: float) -> None:
        """Send a shot."""
        assert self._transport is not None
        self._outcome, self._start, self._data = outcome, start, b""
        outcome.sent_s = asyncio.get_running_loop().time() - start
        self._transport.write(outcome.shot.request)

    @property
    def is_closed_by_server(self) -> bool:
        """Whether the system knows of the other side's end, of which the event loop has not told yet.

        A server says nothing on a connection without a request, so all there is to read is the end.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """A piece of an answer, or all of it."""
        outcome = self._outcome
        if outcome is None:
            self.close()
            return
        self._data += data
        end = self._data.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = self._data[:end]
        length = _LENGTH.search(head)
        assert length is not None, head
        if len(self._data) < end + int(length[1]):
            return
        status, retry_after = _STATUS.match(head), _RETRY_AFTER.search(head)
        assert status is not None, head
        outcome.ended_s = asyncio.get_running_loop().time() - self._start
        outcome.status = int(status[1])
        outcome.retry_after = int(retry_after[1]) if retry_after else None
        outcome.body = self._data[end:]
        outcome.closes = b"connection: close" in head.lower()
        self._outcome = None
        if outcome.closes:
            self.close()
        else:
            self._owner.freed(self)
        self._owner.done()

    def connection_lost(self, error: Exception | None) -> None:
        """The server, or we, closed it."""
        self._owner.lost(self)
        if self._outcome is not None:
            self._outcome = None
            self._owner.done()


def evenly(rate: float, seconds: float, *, begin_s: float = 0.0) -> list[float]:
    """Due times, `rate` a second."""
    return [begin_s + index / rate for index in range(int(rate * seconds))]


def at_random(rate: float, seconds: float, seed: int, *, begin_s: float = 0.0) -> list[float]:
    """Due times of a Poisson process of `rate` a second."""
    dice = random.Random(seed)
    times = []
    now = dice.expovariate(rate)
    while now < seconds:
        times.append(begin_s + now)
        now += dice.expovariate(rate)
    return times


def post(model: str, body: bytes = b"x", **headers: str | int) -> bytes:
    """A prediction; underscores in header names become hyphens."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (
        f"POST /predictions/{model} HTTP/1.1\r\nHost: localhost\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def count_by_status(outcomes: Iterable[Outcome]) -> Counter[int]:
    """How many ended with which status: the sum that must close."""
    return Counter(outcome.status for outcome in outcomes)
