"""Sends requests and notes what became of each: a closed or an open loop, never more than was asked for.

How a request is sent is a matter of its protocol: `http_line`, `grpc_line`.

In a *closed loop* so many clients each send their next request when the last one is answered. In an *open loop*
requests are due at times that know nothing of the server (Poisson), and each is timed from when it was due: what waits
because the server is slow has waited (no coordinated omission). A thread keeps these times, for an event loop's own
timers are a millisecond coarse.

It gives up early where a server does not answer any more.
"""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, Self

from marserve.tuning.payloads import Payload

MOST_CLIENTS: Final = 1024
# So many requests in a row without any answer: the server is gone.
MOST_UNANSWERED: Final = 20
CONNECT_S: Final = 10.0


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
    """Why requests failed: the status, None without an answer, and the reason in a few words.

    A status is HTTP's number or the name of gRPC's code.
    """

    status: int | str | None
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


class Target(Protocol):
    """Where requests go."""

    def line(self, payloads: Sequence[Payload], timeout_s: float) -> Line:
        """Connections that send these."""


class Line(ABC):
    """The connections to one target. They are kept between loads; use it as an async context manager."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @abstractmethod
    async def ask(self, number: int, due: float | None, tally: Tally) -> None:
        """Send the request of this number and note it, timed from when it was due, else from when it is sent."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

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
                await self.ask(number, None, tally)

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
                        await self.ask(number, due, tally)
                    return
                async with places:
                    tally.late.append(time.perf_counter() - due)
                    await self.ask(number, due, tally)

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


def run(work: Callable[[], Any]) -> None:
    """Run a coroutine function to its end, on uvloop where it is there. Ctrl-C cancels it; raises KeyboardInterrupt.

    SIGTERM and SIGHUP cancel it, too, where the process has handlers for them; these are called at the end.
    """
    with _Signals() as signals:
        _run(lambda: signals.await_unless_one_comes(work))


class _Signals:
    """Signals while a loop runs: an exception of their handlers would be lost in some callback of the loop's."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # the only one that may set handlers
            for number in (signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._came:
            self._handlers[self._came[0]](self._came[0], None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if self._cancel is not None and len(self._came) == 1:
            self._cancel()

    async def await_unless_one_comes(self, work: Callable[[], Any]) -> None:
        """The work, which the first signal cancels."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = functools.partial(loop.call_soon_threadsafe, task.cancel)
        try:
            if not self._came:
                await work()
        finally:
            self._cancel = None


def _run(work: Callable[[], Any]) -> None:
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


def _count(first: int) -> Iterator[int]:
    while True:
        yield first
        first += 1
