"""What a version does now and did in the last minute, in brief: a row of `GET /stats`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from marserve.answers.management import VersionActivity, WorkerActivity
from marserve.registry.catalogue.describe import state_of

if TYPE_CHECKING:  # as `describe`
    from marserve.pool.pool import WorkerView
    from marserve.registry.catalogue.versions import Version

# Of a death's detail: a row is one line.
MOST_DETAIL = 200


def activity_of(version: Version, now: float, *, is_default: bool) -> VersionActivity:
    """The row of a version; `now` is monotonic. Reads `/proc` for the memory of its workers."""
    pool = version.pool
    workers = [_worker(each) for each in pool.workers()]
    figures = pool.metrics.windows.figures(now, pool.metrics)
    p50 = p99 = mean = None
    if figures is not None:
        p50, p99 = (figures.total_seconds.quantile(part) for part in (0.5, 0.99))
        mean = figures.batch_sizes.mean
    held = pool.held_bytes
    return VersionActivity(
        modelName=version.model,
        modelVersion=version.name,
        isDefault=is_default,
        state=state_of(pool, version.min_workers),
        answersPerSecond=0.0 if figures is None else round(figures.per_second(figures.total_seconds.count), 3),
        p50=None if p50 is None else round(1000 * p50, 3),
        p99=None if p99 is None else round(1000 * p99, 3),
        errors=0 if figures is None else sum(figures.errors.values()),
        refused=0 if figures is None else sum(figures.refused.values()),
        queued=pool.queued,
        running=pool.running,
        batchSize=pool.options.batch_size,
        meanBatch=None if mean is None else round(mean, 2),
        minWorkers=version.min_workers,
        maxWorkers=version.max_workers,
        readyWorkers=pool.ready_workers,
        memoryBytes=held if held is not None else sum(each.memoryBytes for each in workers),
        workers=workers,
    )


def _worker(worker: WorkerView) -> WorkerActivity:
    return WorkerActivity(
        id=worker.id,
        status=worker.status,
        memoryBytes=worker.memory_bytes,
        restarts=worker.restarts,
        gpuId=worker.gpu_id,
        why=_why(worker) or None,
    )


def _why(worker: WorkerView) -> str:
    """What it waits for and how the one before ended, in one line; empty where there is nothing to say."""
    parts = []
    if worker.status != "READY" and worker.waits_for:
        parts.append(f"waits: {worker.waits_for}")
    if (death := worker.last_death) is not None:
        last = death.detail.strip().rpartition("\n")[2].strip()[:MOST_DETAIL]
        parts.append(f"died: {death.cause}{f': {last}' if last else ''}")
    if worker.next_start_at == math.inf:
        parts.append("not started again before the model is scaled")
    return "; ".join(parts)
