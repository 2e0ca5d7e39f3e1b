"""Which worker has the fewest requests, at a cost that does not grow with the number of workers. Pure."""

from __future__ import annotations

from collections import OrderedDict

from marserve.pool.dispatch.jobs import WorkerLane


class Fewest:
    """Workers by how many requests they have; among equals the one that has had that number longest comes first."""

    __slots__ = ("_counts", "_rows")

    def __init__(self) -> None:
        self._counts: dict[WorkerLane, int] = {}
        self._rows: dict[int, OrderedDict[WorkerLane, None]] = {}  # by count; empty rows are deleted

    def put(self, lane: WorkerLane, count: int) -> None:
        """Add `lane` with so many requests, or change its number."""
        before = self._counts.get(lane)
        if count == before:
            return
        if before is not None:
            self._leave(lane, before)
        self._counts[lane] = count
        self._rows.setdefault(count, OrderedDict())[lane] = None

    def add(self, lane: WorkerLane, more: int) -> None:
        """Add `more` to the requests of `lane`; negative for fewer. Ignored for a lane that was not put."""
        count = self._counts.get(lane)
        if count is not None:
            self.put(lane, count + more)

    def forget(self, lane: WorkerLane) -> None:
        """Remove `lane`. Ignored for a lane that was not put."""
        count = self._counts.pop(lane, None)
        if count is not None:
            self._leave(lane, count)

    def first(self) -> tuple[WorkerLane, int] | None:
        """The lane with the fewest requests, and their number; None without lanes."""
        if not self._rows:
            return None
        fewest = min(self._rows)
        return next(iter(self._rows[fewest])), fewest

    def _leave(self, lane: WorkerLane, count: int) -> None:
        row = self._rows[count]
        del row[lane]
        if not row:
            del self._rows[count]
