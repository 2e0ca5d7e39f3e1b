"""Builds the parts that load and run models: launchers, environments, memory, pools, registry, workflows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from marserve.app.building.desired_state import DesiredStates, state_folder
from marserve.app.building.from_settings import (
    archive_limits,
    cluster_options,
    environment_folder,
    registry_options,
    takes_uploads,
    worker_environment,
)
from marserve.app.building.metrics import declare_families
from marserve.app.building.stores import build_fetcher
from marserve.app.building.tasks import keep
from marserve.app.building.watching import watched_folders
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.environments.environments import Environments
from marserve.environments.interpreters import Interpreters
from marserve.machine.describe import Machine
from marserve.machine.device_watch import DeviceWatch
from marserve.machine.devices import Assigner
from marserve.machine.visible import order_of_devices
from marserve.memory.device_memory import DeviceMemory
from marserve.memory.host_memory import FAMILIES as MEMORY_FAMILIES
from marserve.memory.host_memory import HostMemory
from marserve.memory.learned_memory import LearnedMemory
from marserve.memory.ledger import Ledger
from marserve.memory.needs import budget_of
from marserve.memory.waiting_line import WaitingLine, mib
from marserve.messages import Load
from marserve.optimise.background.background import Background
from marserve.optimise.background.searching import Searching
from marserve.pool.launchers.cgroups import WorkerCgroups
from marserve.pool.launchers.launcher import Launchers
from marserve.pool.launchers.leftovers import Leftovers
from marserve.pool.launchers.remote.cluster import Cluster
from marserve.pool.options import PoolOptions
from marserve.pool.pool import Pool
from marserve.pool.reservation import Reservations
from marserve.registry.catalogue.versions import PoolFactory
from marserve.registry.changes.hooks import Hooks
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.uploads import Uploads
from marserve.registry.model_calls import ModelCalls
from marserve.registry.models import Registry
from marserve.rollout.records import Records
from marserve.rollout.rollouts import Rollouts
from marserve.settings import Settings
from marserve.store.fetching.download_list import FAMILIES as DOWNLOAD_FAMILIES
from marserve.store.fetching.download_list import DownloadList
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.fetching.fetcher import Fetcher
from marserve.store.sources.local import LocalStore
from marserve.telemetry.body_samples import BodySamples, Hiding
from marserve.telemetry.kept_requests import KeptRequests
from marserve.telemetry.metrics.printed_metrics import PrintedMetrics
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.workflows.intake import WorkflowIntake
from marserve.workflows.workflows import WorkflowOptions, Workflows

# What each process of a search for a faster build may allocate, and at most a quarter of the memory: there are two.
MOST_SEARCH_BYTES = 8 << 30

# Memory of hosts and devices is logged under one name.
memory_log = logging.getLogger("marserve.registry.memory")


async def read_desired_state(settings: Settings) -> DesiredStates:
    """The desired state, with its document read if the settings name one. Raises BadSettings for a bad document."""
    desired = await asyncio.to_thread(DesiredStates, settings)
    await asyncio.to_thread(desired.read_first)
    return desired


def build_launchers(
    settings: Settings,
    machine: Machine,
    devices: int,
    worker_log: PrintedMetrics,
    watch: DeviceWatch | None,
    archives: UnpackedArchives,
    hurry: asyncio.Event | None,
) -> Launchers:
    """The launchers of workers, on `devices` accelerators that `watch` reads, from folders that `archives` unpacked.

    `hurry` as `Launchers` has it.
    """
    return Launchers(
        worker_environment(settings) | order_of_devices(machine.vendor, os.environ),
        worker_log,
        first_worker_id=settings.initial_worker_port,
        first_group_id=settings.initial_distribution_port,
        devices=Assigner(devices),
        vendor=machine.vendor,
        accelerators=machine.devices[:devices],
        cores=machine.cores,
        cgroups=WorkerCgroups(settings.worker_cgroup) if settings.worker_cgroup is not None else None,
        cluster=Cluster(cluster_options(settings), os.environ),
        most_loading=settings.max_parallel_loads,
        read_device=watch.of if watch is not None else lambda device: None,
        is_device_lost=watch.has_lost if watch is not None else lambda: False,
        restore_folder=archives.restore,
        hurry=hurry,
    )


def build_environments(settings: Settings, scratch: Path, launchers: Launchers) -> Environments:
    """The environments with the packages that archives require."""
    return Environments(
        environment_folder(settings),
        scratch / "environments",
        launchers.environment,
        limit_bytes=settings.environment_cache_size,
        timeout_s=settings.environment_timeout,
        leftovers=launchers.leftovers,
    )


async def prepare_fetcher(settings: Settings, downloads: DownloadList, metrics: Metrics) -> Fetcher:
    """The fetcher of archives, of models and of workflows. Raises BadSettings."""
    declare_families(metrics, DOWNLOAD_FAMILIES, downloads)
    limits = archive_limits(settings)
    return await asyncio.to_thread(build_fetcher, settings, limits.max_total_bytes, downloads)


def build_waiting_line(settings: Settings, machine: Machine, watch: DeviceWatch | None) -> WaitingLine:
    """The line of those who wait for memory of the host and of devices, with its ledger of reservations."""
    budget = budget_of(machine.memory_bytes) if settings.model_memory == "auto" else settings.model_memory
    if budget:
        memory_log.info("Memory for models: %s MiB (model_memory=%s)", mib(budget), settings.model_memory)
    return WaitingLine(Ledger(budget, watch), least_residence_s=settings.least_residence, watch=watch)


def build_host_memory(
    settings: Settings, line: WaitingLine, launchers: Launchers, metrics: Metrics, stack: contextlib.AsyncExitStack
) -> HostMemory | None:
    """Reserves the host's memory for models and watches it; None if it has no bound."""
    if not line.ledger.budget_bytes:
        return None
    folder = state_folder(settings)
    learned = LearnedMemory(folder / "memory.json" if folder is not None else None)
    host = HostMemory(line, learned, shared_pids=lambda: launchers.shared_pids)
    declare_families(metrics, MEMORY_FAMILIES, host)
    stack.push_async_callback(host.close_all)
    keep(stack, host.run())
    return host


