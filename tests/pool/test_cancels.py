"""A thousand clients that leave at any moment, at real workers: nothing of them is kept."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from pathlib import Path

import pytest

from marserve.errors import DeadlinePassed, QueueFull, WaitTooLong
from support.processes import until
from support.running_pool import RunningPool

QUICK = """
import time

def handle(rows, context):
    if rows is None:
        return None
    for row in rows:
        if bytes(row["body"]) == b"bad":
            raise ValueError("one of them is bad")
    time.sleep(0.001)
    return [b"done"] * len(rows)
"""


@pytest.mark.anyio
async def test_a_thousand_random_cancels_leave_no_job_task_or_memory_behind(tmp_path: Path) -> None:
    """Waiting, in a group of a batch that raised, running, ended; with and without a deadline and a priority."""
    dice = random.Random(4)
    loop = asyncio.get_running_loop()
    async with RunningPool(tmp_path, QUICK, workers=2, batch_size=4, queue_size=200) as running:
        await running.start()
        await running.ask(b"first")
        tasks = asyncio.all_tasks()
        dispatcher = running.pool.dispatcher
        clients = []

        for _ in range(1000):
            deadline = time.monotonic() + dice.choice([0.02, 100.0]) if dice.random() < 0.5 else None
            try:
                sent = running.send(b"bad" if dice.random() < 0.05 else b"good", deadline=deadline)
            except (QueueFull, WaitTooLong, DeadlinePassed):
                await asyncio.sleep(0.005)
                continue
            clients.append(weakref.ref(sent))
            loop.call_later(dice.random() * 0.02, sent.job.cancel)
            if dice.random() < 0.2:
                await asyncio.sleep(0.001)
            del sent
        await until(lambda: dispatcher.is_empty, "nothing waits and nothing runs")
        await asyncio.sleep(0.03)  # the last timers of this test's own
        assert await running.ask_body(b"last") == b"done"

        assert len(clients) > 500
        assert (running.pool.queued, running.pool.running, len(dispatcher.queue)) == (0, 0, 0)
        assert asyncio.all_tasks() == tasks
        assert running.metrics.cancelled > 20  # how many are still waiting when they leave is up to the machine
        assert running.metrics.expired_run == 0
        # Entries of jobs that ended early are dropped when they become the most, not at once.
        gc.collect()
        assert sum(client() is not None for client in clients) < 300
        assert len(dispatcher.deadlines) < 300
        assert not dispatcher.lanes.held


BLOCKING = """
import time

def handle(rows, context):
    if rows is None:
        return None
    [row] = rows
    body = bytes(row["body"])
    open("calls", "a").write(body.decode() + "\\n")
    if body == b"polite":
        end = time.monotonic() + 20
        while not context.is_cancelled(0) and time.monotonic() < end:
            time.sleep(0.002)
    while body == b"deaf" and not os.path.exists("go"):
        time.sleep(0.002)
    return [b"done"]
"""


@pytest.mark.anyio
@pytest.mark.parametrize("first", ["polite", "deaf"])
async def test_what_was_cancelled_before_it_began_never_runs(tmp_path: Path, first: str) -> None:
    """Neither from the queue nor sent ahead; the one that runs frees its worker once it asks, or else at its end."""
    async with RunningPool(tmp_path, "import os\n" + BLOCKING) as running:
        await running.start()
        runs = running.send(first.encode())
        await until(lambda: running.calls() == [first], "the first has begun")
        behind = [running.send(f"behind {number}".encode()) for number in range(4)]

        for each in behind:
            each.job.cancel()
        assert not runs.job.keeps_the_only_worker
        runs.job.cancel()
        if first == "deaf":
            assert runs.job.keeps_the_only_worker
            assert not any(each.job.keeps_the_only_worker for each in behind)
            running.file("go").touch()

        assert await running.ask_body(b"last") == b"done"
        assert running.calls() == [first, "last"]
        assert not runs.job.keeps_the_only_worker
