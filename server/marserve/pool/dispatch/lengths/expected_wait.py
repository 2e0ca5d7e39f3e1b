"""How long a request that comes now would wait for its answer, estimated from the last batches. Pure.

The estimate is used to refuse requests that would be late anyway, so it errs on the short side; without data there is
no estimate.

    run_s   the median of the last 32 batches' times inside the handler; one slow batch does not move it, and fewer than
            5 give no estimate
    free    when each open worker ends what it has: the rest of `run_s` for the batch that it runs (0 if that is
            overdue), and `run_s` for a batch that was sent ahead
    wait    the batches before the new request are dealt to the workers in the order in which they come free, one
            `run_s` each. The request waits for the next free worker and for its own run: without the latter a flood of
            requests with deadlines would be admitted just late enough to be run in vain
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

from marserve.pool.dispatch.jobs import WorkerLane

KEPT_RUNS = 32
FEWEST_RUNS = 5


class RunTimes:
    """The last batches' run times, in seconds."""

    __slots__ = ("_runs", "_typical_s")

    def __init__(self) -> None:
        self._runs: deque[float] = deque(maxlen=KEPT_RUNS)
        self._typical_s: float | None = None

    def add(self, run_s: float) -> None:
        """Add a batch's run time. A batch that reached no handler (0 s) is ignored."""
        if run_s > 0.0:
            self._runs.append(run_s)
            self._typical_s = None

    @property
    def typical_s(self) -> float | None:
        """The median, None while too few batches are known."""
        if self._typical_s is None and len(self._runs) >= FEWEST_RUNS:
            self._typical_s = median(self._runs)
        return self._typical_s


class FreeOrder:
    """The open workers that have work, in the order in which they come free. Call `note` after each change of a lane.

    Since all batches are taken to run equally long, workers with fewer batches come first, and among equals the one
    whose oldest batch was sent first. That order does not change with time, so it is kept, and an estimate costs the
    same with a thousand workers as with one.
    """

    __slots__ = ("_places", "_rows", "_turn")

    def __init__(self) -> None:
        self._rows: list[list[_Place]] = []  # of those with one batch, with two, …
        self._places: dict[WorkerLane, tuple[int, _Place]] = {}
        self._turn = 0

    def note(self, lane: WorkerLane) -> None:
        """The flights of `lane` have changed, or whether it is open."""
        self.forget(lane)
        flights = lane.flights
        if not flights or not lane.is_open:
            return
        held = len(flights)
        while len(self._rows) < held:
            self._rows.append([])
        self._turn += 1
        place = flights[0].sent_at, self._turn
        insort(self._rows[held - 1], place)
        self._places[lane] = held, place

    def forget(self, lane: WorkerLane) -> None:
        """`lane` is gone, or has nothing to do."""
        held, place = self._places.pop(lane, (0, None))
        if place is not None:
            row = self._rows[held - 1]
            del row[bisect_left(row, place)]

    def wait_s(self, batches_before: int, run_s: float, now: float) -> float | None:
        """How long until a batch has run that has `batches_before` it; None if no open worker has work.

        Only for when no worker is idle: else there is no wait.
        """
        if not self._places:
            return None
        rounds, turn = divmod(batches_before, len(self._places))
        ahead = 0
        while turn >= len(self._rows[ahead]):
            turn -= len(self._rows[ahead])
            ahead += 1
        left_s = max(0.0, run_s - (now - self._rows[ahead][turn][0]))
        return left_s + (ahead + rounds + 1) * run_s


# When the oldest batch was sent, and a number that no other place has.
_Place = tuple[float, int]
