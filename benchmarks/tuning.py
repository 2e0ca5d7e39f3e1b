"""How good the setting is that `marserve tune` finds, beside an exhaustive search: in simulated worlds.

    python benchmarks/run.py --only tuning

A world is a machine of four processors and a model whose batches cost what no straight line says, each off by some
percent. More threads make the part of a batch shorter that is computed, and take processors from other workers. The
search asks it for a few batches and measurements; the exhaustive search tries every setting at seven rates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from figures import Figure
from figures import Goal as Bound

from marserve.tuning.search import Sample, search
from marserve.tuning.settings import Goal, Layout, Setting, layouts, space
from marserve.tuning.simulated import Simulated, highest_rate

if TYPE_CHECKING:
    from plan import Plan

CORES = 4
COUNTS = (1, 2, 4)  # of workers, and of threads of each
WORLDS = 20


@dataclass
class World:
    """What batches cost here: a part for the batch, one for each item with a step every few items, and the others'
    share of the processors. Some of it is shorter with more threads. Each batch is off by some percent. `asked` counts
    requests.
    """

    seed: int
    asked: int = 0

    def __post_init__(self) -> None:
        dice = random.Random(self.seed)
        self._fixed = dice.uniform(0.001, 0.010)
        self._item = dice.uniform(0.0003, 0.004)
        self._bend = dice.uniform(0.8, 1.1)
        self._step = dice.choice((1, 1, 4, 8))
        self._crowding = dice.uniform(0.1, 0.8)
        self._spread = dice.uniform(0.02, 0.12)
        self._parallel = dice.uniform(0.0, 0.95)
        self._overhead = dice.uniform(0.0, 0.1)
        self.goal = Goal(0.99, dice.uniform(3, 12) * (self._fixed + self._item))
        self._dice = random.Random(self.seed + 1000)

    def cost(self, layout: Layout, size: int) -> float:
        """What a batch costs on average."""
        padded = math.ceil(size / self._step) * self._step
        threads = max(1, layout.threads)
        part = 1 - self._parallel + self._parallel / threads + self._overhead * (threads - 1)
        busy = layout.workers * (1 + self._parallel * (threads - 1))  # processors' worth of work at a time
        crowded = max(1.0, busy / CORES) * (1 + self._crowding * (min(CORES, busy) - 1) / (CORES - 1))
        return (self._fixed + self._item * padded**self._bend * part) * crowded

    def _noisy(self, layout: Layout, size: int) -> float:
        return self.cost(layout, size) * math.exp(self._dice.gauss(0, self._spread))

    def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
        """Batches on each worker."""
        self.asked += size * batches * layout.workers
        return [self._noisy(layout, size) for _ in range(batches)]

    def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
        """An open loop, other times each time."""
        self.asked += requests
        ran = Simulated(setting, lambda size: self._noisy(setting.layout, size))
        if rate is None:
            return Sample(requests / ran.run([0.0] * requests).now)
        due, dues = 0.0, []
        for _ in range(requests):
            due += self._dice.expovariate(rate)
            dues.append(due)
        ran.run(dues)
        return Sample(requests / ran.now, ran.percentile(self.goal.share))

    def has_time(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Outcome:
    """How the search fared beside an exhaustive one: the part of its best rate, and of its requests."""

    part: float
    requests: float


def play(seed: int, settings: Sequence[Setting] = (), requests: int = 2000, steps: int = 6) -> Outcome:
    """Search a world, and try all of its settings, each at some rates with so many requests."""
    world = World(seed)
    settings = settings or space(layouts("", COUNTS, COUNTS, cores=CORES))
    found = search(settings, world.goal, world)

    def truly(setting: Setting) -> float:
        return highest_rate(
            setting, lambda size: world.cost(setting.layout, size), world.goal, requests=requests, steps=steps, seed=7
        )

    best = max(map(truly, settings))
    chosen = truly(found.best.setting) if found.best is not None else 0.0
    return Outcome(chosen / best if best else 1.0, world.asked / (len(settings) * (steps + 1) * requests))


def measure(plan: Plan) -> list[Figure]:
    """Twenty worlds a round, as `run.py` wants it."""
    found = []
    worlds, requests = (2, 400) if plan.is_quick else (WORLDS, 2000)
    for number in range(plan.rounds):
        for world in range(worlds):
            plan.say(f"tuning: round {number + 1} of {plan.rounds}, world {world + 1} of {worlds}")
            found.append(play(number * worlds + world, requests=requests))
    return [
        Figure(
            "tuning: the best rate of an exhaustive search that the setting found reaches",
            "%",
            [100 * each.part for each in found],
            goal=Bound("at least", 90, "own"),
        ),
        Figure(
            "tuning: requests, of those of an exhaustive search",
            "%",
            [100 * each.requests for each in found],
            goal=Bound("at most", 5, "own"),
            digits=1,
        ),
    ]
