"""The options that a version runs with on this server: which layer's value wins, and what the machine allows. Pure.

Each option has its own order of layers (`model_options.py`). The least and the most workers are taken from one layer
as a pair: from a snapshot or a desired state; from the archive, if minWorkers > 0 and maxWorkers >= minWorkers, or if
minWorkers is 0 and there is an idleTimeout; then at start-up from `models`, by API from the registration; then from the
configured default. The runtime is that of `models`, else of the registration, else of the manifest.

An option with an unusable value counts as not set, and a sentence about it goes to the version's warnings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marserve.archive.contents.model_config import ModelConfig, read_declared, unused_workers
from marserve.errors import BadArchive, BadInput
from marserve.model_options import NOTHING, Layer, Layers, ModelOptions, Said, fold, say
from marserve.option_values import Sample
from marserve.pool.options import PoolOptions, RayOptions
from marserve.registry.intake.call_modes import may_run_coroutines, read_call_mode
from marserve.registry.intake.parallel import read_parallel
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions
from marserve.settings.values import ModelDefaults

RUNTIMES = ("python", "python3")
# Layers that know the largest of `allowedBatchSizes`, and those that may want smaller batches, the highest first.
_OF_DOCUMENTS: tuple[Layer, ...] = ("desired", "archive")
_ABOVE: tuple[Layer, ...] = ("snapshot", "registration", "desired")
_INTERPRETER = frozenset({"interpreter_path", "interpreter_name"})
# With `batchPolicy: goal` the policy finds the size; this is only a bound.
DEFAULT_GOAL_BATCH_SIZE = 64
# Of one worker whose coroutines the declaration alone chose. Fewer than `asyncCommunication` allows: a `predict` that
# blocks although it is `async def` runs them one after the other, each within its responseTimeout.
DEFAULT_DECLARED_CONCURRENT = 64


def effective_options(
    model: str,
    version: str,
    layers: Layers,
    server: RegistryOptions,
    *,
    at_startup: bool,
    drawn_samples: tuple[Sample, ...] = (),
    declares_coroutine: bool = False,
) -> tuple[PoolOptions, list[str]]:
    """The options that a version's pool runs with, and sentences about options that were not used.

    `layers` are all layers except the server's own, which is read from `server`. The workers of `models` count only
    `at_startup`. `drawn_samples` stand in for samples. A handler that `declares_coroutine` runs as coroutines, unless a
    layer says something of `asyncCommunication` or asks for what does not go with it.

    Raises NotEnoughDevices if one worker of the model needs more devices than there are, BadArchive if the model names
    a missing device or would join MIG instances.
    """
    warnings: list[str] = []
    said = fold({**layers, "server": server.defaults})
    said = _with_largest_size(said, layers, warnings)
    asked = ModelOptions(**{**said, "model": model, "version": version})
    restored = layers.get("snapshot")
    is_on_demand = asked.load == "on_demand"
    if restored is not None and (restored["min_workers"] or not restored["max_workers"]):
        is_on_demand = False  # a call scaled it: its workers are always there, or never
    minimum, maximum = _workers(layers, asked, server, at_startup, is_on_demand, warnings)
    idle_timeout_s, least_awake = asked.idle_timeout_s if minimum == 0 and maximum else None, 1
    if is_on_demand:
        own = layers.get("archive", NOTHING).get("min_workers") if restored is not None else None
        least_awake = max(1, minimum or own or 1)
        minimum, maximum = 0, max(maximum, least_awake)
        idle_timeout_s = asked.idle_timeout_s or math.inf
    policy = asked.batch_policy
    if policy == "goal" and asked.latency_goal_s is None:
        warnings.append("batchPolicy goal of the model's configuration is not used: it needs latencyGoalMs")
        policy = "idle"
    ray = _ray(asked, warnings)
    gpu_ids: tuple[int, ...] = ()  # Ray keeps account of a cluster's devices
    if ray is None:
        gpu_ids = _gpu_ids(asked, server.gpu_count, server.refuses_missing_devices, warnings)
    parallel = read_parallel(model, asked, gpu_ids, warnings, server.mig_instances)
    if parallel.most_workers and max(minimum, maximum) > parallel.most_workers:
        minimum, maximum = min(minimum, parallel.most_workers), min(maximum, parallel.most_workers)
        warnings.append(
            f"there are at most {maximum} workers: each has {parallel.parallel_level} of {len(gpu_ids)} devices"
        )
    has_ranks = bool(parallel.parallel_level) and parallel.parallel_type not in (None, "custom")
    runs_coroutines = declares_coroutine and not has_ranks and may_run_coroutines(said)
    if runs_coroutines:
        asked = replace(asked, is_concurrent=True)
    mode = read_call_mode(
        asked,
        server.sequence_headers,
        batch_size=asked.batch_size,
        max_workers=maximum,
        has_ranks=has_ranks,
        warnings=warnings,
    )
    if asked.allowed_batch_sizes and not mode.is_plain:
        raise BadArchive(
            f"allowedBatchSizes is {list(asked.allowed_batch_sizes)} in the configuration of model {model}, whose "
            "requests do not come in batches: leave it out, or asyncCommunication, sequenceBatching and "
            "continuousBatching."
        )
    if not mode.allows(policy):
        policy = "idle"
    is_goal = policy == "goal"
    overlaps = asked.overlap_preprocess
    if overlaps and (has_ranks or not mode.is_plain or policy == "fixed"):
        overlaps = False
        warnings.append(
            "overlapPreprocess of the model's configuration is not used: it needs workers of one process that are "
            "called batch by batch, and a batchPolicy other than fixed, which sends nothing ahead"
        )
    if not asked.samples and not drawn_samples and (asked.warm_up or asked.batch_check != "off"):
        warnings.append("warmUp and batchCheck of the model's configuration are not used: it has no samples")
    checked = said.get("batch_check", "refuse" if asked.samples else "off")
    options = PoolOptions(
        **{**said, "model": model, "version": version, "min_workers": minimum, "max_workers": maximum}
    )
    options = replace(
        options,
        batch_size=said.get("batch_size", DEFAULT_GOAL_BATCH_SIZE if is_goal else asked.batch_size),
        batch_policy=policy,
        latency_goal_s=asked.latency_goal_s if is_goal else None,
        length_from=asked.length_from if is_goal else None,
        overlap_preprocess=overlaps,
        client_timeout_s=asked.client_timeout_s or None,
        queue_size=asked.queue_size or server.defaults.get("queue_size", ModelOptions().queue_size),
        batch_isolation=asked.batch_isolation and not mode.has_state,
        halves_without_memory=not mode.has_state,
        samples=asked.samples if not mode.has_state else (),
        drawn_samples=drawn_samples if not mode.has_state else (),
        batch_check=checked if mode.is_plain else "off",
        batch_check_sample=asked.batch_check_sample if mode.is_plain else 0.0,
        gpu_ids=gpu_ids,
        parallel_type=parallel.parallel_type,
        parallel_level=parallel.parallel_level,
        rank_threads=parallel.rank_threads,
        most_workers=parallel.most_workers,
        load="on_demand" if is_on_demand else "start",
        idle_timeout_s=idle_timeout_s,
        least_awake=least_awake,
        stays_near=bool(gpu_ids) and asked.cpu_pinning == "near",
        has_own_cores=ray is None and asked.cpu_pinning == "cores",
        sequences=mode.sequences,
        continuous_batching=mode.is_continuous,
        is_concurrent=mode.is_concurrent,
        most_concurrent=said.get("most_concurrent", DEFAULT_DECLARED_CONCURRENT)
        if runs_coroutines
        else asked.most_concurrent,
        holds_coroutines=runs_coroutines,
        ray=ray,
    )
    return options, warnings


def _with_largest_size(said: Said, layers: Layers, warnings: list[str]) -> Said:
    """With the largest of `allowedBatchSizes` as the batch size, unless a layer above the archive's wants less.

    Raises BadArchive where the archive's own `batchSize` is another.
    """
    sizes = said.get("allowed_batch_sizes")
    if not sizes:
        return said
    for layer in _OF_DOCUMENTS:
        own = layers.get(layer, NOTHING)
        if "allowed_batch_sizes" in own and own.get("batch_size", sizes[-1]) != sizes[-1]:
            raise BadArchive(
                f"batchSize is {own['batch_size']} and allowedBatchSizes is {list(sizes)}: the largest of them is the "
                "batch size, so leave batchSize out."
            )
    sizes_above = [layers[layer]["batch_size"] for layer in _ABOVE if "batch_size" in layers.get(layer, NOTHING)]
    wanted = sizes_above[0] if sizes_above else sizes[-1]
    if wanted > sizes[-1]:
        warnings.append(f"batches of {wanted} are not formed: the largest of allowedBatchSizes is {sizes[-1]}")
    return Said(said, say(batch_size=min(wanted, sizes[-1])))


def layers_of(
    parameters: RegisterParameters, archive: ModelConfig, configured: ModelDefaults, declared: Mapping[str, Any]
) -> Layers:
    """What each layer says of a version: `configured` is its entry of `models`, `declared` the desired state's keys."""
    desired = read_declared(declared)
    of_archive = archive.said
    if not _INTERPRETER.isdisjoint(desired):  # one word of the document stands for both of the archive's
        of_archive = Said({name: value for name, value in of_archive.items() if name not in _INTERPRETER})
    layers: dict[Layer, Said] = {
        "registration": parameters.said,
        "desired": desired,
        "archive": of_archive,
        "models": configured.options,
    }
    if parameters.restored is not None:
        said = dict(parameters.restored.options)
        if "parallel_type" not in fold(layers):
            said.pop("parallel_level", None)
        layers["snapshot"] = Said(said)
    return layers


