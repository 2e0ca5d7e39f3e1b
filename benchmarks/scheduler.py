"""What a request costs the scheduler, by the number of workers: the real dispatcher, whose workers are a list here.

    python benchmarks/run.py --only scheduler

Requests come as fast as they are answered, one a batch, in this process; nothing but the dispatcher is at work.

    idle        half of the workers have nothing to do
    waiting     all are busy with batches of 100 ms, and as many requests wait
    ahead       with batches of 20 ms: each worker has its next one already, and requests wait behind
    deadlines   as waiting; each request has a deadline, so that its wait is guessed before it is taken
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from figures import Figure, Goal

from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics

if TYPE_CHECKING:
    from plan import Plan

Kind = Literal["idle", "waiting", "ahead", "deadlines"]
RUN_S: dict[Kind, float] = {"idle": 0.1, "waiting": 0.1, "ahead": 0.02, "deadlines": 0.1}
OUTSTANDING: dict[Kind, float] = {"idle": 0.5, "waiting": 2.0, "ahead": 4.0, "deadlines": 2.0}
"""Requests that are not answered yet, for each worker."""

SIZES = (1, 64, 256, 10_000)
FAR_S = 1e6


class StandIn:
    """A dispatcher, and its workers: they have what they were sent, and answer it in that order."""

    def __init__(self, kind: Kind, workers: int) -> None:
        self._run_s = RUN_S[kind]
        self._sent: deque[tuple[str, Flight]] = deque()
        self._now = 1.0
        options = PoolOptions("m", "1", min_workers=1, max_workers=workers, queue_size=10**6, max_batch_delay_s=0.005)
        self._dispatcher = Dispatcher(options, VersionMetrics("m", "1"), self)  # type: ignore[arg-type]
        self._dispatcher.living_slots = workers
        deadline = FAR_S if kind == "deadlines" else None
        self._request = Request("r", [Part("body", b"")], [], deadline=deadline)
        self._result = Result(200, "", [])
        for number in range(workers):
            self._dispatcher.open_lane(str(number), self._now)
        for _ in range(max(1, math.ceil(OUTSTANDING[kind] * workers))):
            self._submit()
        self.answer(2 * workers + 10)  # from now on each has answered, and is known to be slow or quick

    def send(self, key: str, flight: Flight) -> None:
        """A batch leaves."""
        self._sent.append((key, flight))

    def on_answer(self, answer: Answer) -> None:
        """A request is answered: nobody looks at it."""

    def answer(self, requests: int) -> None:
        """Answer so many requests, each of which is followed by another."""
        dispatcher, results, bodies = self._dispatcher, [self._result], [b""]
        for _ in range(requests):
            key, flight = self._sent.popleft()
            self._now += 1e-4
            dispatcher.finished(key, flight.number, self._run_s, results, bodies, self._now)
            dispatcher.next_wake()
            self._submit()

    def _submit(self) -> None:
        self._dispatcher.submit(self._request, self, self._now)  # type: ignore[arg-type]
        self._dispatcher.next_wake()


def request_s(kind: Kind, workers: int, requests: int = 2000, repeats: int = 5) -> float:
    """What a request takes the dispatcher from its coming to its answer, in seconds; the best of some repeats."""
    stand_in = StandIn(kind, workers)
    best = math.inf
    for _ in range(repeats):
        begun = time.perf_counter()
        stand_in.answer(requests)
        best = min(best, (time.perf_counter() - begun) / requests)
    return best


def measure(plan: Plan) -> list[Figure]:
    """Each kind with many workers beside one, as `run.py` wants it."""
    requests, sizes = (200, (1, 256)) if plan.is_quick else (2000, SIZES)
    figures = []
    for kind in RUN_S:
        taken: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(plan.rounds):
            plan.say(f"scheduler: {kind}, round {number + 1} of {plan.rounds}")
            for size in sizes:
                taken[size].append(request_s(kind, size, requests) * 1e6)
        for size in sizes[1:]:
            goal = Goal("at most", 1.5, "compared") if size == 256 else None
            figures.append(
                Figure(f"scheduler, {kind}: a request among {size:,} workers", "µs", taken[size], "1 worker", taken[1],
                       goal=goal, digits=1)
            )  # fmt: skip
    return figures
