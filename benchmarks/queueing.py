"""How many workers a load needs: formulas of queueing, pure. `growing_world.py` is the judge of what they say.

    offered load    a = rate x service time, in workers
    Erlang C        the chance that a request has to wait, of `workers` that take one request each at a time
    waits           exponential beyond that; for service times that vary otherwise, times (1 + c²) / 2 (Allen, Cunneen)
    batches         a worker that takes b requests together needs `fixed_s` + b x `item_s` for them

Times are seconds, rates requests a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a handler takes: a batch of b costs `fixed_s` + b x `item_s`, at most `batch` together.

    `variation` is the service time's coefficient of variation: 0 for always the same, 1 for exponential.
    """

    fixed_s: float
    item_s: float = 0.0
    batch: int = 1
    variation: float = 0.0

    def service_s(self, together: int = 1) -> float:
        """What a batch of `together` takes."""
        return self.fixed_s + together * self.item_s

    @property
    def per_worker(self) -> float:
        """Requests a second that a worker can answer at most: in full batches."""
        return self.batch / self.service_s(self.batch)


def erlang_c(workers: int, offered: float) -> float:
    """The chance that an arrival finds all workers busy; 1 where they cannot keep up. By Erlang B's recursion."""
    if offered >= workers:
        return 1.0
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - offered / workers * (1 - blocked))


def mean_wait_s(workers: int, rate: float, work: Work) -> float:
    """How long a request waits on average for a worker, without batches; infinity where they cannot keep up."""
    offered = rate * work.service_s()
    if offered >= workers:
        return math.inf
    exponential = erlang_c(workers, offered) * work.service_s() / (workers - offered)
    return exponential * (1 + work.variation**2) / 2


def wait_within_s(share: float, workers: int, rate: float, work: Work) -> float:
    """The wait that this share of requests stays within, without batches."""
    offered = rate * work.service_s()
    if offered >= workers:
        return math.inf
    late = 1 - share
    waiting = erlang_c(workers, offered)
    if waiting <= late:
        return 0.0
    beyond = work.service_s() / (workers - offered) * (1 + work.variation**2) / 2
    return beyond * math.log(waiting / late)


def workers_for(rate: float, work: Work, wait_s: float, share: float = 0.99, *, utilisation: float = 0.8) -> int:
    """The fewest workers with which this share waits at most `wait_s`, by the formulas.

    With batches: as many as keep up while each is busy for `utilisation` of its time, with batches as large as a wait
    of `wait_s` allows, for a batch's run is what the next one waits for.
    """
    if work.batch == 1:
        workers = max(1, math.floor(rate * work.service_s()) + 1)
        while wait_within_s(share, workers, rate, work) > wait_s:
            workers += 1
        return workers
    together = work.batch
    while together > 1 and work.service_s(together) > max(wait_s, work.service_s()):
        together -= 1
    return max(1, math.ceil(rate * work.service_s(together) / together / utilisation))
