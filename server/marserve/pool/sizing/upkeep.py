"""Looks at a pool's workers once a second: ends those over their memory limit, and has those replaced that have grown
or aged too much.

Sizes are read in a thread: the kernel may take milliseconds for a large process. The size of a group of ranks is the
sum over its ranks. Without options that need it nothing of this runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from marserve.pool.options import PoolOptions
from marserve.pool.sizing.recycling import RecyclePolicy
from marserve.pool.slots.life import Life
from marserve.pool.worker_end.memory import own_bytes

LOOK_EVERY_S = 1.0
# How far a worker may exceed the limit before it is killed: its own limit, which raises an exception, comes first.
LEAST_SLACK_BYTES = 32 << 20


class Upkeep:
    """The looks at one pool's workers."""

    def __init__(
        self,
        options: PoolOptions,
        workers: Callable[[], Sequence[Life]],
        *,
        read_bytes: Callable[[int], int] = own_bytes,
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._limit_bytes = options.max_worker_memory_bytes
        self._policy = RecyclePolicy(
            options.max_requests_per_worker, options.max_worker_age_s, options.max_worker_growth_bytes
        )
        self._workers = workers
        self._read_bytes = read_bytes
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look, if there is anything to look for."""
        if self._task is None and (self._limit_bytes or self._policy.needs_looks):
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Look once at every worker."""
        workers = [worker for worker in self._workers() if worker.pids]
        sizes = [0] * len(workers)
        if self._limit_bytes or self._policy.max_growth_bytes:
            pids = [list(worker.pids) for worker in workers]
            sizes = await asyncio.to_thread(lambda: [sum(map(self._read_bytes, own)) for own in pids])
        now = time.monotonic()
        for worker, size in zip(workers, sizes, strict=True):
            self.judge(worker, size, now)

    def judge(self, worker: Life, size: int, now: float) -> None:
        """End one worker, or have it replaced, if its size (bytes, 0 if unknown) or age calls for it."""
        worker.own_bytes = size
        limit = self._limit_bytes
        if limit and size > limit + max(LEAST_SLACK_BYTES, limit // 16):
            worker.over_memory(size, limit)
            return
        if not worker.is_ready:
            return
        worker.first_bytes = worker.first_bytes or size
        reason = self._policy.reason(
            requests=worker.requests, age_s=now - worker.ready_at, growth_bytes=size - worker.first_bytes
        )
        if reason is not None:
            worker.due(reason)
