"""Makes the parts of a server, in order. Nothing is served yet, and no port is bound.

Each part that must be ended is put on a stack when it is made, so that parts end in reverse order.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marserve.api.byte_ledger import FAMILIES as LEDGER_FAMILIES
from marserve.api.byte_ledger import ByteLedger
from marserve.api.decoding import Decoding
from marserve.api.http.connections import ConnectionTable
from marserve.api.http.large_answers import LargeAnswers
from marserve.api.open_inference.regions import Regions
from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import LogSettings, TraceSettings
from marserve.api.open_inference.shared_tensors import SharedTensors
from marserve.api.request_ids import RequestIds
from marserve.app.building.access import AccessControl
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.desired_state import FAMILIES as DESIRED_STATE_FAMILIES
from marserve.app.building.desired_state import DesiredStates
from marserve.app.building.devices import build_device_memory, usable_devices, watch_devices
from marserve.app.building.from_settings import http_limits, most_bytes_in_flight
from marserve.app.building.log_levels import LogLevels
from marserve.app.building.metrics import (
    build_metrics,
    build_recorder,
    build_scrapes,
    build_tracing,
    declare_families,
)
from marserve.app.building.models import (
    build_background,
    build_environments,
    build_host_memory,
    build_keeper,
    build_launchers,
    build_registry,
    build_rollouts,
    build_uploads,
    build_waiting_line,
    build_workflows,
    hooks_of,
    pool_maker,
    prepare_fetcher,
    read_desired_state,
)
from marserve.app.building.snapshots import build_snapshots, read_snapshot
from marserve.app.building.tasks import keep
from marserve.app.building.watching import build_watches
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.arrivals.watches import Watches
from marserve.desired_state.reconciler import Reconciler
from marserve.machine.describe import Machine
from marserve.machine.device_watch import DeviceWatch
from marserve.optimise.background.background import Background
from marserve.plugins import InstalledEndpoint, find_endpoints
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.catalogue.snapshot_writer import SnapshotWriter
from marserve.registry.intake.scratch import Scratch, remove_orphans
from marserve.registry.intake.uploads import Uploads
from marserve.registry.model_calls import ModelCalls
from marserve.registry.models import Registry
from marserve.rollout.rollouts import Rollouts
from marserve.settings import Settings
from marserve.store.fetching.download_list import DownloadList
from marserve.telemetry.collector_pauses import CollectorPauses
from marserve.telemetry.happenings import Happenings
from marserve.telemetry.kept_requests import KeptRequests
from marserve.telemetry.logs.logs import Logs
from marserve.telemetry.logs.search import FILES
from marserve.telemetry.loop_lag import FAMILIES as LOOP_FAMILIES
from marserve.telemetry.loop_lag import LoopLag
from marserve.telemetry.metrics.printed_metrics import PrintedMetrics
from marserve.telemetry.metrics.scrapes import Scrapes
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.recorder import Recorder
from marserve.telemetry.traces.tracing import Takes, Tracing
from marserve.workflows.workflows import Workflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that listeners reach, and those that the server starts and ends."""

    settings: Settings
    logs: Logs
    metrics: Metrics
    loop_lag: LoopLag
    scrapes: Scrapes
    registry: Registry
    desired: DesiredStates
    reconciler: Reconciler
    optimising: Background | None
    rollouts: Rollouts
    watches: Watches
    workflows: Workflows
    downloads: DownloadList
    uploads: Uploads | None
    restored: list[SnapshotVersion] | None
    snapshots: SnapshotWriter | None
    endpoints: Sequence[InstalledEndpoint]
    connections: ConnectionTable
    large_answers: LargeAnswers
    decoding: Decoding
    request_ids: RequestIds
    recorder: Recorder | None
    keeper: KeptRequests | None
    ended: Takes | None
    tracing: Tracing | None
    happenings: Happenings
    log_levels: LogLevels
    log_settings: LogSettings
    trace_settings: TraceSettings
    repository: Repository
    regions: Regions
    shared_tensors: SharedTensors | None
    access: AccessControl
    device_watch: DeviceWatch | None
    machine: Machine


