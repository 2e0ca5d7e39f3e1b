"""Tests for a worker's memory limit with real workers (C6): an exception first, the server's watch for the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from marserve.errors import LoadFailed, OutOfMemory
from marserve.messages import Answer
from marserve.pool.launchers.cgroups import WorkerCgroups
from marserve.pool.sizing import upkeep
from marserve.pool.worker_end.memory import own_bytes, resident_bytes
from support.processes import living, until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's"),
]

MB = 1_000_000
LIMIT = 300 * MB
STARTS = ["fork", "fresh"]

GREEDY = """
import mmap, sys
held = []
def handle(data, context):
    return [take(*bytes(row["body"]).split()) for row in data] if data else None
def take(kind, size=b"0"):
    size = int(size)
    if kind == b"heap":
        return str(len(bytearray(size)))
    if kind == b"keep":
        held.append(bytearray(size))
    if kind == b"shared":
        held.append(mmap.mmap(-1, size))
        for at in range(0, size, 4096):
            held[-1][at] = 1
    if kind == b"abort":
        import os
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc\\n")
        os.abort()
    return kind.decode()
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch looks ten times as often as in service."""
    monkeypatch.setattr(upkeep.Upkeep.__init__, "__kwdefaults__", {"read_bytes": own_bytes, "every_s": 0.1})


@pytest.mark.parametrize("start", STARTS)
async def test_an_item_that_takes_too_much_fails_alone_in_a_living_worker(tmp_path: Path, start: str) -> None:
    """C6: two gigabytes at a limit of 300 MB are 507 for that item; its mates are answered, the server stays small."""
    async with RunningPool(tmp_path, GREEDY, start=start, batch_size=4, max_worker_memory_bytes=LIMIT) as running:
        await running.start()
        [pid] = running.pids
        before = resident_bytes(os.getpid())

        sent = [running.send(body) for body in (b"one", b"heap 2000000000", b"heap 1000000", b"two")]
        ends = [await one.told() for one in sent]

        assert isinstance(ends[1], OutOfMemory)
        assert (ends[1].message, ends[1].cause) == ("Out of resources", "out_of_memory")
        mates = [ends[0], ends[2], ends[3]]
        assert mates == [Answer(body) for body in (b"one", b"1000000", b"two")]
        assert running.pids == [pid]
        assert not running.metrics.worker_deaths
        assert resident_bytes(os.getpid()) - before < 30 * MB


@pytest.mark.parametrize("start", STARTS)
async def test_a_load_that_takes_too_much_fails_with_its_cause(tmp_path: Path, start: str) -> None:
    """In a template as in a worker that loads for itself."""
    source = "taken = bytearray(500_000_000)\n" + GREEDY
    async with RunningPool(tmp_path, source, start=start, max_worker_memory_bytes=LIMIT) as running:
        with pytest.raises(LoadFailed) as caught:
            await running.start()

        assert caught.value.out_of_memory
        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == "out_of_memory"


async def test_what_the_template_loaded_does_not_count_against_its_workers(tmp_path: Path) -> None:
    """200 MB of model, then 200 MB of work, at a limit of 300 MB."""
    source = "model = bytearray(200_000_000)\n" + GREEDY
    async with RunningPool(tmp_path, source, start="fork", max_worker_memory_bytes=LIMIT) as running:
        await running.start()

        assert await running.ask(b"heap 200000000") == Answer(b"200000000")
        assert isinstance(await running.ask(b"heap 400000000"), OutOfMemory)


@pytest.mark.usefixtures("looks_often")
async def test_a_worker_that_gets_around_its_own_limit_is_ended_by_the_server(tmp_path: Path) -> None:
    """Shared memory is nobody's data segment; the watch sees it, and the client is told 507."""
    async with RunningPool(
        tmp_path, GREEDY + "\nimport time\n", max_worker_memory_bytes=100 * MB, retry_on_worker_death=False
    ) as running:
        await running.start()
        [pid] = running.pids

        end = await running.ask(b"shared 200000000")
        await until(lambda: not living([pid]), "the worker is ended")
        await until(lambda: running.pool.ready_workers == 1, "its replacement", timeout_s=5.0)

        assert isinstance(end, Answer | OutOfMemory)  # the watch may come while it still takes, or afterwards
        assert dict(running.metrics.worker_deaths) == {"out_of_memory": 1}
        death = running.pool.last_death
        assert death is not None
        assert "maxWorkerMemory is 100000000" in death.detail
        assert await running.ask_body(b"well") == b"well"


@pytest.mark.usefixtures("looks_often")
async def test_who_was_being_served_by_a_worker_over_its_limit_is_told_507(tmp_path: Path) -> None:
    """`Worker died.`, and the class of cause; after a second worker went the same way."""
    source = GREEDY.replace(
        "    return kind.decode()", "        import time; time.sleep(30)\n    return kind.decode()", 1
    )
    source = source.replace('    if kind == b"abort":', '        import time; time.sleep(30)\n    if kind == b"abort":')
    async with RunningPool(tmp_path, source, workers=2, max_worker_memory_bytes=100 * MB) as running:
        await running.start()

        end = await running.ask(b"shared 200000000")

        assert isinstance(end, OutOfMemory)
        assert (end.message, end.cause) == ("Worker died.", "out_of_memory")
        assert dict(running.metrics.worker_deaths) == {"out_of_memory": 2}
        assert dict(running.metrics.errors) == {"out_of_memory": 1}


@pytest.mark.true_starts
async def test_a_crash_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    """C++ aborts; it says why before Python prints where it was."""
    async with RunningPool(tmp_path, GREEDY, retry_on_worker_death=False) as running:
        await running.start()

        end = await running.ask(b"abort")

        assert isinstance(end, OutOfMemory)
        await until(lambda: running.pool.ready_workers == 1, "its replacement")
        death = running.pool.last_death
        assert death is not None
        assert "memory ran out" in death.detail
        assert "SIGABRT" in death.detail


async def test_a_worker_lives_in_its_control_group_where_there_is_a_folder_for_it(tmp_path: Path) -> None:
    """A stand-in folder: the process is put into it, and a kill that the kernel counts there is the cause."""
    root = tmp_path / "cgroup"
    root.mkdir()
    async with RunningPool(tmp_path, GREEDY, retry_on_worker_death=False, max_worker_memory_bytes=LIMIT) as running:
        running.launchers.cgroups = WorkerCgroups(root)
        await running.start()
        [pid] = running.pids
        [group] = [folder for folder in root.iterdir() if folder.is_dir()]
        assert (group / "cgroup.procs").read_text() == str(pid)

        (group / "memory.events").write_text("oom_kill 1\n")
        os.kill(pid, 9)
        await until(lambda: running.metrics.worker_deaths, "the death is seen")

        assert dict(running.metrics.worker_deaths) == {"out_of_memory": 1}
        assert running.pool.last_death is not None
        assert "killed by the kernel" in running.pool.last_death.detail
