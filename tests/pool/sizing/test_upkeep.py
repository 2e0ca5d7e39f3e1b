"""Tests for the looks at a pool's workers: over the limit, grown, aged, or as they should be."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.pool.options import PoolOptions
from marserve.pool.sizing.upkeep import LEAST_SLACK_BYTES, Upkeep

MIB = 1 << 20


class Worker:
    """A worker that remembers what was done to it."""

    def __init__(self, pid: int = 7, *, is_ready: bool = True, ready_at: float = 100.0) -> None:
        self.pids, self.is_ready, self.ready_at = [pid] if pid > 0 else [], is_ready, ready_at
        self.requests = self.first_bytes = self.own_bytes = 0
        self.ended: list[tuple[int, int]] = []
        self.reasons: list[str] = []

    def over_memory(self, own_bytes: int, limit_bytes: int) -> None:
        """It holds too much."""
        self.ended.append((own_bytes, limit_bytes))

    def due(self, reason: str) -> None:
        """It is to be replaced."""
        self.reasons.append(reason)


def upkeep(worker: Worker, size: int = 0, **options: Any) -> Upkeep:
    """An upkeep that finds one worker of this size."""
    return Upkeep(PoolOptions("m", "1.0", 1, 1, **options), lambda: [worker], read_bytes=lambda _: size)


def test_a_worker_over_its_limit_is_ended_with_some_slack_for_its_own_limit_to_act_first() -> None:
    """An exception in the worker is better than its end."""
    worker = Worker()
    looks = upkeep(worker, max_worker_memory_bytes=100 * MIB)

    looks.judge(worker, 100 * MIB + LEAST_SLACK_BYTES, now=0.0)
    assert worker.ended == []
    looks.judge(worker, 100 * MIB + LEAST_SLACK_BYTES + 1, now=0.0)

    assert worker.ended == [(100 * MIB + LEAST_SLACK_BYTES + 1, 100 * MIB)]


def test_growth_is_counted_from_the_first_look_at_a_ready_worker() -> None:
    """What it took to load the model is no growth."""
    worker = Worker(is_ready=False)
    looks = upkeep(worker, max_worker_growth_bytes=10 * MIB)

    looks.judge(worker, 500 * MIB, now=0.0)
    worker.is_ready = True
    for size in (900 * MIB, 905 * MIB, 910 * MIB):
        looks.judge(worker, size, now=0.0)
    assert worker.reasons == []
    looks.judge(worker, 911 * MIB, now=0.0)

    assert worker.reasons == ["growth"]


def test_age_is_counted_from_when_the_worker_was_ready() -> None:
    """Loading may take long."""
    worker = Worker(ready_at=100.0)
    looks = upkeep(worker, max_worker_age_s=60.0)

    looks.judge(worker, 0, now=159.9)
    assert worker.reasons == []
    looks.judge(worker, 0, now=160.0)

    assert worker.reasons == ["age"]


@pytest.mark.anyio
async def test_a_look_reads_sizes_only_where_they_matter_and_passes_over_who_has_no_process() -> None:
    """Reading them costs the kernel milliseconds."""
    unborn, worker = Worker(pid=-1), Worker()
    read: list[int] = []

    def size(pid: int) -> int:
        read.append(pid)
        return 1000 * MIB

    by_age = Upkeep(PoolOptions("m", "1.0", 1, 1, max_worker_age_s=1.0), lambda: [unborn, worker], read_bytes=size)
    by_size = Upkeep(
        PoolOptions("m", "1.0", 1, 1, max_worker_memory_bytes=MIB), lambda: [unborn, worker], read_bytes=size
    )

    await by_age.look()
    assert read == []
    await by_size.look()

    assert read == [7]
    assert len(worker.ended) == 1
    assert unborn.ended == []


@pytest.mark.anyio
async def test_nothing_runs_where_nothing_is_asked_for() -> None:
    """A pool without such options pays nothing."""
    looks = upkeep(Worker(), max_requests_per_worker=5)

    looks.start()

    assert looks._task is None
    await looks.stop()


@pytest.mark.anyio
async def test_a_group_of_ranks_is_as_large_as_all_of_them() -> None:
    """The limit is the worker's, however many processes it is."""
    worker = Worker()
    worker.pids = [7, 8]
    sizes = {7: 70 * MIB, 8: 80 * MIB}
    looks = Upkeep(
        PoolOptions("m", "1.0", 1, 1, max_worker_memory_bytes=100 * MIB), lambda: [worker], read_bytes=sizes.__getitem__
    )

    await looks.look()

    assert worker.ended == [(150 * MIB, 100 * MIB)]