def effective_runtime(requested: str | None, configured: ModelDefaults, manifest: str | None) -> str:
    """The name of the runtime; without any it is `python`. An unknown runtime in the `models` setting is ignored."""
    named = configured.runtime_type if configured.runtime_type in RUNTIMES else None
    return named or requested or manifest or "python"


def _workers(
    layers: Layers,
    asked: ModelOptions,
    server: RegistryOptions,
    at_startup: bool,
    is_on_demand: bool,
    warnings: list[str],
) -> tuple[int, int]:
    has_idle_timeout = asked.idle_timeout_s is not None
    for layer in (layers.get("snapshot", NOTHING), layers.get("desired", NOTHING)):
        if "min_workers" in layer:
            least, most = layer["min_workers"], layer["max_workers"]
            return least, most if least or has_idle_timeout or is_on_demand else 0
    archive = layers.get("archive", NOTHING)
    least, most = archive.get("min_workers") or 0, archive.get("max_workers") or 0
    if least and most >= least:
        return least, most
    if archive.get("min_workers") == 0 and most and has_idle_timeout:
        return 0, most
    if unused := unused_workers(archive, has_idle_timeout):
        warnings.append(unused)
    default = server.workers_at_startup if at_startup else server.workers_by_api
    if not at_startup:
        workers = layers.get("registration", NOTHING).get("min_workers", default)
        return workers, workers
    models = layers.get("models", NOTHING)
    minimum = models.get("min_workers", default)
    return minimum, max(minimum, models.get("max_workers", minimum))


