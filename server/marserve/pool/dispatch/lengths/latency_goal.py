"""Batch sizes for a goal: the 95th percentile of the time from arrival to answer, with the best throughput within it.

The policy learns what a batch costs by its size, and by the length of its longest item where lengths are known. It
chooses how many of the waiting jobs leave together. No job waits while a worker is free: the next choice can gain
whatever waiting would. Pure: time is passed in, in seconds; it knows neither queue nor workers.

The choice: the waiting jobs are taken to leave in batches of one size, one after the other over all workers. For each
candidate size the costs tell how many jobs would be answered within the goal, and when. The size that keeps the goal
for most jobs wins; among equals the one that is done first, where the mean time to an answer counts, too. If no job can
be answered within the goal, that is about the size with the highest throughput.

The costs: the median of the last batches of each size, so that a slow one now and then does not count; between known
sizes a straight line; beyond them a fit through all. The choice goes up to twice the largest known size. One factor
before all costs is the present speed of the machine: if costs double, a few batches of any size show it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from statistics import median, median_low
from typing import Any

KEPT_RUNS = 9
LEVEL_BATCHES = 7
SURE_RUNS = 3
FIT_DECAY = 0.98
CLIP = 4.0
LEAST_LEVEL = 1e-6
# What a batch costs beyond its run: the way to the worker and back.
WAY_S = 0.0001
# A batch that takes less is not cut: the ways of two batches would take longer than it does.
SMALL_S = 0.9 * WAY_S
# Of such small batches, if their size is well known, one in so many is learned from.
LEARN_EVERY = 8
# The weight of the last answer's time against the mean time of all answers.
DONE_WEIGHT = 4.0
EXACT_SIZES = 32
# How many batches in a row the choice looks ahead over; jobs in later full batches count as late.
MAX_LOOKAHEAD = 64
PERCENTILE = 0.95
KEPT_LATENCIES = 400
KEPT_SIZES = 100
SHOWN_SIZES = 12


class BatchCosts:
    """What batches of items of about one length cost, by size."""

    def __init__(self) -> None:
        self._runs: dict[int, deque[float]] = {}
        self._costs: dict[int, float] = {}
        self._sizes: list[int] = []
        self._levels: deque[float] = deque(maxlen=LEVEL_BATCHES)
        self._level = 1.0
        self._sums = [0.0] * 5  # of 1, size, cost, size², size·cost, each decayed

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known yet."""
        return not self._sizes

    @property
    def largest(self) -> int:
        """The largest size that was seen, 0 if none was."""
        return self._sizes[-1] if self._sizes else 0

    def is_sure(self, size: int) -> bool:
        """Whether a size was seen at least `KEPT_RUNS` times."""
        runs = self._runs.get(_key(size))
        return runs is not None and len(runs) == KEPT_RUNS

    def known(self) -> dict[int, float]:
        """The known costs: size to seconds."""
        return {size: self._level * self._costs[size] for size in self._sizes}

    @property
    def sizes(self) -> list[int]:
        """The sizes that were seen, smallest first."""
        return self._sizes

    def learn(self, size: int, seconds: float) -> None:
        """Learn that a batch of `size` took `seconds`."""
        key = _key(size)
        runs = self._runs.get(key)
        if runs is not None and len(runs) >= SURE_RUNS and self._costs[key] > 0:
            self._levels.append(seconds / self._costs[key])
            self._level = max(LEAST_LEVEL, median(self._levels))
        seconds /= self._level
        if runs is not None:
            seconds = min(max(seconds, self._costs[key] / CLIP), self._costs[key] * CLIP)
        else:
            runs = self._runs[key] = deque(maxlen=KEPT_RUNS)
            insort(self._sizes, key)
        runs.append(seconds)
        self._costs[key] = median(runs)
        for index, value in enumerate((1.0, size, seconds, size * size, size * seconds)):
            self._sums[index] = FIT_DECAY * self._sums[index] + value

    def cost(self, size: int) -> float:
        """How long a batch of `size` is expected to take, in seconds; 0 while nothing is known."""
        return self._level * self._shape(size) if self._sizes else 0.0

    def _shape(self, size: int) -> float:
        """The cost at the level of 1."""
        key = _key(size)
        known = self._costs.get(key)
        if known is not None:
            return known
        place = bisect_left(self._sizes, key)
        if place == len(self._sizes):
            return self._beyond(size)
        above = self._sizes[place]
        if place == 0:
            return self._costs[above] * max(self._share_of_fixed(above), size / above)
        below = self._sizes[place - 1]
        part = (key - below) / (above - below)
        return (1 - part) * self._costs[below] + part * self._costs[above]

    def fit(self) -> tuple[float, float]:
        """A straight line through the known costs: seconds a batch, and seconds an item; neither is below 0."""
        fixed, slope = self._fit()
        return self._level * fixed, self._level * slope

    def _fit(self) -> tuple[float, float]:
        weight, sizes, costs, squares, products = self._sums
        if not weight:
            return 0.0, 0.0
        spread = weight * squares - sizes * sizes
        slope = (weight * products - sizes * costs) / spread if spread > 1e-9 * weight * weight else 0.0
        slope = min(max(slope, 0.0), costs / sizes)
        return max(0.0, (costs - slope * sizes) / weight), slope

    def _beyond(self, size: int) -> float:
        largest = self._sizes[-1]
        _, slope = self._fit()
        if len(self._sizes) == 1:  # one size gives no slope: half of its cost is taken to be for the items
            slope = self._costs[largest] / (2 * largest)
        return self._costs[largest] + slope * (size - largest)

    def _share_of_fixed(self, size: int) -> float:
        """The part of a batch's cost that does not depend on the number of its items."""
        fixed, slope = self._fit()
        whole = fixed + slope * size
        return fixed / whole if whole and len(self._sizes) > 1 else 0.5


