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
import gc
import logging
import os
import signal
import socket
import ssl
import struct
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import APIRouter
from uvicorn.server import ServerState

from marserve import __version__
from marserve.allocator import keep_large_blocks
from marserve.api.application import build_app
from marserve.api.connections import ConnectionTable
from marserve.api.description import description_router
from marserve.api.health import health_router
from marserve.api.http_connection import bind_connection
from marserve.api.inference import InferenceSurface
from marserve.api.large_answers import LargeAnswers
from marserve.api.management import management_router
from marserve.api.metrics import metrics_router
from marserve.api.open_inference import open_inference_router
from marserve.api.request_head import HttpLimits
from marserve.archive.reader import Limits
from marserve.errors import BadSettings
from marserve.machine.describe import Machine, Meter, describe_machine
from marserve.machine.devices import Assigner, cap
from marserve.messages import Load
from marserve.pool.cgroups import WorkerCgroups
from marserve.pool.launchers import Launchers
from marserve.pool.options import PoolOptions
from marserve.pool.supervisor import Pool
from marserve.registry.calls import RegistryOptions
from marserve.registry.intake import Intake
from marserve.registry.models import Registry
from marserve.registry.scratch import Scratch, remove_orphans
from marserve.settings import Address, Settings, startup_report
from marserve.store.local import LocalStore
from marserve.telemetry.logs import Logs, configure_logs
from marserve.telemetry.metrics import Metrics, VersionMetrics

log = logging.getLogger("marserve.app")

