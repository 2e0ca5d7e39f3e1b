"""Processors of their own for workers: `cpuPinning: cores`. The least used ones are taken, so that workers share none
while there are enough."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from marserve.pool.launchers.process import WorkerProcess


class Cores:
    """Which of this process's processors the living workers were given."""

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()

    def give(self, process: WorkerProcess, count: int) -> tuple[int, ...]:
        """Keep a worker, all its processes and threads, to `count` processors until it has ended; which these are.

        Empty where the system has no such bounds, or there would be no bound.
        """
        if not hasattr(os, "sched_setaffinity"):
            return ()
        allowed = os.sched_getaffinity(0)
        if count >= len(allowed):
            return ()
        chosen = choose(allowed, self._used, count)
        for pid in process.pids:
            _keep_to(pid, chosen)
        self._used.update(chosen)
        process.exited.add_done_callback(lambda _: self._used.subtract(chosen))
        return chosen


def choose(allowed: Collection[int], used: Mapping[int, int], count: int) -> tuple[int, ...]:
    """`count` of the processors, those with the fewest workers first, in order."""
    return tuple(sorted(sorted(allowed, key=lambda core: (used.get(core, 0), core))[: max(1, count)]))


def _keep_to(pid: int, cores: Iterable[int]) -> None:
    """Every thread that the process has; those that it starts later are like the one that starts them."""
    cores = tuple(cores)
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        threads = [pid]
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(thread, cores)
