"""Which worker has the fewest requests, at a cost that does not grow with the number of workers. Pure."""

from __future__ import annotations

from collections import OrderedDict

from marserve.pool.dispatch.jobs import WorkerLane


class Fewest:
    """Workers by how many requests they have, of those with as many the one first that has had so many for longest."""

    __slots__ = ("_counts", "_rows")

    def __init__(self) -> None:
        self._counts: dict[WorkerLane, int] = {}
        self._rows: dict[int, OrderedDict[WorkerLane, None]] = {}  # by count; none is empty

    def put(self, lane: WorkerLane, count: int) -> None:
        """`lane` takes part, or goes on to, with so many requests."""
        before = self._counts.get(lane)
        if count == before:
            return
        if before is not None:
            self._leave(lane, before)
        self._counts[lane] = count
        self._rows.setdefault(count, OrderedDict())[lane] = None

    def add(self, lane: WorkerLane, more: int) -> None:
        """`lane` has so many requests more; less than 0: fewer. One that takes no part is no matter."""
        count = self._counts.get(lane)
        if count is not None:
            self.put(lane, count + more)

    def forget(self, lane: WorkerLane) -> None:
        """`lane` takes no part any more."""
        count = self._counts.pop(lane, None)
        if count is not None:
            self._leave(lane, count)

    def first(self) -> tuple[WorkerLane, int] | None:
        """Who has the fewest, and how many; None where nobody takes part."""
        if not self._rows:
            return None
        fewest = min(self._rows)
        return next(iter(self._rows[fewest])), fewest

    def _leave(self, lane: WorkerLane, count: int) -> None:
        row = self._rows[count]
        del row[lane]
        if not row:
            del self._rows[count]
