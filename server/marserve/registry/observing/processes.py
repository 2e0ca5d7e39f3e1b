"""What the processes of workers use: processor time and memory, read for the metrics page.

`/proc` is read in a thread, and only when a page is asked for: processor time and resident memory at most every
`EVERY_S`, proportional memory at most every `PROPORTIONAL_EVERY_S`, for the kernel walks page tables for it. With very
many workers the looks are rarer, so that they never take more than a fiftieth of the time. A page does not wait for a
look that takes longer than `WAIT_S`: it shows the last figures.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from marserve.pool.worker_end.memory import held_bytes, resident_bytes
from marserve.telemetry.metrics.counts import Processes, VersionMetrics

EVERY_S: Final = 10.0
PROPORTIONAL_EVERY_S: Final = 60.0
WAIT_S: Final = 0.2
# A look that took a second is followed by so many seconds without one.
REST: Final = 50

Pids = Sequence[int]


class Seen(NamedTuple):
    """One process as it was read: seconds of processors by its number and its start, and bytes."""

    cpu_s: Mapping[tuple[int, int], float]
    resident_bytes: int
    proportional_bytes: int | None


Reading = tuple[list[Seen], float]
RunInThread = Callable[[Callable[[], Reading], str], "asyncio.Future[Reading]"]


class ProcessLooks:
    """Looks at the workers of all versions. `run` calls a function in a thread that the server need not wait for."""

    def __init__(
        self,
        versions: Callable[[], Iterable[tuple[VersionMetrics, Pids]]],
        run: RunInThread,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self._versions = versions
        self._run = run
        self._clock = clock
        self._proc = proc
        self._next_at = self._next_proportional_at = 0.0
        self._call: asyncio.Future[Reading] | None = None
        # Processor time by process, as it was at the last look, of versions that were there then.
        self._before: dict[VersionMetrics, Mapping[tuple[int, int], float]] = {}

    async def look(self) -> None:
        """Look, if it is time to; returns when the figures are there, or after `WAIT_S`."""
        now = self._clock()
        if self._call is not None or now < self._next_at:
            return
        versions = list(self._versions())
        wants_proportional = now >= self._next_proportional_at
        pids = [each for _, each in versions]

        def read() -> Reading:
            began = time.perf_counter()
            seen = [read_processes(each, proportional=wants_proportional, proc=self._proc) for each in pids]
            return seen, time.perf_counter() - began

        def take(call: asyncio.Future[Reading]) -> None:
            self._call = None
            if call.cancelled() or call.exception() is not None:
                return
            found, took_s = call.result()
            self._next_at = now + max(EVERY_S, REST * took_s)
            if wants_proportional:
                self._next_proportional_at = now + max(PROPORTIONAL_EVERY_S, REST * took_s)
            self._take([version for version, _ in versions], found)

        call = self._call = self._run(read, "worker-usage")
        call.add_done_callback(take)
        await asyncio.wait([call], timeout=WAIT_S)

    def _take(self, versions: Sequence[VersionMetrics], found: Sequence[Seen]) -> None:
        before, self._before = self._before, {}
        for version, seen in zip(versions, found, strict=True):
            last, its = version.processes, before.get(version, {})
            cpu_s = 0.0 if last is None else last.cpu_s
            cpu_s += sum(max(0.0, used - its.get(process, 0.0)) for process, used in seen.cpu_s.items())
            proportional = seen.proportional_bytes
            if proportional is None and last is not None:
                proportional = last.proportional_bytes
            version.processes = Processes(round(cpu_s, 3), seen.resident_bytes, proportional)
            self._before[version] = seen.cpu_s


def read_processes(pids: Pids, *, proportional: bool, proc: Path = Path("/proc")) -> Seen:
    """Read these processes; one that has ended meanwhile counts for nothing. Blocks."""
    cpu_s: dict[tuple[int, int], float] = {}
    for pid in pids:
        try:
            text = (proc / str(pid) / "stat").read_text()
            # The second field is the program's name in parentheses and may hold anything.
            fields = text[text.rindex(")") + 1 :].split()
            used, began = int(fields[11]) + int(fields[12]), int(fields[19])
        except (OSError, ValueError, IndexError):
            continue
        cpu_s[pid, began] = used / os.sysconf("SC_CLK_TCK")
    return Seen(
        cpu_s,
        sum(resident_bytes(pid, proc) for pid in pids),
        sum(held_bytes(pid, proc).proportional for pid in pids) if proportional else None,
    )