def pool_maker(
    settings: Settings,
    launchers: Launchers,
    worker_log: PrintedMetrics,
    metrics: Metrics,
    host: HostMemory | None,
    device_memory: DeviceMemory | None,
    on_failed: Callable[[str], None],
    calls: ModelCalls,
) -> PoolFactory:
    """Makes the pool of a version, with its reservations of memory. `on_failed`: see `onCrash: fail`.

    `calls` takes what its handlers ask of other models.
    """

    def make_pool(options: PoolOptions, load: Load) -> Pool:
        if settings.metrics_config is not None:
            load = msgspec.structs.replace(load, metrics_file=str(settings.metrics_config))

        def make(reservations: Reservations) -> Pool:
            return Pool(
                options,
                load,
                launchers,
                worker_log,
                on_measured=lambda measured: metrics.update_custom(options.model, measured.values, measured.dropped),
                on_called=lambda request, message, body, reply: calls.take(
                    options.model, request, message, body, time.monotonic(), options.response_timeout_s, reply
                ),
                on_failed=on_failed,
                reservations=reservations,
            )

        def make_on_devices(reservations: Reservations) -> Pool:
            return make(reservations) if device_memory is None else device_memory.house(reservations, options, make)

        if options.ray is not None:  # its workers use other machines' memory
            return make(Reservations())
        return make_on_devices(Reservations()) if host is None else host.house(options, make_on_devices)

    return make_pool


def build_registry(
    settings: Settings,
    machine: Machine,
    devices: int,
    scratch: Path,
    make_pool: PoolFactory,
    metrics: Metrics,
    environments: Environments,
    leftovers: Leftovers,
    fetcher: Fetcher,
    on_change: Callable[[], None],
    archives: UnpackedArchives,
    hooks: Hooks,
    keeper: KeptRequests | None = None,
) -> Registry:
    """The registry of models; archives are unpacked below `scratch`. `on_change`: see `Registry`."""
    intake = Intake(
        LocalStore(settings.model_store, roots=[*settings.model_roots, *watched_folders(settings)]),
        scratch / "models",
        archive_limits(settings),
        settings.trusted_models,
        fetcher,
        None if settings.keep_fetched_archives else FetchedArchives(state_folder(settings)),
        archives,
    )
    options = registry_options(settings, machine, devices)
    interpreters = Interpreters(
        settings.allowed_interpreters,
        worker_environment(settings),
        scratch / "interpreters",
        leftovers=leftovers,
    )
    options = replace(options, interpreters=interpreters)
    samples = None
    if settings.body_sample:
        samples = BodySamples(settings.body_sample, settings.body_sample_size, Hiding(settings.body_sample_hide))
    return Registry(
        options,
        intake,
        make_pool,
        metrics,
        environments,
        on_change=on_change,
        hooks=hooks,
        samples=samples,
        keeper=keeper,
    )


def build_keeper(settings: Settings) -> KeptRequests | None:
    """What keeps requests to be run again; None if nothing asks for that."""
    if settings.entry != "marserve" or not settings.replay_sample or not settings.replay_size:
        return None
    return KeptRequests(settings.replay_sample, settings.replay_size, Hiding(settings.body_sample_hide))


def build_uploads(settings: Settings, registry: Registry, stack: contextlib.AsyncExitStack) -> Uploads | None:
    """What takes uploaded archives; None if the server takes none."""
    if not takes_uploads(settings):
        return None
    uploads = registry.uploads(settings.max_upload_size)
    keep(stack, uploads.sweep())
    return uploads


def hooks_of(host: HostMemory | None, device_memory: DeviceMemory | None) -> Hooks:
    """The hooks of dry runs for memory; parts that are built later add their own."""
    hooks = Hooks()
    if host is not None:
        hooks.memory = host.foresee
    if device_memory is not None:
        hooks.device_memory = device_memory.foresee
    return hooks


def build_rollouts(settings: Settings, registry: Registry) -> Rollouts:
    """The roll-outs; their records are kept beside the logs."""
    folder = settings.log_location
    return Rollouts(registry, None if folder is None else Records(folder / "state" / "rollouts"))


def build_background(
    settings: Settings, registry: Registry, machine: Machine, leftovers: Leftovers, metrics: Metrics
) -> Background | None:
    """The searches for faster builds; None as `torchserve`, where the key `optimise` is nothing."""
    if settings.entry != "marserve":
        return None
    return Background(
        registry,
        Searching(worker_environment(settings), leftovers),
        state_folder(settings),
        metrics.happenings,
        share=settings.optimise_share,
        memory_bytes=min(MOST_SEARCH_BYTES, machine.memory_bytes // 4),
    )


def build_workflows(
    settings: Settings, registry: Registry, fetcher: Fetcher, scratch: Path, archives: UnpackedArchives
) -> Workflows:
    """The workflows; archives are unpacked below `scratch`."""
    intake = WorkflowIntake(
        settings.workflow_store,
        scratch / "workflows",
        archive_limits(settings),
        settings.trusted_models,
        fetcher,
        archives,
    )
    options = WorkflowOptions(
        queue_size=settings.job_queue_size,
        max_answer_bytes=settings.max_response_size,
        unregister_timeout_s=settings.unregister_model_timeout,
    )
    return Workflows(registry, intake, options)
