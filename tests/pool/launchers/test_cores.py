"""Workers get processors of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from marserve.pool.launchers import cores as cores_module
from marserve.pool.launchers.cores import Cores, choose
from marserve.pool.launchers.process import WorkerProcess
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="processors are chosen on Linux alone"),
]

NOTHING = """
def handle(data, context):
    return data and [b""] * len(data)
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("used", "count", "chosen"),
    [
        ({}, 2, (0, 1)),
        ({0: 1, 1: 1}, 2, (2, 3)),
        ({0: 1, 1: 1, 2: 1}, 2, (0, 3)),
        ({0: 2, 1: 1, 2: 1, 3: 1}, 1, (1,)),
        ({}, 9, (0, 1, 2, 3)),
    ],
)
def test_the_least_used_processors_are_chosen(used: dict[int, int], count: int, chosen: tuple[int, ...]) -> None:
    """None is shared while there are enough; then those with the fewest workers."""
    assert choose({3, 2, 1, 0}, used, count) == chosen


async def test_processors_of_an_ended_worker_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way it ended."""
    monkeypatch.setattr(cores_module, "_keep_to", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cores = Cores()
    first, second = (WorkerProcess(pid, asyncio.get_running_loop().create_future()) for pid in (1, 2))

    taken = [cores.give(first, 2), cores.give(second, 2)]
    first.exited.set_result(None)
    await asyncio.sleep(0)

    assert taken == [(0, 1), (2, 3)]
    assert cores.give(WorkerProcess(3, asyncio.get_running_loop().create_future()), 2) == (0, 1)
    assert cores.give(second, 4) == ()


@pytest.mark.parametrize("start", ["fresh", "auto"])
async def test_workers_keep_to_processors_of_their_own(tmp_path: Path, start: str) -> None:
    """In a fresh interpreter and forked with the model loaded; the server stays where it was."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one processor only")
    async with RunningPool(tmp_path, NOTHING, start=start, workers=2, load={"threads": 1}, has_own_cores=True) as pool:
        await pool.start()

        assert [psutil.Process(pid).cpu_affinity() for pid in pool.pids] == [[allowed[0]], [allowed[1]]]
        assert sorted(os.sched_getaffinity(0)) == allowed
