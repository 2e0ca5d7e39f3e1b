"""Assembly: settings in, a running server out. Nothing else builds objects.

`run(settings)` is a server's whole life: logs, machine, pools, registry, listeners; then it waits for SIGTERM or
SIGINT, drains and ends. A second signal hurries. Order of the start: sockets are bound first (a taken port is found
before anything else is begun), the models of the start are read, then connections are accepted. Order of the end:
readiness falls, requests are answered for `drain_delay` more, new ones are refused, accepted ones are answered,
listeners close, workers and templates end and are reaped, logs are written out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import uvicorn
import uvloop
from fastapi import APIRouter
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from marserve import __version__
from marserve.allocator import BY_SERVER, keep_large_blocks
from marserve.api.application import build_app
from marserve.api.auth import Access, CannotKeepTokens, Guard, Kind, Tokens, token_router
from marserve.api.connections import ConnectionTable
from marserve.api.description import description_router
from marserve.api.desired_state import desired_state_router
from marserve.api.downloads import downloads_router
from marserve.api.events import EventSecrets, events_router, watches_router
from marserve.api.health import PROBES, health_router
from marserve.api.http_connection import bind_connection
from marserve.api.inference import InferenceSurface
from marserve.api.large_answers import LargeAnswers
from marserve.api.management import management_router
from marserve.api.metrics import metrics_router
from marserve.api.open_inference import open_inference_router
from marserve.api.plugin_endpoints import check_patterns, endpoint_router
from marserve.api.request_head import HttpLimits
from marserve.api.response_headers import ResponseHeaders
from marserve.api.rollouts import rollout_router
from marserve.api.sagemaker import Endpoint, sagemaker_router
from marserve.api.tls import Identity, make_up_identity, read_keystore, read_pem_files, server_context
from marserve.api.workflows import workflow_router
from marserve.archive.reader import Limits
from marserve.errors import ArchiveNotFound, BadSettings, InvalidSnapshot
from marserve.machine.describe import Machine, Meter, describe_machine
from marserve.machine.devices import Assigner, cap
from marserve.machine.measuring_program import ProgramFailed, run_program
from marserve.messages import Load
from marserve.plugins import InstalledEndpoint, SnapshotStore, find_endpoints, find_snapshot_store
from marserve.pool.cgroups import WorkerCgroups
from marserve.pool.environments import Environments
from marserve.pool.launchers import Launchers
from marserve.pool.options import PoolOptions
from marserve.pool.supervisor import Pool
from marserve.registry.call_modes import SequenceHeaderNames
from marserve.registry.calls import RegistryOptions
from marserve.registry.intake import Intake
from marserve.registry.models import Registry
from marserve.registry.residency import Residency, house, residency_of
from marserve.registry.scratch import Scratch, remove_orphans
from marserve.registry.snapshot import SnapshotVersion, check_archives, read_models
from marserve.registry.snapshot_writer import SnapshotWriter
from marserve.rollout.assembly import FAMILIES as DESIRED_STATE_FAMILIES
from marserve.rollout.assembly import DesiredStates, state_folder
from marserve.rollout.reconciler import Reconciler
from marserve.rollout.rollouts import Rollouts, build_rollouts
from marserve.rollout.watches import FAMILIES as WATCH_FAMILIES
from marserve.rollout.watches import Watches, build_watches, watched_folders
from marserve.settings import KEYS, Address, Settings, sources_report, startup_report
from marserve.settings.snapshot_files import FolderSnapshots, effective_properties, snapshot_folder
from marserve.store.assembly import build_fetcher
from marserve.store.download_list import FAMILIES, DownloadList
from marserve.store.fetch_guard import is_address, is_store_address
from marserve.store.fetcher import Fetcher
from marserve.store.local import LocalStore
from marserve.telemetry.logs import Logs, configure_logs
from marserve.telemetry.metric_definitions import BUILT_IN, read_metrics_file
from marserve.telemetry.metric_line import parse_line
from marserve.telemetry.metrics import LEGACY_PAGE, Metrics, VersionMetrics
from marserve.telemetry.metrics_log import MetricsLog
from marserve.telemetry.model_metrics import ModelMetrics
from marserve.telemetry.printed_metrics import PrintedMetrics
from marserve.workflows.intake import WorkflowIntake
from marserve.workflows.workflows import WorkflowOptions, Workflows

if TYPE_CHECKING:
    from marserve.api.grpc_listener import GrpcLimits, GrpcListener

log = logging.getLogger("marserve.app")

BACKLOG = 2048
# Linux: a socket filter of one instruction, "return 0 bytes", drops what arrives (linux/filter.h, asm/socket.h).
SO_ATTACH_FILTER, BPF_RET = 26, 0x06
ACCEPT_REST_S = 0.02
# How long the operator's own program may take to measure the machine.
PROGRAM_S = 60.0
# The key that commands send; a server that was started beside them has no use for it, its workers still less.
TOKEN_VARIABLE = "MARSERVE_TOKEN"
# How long a client may take to agree on TLS.
HANDSHAKE_S = 10.0
# What the extra `grpc` brings; the server starts without it.
GRPC_PACKAGES = frozenset(("grpc", "grpc_health", "grpc_reflection", "google"))
# Connections are accepted at the latest this long after the start, though models of the start are still being read.
READ_MODELS_FIRST_S = 1.0
# How long the last snapshot may take.
LAST_SNAPSHOT_S = 10.0
# Threads for what blocks. Python's own number, on two cores six, is less than downloads and archives being unpacked may
# have at a time, and then whatever else needs one would wait for them: the end of a worker that died, for one.
BLOCKING_THREADS = 32
# After the drain, how long connections may take to send their last answers out.
CLOSE_CONNECTIONS_S = 5.0


def run(settings: Settings) -> int:
    """Serve until a signal says stop. Returns the exit status: 0 after an orderly stop, 1 when the start failed, or a
    worker crashed whose model's `onCrash` is `fail`.

    What kept it from starting is said in one sentence on standard error. Raises BadSettings for logs that cannot be
    written; nothing was started then.
    """
    logs = configure_logs(
        folder=settings.log_location,
        format=settings.log_format,
        level=settings.log_level,
        has_request_ids=settings.access_log_request_id,
        metrics_folder=settings.metrics_location,
        has_metrics=settings.metrics_mode != "prometheus",
    )
    server = Server(settings, logs)
    keep_large_blocks(BY_SERVER)
    try:
        uvloop.run(server.serve())
    except CannotStart as error:
        log.error("%s", error)
        print(f"marserve did not start: {error}", file=sys.stderr)  # noqa: T201 - what the operator reads
        return 1
    finally:
        logs.close()
    return 1 if server.has_failed else 0


class CannotStart(Exception):
    """The server cannot start; the message says why and what to change."""


@dataclass(slots=True)
class Listener:
    """One listening address: its socket, and the server on it once it accepts."""

    address: Address
    names: list[str]
    sock: socket.socket
    config: uvicorn.Config
    state: ServerState
    server: asyncio.Server | None = None

    async def accept(self) -> None:
        """Accept connections from now on."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.state, app_state={}, _loop=loop
            )
            return made

        tls: ssl.SSLContext | None = self.config.ssl
        if self.address.scheme == "unix":
            self.server = await loop.create_unix_server(protocol, sock=self.sock, backlog=BACKLOG)
        else:
            self.server = await loop.create_server(
                protocol,
                sock=self.sock,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
                backlog=BACKLOG,
            )

    async def turn_away(self) -> None:
        """Let no new connection in, and take in those that the system has accepted on our behalf.

        Closing a listening socket resets connections that wait on it, requests and all. So new ones are first dropped
        unseen (a client tries again within a second, and is refused by then), where the system can do that.
        """
        if sys.platform == "linux":
            drop_everything = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
            program = struct.pack("HL", 1, ctypes.addressof(drop_everything))
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        await asyncio.sleep(ACCEPT_REST_S)

    def close(self) -> None:
        """Listen no more."""
        if self.server is not None:
            self.server.close()
        self.sock.close()
        if self.address.scheme == "unix" and self.address.path is not None:
            Path(self.address.path).unlink(missing_ok=True)


