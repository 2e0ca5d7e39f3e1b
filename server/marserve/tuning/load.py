"""Sends requests over HTTP/1.1 and notes what became of each: a closed or an open loop, never more than was asked for.

In a *closed loop* so many clients each send their next request when the last one is answered. In an *open loop*
requests are due at times that know nothing of the server (Poisson), and each is timed from when it was due: what waits
because the server is slow has waited (no coordinated omission). A thread keeps these times, for an event loop's own
timers are a millisecond coarse.

It gives up early where a server does not answer any more.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httptools

from marserve.tuning.payloads import Payload

MOST_CLIENTS: Final = 1024
# So many requests in a row without any answer: the server is gone.
MOST_UNANSWERED: Final = 20
KEPT_EXAMPLE: Final = 2000
CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Target:
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


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests come: `clients` in a closed loop, or `rate` a second in an open one, from the times of `seed`."""

    clients: int = 1
    rate: float | None = None
    seed: int = 1

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} a second, due at times of a Poisson process"
        return "one at a time" if self.clients == 1 else f"{self.clients} at a time"


@dataclass(frozen=True, slots=True)
class Limit:
    """When a load ends: after so many requests, or so many seconds, or what is first."""

    requests: int | None = None
    seconds: float | None = None


class Reason(NamedTuple):
    """Why requests failed: the status, None without an answer, and the reason in a few words."""

    status: int | None
    text: str


@dataclass(slots=True)
class Tally:
    """What became of the requests. `seconds` are the times of those that were answered well, in the order of the ends.

    `failed` has, for each reason, how often it came and what the first answer said. `late` is how late requests of an
    open loop were sent, in seconds. `gave_up` says why the load ended early.
    """

    seconds: list[float] = field(default_factory=list)
    failed: dict[Reason, list[Any]] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)
    sent: int = 0
    lasted_s: float = 0.0
    gave_up: str = ""
    _unanswered: int = 0

    @property
    def answered(self) -> int:
        """How many were answered well."""
        return len(self.seconds)

    @property
    def failures(self) -> int:
        """How many were not."""
        return sum(count for count, _ in self.failed.values())

    def fail(self, reason: Reason, example: str) -> None:
        """Note a failed request."""
        self.failed.setdefault(reason, [0, example])[0] += 1
        self._unanswered = self._unanswered + 1 if reason.status is None else 0
        if self._unanswered >= MOST_UNANSWERED and not self.gave_up:
            self.gave_up = f"{self._unanswered} requests in a row got no answer ({reason.text})"

    def answer(self, seconds: float) -> None:
        """Note a request that was answered well."""
        self.seconds.append(seconds)
        self._unanswered = 0

    def add(self, other: Tally) -> None:
        """Take over what another load of the same target saw, right after this one."""
        self.seconds += other.seconds
        for reason, (count, example) in other.failed.items():
            self.failed.setdefault(reason, [0, example])[0] += count
        self.late += other.late
        self.sent += other.sent
        self.lasted_s += other.lasted_s
        self.gave_up = self.gave_up or other.gave_up


class Line:
    """The connections to one target. They are kept between loads; use it as an async context manager."""

    def __init__(self, target: Target, payloads: Sequence[Payload], timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._requests = [target.head(payload) + payload.body for payload in payloads]
        self._free: list[_Connection] = []

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def load(self, shape: Shape, limit: Limit, tally: Tally, *, first: int = 0) -> None:
        """Send requests, beginning with payload `first`, and note them in `tally`, also where this is cancelled."""
        begun = time.perf_counter()
        try:
            if shape.rate is None:
                await self._closed(shape.clients, limit, tally, first)
            else:
                await self._open(shape, limit, tally, first)
        finally:
            tally.lasted_s += time.perf_counter() - begun

    async def _closed(self, clients: int, limit: Limit, tally: Tally, first: int) -> None:
        ends = None if limit.seconds is None else time.perf_counter() + limit.seconds
        numbers = iter(range(first, first + limit.requests)) if limit.requests is not None else _count(first)

        async def client() -> None:
            while not tally.gave_up and (ends is None or time.perf_counter() < ends):
                number = next(numbers, None)
                if number is None:
                    return
                await self._ask(number, None, tally)

        most = clients if limit.requests is None else min(clients, limit.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(most):
                group.create_task(client())

    async def _open(self, shape: Shape, limit: Limit, tally: Tally, first: int) -> None:
        assert shape.rate is not None
        loop, stop, all_due = asyncio.get_running_loop(), threading.Event(), asyncio.Event()
        places = asyncio.Semaphore(MOST_CLIENTS)
        begun = time.perf_counter() + 0.01

        async with asyncio.TaskGroup() as group:

            async def one(number: int, due: float) -> None:
                if places.locked():
                    async with places:
                        await self._ask(number, due, tally)
                    return
                async with places:
                    tally.late.append(time.perf_counter() - due)
                    await self._ask(number, due, tally)

            def is_due(number: int, due: float) -> None:
                if tally.gave_up:
                    stop.set()
                elif not stop.is_set():
                    group.create_task(one(number, due))

            dues = due_times(shape, limit)

            def keep_time() -> None:
                for number, due in enumerate(dues, first):
                    if (left := begun + due - time.perf_counter()) > 0 and stop.wait(left):
                        break
                    if stop.is_set():
                        break
                    loop.call_soon_threadsafe(is_due, number, begun + due)
                loop.call_soon_threadsafe(all_due.set)

            keeper = threading.Thread(target=keep_time, daemon=True)
            keeper.start()
            try:
                await all_due.wait()
            finally:
                stop.set()
                keeper.join()

    async def _ask(self, number: int, due: float | None, tally: Tally) -> None:
        """One request, timed from when it was due, else from when it is sent."""
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


def run(work: Callable[[], Any]) -> None:
    """Run a coroutine function to its end, on uvloop where it is there. Ctrl-C cancels it; raises KeyboardInterrupt."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop  # an optional package

        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work())
    except RuntimeError as error:
        # uvloop cannot be closed where Ctrl-C came while it ran its own code.
        before: BaseException | None = error
        while before is not None:
            if isinstance(before, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            before = before.__context__
        raise


def due_times(shape: Shape, limit: Limit) -> Iterator[float]:
    """When the requests of an open loop are due, in seconds from its begin: as far apart as those of strangers.

    Raises ValueError for a rate of nothing, before it gives the first.
    """
    if not shape.rate:
        raise ValueError("a rate of 0 requests a second has no request that is due")
    return _due_times(shape, shape.rate, limit)


def _due_times(shape: Shape, rate: float, limit: Limit) -> Iterator[float]:
    dice, due, number = random.Random(shape.seed), 0.0, 0
    while limit.requests is None or number < limit.requests:
        due += dice.expovariate(rate)
        if limit.seconds is not None and due >= limit.seconds:
            return
        yield due
        number += 1


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


def _count(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1
