"""A version whose batches cost what a function says: the real dispatcher, driven by a clock that jumps. Pure.

Minutes of load pass in a fraction of a second, the same for a seed each time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import Final, Literal

from marserve.errors import MarserveError
from marserve.messages import Answer, Part, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Question
from marserve.pool.dispatch.lengths.lengths import read_rule
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.tuning.settings import KEPT, Goal, Setting

# What a batch of a size takes, in seconds; with lengths, of a size and its longest item's length.
Cost = Callable[..., float]

REQUESTS: Final = 800
STEPS: Final = 6
_OK = Result(200, "", [])
_QUEUE = 10**6
_LOOKED_AT: Final = 200
_ANY: Final = Request("r", [Part("body", b"")], [])
# A version that is asked less than this share of what it can do is asked next to nothing.
_LEAST_LOAD = 0.05


@dataclass(frozen=True, slots=True)
class Batching:
    """How a version forms its batches, beside its setting.

    With `goal_s` a policy finds their sizes (`batchPolicy: goal`). With `length_from`, the rule of its configuration,
    they are of about one length; `requests`, which come in turns, show it.
    """

    policy: Literal["idle", "fixed"] = "idle"
    goal_s: float | None = None
    length_from: str | None = None
    requests: tuple[Request, ...] = (_ANY,)


IDLE: Final = Batching()


@dataclass(eq=False)
class Simulated:
    """A version under this setting; `cost` is given a batch's size, and with lengths its longest item's."""

    setting: Setting
    cost: Cost
    batching: Batching = IDLE
    now: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        workers = self.setting.layout.workers
        options = PoolOptions(
            "m",
            "1",
            min_workers=workers,
            max_workers=workers,
            batch_size=self.setting.batch_size,
            max_batch_delay_s=max(0.0, self.setting.delay_s),
            batch_policy=self.batching.policy if self.batching.goal_s is None else "goal",
            latency_goal_s=self.batching.goal_s,
            length_from=self.batching.length_from,
            queue_size=_QUEUE,
        )
        if self.setting.layout.padding != KEPT:
            options = replace(options, padding_budget=self.setting.layout.padding)
        self._dispatcher = Dispatcher(options, VersionMetrics("m", "1"), self)
        self._length_of = read_rule(self.batching.length_from or "body_bytes")
        self._dispatcher.living_slots = workers
        self._free_at = {f"w{number}": 0.0 for number in range(workers)}
        self._ends: list[tuple[float, int, str, Flight, float]] = []
        self._sent = 0
        self._bodies = [b""] * self.setting.batch_size
        self._results = [_OK] * self.setting.batch_size
        for key in self._free_at:
            self._dispatcher.open_lane(key, 0.0)

    def run(self, arrivals: Sequence[float]) -> Simulated:
        """Let requests come at these times, in rising order, and all be answered."""
        requests = itertools.cycle(self.batching.requests)
        submit = self._dispatcher.submit
        for arrived in arrivals:
            self._pass_until(arrived)
            self.now = arrived
            submit(next(requests), _Client(arrived, self), arrived)
        self._pass_until(math.inf)
        return self

    def percentile(self, share: float) -> float:
        """The time that this share of the requests was answered within."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def _pass_until(self, when: float) -> None:
        ends, dispatcher = self._ends, self._dispatcher
        while True:
            wake = dispatcher.next_wake()
            if ends and (wake is None or ends[0][0] <= wake):
                if ends[0][0] > when:
                    return
                self.now, _, key, flight, run_s = heapq.heappop(ends)
                count = len(flight.jobs)
                dispatcher.finished(key, flight.number, run_s, self._results[:count], self._bodies[:count], self.now)
            elif wake is not None and wake <= when:
                self.now = max(self.now, wake)
                dispatcher.pump(self.now)
            else:
                return

    # ------------------------------------------------------------------------------------------- dispatcher's actions

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves: it begins when its worker is free, and ends when it has cost what it costs."""
        count = len(flight.jobs)
        if self.batching.length_from is None:
            run_s = self.cost(count)
        else:  # the batcher has looked at the lengths of these, but of one that left alone
            run_s = self.cost(count, max(job.length or self._length_of(job.request) for job in flight.jobs))
        until = self._free_at[key] = max(self.now, self._free_at[key]) + run_s
        self._sent += 1
        heapq.heappush(self._ends, (until, self._sent, key, flight, run_s))

    def ask_lengths(self, key: str, question: Question) -> None:
        """No lengths here."""

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Nothing is cancelled here."""

    def hold(self, key: str) -> None:
        """No streams here."""

    def resume(self, key: str) -> None:
        """No streams here."""

    def lane_emptied(self, key: str) -> None:
        """No worker leaves here."""

    def all_ended(self) -> None:
        """Nothing is cancelled here."""


class _Client:
    """Notes when its request is answered."""

    __slots__ = ("_arrived", "_of")

    def __init__(self, arrived: float, of: Simulated) -> None:
        self._arrived, self._of = arrived, of

    def on_answer(self, answer: Answer) -> None:
        """It is answered."""
        self._of.latencies.append(self._of.now - self._arrived)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """No streams here."""

    def on_error(self, error: MarserveError) -> None:
        """No request is refused here: the queue is as long as need be, and no worker dies."""
        raise AssertionError(error)


def highest_rate(
    setting: Setting,
    cost: Cost,
    goal: Goal,
    *,
    batching: Batching = IDLE,
    requests: int = REQUESTS,
    steps: int = STEPS,
    seed: int = 1,
) -> float:
    """The highest rate of requests, a second, that a version keeps the goal at; 0 where it never does."""
    if goal.seconds is None:
        ended = Simulated(setting, cost, batching).run([0.0] * requests)
        return requests / ended.now
    gaps = _gaps(requests, seed)

    def keeps(rate: float) -> bool:
        assert goal.seconds is not None
        ran = Simulated(setting, cost, batching).run([due / rate for due in gaps])
        return ran.percentile(goal.share) <= goal.seconds

    sizes = range(1, setting.batch_size + 1)
    usual = _usual_cost(cost, batching)
    most = setting.layout.workers * max(size / max(usual(size), 1e-9) for size in sizes)
    low, high = _LEAST_LOAD * most, most
    if not keeps(low):
        return 0.0
    for _ in range(steps):
        middle = (low + high) / 2
        if keeps(middle):
            low = middle
        else:
            high = middle
    return low


def _usual_cost(cost: Cost, batching: Batching) -> Cost:
    """What a batch of a size takes, if all of its items are as long as one of the requests: the mean over these."""
    if batching.length_from is None:
        return cost
    length_of = read_rule(batching.length_from)
    lengths = [length_of(request) for request in batching.requests[:_LOOKED_AT]]
    return lambda size: fmean(cost(size, length) for length in lengths)


@lru_cache(maxsize=8)
def _gaps(requests: int, seed: int) -> tuple[float, ...]:
    """When requests are due that know nothing of each other, one a second on average."""
    dice, now, dues = random.Random(seed), 0.0, []
    for _ in range(requests):
        now += dice.expovariate(1.0)
        dues.append(now)
    return tuple(dues)
