"""A pool without processes whose batches cost what a function says: open-loop arrivals in, times to answer out.

The real `Dispatcher` is driven by a clock that jumps: minutes of load pass in a second, the same for a seed each time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from marserve.errors import MarserveError, QueueFull
from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Question
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

OK = Result(200, "", [])

Cost = Callable[[int, int, float], float]


def poisson(rate: float, number: int, seed: int) -> list[float]:
    """Times of `number` arrivals that know nothing of each other, `rate` a second on average."""
    dice, now, times = random.Random(seed), 0.0, []
    for _ in range(number):
        now += dice.expovariate(rate)
        times.append(now)
    return times


def bursty(rate: float, number: int, seed: int) -> list[float]:
    """The same on average, but for 0.1 s at 2.2 times the rate, then for 0.2 s at 0.4 times, and so on."""
    dice, now, times = random.Random(seed), 0.0, []
    is_burst, until = False, 0.0
    while len(times) < number:
        present = rate * (2.2 if is_burst else 0.4)
        step = dice.expovariate(present)
        if now + step > until:
            now = until
            is_burst = not is_burst
            until = now + (0.1 if is_burst else 0.2)
            continue
        now += step
        times.append(now)
    return times


@dataclass(eq=False)
class _Client:
    arrived: float
    pool: KnownCost

    def on_answer(self, answer: Answer) -> None:
        self.pool.latencies.append((self.arrived, self.pool.now - self.arrived))

    def on_piece(self, piece: Answer, last: bool) -> None:
        raise AssertionError("no streams here")

    def on_error(self, error: MarserveError) -> None:
        self.pool.refused += 1


@dataclass(eq=False)
class KnownCost:
    """One pool. `cost` is given a batch's size, its longest item's length and the time, and says how long it takes.

    With `length_s` the handler can be asked for lengths, and takes so long for each.
    """

    options: PoolOptions
    cost: Cost
    workers: int = 1
    length_s: float | None = None
    asked: int = 0
    now: float = 0.0
    refused: int = 0
    latencies: list[tuple[float, float]] = field(default_factory=list)
    batches: list[tuple[float, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(self.options, VersionMetrics("m", "1"), self)
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._free_at: dict[str, float] = {}
        self._lengths: dict[str, int] = {}
        self.dispatcher.living_slots = self.workers
        for number in range(self.workers):
            self._free_at[f"w{number}"] = 0.0
            self.dispatcher.open_lane(f"w{number}", 0.0)
        if self.length_s is not None:
            self.dispatcher.offer_lengths()

    def run(self, arrivals: Iterable[float], lengths: Iterable[int] | None = None) -> KnownCost:
        """Let requests come at these times, each with its length (1 unless given), and all be answered."""
        sizes = iter(lengths) if lengths is not None else None
        for number, arrived in enumerate(arrivals):
            self._pass_until(arrived)
            self.now = arrived
            length = next(sizes) if sizes is not None else 1
            name = str(number)
            self._lengths[name] = length
            request = Request(name, [Part("body", name.encode())], headers=[(b"length", b"%d" % length)])
            try:
                self.dispatcher.submit(request, _Client(arrived, self), arrived)
            except QueueFull:
                self.refused += 1
        self._pass_until(float("inf"))
        assert self.dispatcher.is_empty
        return self

    def _pass_until(self, when: float) -> None:
        while True:
            wake = self.dispatcher.next_wake()
            end = self._ends[0][0] if self._ends else None
            if end is not None and (wake is None or end <= wake):
                if end > when:
                    return
                self.now, _, happen = heapq.heappop(self._ends)
                happen()
            elif wake is not None:
                if wake > when:
                    return
                self.now = max(self.now, wake)
                self.dispatcher.pump(self.now)
            else:
                return

    def percentile(self, share: float, *, since: float = 0.0, until: float = float("inf")) -> float:
        """The time that this share of the requests which came in the span were answered within."""
        spans = sorted(latency for arrived, latency in self.latencies if since <= arrived < until)
        return spans[min(len(spans) - 1, int(share * len(spans)))]

    # ------------------------------------------------------------------------------------------- dispatcher's actions

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves: it begins when its worker is free, and ends when it cost what it costs."""
        begins = max(self.now, self._free_at[key])
        lengths = [self._lengths[job.request.id] for job in flight.jobs]
        run_s = self.cost(len(flight.jobs), max(lengths), begins)
        self.batches.append((begins, lengths))
        self._occupy(key, begins + run_s, lambda: self._finish(key, flight, run_s))

    def _finish(self, key: str, flight: Flight, run_s: float) -> None:
        count = len(flight.jobs)
        self.dispatcher.finished(key, flight.number, run_s, [OK] * count, [b""] * count, self.now)

    def ask_lengths(self, key: str, question: Question) -> None:
        """A worker is asked how long some inputs are: it says so before it begins its next batch."""
        assert self.length_s is not None
        lengths = [self._lengths[job.request.id] for job in question.jobs]
        self.asked += len(lengths)
        took_s = self.length_s * len(lengths)
        self._occupy(
            key,
            max(self.now, self._free_at[key]) + took_s,
            lambda: self.dispatcher.told_lengths(key, question.number, took_s, lengths),
        )

    def _occupy(self, key: str, until: float, then: Callable[[], None]) -> None:
        self._free_at[key] = until
        heapq.heappush(self._ends, (until, next(self._order), then))

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Nobody cancels here."""

    def lane_emptied(self, key: str) -> None:
        """Nobody leaves here."""

    def all_ended(self) -> None:
        """Nobody cancels here."""