class GoalPolicy:
    """The costs of one version's batches, and the sizes chosen by them. `goal_s` is from arrival to answer."""

    def __init__(self, goal_s: float, max_batch_size: int, *, padding_budget: float = 0.25) -> None:
        self.goal_s = goal_s
        self.max_batch_size = max_batch_size
        self.padding_budget = padding_budget
        self.chosen = 1
        self._costs: dict[int, BatchCosts] = {}
        self._latencies: deque[float] = deque(maxlen=KEPT_LATENCIES)
        self._sizes: deque[int] = deque(maxlen=KEPT_SIZES)
        self._passed_over = 0

    def choose(self, waiting: int, oldest_wait_s: float, *, workers: int = 1, length: int = 1) -> int:
        """How many of `waiting` jobs should leave now, 1 or more.

        The oldest came `oldest_wait_s` ago; the others are taken to have come at equal intervals since. `workers` share
        the work. `length` is that of a typical item.
        """
        most = min(waiting, self.max_batch_size)
        costs = self._costs.get(_bucket(length)) or self._nearest(length)
        if most <= 1 or costs is None:
            self.chosen = most if costs is not None else min(most, 2)
            return max(1, self.chosen)
        most = min(most, max(2, 2 * costs.largest))
        self.chosen = most
        cost_s = costs.cost(most)
        rounds = -(-waiting // most)
        if cost_s < SMALL_S and oldest_wait_s + rounds * (cost_s + WAY_S) <= self.goal_s:
            return most  # the usual case of quick handlers, for which the choice itself would cost too much
        workers = max(1, workers)
        best_kept, best_quickness = -1.0, -math.inf
        for size in _candidates(most, costs.sizes):
            quickness = self._quickness(size, waiting, workers, costs)
            if best_kept >= waiting and quickness <= best_quickness:
                continue  # all are kept already, and this size is not quicker
            kept = self._count_kept(size, waiting, oldest_wait_s, workers, costs)
            if (kept, quickness) > (best_kept, best_quickness):
                self.chosen, best_kept, best_quickness = size, kept, quickness
        return self.chosen

    def allows_ahead(self, waiting: int, oldest_wait_s: float, *, length: int = 1) -> bool:
        """Whether a busy worker should be sent the next batch before it has ended the present one.

        That saves the time on the wire, but jobs that come meanwhile can no longer join the batch. So it pays for a
        full batch, and where a batch's fixed cost is less than the wire's; and only if both batches keep the goal.
        """
        costs = self._costs.get(_bucket(length)) or self._nearest(length)
        if costs is None:
            return False
        size = min(waiting, self.max_batch_size)
        if size < self.max_batch_size and costs.fit()[0] >= WAY_S:
            return False
        return oldest_wait_s + 2 * costs.cost(size) + WAY_S <= self.goal_s

    def learn(self, size: int, seconds: float, *, length: int = 1) -> None:
        """Learn that a batch of `size` items, the longest of them `length` long, took `seconds`."""
        self._sizes.append(size)
        bucket = _bucket(length)
        costs = self._costs.get(bucket)
        if costs is None:
            costs = self._costs[bucket] = BatchCosts()
        elif seconds < SMALL_S and costs.is_sure(size):
            self._passed_over += 1
            if self._passed_over % LEARN_EVERY:
                return  # thousands of these a second say no more than hundreds
        costs.learn(size, seconds)

    def answered(self, latency_s: float) -> None:
        """Add the time from a request's arrival to its answer."""
        self._latencies.append(latency_s)

    def may_join(self, lengths_sum: int, count: int, longest: int, length: int) -> bool:
        """Whether an item may join a batch of `count` others without more than the budget's share being padding."""
        widest = max(longest, length)
        return lengths_sum + length >= (1.0 - self.padding_budget) * widest * (count + 1)

    @property
    def p95_s(self) -> float | None:
        """The 95th percentile of the latest answers' times, None while there are few."""
        if len(self._latencies) < 20:
            return None
        ordered = sorted(self._latencies)
        return ordered[min(len(ordered) - 1, int(PERCENTILE * len(ordered)))]

    @property
    def usual_size(self) -> int:
        """The median size of the latest batches: the last one before a pause is often smaller than all before it."""
        return median_low(self._sizes) if self._sizes else self.chosen

    def describe(self) -> dict[str, Any]:
        """The costs and the choice, for describe; in milliseconds, as the configuration."""
        described: dict[str, Any] = {
            "latencyGoalMs": _milliseconds(self.goal_s),
            "chosenBatchSize": self.usual_size,
            "costs": [
                {
                    **({} if len(self._costs) == 1 else {"lengthUpTo": 2 ** (bucket + 1) - 1}),
                    "batchMs": _milliseconds(costs.fit()[0]),
                    "itemMs": _milliseconds(costs.fit()[1]),
                    "bySize": {str(size): _milliseconds(cost) for size, cost in _thinned(costs.known())},
                }
                for bucket, costs in sorted(self._costs.items())
            ],
        }
        p95_s = self.p95_s
        if p95_s is not None:
            described["p95Ms"] = _milliseconds(p95_s)
            described["isKept"] = p95_s <= self.goal_s
        return described

    # The next two assume batches of one size that leave one after the other, one at a time for each worker.

    def _count_kept(self, size: int, waiting: int, oldest_wait_s: float, workers: int, costs: BatchCosts) -> float:
        """How many of the waiting jobs would be answered within the goal."""
        cost = costs.cost(size) + WAY_S
        full, rest = divmod(waiting, size)
        kept = 0.0
        for number in range(min(full, MAX_LOOKAHEAD)):
            done_s = (number // workers + 1) * cost
            if done_s > self.goal_s:
                break
            kept += _kept(number * size, size, waiting, oldest_wait_s, self.goal_s - done_s)
        if rest:
            rest_done_s = full // workers * cost + costs.cost(rest) + WAY_S
            kept += _kept(full * size, rest, waiting, oldest_wait_s, self.goal_s - rest_done_s)
        return kept

    def _quickness(self, size: int, waiting: int, workers: int, costs: BatchCosts) -> float:
        """How quickly all are answered: minus a weighted sum of the last answer's time and the mean time."""
        cost = costs.cost(size) + WAY_S
        full, rest = divmod(waiting, size)
        rounds, over = divmod(full, workers)
        done_s = (rounds + bool(over)) * cost
        sum_s = size * cost * (workers * rounds * (rounds + 1) / 2 + over * (rounds + 1))
        if rest:
            rest_done_s = rounds * cost + costs.cost(rest) + WAY_S
            done_s = max(done_s, rest_done_s)
            sum_s += rest * rest_done_s
        return -(DONE_WEIGHT * done_s + sum_s / waiting)

    def _nearest(self, length: int) -> BatchCosts | None:
        """The costs for the known length that is nearest to `length`; None while nothing is known."""
        if not self._costs:
            return None
        bucket = _bucket(length)
        return self._costs[min(self._costs, key=lambda known: abs(known - bucket))]


def _kept(first: int, count: int, waiting: int, oldest_wait_s: float, left_s: float) -> float:
    """How many of `count` jobs from place `first` have waited at most `left_s` so far."""
    if left_s < 0:
        return 0.0
    step_s = oldest_wait_s / waiting
    waited_s = oldest_wait_s - first * step_s
    if waited_s <= left_s:
        return float(count)
    late = math.ceil((waited_s - left_s) / step_s)
    return float(max(0, count - late))


def _candidates(most: int, seen: list[int]) -> list[int]:
    """Sizes worth comparing: all small ones, then those seen, powers of two, and all jobs at once."""
    sizes = set(range(1, min(most, 8) + 1)) | {size for size in seen if size <= most} | {most}
    power = 16
    while power < most:
        sizes.add(power)
        power *= 2
    return sorted(sizes, reverse=True)


def _key(size: int) -> int:
    """The size under which a size is learned: above `EXACT_SIZES` rounded to four significant bits."""
    if size <= EXACT_SIZES:
        return size
    step = 1 << (size.bit_length() - 4)
    return (size + step // 2) // step * step


def _bucket(length: int) -> int:
    """The number under which a length is learned: lengths between two powers of two share one."""
    return max(1, length).bit_length() - 1


def _thinned(costs: dict[int, float]) -> list[tuple[int, float]]:
    items = list(costs.items())
    if len(items) <= SHOWN_SIZES:
        return items
    return [items[round(index * (len(items) - 1) / (SHOWN_SIZES - 1))] for index in range(SHOWN_SIZES)]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
