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

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
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


class FreeOrder:
    """The open workers that have work, in the order in which they come free. Whoever changes a lane says so (`note`).

    Since all batches are taken to run equally long, that is: those with fewer batches first, and of those with as many
    the one whose oldest was sent first. That order does not change as time passes, so it is kept, and a guess costs the
    same with a thousand workers as with one.
    """

    __slots__ = ("_places", "_rows", "_turn")

    def __init__(self, lanes: Iterable[WorkerLane]) -> None:
        self._rows: list[list[_Place]] = []  # of those with one batch, with two, …
        self._places: dict[WorkerLane, tuple[int, _Place]] = {}
        self._turn = 0
        for lane in lanes:
            self.note(lane)

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
        """How long until a batch that has `batches_before` it has been run; None where no open worker has work.

        It is for when no worker is idle: else the wait is none.
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
