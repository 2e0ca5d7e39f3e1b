"""Metrics pages for those who ask: written in short steps, so that requests are answered meanwhile.

A page in the making is shared by all who asked before its first line was written; who comes later gets the next one.
So each page is as new as its scrape, twenty scrapes at once cost two pages, and pages are written one after the other.
Between two steps the event loop runs, and numbers move: each family is of one moment, or a part of a family of 64
series, and a histogram's buckets, count and sum always fit together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

from marserve.errors import TooManyScrapes
from marserve.telemetry.metrics.page.foreign import ForeignCollectors
from marserve.telemetry.metrics.page.writer import EOF
from marserve.telemetry.metrics.server_metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

# When a step ends, after the piece that is being written: in all it takes less than a millisecond.
STEP_S: Final = 0.0005
# So many pages may be with their clients at once. Prometheus, a pair of it and people's browsers are fewer.
MAX_SCRAPES: Final = 32
# For so long a client keeps its place: Prometheus gives a scrape up after 10 s.
PATIENCE_S: Final = 10.0

Look = Callable[[], Awaitable[None]]


class Page(NamedTuple):
    """A page in its parts, in order, and its content type. Scrapes that share a page share its bytes."""

    parts: tuple[bytes, ...]
    content_type: str

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return sum(map(len, self.parts))


class Scrapes:
    """Writes pages of `metrics`, with what `foreign` collects.

    With `negotiates` clients may have OpenMetrics, else all get text 0.0.4. `looks` are awaited before each page, at
    the same time as the collectors. `clock` measures steps, and `now` how long clients take.
    """

    def __init__(
        self,
        metrics: Metrics,
        foreign: ForeignCollectors,
        *,
        negotiates: bool = True,
        looks: Sequence[Look] = (),
        clock: Callable[[], float] = perf_counter,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._metrics = metrics
        self._foreign = foreign
        self._negotiates = negotiates
        self._looks = looks
        self._clock = clock
        self._now = now
        self._lock = asyncio.Lock()
        self._coming: dict[tuple[str, frozenset[str]], asyncio.Task[Page]] = {}
        # Those that take a page, the oldest first: their limits of time, and since when.
        self._taking: dict[asyncio.Timeout, float] = {}
        if metrics.mode == "prometheus":
            metrics.declare_rows("marserve_collector_failures_total", foreign.failures)

    def registry(self) -> CollectorRegistry:
        """All of the page as a registry of prometheus_client. It must be read on the event loop."""
        # Importing the library takes 14 ms, which a start does without.
        from marserve.telemetry.metrics.page.registry import registry_of

        registry = registry_of(lambda: self._metrics.families)
        for source in self._foreign.sources:
            registry.register(source.collector)
        return registry

    @contextlib.asynccontextmanager
    async def taking(self) -> AsyncIterator[None]:
        """One client takes a page, from its request to the last byte. Raises TooManyScrapes.

        Raises TimeoutError in the place where it waits, when it has taken longer than `PATIENCE_S` and another client
        wants its place.
        """
        now = self._now()
        if len(self._taking) >= MAX_SCRAPES:
            slowest, since = next(iter(self._taking.items()))
            if now - since < PATIENCE_S:
                raise TooManyScrapes(MAX_SCRAPES)
            del self._taking[slowest]
            slowest.reschedule(asyncio.get_running_loop().time())
            self._metrics.count_refused("slow_reader")
        async with asyncio.timeout(None) as limit:
            self._taking[limit] = now
            try:
                yield
            finally:
                self._taking.pop(limit, None)

    @property
    def open(self) -> int:
        """How many clients take a page."""
        return len(self._taking)

    async def page(self, accept: str = "", names: Sequence[str] = ()) -> Page:
        """The page in the format that `accept` asks for, or only the samples with exactly these names."""
        if self._metrics.mode == "log":
            return Page((), CONTENT_TYPE)
        key = accept if self._negotiates else "", frozenset(names)
        task = self._coming.get(key)
        if task is None:
            task = self._coming[key] = asyncio.create_task(self._write(*key))
        # A client that goes leaves the page to the others.
        return await asyncio.shield(task)

    async def _write(self, accept: str, wanted: frozenset[str]) -> Page:
        async with self._lock:
            # Who comes from now on wants a newer page.
            del self._coming[accept, wanted]
            # Importing the library takes 14 ms, which a start does without.
            from marserve.telemetry.metrics.page.registry import format_for

            form = format_for(accept)
            if form.is_open:
                self._metrics.keep_examples()
            looks = [asyncio.ensure_future(look()) for look in self._looks]
            others: list[str] = []
            if self._metrics.mode == "prometheus":
                others = await self._foreign.write(form, wanted, self._metrics.names)
            if looks:
                await asyncio.wait(looks)
            parts = await self._in_steps(self._metrics.pieces(wanted, is_open=form.is_open))
            parts += [text.encode() for text in others]
            if form.is_open:
                parts.append(EOF.encode())
            return Page(tuple(parts), form.content_type)

    async def _in_steps(self, pieces: Iterator[str]) -> list[bytes]:
        parts: list[bytes] = []
        step: list[str] = []
        began = self._clock()
        for piece in pieces:
            step.append(piece)
            if self._clock() - began >= STEP_S:
                parts.append("".join(step).encode(errors="replace"))
                step.clear()
                await asyncio.sleep(0)
                began = self._clock()
        parts.append("".join(step).encode(errors="replace"))
        return parts
