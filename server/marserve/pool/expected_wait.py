"""How long a request that comes now would wait for its answer, as far as the last batches tell. Pure.

The guess is used to refuse what would be late anyway, so it errs on the short side: what may be quicker counts as
quicker, and where nothing is known there is no guess.

    run_s   the median of the last 32 batches' times inside the handler; one slow batch does not move it, and with fewer
            than 5 nothing is known
    free    when each open worker ends what it has: what is left of `run_s` for the batch it runs (0 if it is overdue),
            and `run_s` for a batch that was sent ahead
    wait    the batches before ours are dealt to the workers in the order in which they come free, one `run_s` each; we
            wait for the worker that is free next, and for our own run: if that were left out, a flood of requests with
            deadlines would be let in just late enough to be run in vain
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from marserve.pool.batcher import WorkerLane

KEPT_RUNS = 32
FEWEST_RUNS = 5


class RunTimes:
    """The last batches' run times, in seconds."""

    __slots__ = ("_runs", "_typical_s")

    def __init__(self) -> None:
        self._runs: deque[float] = deque(maxlen=KEPT_RUNS)
        self._typical_s: float | None = None

    def add(self, run_s: float) -> None:
        """A batch has run. One that reached no handler (0 s) says nothing."""
        if run_s > 0.0:
            self._runs.append(run_s)
            self._typical_s = None

    @property
    def typical_s(self) -> float | None:
        """The median, None while too few batches are known."""
        if self._typical_s is None and len(self._runs) >= FEWEST_RUNS:
            self._typical_s = median(self._runs)
        return self._typical_s


def expected_wait_s(batches_before: int, lanes: Iterable[WorkerLane], run_s: float, now: float) -> float | None:
    """How long until a batch that has `batches_before` it has been run; None where there is no open worker."""
    free = sorted(_free_in_s(lane, run_s, now) for lane in lanes if lane.is_open)
    if not free:
        return None
    rounds, turn = divmod(batches_before, len(free))
    return free[turn] + (rounds + 1) * run_s


def _free_in_s(lane: WorkerLane, run_s: float, now: float) -> float:
    if not lane.flights:
        return 0.0
    left_s = max(0.0, run_s - (now - lane.flights[0].sent_at))
    return left_s + run_s * (len(lane.flights) - 1)
