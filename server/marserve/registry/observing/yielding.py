"""Gives the workers of a shadow the lowest priority for processors, as long as no client waits for their answers.

It uses the system's `nice`. A process may always be made nicer; to undo that needs a right (CAP_SYS_NICE, or a limit
RLIMIT_NICE that reaches 0). Without that right nothing is done here: the workers must be as quick as any others as soon
as their version gets requests of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

from marserve.pool.pool import Pool

NICE = 19
PLAIN = 0
# New workers are looked for this often, in seconds.
LOOK_EVERY_S = 1.0
_CAP_SYS_NICE = 23
# RLIMIT_NICE counts from 20 (nice 0) to 40 (nice -20).
_LIMIT_FOR_PLAIN = 20


def can_take_back(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process may lower the niceness of others again."""
    with contextlib.suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_SYS_NICE & 1:
                return True
    limit = getattr(resource, "RLIMIT_NICE", None)
    if limit is None:
        return False
    soft = resource.getrlimit(limit)[0]
    return soft == resource.RLIM_INFINITY or soft >= _LIMIT_FOR_PLAIN


class Yielding:
    """The niceness of one version's workers. `is_yielding`: they were made nice."""

    def __init__(
        self,
        find_pool: Callable[[], Pool | None],
        has_own_requests: Callable[[], bool],
        is_able: Callable[[], bool] = can_take_back,
        renice: Callable[[int, int], None] | None = None,
    ) -> None:
        self.is_yielding = False
        self._find_pool = find_pool
        self._has_own_requests = has_own_requests
        self._is_able = is_able
        self._renice = renice or _renice
        self._nice: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look for workers, if their niceness can be undone."""
        if self._timer is None and self._is_able():
            self._look_again()

    def stop(self) -> None:
        """Stop looking, and undo the niceness."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._take_back()

    def look(self) -> None:
        """Look now: the version may have got requests of its own, or lost them."""
        if self._timer is None:
            return
        pool = self._find_pool()
        if pool is None or self._has_own_requests():
            self._take_back()
            return
        self.is_yielding = True
        pids = {pid for worker in pool.workers() for pid in (worker.pid, *worker.ranks) if pid > 0}
        for pid in pids - self._nice:
            self._renice(pid, NICE)
        self._nice = pids

    def _look_again(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_again)
        self.look()

    def _take_back(self) -> None:
        pool = self._find_pool()
        living = (
            {pid for worker in pool.workers() for pid in (worker.pid, *worker.ranks)} if pool is not None else set()
        )
        for pid in self._nice & living:
            self._renice(pid, PLAIN)
        self._nice.clear()
        self.is_yielding = False


def _renice(pid: int, value: int) -> None:
    """Set the niceness of every thread, as on Linux each has its own. Threads that have ended are skipped."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), value)