BACKLOG = 2048
# Linux: a socket filter of one instruction, "return 0 bytes", drops what arrives (linux/filter.h, asm/socket.h).
SO_ATTACH_FILTER, BPF_RET = 26, 0x06
ACCEPT_REST_S = 0.02
# Connections are accepted at the latest this long after the start, though models of the start are still being read.
READ_MODELS_FIRST_S = 1.0
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
    )
    server = Server(settings, logs)
    keep_large_blocks()
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
            self.server = await loop.create_unix_server(protocol, sock=self.sock, ssl=tls, backlog=BACKLOG)
        else:
            self.server = await loop.create_server(protocol, sock=self.sock, ssl=tls, backlog=BACKLOG)

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
        self.has_failed = False
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> None:
        """From start to end. Raises CannotStart; nothing is left behind then."""
        loop = asyncio.get_running_loop()
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
        for note in settings.notes:
            log.info("%s", note)
        async with contextlib.AsyncExitStack() as stack:
            await self._serve(machine, stack)
        log.info("Model server stopped.")

    async def _serve(self, machine: Machine, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        scratch = Scratch(settings.temporary_folder)
        stack.callback(scratch.remove)
        self._keep(stack, asyncio.to_thread(remove_orphans, settings.temporary_folder))
        metrics = Metrics(machine.hostname, self._logs.dropped)
        devices = cap(machine.accelerators, settings.number_of_gpu)
        launchers = Launchers(
            worker_environment(settings),
            self._logs.workers,
            first_worker_id=settings.initial_worker_port,
            first_group_id=settings.initial_distribution_port,
            devices=Assigner(devices),
            vendor=machine.vendor,
            cores=machine.cores,
            cgroups=WorkerCgroups(settings.worker_cgroup) if settings.worker_cgroup is not None else None,
        )
        stack.push_async_callback(launchers.close)
        registry = self._build_registry(scratch.path, metrics, launchers, machine, devices)
        stack.push_async_callback(registry.stop)
        connections = ConnectionTable(http_limits(settings))
        large_answers = LargeAnswers(
            scratch.path, memory_bytes=settings.large_answer_memory, disk_bytes=settings.large_answer_disk
        )
        stack.callback(large_answers.close)
        listeners = self._bind(registry, metrics, connections, large_answers)
        for listener in listeners:
            stack.callback(listener.close)
        if not settings.disable_system_metrics:
            self._keep(stack, self._watch_machine(machine, metrics))
        reading = self._keep(stack, registry.load_at_start(settings.load_models))
        await asyncio.wait(
            [reading, asyncio.ensure_future(self._stop_asked.wait())],
            timeout=READ_MODELS_FIRST_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for listener in listeners:
            await listener.accept()
            log.info("%s API listens on %s", " and ".join(listener.names), listener.address)
        connections.start()
        stack.callback(connections.stop)
        gc.collect()
        gc.freeze()  # what the start made stays: collections on the hot path need not look at it again
        self._logs.announce("Model server started.")
        await self._stop_asked.wait()
        await self._drain(registry, connections, listeners)

    # ------------------------------------------------------------------------------------------- parts

    def _build_registry(
        self, scratch: Path, metrics: Metrics, launchers: Launchers, machine: Machine, devices: int
    ) -> Registry:
        settings = self._settings

        def make_pool(options: PoolOptions, load: Load) -> Pool:
            version = VersionMetrics(options.model, options.version)
            return Pool(
                options,
                load,
                launchers,
                version,
                self._logs.workers,
                on_measured=lambda values: metrics.update_custom(options.model, values),
                on_failed=self._on_crash,
            )

        intake = Intake(
            LocalStore(settings.model_store), scratch / "models", archive_limits(settings), settings.trusted_models
        )
        return Registry(registry_options(settings, machine, devices), intake, make_pool, metrics)

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
        routers: list[APIRouter] = [
            description_router(registry, has_inference=has_inference, has_management=has_management)
        ]
        if has_inference or has_management:
            routers.append(health_router(registry, has_ping=has_inference))
        if has_inference and settings.ts_open_inference_protocol:
            routers.append(open_inference_router())
        if has_management:
            routers.append(management_router(registry, enable_model_api=settings.enable_model_api))
        if "Metrics" in names:
            routers.append(metrics_router(metrics, is_filled=settings.metrics_mode != "log"))
        connection = bind_connection(
            InferenceSurface(registry) if has_inference else None,
            http_limits(settings),
            self._logs.access,
            metrics,
            connections,
            overload_status=settings.unavailable_status,
            large_answers=large_answers,
        )
        config = uvicorn.Config(
            build_app(
                routers,
                title=f"marserve: {' and '.join(names)} API",
                overload_status=settings.unavailable_status,
            ),
            http=connection,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ssl_keyfile=settings.private_key_file if address.is_tls else None,
            ssl_certfile=settings.certificate_file if address.is_tls else None,
        )
        try:
            config.load()
            sock = bind(address)
        except (OSError, ssl.SSLError) as error:
            raise CannotStart(
                f"Failed to bind to address: {address} ({error.strerror or error}). Is another server running there? "
                f"Set {'_address, '.join(name.lower() for name in names)}_address to a free one."
            ) from error
        return Listener(address, names, sock, config, ServerState())

    async def _watch_machine(self, machine: Machine, metrics: Metrics) -> None:
        """Read the machine's figures from time to time."""
        meter = Meter(machine)
        while True:
            metrics.set_system(await asyncio.to_thread(meter.read))
            await asyncio.sleep(self._settings.metric_time_interval)

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

    def _on_crash(self, why: str) -> None:
        """A worker of a model with `onCrash: fail` crashed: end as on SIGTERM, with another exit status."""
        if not self.has_failed:
            log.error("%s; the model's onCrash is fail: the server ends", why)
        self.has_failed = True
        self._stop_asked.set()

    async def _drain(self, registry: Registry, connections: ConnectionTable, listeners: list[Listener]) -> None:
        """Answer what was accepted, refuse what comes; a second signal ends the wait."""
        settings = self._settings
        registry.begin_drain()
        await self._unless_hurried(asyncio.sleep(settings.drain_delay))
        registry.refuse_new()
        given_up = await self._unless_hurried(registry.drain(settings.drain_timeout))
        if given_up:
            log.warning("%d requests were given up: they were not answered within drain_timeout", given_up)
        await asyncio.gather(*(listener.turn_away() for listener in listeners))
        for listener in listeners:
            listener.close()
            for connection in list(listener.state.connections):
                connection.shutdown()
        await self._unless_hurried(self._wait_for_connections(connections), CLOSE_CONNECTIONS_S)

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


# ------------------------------------------------------------------------------------------------ from settings


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
    """What workers inherit: the server's environment without what the operator hides, and what handlers look for."""
    hidden = settings.blacklist_env_vars
    environment = {
        name: value for name, value in os.environ.items() if hidden is None or hidden.fullmatch(name) is None
    }
    environment["TS_DECODE_INPUT_REQUEST"] = str(settings.decode_input_request).lower()
    # onnxruntime reports its use to its makers as soon as it is imported, unless told not to.
    environment["ORT_DISABLE_TELEMETRY"] = "1"
    return environment


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
        queue_size=settings.job_queue_size,
        max_worker_memory_bytes=settings.max_worker_memory,
        readiness_rule=settings.readiness_rule,
        default_handler=settings.default_service_handler,
        decode_input=settings.decode_input_request,
        limit_max_image_pixels=settings.limit_max_image_pixels,
        max_answer_bytes=settings.max_response_size,
        threads=settings.worker_threads,
        autoscale=settings.autoscale,
        gpu_count=devices,
        models=settings.models,
    )
