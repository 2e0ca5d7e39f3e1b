"""The describe answer of a version: TorchServe's members in its order, and marserve's behind them. Pure.

Times are written in UTC. Members without a value are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from msgspec import to_builtins

from marserve.answers.management import (
    Death,
    DescribedInterpreter,
    LastMinute,
    LoadedCheckpoint,
    Worker,
    WorkerHealth,
    WorkerRank,
)
from marserve.messages import CheckpointRead
from marserve.model_options import IN_FORCE, NOTHING, OPTIONS, ModelOptions, Said, written
from marserve.pool.options import PoolOptions
from marserve.store.addresses.fetch_guard import hide_query

if TYPE_CHECKING:  # `marserve migrate` makes plans, and a pool would be a seventh of its start
    from marserve.pool.checks.health import HealthView
    from marserve.pool.pool import DeathView, Pool, WorkerView

State = Literal["ready", "degraded", "loading", "failed", "idle"]

# Stands for a time: the worker is started again only when the version is scaled.
WHEN_SCALED = "when scaled"


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a version is registered. `url` is the URL or name that it was registered with.

    `config` is what the archive asks for, or the desired state in its place.
    `workflow` is the workflow whose node the version is, None for a plain model; `is_function`: it is a function there.
    `copy_of` is the model that the version is a copy of, to be measured; None for none.
    `requirements` describes the installation of the archive's requirements, None without any. `is_restored`: it came
    from a snapshot. `asked` are the options that its registration, or its snapshot, set.
    `declared` is what a desired state says of the version, None if no document names it. `resolved_url` names exactly
    what was fetched if `url` names something that may change (a branch), else None. `left_by_calls` are values that
    calls had set when a document first named the version and did not mention them: they stay in force.
    `declaration` is what the archive says that the model takes and gives; without it describe shows what a worker says.
    """

    url: str
    runtime: str
    options: PoolOptions
    config: ModelOptions
    is_at_startup: bool
    warnings: tuple[str, ...] = ()
    workflow: str | None = None
    is_function: bool = False
    copy_of: str | None = None
    requirements: Mapping[str, Any] | None = None
    is_restored: bool = False
    asked: Said = NOTHING
    declared: Mapping[str, Any] | None = None
    resolved_url: str | None = None
    left_by_calls: Mapping[str, Any] = field(default_factory=dict)
    declaration: Mapping[str, Any] | None = None

    @property
    def is_operators(self) -> bool:
        """Whether snapshots and documents have the version: it is neither a workflow's node nor a copy."""
        return self.workflow is None and self.copy_of is None


def describe_version(
    facts: Facts,
    pool: Pool,
    now: PoolOptions,
    *,
    is_default: bool,
    remarks: Sequence[str] = (),
    as_torchserve: bool = False,
) -> dict[str, Any]:
    """One element of the describe answer.

    `now` are the options in force, `remarks` are warnings about calls since the registration.
    A worker without a process has no `pid`. With `as_torchserve` its `pid` is -1, as in TorchServe, whose answers have
    no `declaration` either.
    """
    options, config = facts.options, facts.config
    came: Literal["checkpoint", "share"] = "checkpoint" if options.parallel is None or options.checkpoint else "share"
    described: dict[str, Any] = {
        "modelName": options.model,
        "modelVersion": options.version,
        "modelUrl": hide_query(facts.url),
        "runtime": facts.runtime,
        **written(now, *IN_FORCE, "maxRetryTimeoutInSec", "clientTimeoutInMills"),
        "parallelType": config.parallel_type or ("" if config.parallel is None else "tp"),
        "parallelLevel": config.parallel_level if config.parallel is None else config.parallel.ranks,
        "deviceType": "gpu" if options.gpu_ids else "cpu",
    }
    if config.device_ids and options.gpu_ids == tuple(config.device_ids):
        described["deviceIds"] = list(config.device_ids)
    has_sequences = config.sequence_max_idle_s > 0
    described |= {
        "continuousBatching": config.continuous_batching,
        "useJobTicket": options.use_job_ticket,
        "useVenv": config.use_venv,
        "stateful": config.sequence_batching,
        **written(config, "sequenceMaxIdleMSec", "sequenceTimeoutMSec"),
        "maxNumSequence": _most_sequences(options, config) if has_sequences else 0,
        "maxSequenceJobQueueSize": config.max_sequence_job_queue_size if has_sequences else 0,
        "loadedAtStartup": facts.is_at_startup,
        "workers": [_describe_worker(worker, came, as_torchserve) for worker in pool.workers()],
        "jobQueueStatus": {
            "remainingCapacity": max(0, options.queue_size - pool.queued),
            "pendingRequests": pool.queued,
        },
        "isDefault": is_default,
        "state": state_of(pool, now.min_workers),
        "runningRequests": pool.running,
        "defaultPriority": options.default_priority,
        **pool.described,
    }
    described |= _limits_of_life(options)
    recent = pool.metrics.windows.figures(monotonic(), pool.metrics)
    if recent is not None:
        p95_s, mean_batch = recent.total_seconds.quantile(0.95), recent.batch_sizes.mean
        described["lastMinute"] = to_builtins(
            LastMinute(
                round(recent.per_second(recent.total_seconds.count), 3),
                None if p95_s is None else round(1000 * p95_s, 3),
                None if mean_batch is None else round(mean_batch, 2),
            )
        )
    if facts.resolved_url is not None:
        described["resolvedUrl"] = hide_query(facts.resolved_url)
    if facts.copy_of is not None:
        described["copyOf"] = facts.copy_of
    if facts.declared is not None:
        described["declared"] = {**facts.declared, "url": hide_query(str(facts.declared.get("url", "")))}
    if options.interpreter is not None:
        described["interpreter"] = to_builtins(
            DescribedInterpreter(
                options.interpreter.path, options.interpreter.version, options.interpreter.name or None
            )
        )
    if facts.requirements is not None:
        described["requirements"] = dict(facts.requirements)
    declaration = declared_by(facts, pool)
    if declaration is not None and not as_torchserve:
        described["declaration"] = dict(declaration)
    warnings = [*facts.warnings, *pool.warnings, *remarks]
    if warnings:
        described["warnings"] = warnings
    if pool.last_death is not None:
        described["lastDeath"] = to_builtins(_death_of(pool.last_death))
    return described


