"""Workers that keep to the processors near their devices: real affinity, on the processors of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from marserve.machine.accelerators import Accelerator
from marserve.pool.launchers.launcher import Launchers
from marserve.worker.process.own_process import stay_on
from support.running_pool import RunningPool, worker_environment
from support.worker_logs import KeptLines

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


@pytest.fixture
def two_processors() -> list[int]:
    """The first two that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one processor only")
    return allowed[:2]


@pytest.mark.parametrize(("start", "ranks"), [("fresh", 0), ("auto", 0), ("auto", 2)])
async def test_a_worker_stays_near_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_processors: list[int], start: str, ranks: int
) -> None:
    """In a fresh interpreter, forked, and as a group of ranks; the server itself stays where it was."""
    asked: list[Sequence[int]] = []

    def near(launchers: Launchers, devices: Sequence[int]) -> tuple[int, ...]:
        asked.append(tuple(devices))
        return (two_processors[1],)

    import_template = Launchers.import_template
    monkeypatch.setattr(Launchers, "cpus_near", near)
    # They are forked from a template that has imported torch, which takes seconds: here from an empty one.
    monkeypatch.setattr(Launchers, "import_template", lambda launchers, modules: import_template(launchers, ()))
    group = {"parallel_type": "tp", "parallel_level": ranks} if ranks else {}
    async with RunningPool(tmp_path, NOTHING, start=start, gpu_ids=(0, 1), stays_near=True, **group) as pool:
        await pool.start()

        pids = [pid for own in pool.pool.pids_by_worker for pid in own]
        assert len(pids) == max(1, ranks)
        assert [psutil.Process(pid).cpu_affinity() for pid in pids] == [[two_processors[1]]] * len(pids)
        assert asked == [(0, 1) if ranks else (0,)]
        assert set(two_processors) <= os.sched_getaffinity(0)


async def test_a_worker_that_is_not_told_to_goes_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks where its device is."""
    monkeypatch.setattr(Launchers, "cpus_near", lambda *_: pytest.fail("was asked"))
    async with RunningPool(tmp_path, NOTHING, start="fresh", gpu_ids=(0,)) as pool:
        await pool.start()

        assert psutil.Process(pool.pids[0]).cpu_affinity() == sorted(os.sched_getaffinity(0))


def test_devices_without_an_address_have_no_processors_near() -> None:
    """A device of which nobody knows where it is, and one that is not there."""
    launchers = Launchers(worker_environment(), KeptLines(), accelerators=[Accelerator("GPU", "0", "0")])

    assert launchers.cpus_near([0]) == launchers.cpus_near([7]) == launchers.cpus_near([]) == ()


def test_processors_that_are_gone_leave_a_worker_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A container's may be changed while it runs."""
    before = os.sched_getaffinity(0)

    stay_on([1023])
    stay_on([])

    assert os.sched_getaffinity(0) == before
    assert "does not stay on the processors near its device" in caplog.text
