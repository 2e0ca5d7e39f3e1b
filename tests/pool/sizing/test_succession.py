"""Tests for replacing workers that have served long enough, replacement first, with real workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.pool.sizing import upkeep
from marserve.pool.worker_end.memory import own_bytes
from support.processes import living, until
from support.running_pool import RunningPool

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

STARTS = ["fork", "fresh"]
LEAKS = """
import os
held = []
def handle(data, context):
    if data is None:
        return None
    held.append(bytearray(10_000_000) if bytes(data[0]["body"]) == b"leak" else b"")
    return [b"%d" % os.getpid() if bytes(row["body"]) == b"pid" else bytes(row["body"]) for row in data]
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upkeep looks ten times as often as in service."""
    monkeypatch.setattr(upkeep.Upkeep.__init__, "__kwdefaults__", {"read_bytes": own_bytes, "every_s": 0.1})


async def replace_under_load(running: RunningPool, is_enough: Callable[[], bool]) -> int:
    """Ask with 16 clients until it is enough; every answer is the client's own. Returns how many were answered."""
    answered = 0

    async def client(name: int) -> None:
        nonlocal answered
        turn = 0
        while not is_enough():
            nonce = b"%d/%d" % (name, turn)
            assert await running.ask_body(nonce) == nonce
            answered += 1
            turn += 1

    await asyncio.gather(*[client(name) for name in range(16)])
    return answered


@pytest.mark.parametrize("start", STARTS)
async def test_recycling_by_requests_loses_none(tmp_path: Path, start: str) -> None:
    """Every 200 requests a worker goes and another is there already; clients notice nothing."""
    async with RunningPool(
        tmp_path, LEAKS, start=start, workers=2, batch_size=8, queue_size=1000, max_requests_per_worker=200
    ) as running:
        await running.start()
        running.look()

        recycles = running.metrics.worker_recycles
        async with asyncio.timeout(60):
            answered = await replace_under_load(running, lambda: recycles["requests"] >= 3)
        await until(lambda: len(running.pool.workers()) == 2, "no replacement is under way")

        recycled = recycles["requests"]
        assert answered >= 3 * 200
        assert not running.metrics.errors
        assert not running.metrics.worker_deaths
        assert running.metrics.retried == 0
        assert [view.last_death for view in running.pool.workers()] == [None, None]
        assert [view.id for view in running.pool.workers()] == ["9000", "9001"]
        assert sum(view.restarts for view in running.pool.workers()) == recycled


@pytest.mark.long
async def test_recycling_every_thousand_requests_loses_none_for_a_minute(tmp_path: Path) -> None:
    """As the promise has it."""
    async with RunningPool(
        tmp_path, LEAKS, workers=4, batch_size=8, queue_size=1000, max_requests_per_worker=1000
    ) as running:
        await running.start()

        end = time.monotonic() + 60.0
        answered = await replace_under_load(running, lambda: time.monotonic() >= end)

        assert running.metrics.worker_recycles["requests"] > answered / 2000 / 4
        assert not running.metrics.errors
        assert not running.metrics.worker_deaths


async def test_the_replacement_is_there_before_the_worker_goes(tmp_path: Path) -> None:
    """There is never a moment without a ready worker, though loading takes a while."""
    source = "import os, time\nif os.path.exists('slow'): time.sleep(0.4)\nopen('slow', 'w').close()\n" + LEAKS
    async with RunningPool(tmp_path, source, start="fresh", max_requests_per_worker=5) as running:
        await running.start()
        [first] = running.pids
        fewest = 1

        while running.pids == [first]:
            await running.ask(b"x")
            fewest = min(fewest, running.pool.ready_workers)

        assert fewest == 1
        assert await running.ask_body(b"pid") == b"%d" % running.pids[0]
        await until(lambda: not living([first]), "the first one is gone")


async def test_a_batch_that_runs_when_its_worker_is_replaced_is_finished(tmp_path: Path) -> None:
    """The first worker goes when its work is done."""
    async with RunningPool(tmp_path, max_requests_per_worker=1) as running:
        await running.start()
        [first] = running.pids
        await running.ask(b"x")
        slow = running.send(b"touch started finish")
        await until(running.file("started").exists, "it runs")
        await until(lambda: running.pids not in ([], [first]), "the replacement took over")

        running.file("finish").touch()

        assert (await slow.told()).body == b"saw finish"  # type: ignore[union-attr]
        assert not running.metrics.worker_deaths


@pytest.mark.usefixtures("looks_often")
async def test_a_worker_that_grows_is_replaced(tmp_path: Path) -> None:
    """Ten megabytes leak with each request; at forty more than at first it goes."""
    async with RunningPool(tmp_path, LEAKS, max_worker_growth_bytes=40_000_000) as running:
        await running.start()
        [first] = running.pids
        await until(lambda: all(life.first_bytes for life in running.pool.lives.by_key.values()), "the first look")

        for _ in range(8):
            await running.ask(b"leak")
        await until(lambda: running.pids not in ([], [first]), "a replacement")

        assert dict(running.metrics.worker_recycles) == {"growth": 1}


@pytest.mark.usefixtures("looks_often")
async def test_a_worker_that_is_old_is_replaced(tmp_path: Path) -> None:
    """Though nobody asks it anything."""
    async with RunningPool(tmp_path, LEAKS, max_worker_age_s=0.3) as running:
        await running.start()
        [first] = running.pids

        await until(lambda: running.pids not in ([], [first]), "a replacement")

        assert running.metrics.worker_recycles["age"] >= 1
        running.look()


async def test_a_replacement_that_cannot_load_changes_nothing(tmp_path: Path) -> None:
    """The worker goes on serving, and the next try waits for a while."""
    source = "import os\nif os.path.exists('broken'): raise RuntimeError('broken')\n" + LEAKS
    async with RunningPool(tmp_path, source, start="fresh", max_requests_per_worker=3) as running:
        await running.start()
        [first] = running.pids
        running.file("broken").touch()

        for _ in range(3):
            await running.ask(b"x")
        await until(lambda: running.metrics.worker_deaths["load_failed"], "the failed load")
        for _ in range(10):
            assert await running.ask_body(b"pid") == b"%d" % first

        assert running.metrics.worker_starts <= 3
        assert not running.metrics.worker_recycles
        assert running.pool.ready_workers == 1


@pytest.mark.parametrize("how", ["stop", "scale"])
async def test_a_pool_that_is_stopped_or_scaled_while_a_replacement_loads_leaves_nothing(
    tmp_path: Path, how: str
) -> None:
    """Nobody waits for it."""
    source = "import os, time\nif os.path.exists('slow'): time.sleep(60)\nopen('slow', 'w').close()\n" + LEAKS
    async with RunningPool(tmp_path, source, start="fresh", max_requests_per_worker=1) as running:
        await running.start()
        await running.ask(b"x")
        await until(lambda: len(running.pool.lives.by_key) == 2, "the replacement loads")
        began = time.monotonic()

        if how == "scale":
            running.pool.scale(0, 0)
            await until(lambda: not running.pool.lives.by_key, "both are gone")
        else:
            await running.pool.stop()

        assert time.monotonic() - began < 5.0
