"""What workers use: read off the loop, seldom, and processor time that never falls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.machine.own_thread import in_own_thread
from marserve.registry.observing.processes import ProcessLooks, read_processes
from marserve.telemetry.metrics.counts import VersionMetrics

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """These are asyncio's futures."""
    return "asyncio"


def plant(proc: Path, pid: int, *, ticks: int, pages: int = 1, pss_kib: int = 1, began: int = 7) -> None:
    """A process as `/proc` shows it."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 6, str(began), "0", "0"]
    (folder / "stat").write_text(f"{pid} (odd) name) {' '.join(fields)}")
    (folder / "statm").write_text(f"9 {pages} 0")
    (folder / "smaps_rollup").write_text(f"Pss: {pss_kib} kB\nPrivate_Dirty: 0 kB\n")


TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class World:
    """A version with processes, and a clock."""

    def __init__(self, proc: Path) -> None:
        self.now = 1000.0
        self.proc = proc
        self.version = VersionMetrics("m", "1")
        self.pids: list[int] = []
        self.calls = 0
        self.looks = ProcessLooks(lambda: [(self.version, self.pids)], self.run, lambda: self.now, proc)

    def run(self, function: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        """A thread."""
        self.calls += 1
        return in_own_thread(function, name)


async def test_processor_time_of_workers_that_ended_still_counts(tmp_path: Path) -> None:
    """A new process with an old number is another one; the sum never falls."""
    world = World(tmp_path)
    seen = []
    for pids in ([(1, 100, 7), (2, 50, 7)], [(1, 150, 7)], [(1, 10, 9)], []):
        world.pids = [pid for pid, _, _ in pids]
        for pid, ticks, began in pids:
            plant(tmp_path, pid, ticks=ticks, began=began)
        await world.looks.look()
        world.now += 60
        assert world.version.processes is not None
        seen.append(world.version.processes.cpu_s)

    assert seen == pytest.approx([150 * TICK_S, 200 * TICK_S, 210 * TICK_S, 210 * TICK_S])


async def test_looks_are_as_far_apart_as_they_may_be_costly(tmp_path: Path) -> None:
    """Ten seconds for what is cheap, a minute for what makes the kernel walk page tables."""
    world = World(tmp_path)
    world.pids = [1]
    seen = []
    for after_s, pss in ((0, 10), (9, 20), (2, 30), (50, 40)):
        world.now += after_s
        plant(tmp_path, 1, ticks=1, pages=pss, pss_kib=pss)
        await world.looks.look()
        assert world.version.processes is not None
        seen.append(world.version.processes[1:])

    assert seen == [(10 * PAGE, 10 << 10), (10 * PAGE, 10 << 10), (30 * PAGE, 10 << 10), (40 * PAGE, 40 << 10)]
    assert world.calls == 3


async def test_a_look_that_hangs_delays_a_page_once_and_is_not_joined_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the last figures."""
    monkeypatch.setattr("marserve.registry.observing.processes.WAIT_S", 0.01)
    never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    calls = []

    def run(function: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        calls.append(name)
        return never

    version = VersionMetrics("m", "1")
    now = 0.0
    looks = ProcessLooks(lambda: [(version, [1])], run, lambda: now, tmp_path)

    for _ in range(3):
        await looks.look()
        now += 1000

    assert calls == ["worker-usage"]
    assert version.processes is None
    never.cancel()


def test_a_process_that_has_ended_counts_for_nothing(tmp_path: Path) -> None:
    """Nor one whose text is another's."""
    plant(tmp_path, 1, ticks=3)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "stat").write_text("no such thing")

    seen = read_processes([1, 2, 3], proportional=True, proc=tmp_path)

    assert seen.cpu_s == {(1, 7): 3 * TICK_S}
    assert (seen.resident_bytes, seen.proportional_bytes) == (PAGE, 1024)


def test_this_process_is_read() -> None:
    """The kernel's own files."""
    seen = read_processes([os.getpid()], proportional=True)

    assert sum(seen.cpu_s.values()) > 0
    assert seen.resident_bytes > 1 << 20
    assert (seen.proportional_bytes or 0) > 1 << 20