def declared_by(facts: Facts, pool: Pool) -> Mapping[str, Any] | None:
    """What the archive says that the model takes and gives, or else what a worker says; None for nothing."""
    return facts.declaration if facts.declaration is not None else pool.declaration


def takes_elements(declaration: Mapping[str, Any]) -> bool:
    """Whether a model of one text, of bytes or of a picture takes them as elements of a BYTES tensor.

    In the Open Inference Protocol, if an answer comes whole; as `Declaration.takes_elements` of the handlers says.
    """
    item, answer = declaration.get("input"), declaration.get("output")
    is_stream = isinstance(answer, Mapping) and bool(answer.get("stream"))
    return isinstance(item, Mapping) and item.get("type") in ("text", "bytes", "image") and not is_stream


def state_of(pool: Pool, min_workers: int) -> State:
    """`ready`, `degraded` (it serves, but workers that died or wait are missing), `loading`, `failed` (given up until
    scaled or probed, or all of its devices are lost), or `idle` if no worker is wanted.
    """
    if pool.ready_workers and pool.ready_workers >= min_workers:
        return "ready"
    if pool.ready_workers and any(
        (worker.last_death or worker.waits_for) and worker.status != "READY" for worker in pool.workers()
    ):
        return "degraded"
    if not min_workers:
        return "idle"
    return "loading" if pool.is_healthy else "failed"


def _most_sequences(options: PoolOptions, config: ModelOptions) -> int:
    return options.sequences.most if options.sequences is not None else config.max_num_sequence or 1


def _limits_of_life(options: PoolOptions) -> dict[str, Any]:
    """Bounds of queues, retries and workers' lives, under their names in the configuration; unset ones are left out.

    The queue's length and the pause between probes of a given-up version always have a value.
    """
    limits = written(options, "jobQueueSize", "retryFailedEvery")
    if options.is_concurrent:
        limits |= written(options, "maxConcurrentRequests")
    for option in OPTIONS:
        value = getattr(options, option.attribute)
        if option.is_described and value not in (option.default, math.inf):
            limits[option.key] = option.kind.write(value)
    return limits


def _describe_worker(worker: WorkerView, came: Literal["checkpoint", "share"], as_torchserve: bool) -> dict[str, Any]:
    """One worker; `came` is the member that says how its weights came."""
    described: dict[str, Any] = to_builtins(
        Worker(
            id=worker.id,
            startTime=_utc(worker.started_at),
            status=worker.status,
            memoryUsage=worker.memory_bytes,
            # Left out without a process: a script that signals -1 as root ends every process of its machine.
            pid=worker.pid if worker.pid > 0 or as_torchserve else None,
            gpu=worker.gpu_id is not None,
            gpuUsage=worker.gpu_usage,
            restarts=worker.restarts,
            node=worker.node or None,
            waitsFor=worker.waits_for or None,
            gpuId=worker.gpu_id,
            computesOn=worker.computes_on or None,
            engine=None if as_torchserve else worker.engine or None,
            cpuFlags=None if as_torchserve else list(worker.cpu_flags) or None,
            **{came: None if worker.checkpoint is None or as_torchserve else _checkpoint_of(worker.checkpoint)},
            gpuIds=list(worker.devices) or None,
            ranks=[WorkerRank(rank, pid) for rank, pid in enumerate(worker.ranks)] or None,
            health=None if worker.health is None else _health_of(worker.health),
            lastDeath=None if worker.last_death is None else _death_of(worker.last_death),
            nextStart=None if worker.next_start_at is None else _start_of(worker.next_start_at),
        )
    )
    return described


def _health_of(health: HealthView) -> WorkerHealth:
    at = health.checked_at
    return WorkerHealth(health.state, health.failures, None if at is None else _utc(at), health.reason or None)


def _checkpoint_of(read: CheckpointRead) -> LoadedCheckpoint:
    per_gb = round(read.seconds * 1e9 / read.size, 3) if read.size else None
    return LoadedCheckpoint(read.size, read.mapped, round(read.seconds, 3), per_gb)


def _start_of(seconds: float) -> str:
    return _utc(seconds) if seconds < math.inf else WHEN_SCALED


def _death_of(death: DeathView) -> Death:
    return Death(
        cause=str(death.cause),
        at=_utc(death.at),
        detail=death.detail,
        traceback=death.traceback or None,
        lastLines=list(death.last_lines) or None,
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def page_of(
    names: Sequence[tuple[str, str]], *, limit: int | None, offset: int | None
) -> tuple[list[tuple[str, str]], int | None]:
    """One page of (name, url) pairs in order of name, and the offset of the next page, None if nothing follows.

    A `limit` of None or outside 1 to 100 counts as 100; an `offset` of None or below 0 as 0.
    """
    size = limit if limit is not None and 1 <= limit <= 100 else 100
    begin = max(0, offset or 0)
    ordered = sorted(names)
    page = ordered[begin : begin + size]
    following = begin + size
    return page, following if following < len(ordered) else None