async def build_parts(
    settings: Settings,
    logs: Logs,
    machine: Machine,
    access: AccessControl,
    stack: contextlib.AsyncExitStack,
    on_crash: Callable[[str], None],
    hurry: asyncio.Event | None = None,
) -> Parts:
    """Make all parts. `on_crash` is called when a worker of a model with `onCrash: fail` crashed.

    `hurry` is set when the server's end is not to wait for workers.

    Raises CannotStart and BadSettings; the parts made so far are on the stack.
    """
    try:
        scratch = Scratch(settings.temporary_folder)
    except OSError as error:
        raise CannotStart(
            f"No folder can be made in the temporary folder {settings.temporary_folder or tempfile.gettempdir()} "
            f"({error.strerror}), and archives are unpacked there; name another with temporary_folder, or TEMP"
        ) from error
    stack.callback(scratch.remove)
    keep(stack, asyncio.to_thread(remove_orphans, settings.temporary_folder))
    metrics = build_metrics(settings, logs, machine, stack)
    recorder = build_recorder(settings, stack)
    if recorder is not None:
        metrics.prepare_by(recorder.sort)  # else a quiet model's stages are on the page much later than its requests
    pauses = CollectorPauses(metrics.happenings)
    pauses.begin()
    stack.callback(pauses.end)
    loop_lag = LoopLag(time.monotonic(), settings.loop_stall_threshold, metrics.happenings)
    metrics.declare_rows("marserve_loop_lag_seconds", lambda: [((), loop_lag.lag_seconds)])
    declare_families(metrics, LOOP_FAMILIES, loop_lag)
    worker_log = PrintedMetrics(logs.workers, metrics.update_custom)
    devices = usable_devices(settings, machine)
    restored = await asyncio.to_thread(read_snapshot, settings)
    desired = await read_desired_state(settings)
    endpoints = find_endpoints()
    snapshots = build_snapshots(settings, devices)
    archives = UnpackedArchives()
    device_watch = await watch_devices(machine, devices, metrics, stack)
    launchers = build_launchers(settings, machine, devices, worker_log, device_watch, archives, hurry)
    stack.push_async_callback(launchers.close)
    environments = build_environments(settings, scratch.path, launchers)
    tracing = await build_tracing(settings, metrics, recorder, stack)

    def note_download(began: float, ended: float, text: str) -> None:
        metrics.happenings.note("download", began, ended, text)

    downloads = DownloadList(note_download)
    fetcher = await prepare_fetcher(settings, downloads, metrics)
    line = build_waiting_line(settings, machine, device_watch)
    host = build_host_memory(settings, line, launchers, metrics, stack)
    device_memory = await build_device_memory(settings, line, device_watch, launchers.devices, metrics, stack)
    calls = ModelCalls(settings.handler_error_status)
    keeper = build_keeper(settings)
    registry = build_registry(
        settings,
        machine,
        devices,
        scratch.path,
        pool_maker(settings, launchers, worker_log, metrics, host, device_memory, on_crash, calls),
        metrics,
        environments,
        launchers.leftovers,
        fetcher,
        snapshots.note_change if snapshots is not None else lambda: None,
        archives,
        hooks_of(host, device_memory),
        keeper,
    )
    calls.open(registry.data_plane)
    uploads = build_uploads(settings, registry, stack)
    reconciler = desired.build(registry)
    stack.push_async_callback(reconciler.stop)
    stack.push_async_callback(registry.stop)
    declare_families(metrics, DESIRED_STATE_FAMILIES, reconciler)
    optimising = build_background(settings, registry, machine, launchers.leftovers, metrics)
    if optimising is not None:
        stack.push_async_callback(optimising.stop)
    rollouts = build_rollouts(settings, registry)
    stack.push_async_callback(rollouts.stop)
    metrics.declare_rows("marserve_rollouts_ended_total", rollouts.rows)
    watches = build_watches(settings, registry, fetcher, scratch.path, rollouts, metrics, archives)
    workflows = build_workflows(settings, registry, fetcher, scratch.path, archives)
    stack.push_async_callback(workflows.stop)
    ledger = ByteLedger(most_bytes_in_flight(settings, machine))
    declare_families(metrics, LEDGER_FAMILIES, ledger)
    large_answers = LargeAnswers(
        scratch.path,
        memory_bytes=settings.large_answer_memory,
        disk_bytes=settings.large_answer_disk,
        ledger=ledger,
        ready_threads=1,
    )
    stack.callback(large_answers.close)
    decoding = Decoding(ready_threads=1)
    stack.callback(decoding.close)
    log_levels = LogLevels(logs, launchers.levels)
    regions = Regions(
        settings.system_shared_memory_folder,
        most_bytes=settings.system_shared_memory_size,
        most_regions=settings.system_shared_memory_max_regions,
    )
    return Parts(
        settings=settings,
        logs=logs,
        metrics=metrics,
        loop_lag=loop_lag,
        scrapes=build_scrapes(settings, metrics, registry),
        registry=registry,
        desired=desired,
        reconciler=reconciler,
        optimising=optimising,
        rollouts=rollouts,
        watches=watches,
        workflows=workflows,
        downloads=downloads,
        uploads=uploads,
        restored=restored,
        snapshots=snapshots,
        endpoints=endpoints,
        connections=ConnectionTable(http_limits(settings), ledger),
        large_answers=large_answers,
        decoding=decoding,
        request_ids=RequestIds(takes_clients=settings.take_request_id),
        happenings=metrics.happenings,
        recorder=recorder,
        keeper=keeper,
        ended=recorder if tracing is None else tracing,
        tracing=tracing,
        log_levels=log_levels,
        trace_settings=TraceSettings(None if tracing is None else tracing.share),
        log_settings=LogSettings(
            log_levels,
            f"{FILES['server']}.log" if settings.log_location else "",
            "default" if settings.log_format == "text" else settings.log_format,
        ),
        repository=Repository(registry, desired.changes(registry), enable_model_api=settings.enable_model_api),
        regions=regions,
        shared_tensors=SharedTensors(regions, registry) if regions.is_on else None,
        access=access,
        device_watch=device_watch,
        machine=machine,
    )
