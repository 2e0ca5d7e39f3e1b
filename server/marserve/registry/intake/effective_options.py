"""Which value wins: registration, archive, `models` setting or default. Pure; knows no files and no HTTP.

Highest first (the contract's table of registration, in the form that its recorded answers leave):

    batch size, batch delay          request, archive, `models`, 1 and 0.1 s
    response and start-up time-out   archive (only what it sets), request, `models`, configured default
    workers                          archive (a pair with minWorkers > 0 and maxWorkers >= minWorkers, or with 0 and
                                     idleTimeout), at start-up then `models`, by API then the request; then the
                                     configured default
    runtime                          `models`, request, manifest
    memory, load, pinned             request, `models`, archive; then for `load` the configured default
    the rest                         archive, default

A version that is restored from a snapshot is served as that says, whatever the others say. What a desired state
declares stands in the archive's place before it comes here, and its bounds of workers go before all others.

What is set to a value that cannot be meant counts as not set, and a sentence about it goes to the version's warnings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from marserve.archive.contents.model_config import ModelConfig
from marserve.errors import BadArchive, BadInput
from marserve.pool.options import PoolOptions, RayOptions
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames, read_call_mode
from marserve.registry.intake.parallel import read_parallel
from marserve.settings.values import NO_WISH, MemoryWish, ModelDefaults

RUNTIMES = ("python", "python3")
DEFAULT_BATCH_SIZE = 1
DEFAULT_BATCH_DELAY_S = 0.1
# With `batchPolicy: goal` the size is the policy's to find; this is only a bound.
DEFAULT_GOAL_BATCH_SIZE = 64

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """What a registration asks for, None where it says nothing. Times in seconds.

    `bounds` are the fewest and most workers that a desired state declares.
    """

    workers: int | None = None
    bounds: tuple[int, int] | None = None
    batch_size: int | None = None
    max_batch_delay_s: float | None = None
    response_timeout_s: float | None = None
    startup_timeout_s: float | None = None
    memory: MemoryWish = NO_WISH


@dataclass(frozen=True, slots=True)
class OptionDefaults:
    """The server's own values, in seconds. `workers` is how many a version gets that nobody named a number for.

    With `refuses_missing_devices` a version whose `deviceIds` names a device that is not there is refused; else the
    list counts as not given, as in TorchServe. `mig_instances` are those devices that are a part of a GPU.
    """

    workers: int = 0
    response_timeout_s: float = 120.0
    startup_timeout_s: float = 120.0
    queue_size: int = 100
    max_worker_memory_bytes: int = 0
    readiness_rule: Literal["any", "min", "all"] = "any"
    autoscale: bool = False
    load: Literal["start", "on_demand"] = "start"
    cpu_pinning: Literal["off", "near"] = "off"
    refuses_missing_devices: bool = False
    mig_instances: frozenset[int] = frozenset()
    sequence_headers: SequenceHeaderNames = PLAIN_NAMES


def effective_options(
    model: str,
    version: str,
    *,
    requested: RequestedOptions,
    archive: ModelConfig,
    configured: ModelDefaults,
    defaults: OptionDefaults,
    at_startup: bool,
    gpu_count: int,
    restored: SnapshotVersion | None = None,
) -> tuple[PoolOptions, list[str]]:
    """The options that a version's pool runs with, and sentences about what was not used.

    `configured` is the version's entry of the `models` setting; its workers count only at start-up. `gpu_count` is
    how many accelerators the server may use. `restored` goes before all of it. Raises NotEnoughDevices where one
    worker of the model needs more, BadArchive where it names one that is not there or would join
    MIG instances.
    """
    warnings: list[str] = []
    asked = requested.memory if restored is None else restored.memory
    wish = asked.over(configured.memory).over(MemoryWish(archive.memory_bytes, archive.load, archive.is_pinned))
    is_on_demand = (wish.load or defaults.load) == "on_demand"
    if restored is not None and (restored.min_workers or not restored.max_workers):
        is_on_demand = False  # somebody scaled it, and its workers are there always, or never
    if restored is None and requested.bounds is not None:
        may_sleep = archive.idle_timeout_s is not None or is_on_demand
        minimum, maximum = requested.bounds[0], requested.bounds[1] if requested.bounds[0] or may_sleep else 0
    elif restored is None:
        minimum, maximum = _workers(requested, archive, configured, defaults.workers, at_startup, warnings)
    else:
        requested, archive = _as_restored(archive, restored)
        may_sleep = archive.idle_timeout_s is not None or is_on_demand
        minimum, maximum = restored.min_workers, restored.max_workers if restored.min_workers or may_sleep else 0
    idle_timeout_s, least_awake = archive.idle_timeout_s if minimum == 0 and maximum else None, 1
    if is_on_demand:
        least_awake = max(1, minimum or (archive.min_workers or 1 if restored is not None else 1))
        minimum, maximum = 0, max(maximum, least_awake)
        idle_timeout_s = archive.idle_timeout_s or math.inf
    policy = archive.batch_policy
    if policy == "goal" and archive.latency_goal_s is None:
        warnings.append("batchPolicy goal of the model's configuration is not used: it needs latencyGoalMs")
        policy = "idle"
    ray = _ray(model, archive, warnings)
    gpu_ids: tuple[int, ...] = ()  # of a cluster's devices Ray keeps account
    if ray is None:
        gpu_ids = _gpu_ids(model, archive, gpu_count, defaults.refuses_missing_devices, warnings)
    parallel = read_parallel(model, archive, gpu_ids, warnings, defaults.mig_instances)
    if parallel.most_workers and max(minimum, maximum) > parallel.most_workers:
        minimum, maximum = min(minimum, parallel.most_workers), min(maximum, parallel.most_workers)
        warnings.append(
            f"there are at most {maximum} workers: each has {parallel.parallel_level} of {len(gpu_ids)} devices"
        )
    has_ranks = bool(parallel.parallel_level) and parallel.parallel_type not in (None, "custom")
    size = _first(requested.batch_size, archive.batch_size, configured.batch_size, DEFAULT_BATCH_SIZE)
    mode = read_call_mode(
        archive,
        defaults.sequence_headers,
        batch_size=size,
        max_workers=maximum,
        has_ranks=has_ranks,
        warnings=warnings,
    )
    if not mode.allows(policy):
        policy = "idle"
    most_together = DEFAULT_BATCH_SIZE if policy != "goal" else DEFAULT_GOAL_BATCH_SIZE
    options = PoolOptions(
        model=model,
        version=version,
        min_workers=minimum,
        max_workers=maximum,
        batch_size=_first(requested.batch_size, archive.batch_size, configured.batch_size, most_together),
        max_batch_delay_s=_first(
            requested.max_batch_delay_s, archive.max_batch_delay_s, configured.max_batch_delay_s, DEFAULT_BATCH_DELAY_S
        ),
        batch_policy=policy,
        latency_goal_s=archive.latency_goal_s if policy == "goal" else None,
        length_from=archive.length_from if policy == "goal" else None,
        padding_budget=archive.padding_budget,
        response_timeout_s=_first(
            archive.response_timeout_s,
            requested.response_timeout_s,
            configured.response_timeout_s,
            defaults.response_timeout_s,
        ),
        startup_timeout_s=_first(
            archive.startup_timeout_s,
            requested.startup_timeout_s,
            configured.startup_timeout_s,
            defaults.startup_timeout_s,
        ),
        client_timeout_s=archive.client_timeout_s or None,
        default_priority=archive.default_priority,
        queue_size=archive.job_queue_size or defaults.queue_size,
        use_job_ticket=archive.use_job_ticket,
        max_retry_timeout_s=archive.max_retry_timeout_s,
        retry_failed_every_s=archive.retry_failed_every_s,
        retry_on_worker_death=archive.retry_on_worker_death,
        max_restarts=archive.max_restarts,
        no_restart_exit_codes=archive.no_restart_exit_codes,
        on_crash=archive.on_crash,
        readiness_rule=archive.readiness_rule or defaults.readiness_rule,
        max_worker_memory_bytes=_first(archive.max_worker_memory_bytes, defaults.max_worker_memory_bytes),
        max_requests_per_worker=archive.max_requests_per_worker,
        max_worker_age_s=archive.max_worker_age_s,
        max_worker_growth_bytes=archive.max_worker_growth_bytes,
        batch_isolation=archive.batch_isolation and not mode.has_state,
        halves_without_memory=not mode.has_state,
        samples=archive.samples if not mode.has_state else (),
        batch_check="off" if not mode.is_plain else archive.batch_check or ("refuse" if archive.samples else "off"),
        batch_check_sample=archive.batch_check_sample if mode.is_plain else 0.0,
        batch_tolerance=archive.batch_tolerance,
        worker_start=archive.worker_start,
        gpu_ids=gpu_ids,
        parallel_type=parallel.parallel_type,
        parallel_level=parallel.parallel_level,
        rank_threads=parallel.rank_threads,
        most_workers=parallel.most_workers,
        autoscale=_first(archive.autoscale, defaults.autoscale),
        idle_timeout_s=idle_timeout_s,
        least_awake=least_awake,
        memory_bytes=wish.needed_bytes,
        is_pinned=bool(wish.is_pinned),
        device_memory_bytes=archive.device_memory_bytes,
        stays_near=bool(gpu_ids) and (archive.cpu_pinning or defaults.cpu_pinning) == "near",
        sequences=mode.sequences,
        continuous_batching=mode.is_continuous,
        is_concurrent=mode.is_concurrent,
        most_concurrent=archive.max_concurrent_requests,
        ray=ray,
    )
    if not archive.samples and (archive.warm_up or archive.batch_check in ("warn", "refuse")):
        warnings.append("warmUp and batchCheck of the model's configuration are not used: it has no samples")
    return options, warnings


def _as_restored(archive: ModelConfig, restored: SnapshotVersion) -> tuple[RequestedOptions, ModelConfig]:
    """What a registration and the archive would have said to come to the values of the snapshot."""
    requested = RequestedOptions(batch_size=restored.batch_size, max_batch_delay_s=restored.max_batch_delay_s)
    level = restored.parallel_level if archive.parallel_type else 0
    return requested, replace(
        archive,
        response_timeout_s=restored.response_timeout_s,
        startup_timeout_s=restored.startup_timeout_s,
        parallel_level=level or archive.parallel_level,
    )


def effective_runtime(requested: str | None, configured: ModelDefaults, manifest: str | None) -> str:
    """The name of the runtime; a version whose manifest names none runs in `python`.

    A word of the `models` setting that is no runtime counts as not given.
    """
    named = configured.runtime_type if configured.runtime_type in RUNTIMES else None
    return named or requested or manifest or "python"


def _workers(
    requested: RequestedOptions,
    archive: ModelConfig,
    configured: ModelDefaults,
    default: int,
    at_startup: bool,
    warnings: list[str],
) -> tuple[int, int]:
    if archive.min_workers and archive.max_workers and archive.max_workers >= archive.min_workers:
        return archive.min_workers, archive.max_workers
    if archive.idle_timeout_s is not None and archive.min_workers == 0 and archive.max_workers:
        return 0, archive.max_workers
    if archive.min_workers or archive.max_workers:
        warnings.append(
            f"minWorkers {archive.min_workers or 0} and maxWorkers {archive.max_workers or 0} of the model's "
            "configuration are not used: both are needed, and maxWorkers must not be below minWorkers"
        )
    if not at_startup:
        workers = _first(requested.workers, default)
        return workers, workers
    minimum = _first(configured.min_workers, default)
    maximum = _first(configured.max_workers, minimum if configured.min_workers is not None else default)
    return minimum, max(minimum, maximum)


def _gpu_ids(
    model: str, archive: ModelConfig, gpu_count: int, refuses_missing: bool, warnings: list[str]
) -> tuple[int, ...]:
    missing = [device for device in archive.device_ids or () if not 0 <= device < gpu_count]
    if missing and refuses_missing and archive.device_type != "cpu":
        there = f"devices 0 to {gpu_count - 1}" if gpu_count else "no accelerator"
        raise BadArchive(
            f"deviceIds is {list(archive.device_ids or ())} in the configuration of model {model}, and there is no "
            f"device {missing[0]}: the server has {there}. Name devices that it has, or leave deviceIds out to use all "
            "of them; deviceType: cpu uses none."
        )
    if archive.device_type == "gpu" and not gpu_count:
        warnings.append("deviceType gpu of the model's configuration is not used: the server has no accelerator")
    if not gpu_count or archive.device_type == "cpu":
        return ()
    if archive.device_ids:
        if all(0 <= device < gpu_count for device in archive.device_ids):
            return tuple(archive.device_ids)
        warnings.append(
            f"deviceIds {list(archive.device_ids)} of the model's configuration are not used: the server has devices "
            f"0 to {gpu_count - 1}"
        )
    return tuple(range(gpu_count))


def _ray(model: str, archive: ModelConfig, warnings: list[str]) -> RayOptions | None:
    """What each worker has on a Ray cluster; None where the model's workers run on this machine."""
    if archive.launcher != "ray":
        if archive.worker_resources is not None:
            warnings.append("workerResources of the model's configuration are not used: they need launcher ray")
        return None
    if archive.parallel_type not in (None, "custom") and archive.parallel_level:
        raise BadInput(
            f"Model {model} cannot be loaded: launcher is ray and parallelType {archive.parallel_type}, which makes a "
            "worker of several processes; leave out one of the two."
        )
    amounts = dict(archive.worker_resources or {})
    return RayOptions(
        cpus=amounts.pop("cpus", 1.0),
        gpus=amounts.pop("gpus", 0.0),
        memory_bytes=int(amounts.pop("memory", 0)),
        resources=amounts,
        placement=archive.worker_placement,
    )


def _first(*values: Value | None) -> Value:
    """The first that is not None; the last one never is."""
    return next(value for value in values if value is not None)
