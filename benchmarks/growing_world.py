"""A simulation of marserve grown large: front ends of one loop each, before pools of workers. Pure.

Each front end is one process with one thread, so it does one thing at a time: it takes a request in, sends a batch,
reads a batch's answers and writes them out. Each of these costs what was measured (`Costs`). Workers belong to one
front end, on its machine or beyond; a balancer before the front ends shares requests out at random, so that each sees
a Poisson stream. A batch leaves as `batchPolicy: idle` has it: as soon as a worker is idle, with what is there.

What is left out: the network between clients and front ends, the balancer, deaths, and whatever else a machine does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from queueing import Work

SCRAPE_EVERY_S = 15.0
AHEAD_BELOW_S = 0.05
"""Workers whose batches take less are sent the next one ahead: `pool/dispatch/batcher.py` has the same bound."""

MOST_UPKEEP = 0.02
"""Sizes of processes, which are what upkeep reads, are read for no more than a fiftieth of the time."""

RUN_SHARE = 0.7
"""How busy a front end may be on average: beyond it, requests wait for its loop and not for workers."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost a front end's loop, in seconds. `growing.py` measures them.

    request_s       a request, from its first byte to its answer's last one, beside its share of a batch
    batch_s         a batch, there and back
    lane_s          more of a request for each worker of the pool while requests wait
    scrape_s, scrape_worker_s   a scrape of the metrics, and more of it for each worker
    upkeep_worker_s             in each second, for each worker: its sizes are read, in all for `MOST_UPKEEP` at most
    wire_s          what a batch's way to its worker and back takes. Quick workers have their next batch by then
                    (it is sent ahead), and only the client waits for it; others stand idle meanwhile
    """

    request_s: float
    batch_s: float
    lane_s: float
    scrape_s: float
    scrape_worker_s: float
    upkeep_worker_s: float
    wire_s: float = 0.0

    def scrape(self, workers: int) -> float:
        """How long a scrape keeps the loop from anything else."""
        return self.scrape_s + workers * self.scrape_worker_s

    def upkeep(self, workers: int) -> float:
        """What share of the loop's time goes to looks at workers."""
        return min(MOST_UPKEEP, workers * self.upkeep_worker_s)

    def parts(self, rate: float, together: float, workers: int) -> dict[str, float]:
        """What takes which share of a loop's time at `rate` requests a second in batches of `together`.

        Where requests share batches, they wait for each other, and the scheduler has most to do.
        """
        looks = rate * (1 + 1 / together) * self.lane_s * workers if together > 1 else 0.0
        return {
            "requests": rate * (self.request_s + self.batch_s / together),
            "the scheduler": looks,
            "scrapes": self.scrape(workers) / SCRAPE_EVERY_S,
            "upkeep": self.upkeep(workers),
        }


@dataclass(frozen=True, slots=True)
class Seen:
    """What a simulation saw of all requests due after the first fifth of it. Times are seconds.

    `mean_s`, `p50_s` and `p99_s` are times to answer, `wait_p99_s` what comes on top of a request's own run alone;
    `together` is the mean batch, `left` what was not answered at the end; `loop` and `workers` are shares of time
    busy; `scraped_s` is how long a scrape keeps the loop.
    """

    per_second: float
    mean_s: float
    p50_s: float
    p99_s: float
    wait_p99_s: float
    together: float
    loop: float
    workers: float
    left: int
    scraped_s: float