class Server:
    """One server process's parts, and its life."""

    def __init__(self, settings: Settings, logs: Logs) -> None:
        self._settings = settings
        self._logs = logs
        self._workflows: Workflows | None = None
        self._rollouts: Rollouts | None = None
        self._watches: Watches | None = None
        self._snapshots: SnapshotWriter | None = None
        self._endpoints: list[InstalledEndpoint] = []
        self.has_failed = False
        self._tokens: Tokens | None = None
        self._tls: ssl.SSLContext | None = None
        self._downloads = DownloadList()
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> None:
        """From start to end. Raises CannotStart; nothing is left behind then."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="blocking"))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        settings = self._settings
        try:
            machine = await asyncio.to_thread(describe_machine, os.environ)
        except BadSettings as error:
            raise CannotStart(str(error)) from error
        report = startup_report(settings, version=__version__, cores=machine.cores, accelerators=machine.accelerators)
        for line in report:
            log.info("%s", line)
        for warning in settings.warnings:
            log.warning("%s", warning)
        for note in (*settings.notes, *sources_report(settings)):
            log.info("%s", note)
        async with contextlib.AsyncExitStack() as stack:
            await self._serve(machine, stack)
        log.info("Model server stopped.")

    async def _serve(self, machine: Machine, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        scratch = Scratch(settings.temporary_folder)
        stack.callback(scratch.remove)
        self._keep(stack, asyncio.to_thread(remove_orphans, settings.temporary_folder))
        metrics = self._build_metrics(machine, stack)
        worker_log = PrintedMetrics(self._logs.workers, metrics.update_custom)
        devices = cap(machine.accelerators, settings.number_of_gpu)
        restored = await asyncio.to_thread(read_snapshot, settings)
        self._desired = desired = await self._read_desired_state()
        self._load_plugins(devices)
        launchers = Launchers(
            worker_environment(settings),
            worker_log,
            first_worker_id=settings.initial_worker_port,
            first_group_id=settings.initial_distribution_port,
            devices=Assigner(devices),
            vendor=machine.vendor,
            cores=machine.cores,
            cgroups=WorkerCgroups(settings.worker_cgroup) if settings.worker_cgroup is not None else None,
        )
        stack.push_async_callback(launchers.close)
        environments = Environments(
            environment_folder(settings),
            scratch.path / "environments",
            launchers.environment,
            limit_bytes=settings.environment_cache_size,
            timeout_s=settings.environment_timeout,
            leftovers=launchers.leftovers,
        )
        fetcher = await self._build_fetcher(metrics)
        residency = self._build_residency(machine, launchers, metrics, stack)
        registry = self._build_registry(
            scratch.path, metrics, worker_log, launchers, machine, devices, environments, fetcher, residency
        )
        reconciler = desired.build(registry)
        stack.push_async_callback(reconciler.stop)
        stack.push_async_callback(registry.stop)
        for name, kind, text, label, read in DESIRED_STATE_FAMILIES:
            metrics.declare(name, kind, text, label, functools.partial(read, reconciler))
        self._rollouts = build_rollouts(settings, registry)
        stack.push_async_callback(self._rollouts.stop)
        self._watches = self._build_watches(scratch.path, registry, fetcher, metrics)
        self._workflows = self._build_workflows(scratch.path, registry, fetcher)
        stack.push_async_callback(self._workflows.stop)
        connections = ConnectionTable(http_limits(settings))
        large_answers = LargeAnswers(
            scratch.path, memory_bytes=settings.large_answer_memory, disk_bytes=settings.large_answer_disk
        )
        stack.callback(large_answers.close)
        await self._prepare_access()
        listeners = self._bind(registry, metrics, connections, large_answers)
        for listener in listeners:
            stack.callback(listener.close)
        grpc_listeners = self._bind_grpc(registry, metrics)
        for grpc_listener in grpc_listeners:
            stack.push_async_callback(grpc_listener.stop)
        await self._write_tokens(stack)
        if not settings.disable_system_metrics:
            self._keep(stack, self._watch_machine(machine, metrics))
        loading = registry.load_at_start(settings.load_models) if restored is None else registry.restore(restored)
        if desired.place is not None:
            loading.close()
            loading = desired.start(registry)
        reading = self._keep(stack, loading)
        self._keep(stack, desired.watch(reading))
        await asyncio.wait(
            [reading, asyncio.ensure_future(self._stop_asked.wait())],
            timeout=READ_MODELS_FIRST_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if settings.strict_start:
            await self._insist_on_models(registry, reading, stack)
        for listener in listeners:
            await listener.accept()
            log.info("%s API listens on %s", " and ".join(listener.names), listener.address)
        for grpc_listener in grpc_listeners:
            await grpc_listener.accept()
            log.info("%s API listens on %s", grpc_listener.name, grpc_listener.address)
        if self._snapshots is not None:
            self._keep(stack, self._write_snapshots(self._snapshots, registry, reading))
        await self._rollouts.start()
        self._keep(stack, self._watch_places(self._watches, reading, reconciler))
        connections.start()
        stack.callback(connections.stop)
        gc.collect()
        gc.freeze()  # what the start made stays: collections on the hot path need not look at it again
        self._logs.announce("Model server started.")
        await self._stop_asked.wait()
        await self._drain(registry, connections, listeners, grpc_listeners)
        if self._snapshots is not None and has_succeeded(reading):
            # What was not read would be missing from it; the snapshot before has it.
            last = self._snapshots.write("shutdown", registry.snapshot())
            await self._unless_hurried(last, LAST_SNAPSHOT_S)

    # ------------------------------------------------------------------------------------------- parts

    async def _read_desired_state(self) -> DesiredStates:
        """What decides about models where the settings name it. Raises CannotStart for a document that cannot be."""
        try:
            desired = await asyncio.to_thread(DesiredStates, self._settings)
            await asyncio.to_thread(desired.read_first)
        except BadSettings as error:
            raise CannotStart(str(error)) from error
        return desired

    def _build_metrics(self, machine: Machine, stack: contextlib.AsyncExitStack) -> Metrics:
        """The metrics that the metrics file lists, on the page or as lines. Raises CannotStart for a file that is none.

        A page is only read from; lines need a thread, which ends after everything that is measured.
        """
        settings = self._settings
        try:
            path = settings.metrics_config
            definitions = BUILT_IN if path is None else read_metrics_file(path)
        except BadSettings as error:
            raise CannotStart(str(error)) from error
        models = ModelMetrics(definitions, detects=settings.model_metrics_auto_detect)
        mode, lines = settings.metrics_mode, None
        if mode != "prometheus":
            skips = LEGACY_PAGE if mode == "legacy" else ()
            lines = MetricsLog(definitions.front, models.known, machine.hostname, self._logs.write_metrics, skips)
        metrics = Metrics(
            machine.hostname, self._logs.dropped, definitions=definitions, model_metrics=models, mode=mode, lines=lines
        )
        if lines is not None:
            lines.start(metrics.responses)
            stack.callback(lines.close)
        return metrics

    def _build_registry(
        self,
        scratch: Path,
        metrics: Metrics,
        worker_log: PrintedMetrics,
        launchers: Launchers,
        machine: Machine,
        devices: int,
        environments: Environments,
        fetcher: Fetcher,
        residency: Residency | None,
    ) -> Registry:
        settings = self._settings

        def make_pool(options: PoolOptions, load: Load) -> Pool:
            version = VersionMetrics(options.model, options.version)
            if settings.metrics_config is not None:
                load = msgspec.structs.replace(load, metrics_file=str(settings.metrics_config))
            return house(
                residency,
                options,
                lambda room: Pool(
                    options,
                    load,
                    launchers,
                    version,
                    worker_log,
                    on_measured=lambda values: metrics.update_custom(options.model, values),
                    on_failed=self._on_crash,
                    room=room,
                ),
            )

        intake = Intake(
            LocalStore(settings.model_store, roots=[*settings.model_roots, *watched_folders(settings)]),
            scratch / "models",
            archive_limits(settings),
            settings.trusted_models,
            fetcher,
        )
        return Registry(
            registry_options(settings, machine, devices),
            intake,
            make_pool,
            metrics,
            environments,
            on_change=self._snapshots.note_change if self._snapshots is not None else lambda: None,
        )

    def _build_residency(
        self, machine: Machine, launchers: Launchers, metrics: Metrics, stack: contextlib.AsyncExitStack
    ) -> Residency | None:
        """What keeps the memory for models, and watches it; None where there is no bound."""
        settings = self._settings
        folder = state_folder(settings)
        residency = residency_of(settings, machine.memory_bytes, lambda: launchers.shared_pids, state_folder=folder)
        if residency is not None:
            metrics.read_memory = residency.figures
            stack.push_async_callback(residency.close_all)
            self._keep(stack, residency.run())
        return residency

    def _build_watches(self, scratch: Path, registry: Registry, fetcher: Fetcher, metrics: Metrics) -> Watches:
        """What watches stores for new versions. Raises CannotStart for a place that cannot be watched."""
        settings = self._settings
        try:
            watches = build_watches(
                settings,
                registry,
                fetcher,
                scratch / "arrivals",
                archive_limits(settings),
                self._rollouts,
                os.environ,
            )
        except BadSettings as error:
            raise CannotStart(str(error)) from error
        for name, kind, text, label, read in WATCH_FAMILIES:
            metrics.declare(name, kind, text, label, functools.partial(read, watches))
        return watches

    async def _watch_places(self, watches: Watches, reading: asyncio.Task[Any], reconciler: Reconciler) -> None:
        """Watch once the models of the start are read: they go first."""
        await asyncio.wait([reading])
        await watches.run(reconciler.policies)

    def _load_plugins(self, devices: int) -> None:
        """Load what installed packages add, and make the writer of snapshots. Raises CannotStart."""
        settings = self._settings
        try:
            self._endpoints = find_endpoints()
            if settings.config_snapshots:
                store = find_snapshot_store() or FolderSnapshots(
                    snapshot_folder(settings.log_location, settings.working_directory), settings.config_snapshots_kept
                )
                self._snapshots = self._build_snapshots(store, devices)
        except BadSettings as error:
            raise CannotStart(str(error)) from error

    def _build_snapshots(self, store: SnapshotStore, devices: int) -> SnapshotWriter:
        settings = self._settings
        facts = {
            "model_store": str(settings.model_store or ""),
            "workflow_store": str(settings.workflow_store or ""),
            "number_of_gpu": str(devices),
            "python": sys.executable,
        }
        log.info("Snapshots are written to %s; --ncs (config_snapshots=false) switches that off", store.where)
        return SnapshotWriter(store, effective_properties(settings, facts, __version__))

    async def _write_snapshots(self, writer: SnapshotWriter, registry: Registry, reading: asyncio.Task[Any]) -> None:
        """Write snapshots once the models of the start are read: one of half of them would lose the others."""
        await asyncio.wait([reading])
        if has_succeeded(reading):
            await writer.run(registry.snapshot)

    async def _build_fetcher(self, metrics: Metrics) -> Fetcher:
        """What fetches archives, of models and of workflows. Raises CannotStart."""
        for name, kind, text, label, read in FAMILIES:
            metrics.declare(name, kind, text, label, functools.partial(read, self._downloads))
        limits = archive_limits(self._settings)
        try:
            return await asyncio.to_thread(build_fetcher, self._settings, limits.max_total_bytes, self._downloads)
        except BadSettings as error:
            raise CannotStart(str(error)) from error

    def _build_workflows(self, scratch: Path, registry: Registry, fetcher: Fetcher) -> Workflows:
        settings = self._settings
        intake = WorkflowIntake(
            settings.workflow_store,
            scratch / "workflows",
            archive_limits(settings),
            settings.trusted_models,
            fetcher,
        )
        options = WorkflowOptions(
            queue_size=settings.job_queue_size,
            max_answer_bytes=settings.max_response_size,
            unregister_timeout_s=settings.unregister_model_timeout,
        )
        return Workflows(registry, intake, options)

    async def _prepare_access(self) -> None:
        """Make the keys of clients, and the TLS of https addresses, where either is asked for."""
        settings = self._settings
        if not settings.disable_token_authorization:
            self._tokens = Tokens(settings.token_file, settings.token_expiration_min * 60)
        try:
            identity = await asyncio.to_thread(listeners_identity, settings)
            self._tls = server_context(identity) if identity is not None else None
        except BadSettings as error:
            raise CannotStart(str(error)) from error

    async def _write_tokens(self, stack: contextlib.AsyncExitStack) -> None:
        """Let clients find their keys. After the ports are ours: a server that cannot start leaves another's file."""
        if self._tokens is None:
            return
        try:
            await asyncio.to_thread(self._tokens.write)
        except CannotKeepTokens as error:
            raise CannotStart(str(error)) from error
        stack.callback(self._tokens.remove)
        log.info("Tokens are on: clients find their keys in %s", self._settings.token_file)

    def _bind(
        self, registry: Registry, metrics: Metrics, connections: ConnectionTable, large_answers: LargeAnswers
    ) -> list[Listener]:
        """Bind every address that is asked for; equal addresses are one listener with all their routes."""
        settings = self._settings
        wanted = {"Inference": settings.inference_address, "Management": settings.management_address}
        if settings.enable_metrics_api:
            wanted["Metrics"] = settings.metrics_address
        by_address: dict[str, list[str]] = {}
        for name, address in wanted.items():
            by_address.setdefault(str(address), []).append(name)
        both = by_address[str(settings.inference_address)]
        if settings.enable_metrics_api and "Management" in both and "Metrics" not in both:
            both.append("Metrics")  # the contract's §1.1: a shared listener serves the metrics too
        listeners: list[Listener] = []
        try:
            for names in by_address.values():
                listener = self._bind_one(names, wanted[names[0]], registry, metrics, connections, large_answers)
                listeners.append(listener)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def _bind_one(
        self,
        names: list[str],
        address: Address,
        registry: Registry,
        metrics: Metrics,
        connections: ConnectionTable,
        large_answers: LargeAnswers,
    ) -> Listener:
        settings = self._settings
        has_inference, has_management = "Inference" in names, "Management" in names
        own: Access = "either" if has_inference and has_management else "management" if has_management else "inference"
        routers: list[tuple[APIRouter, Access]] = [
            (description_router(registry, has_inference=has_inference, has_management=has_management), own)
        ]
        if has_inference and settings.sagemaker_endpoints:
            routers.append((sagemaker_router(registry, sagemaker_endpoint(settings, os.environ)), own))
        if has_inference or has_management:
            health = health_router(registry, has_ping=has_inference, ping_route=settings.health_route)
            routers.append((health, own))
        if has_inference and settings.ts_open_inference_protocol:
            routers.append((open_inference_router(), "inference"))
        if has_management:
            allows = settings.enable_model_api
            changes = self._desired.changes(registry)
            routers.append((management_router(registry, enable_model_api=allows, changes=changes), "management"))
            routers.append((desired_state_router(self._desired.reconciler, enable_model_api=allows), "management"))
            downloads = downloads_router(self._downloads, enable_model_api=settings.enable_model_api)
            routers.append((downloads, "management"))
        if has_management and self._watches is not None:
            routers.append((watches_router(self._watches), "management"))
            # It asks for the management key itself, or for the source's own secret.
            secrets = EventSecrets(settings.event_secrets, self._authorize("management"), os.environ)
            routers.append((events_router(self._watches, secrets, self._watches.count_events), "open"))
        if has_management and self._rollouts is not None:
            guard = self._desired.guard(registry)
            routers.insert(0, (rollout_router(registry, self._rollouts, guard), "management"))
        if has_management and self._workflows is not None:
            workflows = workflow_router(self._workflows, enable_model_api=settings.enable_model_api)
            routers.append((workflows, "management"))
        for installed in self._endpoints:
            if not (has_inference if installed.endpoint.listener == "inference" else has_management):
                continue
            try:
                check_patterns(installed, [router for router, _ in routers])
            except BadSettings as error:
                raise CannotStart(str(error)) from error
            routers.insert(0, (endpoint_router(installed, registry), installed.endpoint.access))
            log.info("/%s is answered by %s", installed.endpoint.pattern, installed.origin)
        if has_management and self._tokens is not None:
            routers.append((token_router(self._tokens), "open"))  # asks for the API key itself
        if "Metrics" in names:
            routers.append((metrics_router(metrics, is_filled=settings.metrics_mode != "log"), "open"))
        connection = bind_connection(
            InferenceSurface(registry, self._workflows, settings.predict_route) if has_inference else None,
            http_limits(settings),
            self._logs.access,
            metrics,
            connections,
            overload_status=settings.unavailable_status,
            large_answers=large_answers,
            response_headers=ResponseHeaders(cors_headers(settings)),
            tokens=self._tokens,
        )
        config = uvicorn.Config(
            build_app(
                [router for router, _ in routers],
                title=f"marserve: {' and '.join(names)} API",
                overload_status=settings.unavailable_status,
                guard=self._guard(routers, own) if has_inference or has_management else None,
            ),
            http=connection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
        )
        try:
            config.load()
            config.ssl = self._tls if address.is_tls else None
            sock = bind(address)
        except OSError as error:
            raise CannotStart(
                f"Failed to bind to address: {address} ({error.strerror or error}). Is another server running there? "
                f"Set {'_address, '.join(name.lower() for name in names)}_address to a free one."
            ) from error
        return Listener(address, names, sock, config, ServerState())

    def _guard(self, routers: list[tuple[APIRouter, Access]], otherwise: Access) -> Callable[[ASGIApp], ASGIApp] | None:
        """What asks a listener's requests for keys; None where tokens are off."""
        settings, tokens = self._settings, self._tokens
        if tokens is None:
            return None
        pings = ("/ping", settings.health_route or "/ping") if settings.allow_open_ping else ()
        open_paths = (*PROBES, *pings)
        answers_preflight = bool(settings.cors_allowed_origin)
        return lambda app: Guard(app, tokens, routers, otherwise, open_paths, answers_preflight=answers_preflight)

    def _bind_grpc(self, registry: Registry, metrics: Metrics) -> list[GrpcListener]:
        """Bind the gRPC ports; none, and a line in the log, without the libraries that they need."""
        settings = self._settings
        try:
            from marserve.api.grpc_listener import GrpcAddress, GrpcPorts
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in GRPC_PACKAGES:
                raise
            log.warning(
                "gRPC ports %d and %d stay closed: %s is not installed; pip install 'marserve[grpc]' opens them",
                settings.grpc_inference_port,
                settings.grpc_management_port,
                error.name,
            )
            return []
        listeners: list[GrpcListener] = []
        address, name = GrpcAddress(settings.grpc_inference_address, settings.grpc_inference_port), "grpc_inference"
        try:
            ports = GrpcPorts(
                registry,
                self._logs.access,
                metrics,
                identity=grpc_identity(settings),
                overload_status=settings.unavailable_status,
            )
            listeners.append(
                ports.bind_inference(
                    address,
                    grpc_limits(
                        settings,
                        settings.grpc_inference_max_connection_age_ms,
                        settings.grpc_inference_max_connection_age_grace_ms,
                    ),
                    self._authorize("inference"),
                    has_open_inference=settings.ts_open_inference_protocol,
                    sequence=SequenceHeaderNames(
                        settings.ts_header_key_sequence_id,
                        settings.ts_header_key_sequence_start,
                        settings.ts_header_key_sequence_end,
                    ),
                )
            )
            address = GrpcAddress(settings.grpc_management_address, settings.grpc_management_port)
            name = "grpc_management"
            listeners.append(
                ports.bind_management(
                    address,
                    grpc_limits(
                        settings,
                        settings.grpc_management_max_connection_age_ms,
                        settings.grpc_management_max_connection_age_grace_ms,
                    ),
                    self._authorize("management"),
                    enable_model_api=settings.enable_model_api,
                    changes=self._desired.changes(registry),
                )
            )
        except BadSettings as error:
            raise CannotStart(str(error)) from error
        except OSError as error:
            raise CannotStart(
                f"Failed to bind to address: {address} ({error.strerror or error}). Is another server running there? "
                f"Set {name}_port or {name}_address to a free one."
            ) from error
        return listeners

    def _authorize(self, kind: Kind) -> Callable[[str | bytes | None], None] | None:
        """What lets a call pass that has the key of this kind; None where none is needed."""
        tokens = self._tokens
        return None if tokens is None else lambda value: tokens.check(kind, value)

    async def _watch_machine(self, machine: Machine, metrics: Metrics) -> None:
        """Read the machine's figures from time to time."""
        settings = self._settings
        if settings.system_metrics_cmd:
            await self._watch_with_program(settings.system_metrics_cmd.split(), metrics)
        meter = Meter(machine)
        while True:
            metrics.set_system(await asyncio.to_thread(meter.read))
            await asyncio.sleep(settings.metric_time_interval)

    async def _watch_with_program(self, words: list[str], metrics: Metrics) -> NoReturn:
        """Have the operator's own program read the machine's figures. What is wrong with it is said when it changes."""
        settings = self._settings
        told = ""
        while True:
            trouble = ""
            try:
                printed = await run_program(words, settings.working_directory, PROGRAM_S)
            except ProgramFailed as error:
                trouble = str(error)
            else:
                for line in printed:
                    metric = parse_line(line)
                    if metric is None:
                        trouble = f"printed a line that says no metric: {line[:200]!r}"
                    elif not metrics.update_front(metric):
                        trouble = f"measured {metric.name}, which ts_metrics does not list with those dimensions"
            if trouble and trouble != told:
                log.error("system_metrics_cmd=%s %s", " ".join(words), trouble)
            told = trouble
            await asyncio.sleep(settings.metric_time_interval)

    def _keep(self, stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the server; it is ended, and awaited, with it. Its failure is logged."""
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        def report(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a part of the server failed", exc_info=error)

        task.add_done_callback(report)
        stack.push_async_callback(end)
        return task

    # ------------------------------------------------------------------------------------------- the end

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("%s: draining", signal.Signals(number).name)
            self._stop_asked.set()
        else:
            log.info("%s again: stopping now", signal.Signals(number).name)
            self._hurry.set()

    async def _insist_on_models(
        self, registry: Registry, reading: asyncio.Task[Any], stack: contextlib.AsyncExitStack
    ) -> None:
        """With `strict_start`: nobody is let in before all models of the start are registered.

        One that cannot be loaded later ends the server. Raises CannotStart for one that cannot be registered.
        """
        stop_asked = asyncio.ensure_future(self._stop_asked.wait())
        await asyncio.wait([reading, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        stop_asked.cancel()
        if failures := registry.startup_failures:
            raise CannotStart(f"{'; '.join(failures)} (strict_start=true)")

        async def insist_on_loads() -> None:
            if failures := await registry.wait_until_loaded():
                self.has_failed = True
                sentence = f"{'; '.join(failures)} (strict_start=true)"
                log.error("%s: the server ends", sentence)
                print(f"marserve ends: {sentence}", file=sys.stderr)  # noqa: T201 - what the operator reads
                self._stop_asked.set()

        self._keep(stack, insist_on_loads())

    def _on_crash(self, why: str) -> None:
        """A worker of a model with `onCrash: fail` crashed: end as on SIGTERM, with another exit status."""
        if not self.has_failed:
            log.error("%s; the model's onCrash is fail: the server ends", why)
        self.has_failed = True
        self._stop_asked.set()

    async def _drain(
        self,
        registry: Registry,
        connections: ConnectionTable,
        listeners: list[Listener],
        grpc_listeners: list[GrpcListener],
    ) -> None:
        """Answer what was accepted, refuse what comes; a second signal ends the wait."""
        settings = self._settings
        registry.begin_drain()
        if self._rollouts is not None:
            await self._rollouts.stop()  # before anything ends: that would be no verdict on a version
        await self._unless_hurried(asyncio.sleep(settings.drain_delay))
        registry.refuse_new()
        given_up = await self._unless_hurried(self._finish_accepted(registry))
        if given_up:
            log.warning("%d requests were given up: they were not answered within drain_timeout", given_up)
        await asyncio.gather(*(listener.turn_away() for listener in listeners))
        for listener in listeners:
            listener.close()
            for connection in list(listener.state.connections):
                connection.shutdown()
        closing = [listener.stop(CLOSE_CONNECTIONS_S) for listener in grpc_listeners]
        closing.append(self._wait_for_connections(connections))
        await self._unless_hurried(wait_for_all(closing), CLOSE_CONNECTIONS_S)

    async def _finish_accepted(self, registry: Registry) -> int:
        """Wait for what was accepted; returns how many requests are left. Workflows first: their nodes are models."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.drain_timeout
        left = 0
        if self._workflows is not None:
            self._workflows.refuse_new()
            left = await self._workflows.drain(self._settings.drain_timeout)
        return left + await registry.drain(max(0.0, end - loop.time()))

    async def _wait_for_connections(self, connections: ConnectionTable) -> None:
        while len(connections):
            await asyncio.sleep(0.01)

    async def _unless_hurried(self, work: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
        """Wait for `work`, at most `limit_s`, unless a second signal came; None if it was not finished."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.ensure_future(self._hurry.wait())
        done, _ = await asyncio.wait([task, hurry], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for other in (task, hurry):
            if not other.done():
                other.cancel()
        await asyncio.wait([task, hurry])
        return task.result() if task in done else None


def has_succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended, and well."""
    return task.done() and not task.cancelled() and task.exception() is None


async def wait_for_all(works: Sequence[Coroutine[Any, Any, Any]]) -> None:
    """Return when all have ended."""
    await asyncio.gather(*works)


# ------------------------------------------------------------------------------------------------ from settings


def read_snapshot(settings: Settings) -> list[SnapshotVersion] | None:
    """The versions to restore, None where the settings name no snapshot. Blocks.

    Raises CannotStart for a snapshot that cannot be meant, or names an archive that the store has not.
    """
    if settings.model_snapshot is None:
        return None
    store = LocalStore(settings.model_store, roots=[*settings.model_roots, *watched_folders(settings)])

    def has_archive(name: str) -> bool:
        if is_address(name) or is_store_address(name):
            return True  # it will be fetched, or was kept
        try:
            store.find(name)
        except ArchiveNotFound:
            return False
        return True

    where = settings.restored_from or settings.origins["model_snapshot"][-1].where
    try:
        versions = read_models(settings.model_snapshot)
        check_archives(versions, has_archive)
    except InvalidSnapshot as error:
        way_out = (
            "mend that, or start with --ncs (config_snapshots=false) to start without the snapshot"
            if settings.restored_from is not None
            else "mend that, or remove model_snapshot and name the models in load_models"
        )
        raise CannotStart(f"{error.message} (InvalidSnapshotException, {where}); {way_out}") from error
    log.info("Restoring %d model versions, as %s has them", len(versions), where)
    return versions


def bind(address: Address) -> socket.socket:
    """A socket that is bound to `address` and does not listen yet. Raises OSError."""
    if address.scheme == "unix":
        assert address.path is not None
        Path(address.path).unlink(missing_ok=True)  # a stale one: the contract's §6.3
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(address.path)
        except BaseException:
            sock.close()
            raise
        return sock
    infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    return sock


def worker_environment(settings: Settings) -> dict[str, str]:
    """What workers inherit: the server's environment without what the operator hides, and what handlers look for.

    What is a secret of the server's own is hidden too.
    """
    hidden = settings.blacklist_env_vars
    secrets = {TOKEN_VARIABLE}.union(*((key.env, key.ts_env) for key in KEYS.values() if key.is_secret))
    secrets |= settings.stores.variables
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in secrets and (hidden is None or hidden.fullmatch(name) is None)
    }
    environment["TS_DECODE_INPUT_REQUEST"] = str(settings.decode_input_request).lower()
    environment["TS_IPEX_ENABLE"] = str(settings.ipex_enable).lower()
    environment["TS_IPEX_GPU_ENABLE"] = str(settings.ipex_gpu_enable).lower()
    # onnxruntime reports its use to its makers as soon as it is imported, unless told not to.
    environment["ORT_DISABLE_TELEMETRY"] = "1"
    return environment


def environment_folder(settings: Settings) -> Path | None:
    """Where what archives require is kept: what the setting says, else in the user's cache; None without a home."""
    if settings.environment_folder is not None:
        return settings.environment_folder
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "marserve" / "environments"


def http_limits(settings: Settings) -> HttpLimits:
    """The limits of a client, from the settings."""
    return HttpLimits(
        header_bytes=settings.max_header_bytes,
        header_lines=settings.max_header_lines,
        request_line_bytes=settings.max_request_line,
        body_bytes=settings.max_request_size,
        connections=settings.max_connections,
        connections_per_address=settings.max_connections_per_address,
        header_timeout_s=settings.header_timeout,
        body_timeout_s=settings.body_timeout,
        body_bytes_per_s=settings.min_body_rate,
        keep_alive_s=settings.keep_alive_timeout,
    )


def grpc_identity(settings: Settings) -> Identity | None:
    """Certificate and key of the gRPC ports, None where they speak in the clear. Raises BadSettings."""
    if not settings.enable_grpc_ssl:
        return None
    assert settings.certificate_file is not None
    assert settings.private_key_file is not None
    identity = read_pem_files(settings.certificate_file, settings.private_key_file)
    server_context(identity)  # says what does not fit, which grpcio does not
    return identity


def grpc_limits(settings: Settings, age_ms: int | None, age_grace_ms: int | None) -> GrpcLimits:
    """The limits of a gRPC client, from the settings."""
    from marserve.api.grpc_listener import GrpcLimits

    return GrpcLimits(
        message_bytes=settings.max_request_size,
        header_bytes=settings.max_header_bytes,
        connections=settings.max_connections,
        calls_per_connection=settings.grpc_max_calls_per_connection,
        age_s=None if age_ms is None else age_ms / 1000,
        age_grace_s=None if age_grace_ms is None else age_grace_ms / 1000,
        keepalive_s=settings.grpc_keepalive_time,
        keepalive_timeout_s=settings.grpc_keepalive_timeout,
        least_ping_interval_s=settings.grpc_min_ping_interval,
    )


def cors_headers(settings: Settings) -> list[tuple[str, str]]:
    """What every answer tells browsers: the settings' words as they stand."""
    told = {
        "Access-Control-Allow-Origin": settings.cors_allowed_origin,
        "Access-Control-Allow-Methods": settings.cors_allowed_methods,
        "Access-Control-Allow-Headers": settings.cors_allowed_headers,
    }
    return [(name, value) for name, value in told.items() if value]


def sagemaker_endpoint(settings: Settings, environment: Mapping[str, str]) -> Endpoint:
    """What a SageMaker endpoint is told, and whether it serves many models."""
    handler = settings.default_service_handler
    return Endpoint(
        concurrent_transforms=settings.NUM_WORKERS or 1,
        max_request_bytes=settings.max_request_size,
        is_multi_model=environment.get("SAGEMAKER_MULTI_MODE", "false").lower() not in ("", "false"),
        service_file=settings.working_directory / handler.partition(":")[0] if handler else None,
    )


def listeners_identity(settings: Settings) -> Identity | None:
    """Certificate and key of https addresses; None where there are none. Raises BadSettings.

    As TorchServe has it: the keystore if one is named, else the PEM files, else a certificate that is made up.
    """
    addresses = [settings.inference_address, settings.management_address, settings.metrics_address]
    hosts = [address.host for address in addresses if address.is_tls]
    if not hosts:
        return None
    if settings.keystore is not None:
        return read_keystore(settings.keystore, settings.keystore_pass, settings.keystore_type)
    if settings.certificate_file is not None and settings.private_key_file is not None:
        return read_pem_files(settings.certificate_file, settings.private_key_file)
    return make_up_identity(dict.fromkeys([*hosts, "localhost", "127.0.0.1", socket.gethostname()]))


def archive_limits(settings: Settings) -> Limits:
    """The bounds of an archive, from the settings."""
    return Limits(max_entries=settings.max_archive_entries, max_total_bytes=settings.max_archive_bytes)


def registry_options(settings: Settings, machine: Machine, devices: int) -> RegistryOptions:
    """What the registry needs of the settings."""
    workers = settings.default_workers_per_model
    return RegistryOptions(
        workers_by_api=workers or 0,
        workers_at_startup=workers or devices or machine.cores,
        response_timeout_s=settings.default_response_timeout,
        startup_timeout_s=settings.default_startup_timeout,
        unregister_timeout_s=settings.unregister_model_timeout,
        swap_order=settings.swap_order,
        queue_size=settings.job_queue_size,
        max_worker_memory_bytes=settings.max_worker_memory,
        readiness_rule=settings.readiness_rule,
        default_handler=settings.default_service_handler,
        envelope=settings.service_envelope,
        decode_input=settings.decode_input_request,
        limit_max_image_pixels=settings.limit_max_image_pixels,
        max_answer_bytes=settings.max_response_size,
        threads=settings.worker_threads,
        autoscale=settings.autoscale,
        load=settings.model_load,
        gpu_count=devices,
        models=settings.models,
        sequence_headers=SequenceHeaderNames(
            settings.ts_header_key_sequence_id,
            settings.ts_header_key_sequence_start,
            settings.ts_header_key_sequence_end,
        ),
        installs_requirements=settings.install_py_dep_per_model,
        allowed_urls=settings.allowed_urls,
    )
