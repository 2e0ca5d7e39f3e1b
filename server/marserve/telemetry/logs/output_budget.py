"""Bounds what workers print into the model log, and the event loop's time for it. Pure.

Callers pass the time, in seconds on the monotonic clock. A line costs its bytes and those of its head. All workers
share one allowance. Once it is empty, each worker has a small one of its own, so that a worker that floods the log
cannot silence the others. A worker over both is cut: for `CUT_S` its lines are counted and dropped.
"""

from __future__ import annotations

import math

from marserve.telemetry.logs.bucket import Bucket

# The length of the head before each line in the log.
HEAD_BYTES = 100
SHARED_BYTES_PER_S, SHARED_BURST_BYTES = 1 << 20, 16 << 20
OWN_BYTES_PER_S, OWN_BURST_BYTES = 32 << 10, 1 << 20
# Errors that a worker logs while its other lines are dropped.
ERROR_BYTES_PER_S, ERROR_BURST_BYTES = 8 << 10, 64 << 10
# Tracebacks of failed requests, which clients can cause.
TRACEBACK_BYTES_PER_S, TRACEBACK_BURST_BYTES = 4 << 10, 64 << 10
CUT_S = 1.0
# The least time between two reads of one pipe.
TURN_S = 0.002
# The share of the event loop's time that all reads together may take, and for how many seconds it can be saved up. The
# same for the small share that each pipe always has.
LOOP_SHARE, LOOP_BURST_S = 0.05, 0.5
OWN_LOOP_SHARE, OWN_LOOP_BURST_S = 0.0002, 10.0


class OutputBudget:
    """The budget of one model log for all workers. `left_out` counts the lines that were dropped."""

    def __init__(self) -> None:
        self.left_out = 0
        self._shared = Bucket(SHARED_BYTES_PER_S, SHARED_BURST_BYTES)
        self._loop = _Share(LOOP_SHARE, LOOP_BURST_S)

    def allowance(self) -> Allowance:
        """A new worker's allowance."""
        return Allowance(self, self._shared)

    def turns(self) -> Turns:
        """A new pipe's turns."""
        return Turns(self._loop)


class Turns:
    """Decides when one pipe is read."""

    def __init__(self, loop: _Share) -> None:
        self._loop = loop
        self._own = _Share(OWN_LOOP_SHARE, OWN_LOOP_BURST_S)

    def next(self, now: float, spent_s: float) -> float:
        """When to read it again, if its last turn ended at `now` and took `spent_s` of processor time."""
        return max(now + TURN_S, min(self._loop.spend(now, spent_s), self._own.spend(now, spent_s)))


class Allowance:
    """The allowance of one worker. `cut_until` is when its lines are taken again; 0 while it is not cut."""

    def __init__(self, budget: OutputBudget, shared: Bucket) -> None:
        self.cut_until = 0.0
        self._budget = budget
        self._shared = shared
        self._own = Bucket(OWN_BYTES_PER_S, OWN_BURST_BYTES)
        self._errors = Bucket(ERROR_BYTES_PER_S, ERROR_BURST_BYTES)
        self._tracebacks = Bucket(TRACEBACK_BYTES_PER_S, TRACEBACK_BURST_BYTES)
        self._lines = self._bytes = 0

    def admit(self, now: float, lines: int, size: int) -> bool:
        """Whether these lines of `size` bytes are taken; if not, the worker is cut."""
        if self.cut_until:
            return False
        cost = lines * HEAD_BYTES + size
        if self._shared.spend(now, cost) or self._own.spend(now, cost):
            return True
        self.cut_until = now + CUT_S
        return False

    def admit_error(self, now: float, size: int) -> bool:
        """Whether an error's line is taken from a cut worker."""
        return self._errors.spend(now, HEAD_BYTES + size)

    def admit_traceback(self, now: float, size: int) -> bool:
        """Whether the traceback of a failed request is taken."""
        return self._tracebacks.spend(now, size)

    def leave_out(self, lines: int, size: int) -> None:
        """Count lines of `size` bytes that are dropped."""
        self._lines += lines
        self._bytes += size
        self._budget.left_out += lines

    def end_cut(self) -> tuple[int, int]:
        """End the cut; returns how many lines and bytes were dropped during it."""
        self.cut_until = 0.0
        lines, size = self._lines, self._bytes
        self._lines = self._bytes = 0
        return lines, size


class _Share:
    """A share of the event loop's time."""

    def __init__(self, share: float, burst_s: float) -> None:
        self._share, self._burst_s = share, burst_s
        self._free_at = -math.inf

    def spend(self, now: float, spent_s: float) -> float:
        """Book `spent_s`; returns when the share has room again."""
        self._free_at = max(self._free_at, now - self._burst_s) + spent_s / self._share
        return self._free_at