def simulate(
    front_ends: int, workers: int, rate: float, work: Work, costs: Costs, seconds: float, seed: int = 1,
    *, scrape_at_s: float | None = None, dues: Sequence[float] | None = None,
) -> Seen:  # fmt: skip
    """Play `seconds` of `rate` requests a second. Workers are shared out evenly; a scrape comes once at most.

    With `dues` requests come to each front end at these times, and at `rate` otherwise.
    """
    dice = random.Random(seed)
    spans: list[float] = []
    waits: list[float] = []
    answered, batches, left = 0, 0, 0
    loop_s, worker_s = 0.0, 0.0
    for number in range(front_ends):
        own = workers * (number + 1) // front_ends - workers * number // front_ends
        front = _FrontEnd(own, work, costs, dice)
        front.run(_poisson(rate / front_ends, dice) if dues is None else iter(dues), seconds, scrape_at_s)
        spans += front.spans
        waits += front.waits
        answered, batches, left = answered + front.answered, batches + front.batches, left + front.left
        loop_s, worker_s = loop_s + front.loop_s, worker_s + front.worker_s
    spans.sort()
    waits.sort()
    counted = len(spans)
    return Seen(
        per_second=answered / seconds,
        mean_s=fmean(spans) if spans else math.nan,
        p50_s=spans[counted // 2] if spans else math.nan,
        p99_s=spans[min(counted - 1, int(0.99 * counted))] if spans else math.nan,
        wait_p99_s=waits[min(counted - 1, int(0.99 * counted))] if waits else math.nan,
        together=answered / batches if batches else math.nan,
        loop=loop_s / seconds / front_ends,
        workers=worker_s / seconds / workers,
        left=left,
        scraped_s=costs.scrape(math.ceil(workers / front_ends)),
    )


def _poisson(rate: float, dice: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += dice.expovariate(rate)
        yield now


_ARRIVES, _SCRAPED, _LOOP_DONE, _WORKER_DONE = range(4)


class _Batch(NamedTuple):
    """When its requests were due, and what one of them would have taken alone."""

    dues: list[float]
    alone_s: float


class _FrontEnd:
    """One loop and its workers, from an empty start."""

    def __init__(self, workers: int, work: Work, costs: Costs, dice: random.Random) -> None:
        self._workers, self._work, self._costs, self._dice = workers, work, costs, dice
        self._idle = workers
        # Upkeep comes in small pieces all the time: whatever else the loop does takes so much longer.
        self._stretch = 1 / (1 - costs.upkeep(workers))
        self._is_quick = work.service_s(work.batch) < AHEAD_BELOW_S
        self._waiting: deque[float] = deque()
        # What the loop has to do: a request that came (when it was due) or a batch that came back (its requests' dues).
        self._to_do: deque[float | _Batch | None] = deque()
        self._is_busy = False
        self._events: list[tuple[float, int, int, _Batch | None]] = []
        self._count = 0
        self._counted_from = 0.0
        self.spans: list[float] = []
        self.waits: list[float] = []
        self.answered, self.batches, self.left = 0, 0, 0
        self.loop_s, self.worker_s = 0.0, 0.0

    def run(self, dues: Iterator[float], seconds: float, scrape_at_s: float | None) -> None:
        """Requests come until `seconds` are over; what is not answered by then is left."""
        events = self._events
        self._counted_from = seconds / 5
        self._at(next(dues, math.inf), _ARRIVES, None)
        if scrape_at_s is not None:
            self._at(scrape_at_s, _SCRAPED, None)
        while events:
            now, _, kind, batch = heapq.heappop(events)
            if now > seconds:
                break
            if kind == _ARRIVES:
                self._to_do.append(now)
                self._at(next(dues, math.inf), _ARRIVES, None)
            elif kind == _SCRAPED:
                self._to_do.append(None)
            elif kind == _LOOP_DONE:
                self._is_busy = False
            else:
                assert batch is not None
                self._to_do.append(batch)
            while self._to_do and not self._is_busy:
                self._work_on(now, seconds)
        self.left = len(self._waiting) + sum(isinstance(each, float) for each in self._to_do)

    def _at(self, when: float, kind: int, batch: _Batch | None) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, batch))

    def _work_on(self, now: float, seconds: float) -> None:
        """Do the next thing; what follows from it is sent at its end."""
        costs = self._costs
        task = self._to_do.popleft()
        if isinstance(task, float):
            took = costs.request_s / 2
            self._waiting.append(task)
        elif task is None:
            took = costs.scrape(self._workers)
        else:
            took = costs.batch_s / 2 + len(task.dues) * costs.request_s / 2
            self._idle += 1
            self.answered += len(task.dues)
            for due in task.dues:
                if due >= self._counted_from:
                    span_s = now + took + (costs.wire_s if self._is_quick else 0.0) - due
                    self.spans.append(span_s)
                    self.waits.append(span_s - task.alone_s)
        while self._waiting and self._idle:
            together = min(self._work.batch, len(self._waiting))
            dues = [self._waiting.popleft() for _ in range(together)]
            took += costs.batch_s / 2
            spread = self._spread() if self._work.variation else 1.0
            runs_s = self._work.service_s(together) * spread
            self._idle -= 1
            self.batches += 1
            end = now + took + runs_s + (0.0 if self._is_quick else costs.wire_s)
            self.worker_s += max(0.0, min(runs_s, seconds - now))
            self._at(end, _WORKER_DONE, _Batch(dues, self._work.service_s() * spread))
        if self._waiting:
            took += costs.lane_s * self._workers
        took *= self._stretch
        self.loop_s += took
        self._is_busy = True
        self._at(now + took, _LOOP_DONE, None)

    def _spread(self) -> float:
        """A factor with mean 1 and the work's coefficient of variation: gamma."""
        shape = 1 / self._work.variation**2
        return self._dice.gammavariate(shape, 1 / shape)