def _gpu_ids(asked: ModelOptions, gpu_count: int, refuses_missing: bool, warnings: list[str]) -> tuple[int, ...]:
    missing = [device for device in asked.device_ids or () if not 0 <= device < gpu_count]
    if missing and refuses_missing and asked.device_type != "cpu":
        there = f"devices 0 to {gpu_count - 1}" if gpu_count else "no accelerator"
        raise BadArchive(
            f"deviceIds is {list(asked.device_ids or ())} in the configuration of model {asked.model}, and there is no "
            f"device {missing[0]}: the server has {there}. Name devices that it has, or leave deviceIds out to use all "
            "of them; deviceType: cpu uses none."
        )
    if asked.device_type == "gpu" and not gpu_count:
        warnings.append("deviceType gpu of the model's configuration is not used: the server has no accelerator")
    if not gpu_count or asked.device_type == "cpu":
        return ()
    if asked.device_ids:
        if all(0 <= device < gpu_count for device in asked.device_ids):
            return tuple(asked.device_ids)
        warnings.append(
            f"deviceIds {list(asked.device_ids)} of the model's configuration are not used: the server has devices "
            f"0 to {gpu_count - 1}"
        )
    return tuple(range(gpu_count))


def _ray(asked: ModelOptions, warnings: list[str]) -> RayOptions | None:
    """What each worker gets on a Ray cluster; None if the model's workers run on this machine."""
    if asked.launcher != "ray":
        if asked.worker_resources is not None:
            warnings.append("workerResources of the model's configuration are not used: they need launcher ray")
        return None
    is_group = asked.parallel_type not in (None, "custom") and asked.parallel_level
    if is_group or asked.parallel is not None:
        which = f"parallelType {asked.parallel_type}" if is_group else "there is a parallel"
        raise BadInput(
            f"Model {asked.model} cannot be loaded: launcher is ray and {which}, which "
            "makes a worker of several processes; leave out one of the two."
        )
    amounts = dict(asked.worker_resources or {})
    return RayOptions(
        cpus=amounts.pop("cpus", 1.0),
        gpus=amounts.pop("gpus", 0.0),
        memory_bytes=int(amounts.pop("memory", 0)),
        resources=amounts,
        placement=asked.worker_placement,
    )
