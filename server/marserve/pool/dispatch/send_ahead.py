"""Which busy workers may be sent a batch ahead, and which of them is the least busy. Pure.

This is asked for each request that waits, so its cost must not grow with the number of workers. Workers with room that
have the same number of batches in flight and are about equally quick share a row. A row is in the order in which they
came into it: its first worker has run its batch longest. The number of rows is small and does not depend on the number
of workers; the least busy worker is the first of one of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict

from marserve.pool.dispatch.batcher import (
    AHEAD_BELOW_S,
    AHEAD_FOR_GOAL_BELOW_S,
    AHEAD_OF_PRIORITIES_BELOW_S,
    MANY_AHEAD_BELOW_S,
    MAX_IN_FLIGHT,
    MAX_JOBS_IN_FLIGHT,
)
from marserve.pool.dispatch.jobs import WorkerLane

# A batch is sent ahead to workers whose batches take less than one of these, in seconds.
BOUNDS = (MANY_AHEAD_BELOW_S, AHEAD_OF_PRIORITIES_BELOW_S, AHEAD_FOR_GOAL_BELOW_S, AHEAD_BELOW_S)


class RoomAhead:
    """The busy workers with room for another batch. Call `note` after each change of a lane, `forget` at its end.

    A lane is in at most one row, which it remembers (`WorkerLane.row`), so it belongs to one `RoomAhead` only.
    """

    __slots__ = ("_rows", "_turn")

    def __init__(self) -> None:
        # By batches in flight, and by how many of the bounds its batches exceed.
        self._rows: dict[tuple[int, int], OrderedDict[WorkerLane, int]] = {}
        self._turn = 0

    def note(self, lane: WorkerLane) -> None:
        """Something of `lane` has changed: its flights, how long its batches take, or whether it is open.

        It has room if it is open, runs no group, is known to be quick, and has few batches. A worker that overlaps may
        be slow: it begins with the batch at once.
        """
        row = None
        flights, run_s = lane.flights, lane.mean_run_s
        if flights and lane.is_open and (0 < run_s < AHEAD_BELOW_S or lane.overlaps) and not flights[0].is_group:
            held, slow = len(flights), 0 if lane.overlaps else bisect_right(BOUNDS, run_s)
            if held < MAX_IN_FLIGHT or (
                not slow and not lane.overlaps and held * len(flights[-1].jobs) < MAX_JOBS_IN_FLIGHT
            ):
                row = self._rows.get((held, slow))
                if row is None:
                    row = self._rows[held, slow] = OrderedDict()
        before = lane.row
        if row is before:
            return
        if before is not None:
            del before[lane]
        lane.row = row
        if row is not None:
            self._turn += 1
            row[lane] = self._turn

    def forget(self, lane: WorkerLane) -> None:
        """`lane` is gone."""
        if lane.row is not None:
            del lane.row[lane]
            lane.row = None

    def least_busy(self, below_s: float) -> WorkerLane | None:
        """The lane with the fewest batches in flight, among equals the longest in its row; None if no lane has room.

        Only workers whose batches take less than `below_s` count, one of `BOUNDS`, and those that overlap.
        """
        slowest = bisect_left(BOUNDS, below_s)
        best: WorkerLane | None = None
        least = (0, 0)
        for (held, slow), row in self._rows.items():
            if row and slow <= slowest:
                lane, turn = next(iter(row.items()))
                if best is None or (held, turn) < least:
                    best, least = lane, (held, turn)
        return best

    def has_any(self, below_s: float) -> bool:
        """Whether any worker has room whose batches take less than `below_s`, one of `BOUNDS`, or that overlaps."""
        slowest = bisect_left(BOUNDS, below_s)
        return any(row and slow <= slowest for (_, slow), row in self._rows.items())

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))
