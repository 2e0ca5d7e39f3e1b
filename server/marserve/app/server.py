"""A server's life: start, serve, end.

Order of the start: sockets are bound first (a taken port is found before anything else is begun), the models of the
start are read and loaded, or have had their time for it, then connections are accepted. Order of the end: what
`draining.py` does, then workers and templates end and are reaped, logs are written out.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

from marserve import __version__
from marserve.allocator import BY_SERVER, keep_large_blocks
from marserve.api.rest.late_routes import import_for_first_request
from marserve.app.building.access import AccessControl, prepare_access
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.metrics import watch_machine
from marserve.app.building.parts import Parts, build_parts
from marserve.app.building.snapshots import write_snapshots
from marserve.app.building.tasks import has_succeeded, keep
from marserve.app.draining import CLOSE_CONNECTIONS_S, Stop, drain
from marserve.app.grpc_ports import bind_grpc, import_grpc
from marserve.app.hanging_calls import give_up_hanging
from marserve.app.last_resort import LastResort
from marserve.app.listeners import bind_listeners
from marserve.app.look import look_at_machine
from marserve.app.places import refuse_unusable
from marserve.app.preemption import Preemption, find_notices, notice_signal
from marserve.app.service_manager import ServiceManager
from marserve.errors import CallHangs
from marserve.machine.describe import Machine
from marserve.machine.start_watch import StartWatch
from marserve.machine.threads import DaemonThreads
from marserve.optional import reason
from marserve.registry.models import Registry
from marserve.settings import Settings, sources_report, startup_report
from marserve.telemetry.logs.log_limit import TELL_EVERY_S
from marserve.telemetry.logs.logs import Logs, configure_logs

log = logging.getLogger("marserve.app")

# Connections are accepted at the latest this long after the start, though models of the start are still being loaded.
LOAD_MODELS_FIRST_S = 1.0
# How long the last snapshot may take.
LAST_SNAPSHOT_S = 10.0
# How long workers may take to end and be reaped, with all that a process of a handler's may still do.
LAST_WORKERS_S = 15.0
# So long after all of that has had its time the process is ended whatever hangs in it.
LAST_RESORT_AFTER_S = 5.0
# Threads for what blocks. Python's own number, on two cores six, is less than downloads and archives being unpacked may
# have at a time, and then whatever else needs one would wait for them: the end of a worker that died, for one.
BLOCKING_THREADS = 32
# So many are begun at the start: a server that meets a limit on threads later goes on with them.
READY_THREADS = 4


def run(settings: Settings, watch: StartWatch | None = None) -> int:
    """Serve until a signal says stop. Returns the exit status: 0 after an orderly stop, 1 when the start failed, or a
    worker crashed whose model's `onCrash` is `fail`.

    `watch` watches the start, and is closed when the server is up.

    What kept it from starting is said in one sentence on standard error. Raises BadSettings for folders that
    cannot be written; nothing was started then.
    """
    refuse_unusable(settings)
    logs = configure_logs(
        folder=settings.log_location,
        format=settings.log_format,
        level=settings.log_level,
        has_request_ids=settings.access_log_request_id,
        metrics_folder=settings.metrics_location,
        has_metrics=settings.metrics_mode != "prometheus",
    )
    last_resort = LastResort(longest_stop_s(settings) + LAST_RESORT_AFTER_S)
    server = Server(settings, logs, last_resort, watch)
    keep_large_blocks(BY_SERVER)
    try:
        _run_loop()(server.serve())
    except CannotStart as error:
        log.error("%s", error)
        print(f"marserve did not start: {error}", file=sys.stderr)  # noqa: T201 - what the operator reads
        return 1
    except RuntimeError as error:  # the loop ends its threads, which are daemons, by one more thread
        if not server.has_ended:
            raise
        log.warning("The event loop was not closed: %s", error)
    finally:
        logs.close()
        last_resort.close()
    return 1 if server.has_failed else 0


def _run_loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """What runs the server's coroutine: uvloop, else Python's own loop, which is slower and serves all the same."""
    try:
        from uvloop import run as run_on_uvloop
    except Exception as error:  # one that is broken raises what it likes
        log.warning("The server runs on asyncio's own loop, which is slower: uvloop cannot be used (%s)", reason(error))
        return asyncio.run
    return run_on_uvloop


def longest_stop_s(settings: Settings) -> float:
    """How long the end may take, from the signal to the last process, in seconds."""
    return settings.drain_delay + settings.drain_timeout + CLOSE_CONNECTIONS_S + LAST_SNAPSHOT_S + LAST_WORKERS_S


async def tell_left_out(logs: Logs) -> None:
    """Have the logs say now and then how many records of clients were left out; never returns."""
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        logs.tell_left_out(time.monotonic())


class Server:
    """One server process, from start to end."""

    def __init__(
        self,
        settings: Settings,
        logs: Logs,
        last_resort: LastResort | None = None,
        watch: StartWatch | None = None,
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._is_up = asyncio.Event()
        self._on_signal = last_resort.on_signal if last_resort is not None else _do_nothing
        self._logs = logs
        self._stop = Stop()
        self.has_ended = False
        """Whether all that was begun has ended in its order."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended because of a model: one that crashed with `onCrash: fail`, or `strict_start` missed one."""
        return self._stop.has_failed

    async def serve(self) -> None:
        """From start to end. Raises CannotStart; nothing is left behind then."""
        loop = asyncio.get_running_loop()
        threads = DaemonThreads(BLOCKING_THREADS, "blocking", ready=READY_THREADS)
        loop.set_default_executor(threads)
        if self._watch is not None:
            self._watch.follow(threads)
        for number in (signal.SIGINT, signal.SIGTERM):
            _listen(number, loop, self._stop.on_signal, self._on_signal)
        notice = notice_signal(self._settings)
        if notice is not None:
            _listen(notice, loop, self._stop.on_notice_signal)
        giving_up = asyncio.ensure_future(give_up_hanging(threads, self._stop, self._is_up))
        try:
            await self._live()
        except CallHangs as error:
            if self._is_up.is_set():
                raise
            log.warning("%s", error)
            log.info("Model server stopped before it had started.")
        finally:
            giving_up.cancel()
            await asyncio.wait([giving_up])

    async def _live(self) -> None:
        settings = self._settings
        access = await prepare_access(settings)
        machine = await look_at_machine(settings, self._stop, access.tls)
        if machine is None:
            log.info("Model server stopped before it had started.")
            return
        report = startup_report(settings, version=__version__, cores=machine.cores, accelerators=machine.accelerators)
        for line in report:
            log.info("%s", line)
        for warning in (*machine.remarks, *settings.warnings):
            log.warning("%s", warning)
        for note in (*settings.notes, *sources_report(settings)):
            log.info("%s", note)
        async with contextlib.AsyncExitStack() as stack:
            await self._serve(machine, access, stack)
        self.has_ended = True
        log.info("Model server stopped.")

    async def _serve(self, machine: Machine, access: AccessControl, stack: contextlib.AsyncExitStack) -> None:
        settings, stop = self._settings, self._stop
        import_grpc()
        preemption = Preemption(find_notices(settings), settings.preemption_interval, stop.on_notice)
        stack.callback(preemption.stop)
        parts = await build_parts(settings, self._logs, machine, access, stack, stop.on_crash)
        listeners = bind_listeners(parts)
        for listener in listeners:
            stack.callback(listener.close)
        grpc_listeners = bind_grpc(parts)
        for grpc_listener in grpc_listeners:
            stack.push_async_callback(grpc_listener.stop)
        keep(stack, tell_left_out(self._logs))
        await access.write_tokens(stack)
        preemption.start()
        if not settings.disable_system_metrics:
            keep(stack, watch_machine(settings, parts.device_watch, parts.metrics))
        reading = keep(stack, _load_models(parts))
        keep(stack, parts.desired.watch(reading))
        await self._wait_for_models(parts.registry, reading)
        gc.collect()  # before anybody is let in: it holds everything up
        gc.freeze()  # what the start made stays: collections on the hot path need not look at it again
        gc.enable()  # who started this may have put it off until now
        if settings.strict_start:
            await self._insist_on_models(parts.registry, reading, stack)
        for listener in listeners:
            await listener.accept()
            log.info("%s API listens on %s", " and ".join(listener.names), listener.address)
        for grpc_listener in grpc_listeners:
            await grpc_listener.accept()
            log.info("%s API listens on %s", grpc_listener.name, grpc_listener.address)
        if parts.snapshots is not None:
            keep(stack, write_snapshots(parts.snapshots, parts.registry, reading))
        await parts.rollouts.start()
        keep(stack, _watch_places(parts, reading))
        parts.connections.start()
        stack.callback(parts.connections.stop)
        self._is_up.set()
        if self._watch is not None:
            self._watch.close()
        self._logs.announce("Model server started.")
        keep(stack, asyncio.to_thread(import_for_first_request))
        manager = ServiceManager(os.environ)
        manager.is_serving(" and ".join(str(listener.address) for listener in listeners))
        await stop.asked.wait()
        manager.is_stopping(longest_stop_s(settings))
        await drain(parts, stop, listeners, grpc_listeners)
        if parts.snapshots is not None and has_succeeded(reading):
            # What was not read would be missing from it; the snapshot before has it.
            last = parts.snapshots.write("shutdown", parts.registry.snapshot())
            await stop.unless_hurried(last, LAST_SNAPSHOT_S)

    async def _wait_for_models(self, registry: Registry, reading: asyncio.Task[Any]) -> None:
        """Let nobody in while models need a moment only: another server may answer those who are refused until then."""

        async def load() -> None:
            await asyncio.wait([reading])
            await registry.wait_for_loads()

        waiting = [asyncio.ensure_future(load()), asyncio.ensure_future(self._stop.asked.wait())]
        await asyncio.wait(waiting, timeout=LOAD_MODELS_FIRST_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def _insist_on_models(
        self, registry: Registry, reading: asyncio.Task[Any], stack: contextlib.AsyncExitStack
    ) -> None:
        """With `strict_start`: nobody is let in before all models of the start are registered.

        One that cannot be loaded later ends the server. Raises CannotStart for one that cannot be registered.
        """
        stop = self._stop
        stop_asked = asyncio.ensure_future(stop.asked.wait())
        await asyncio.wait([reading, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        stop_asked.cancel()
        if failures := registry.startup_failures:
            raise CannotStart(f"{'; '.join(failures)} (strict_start=true)")

        async def insist_on_loads() -> None:
            if failures := await registry.wait_until_loaded():
                stop.has_failed = True
                sentence = f"{'; '.join(failures)} (strict_start=true)"
                log.error("%s: the server ends", sentence)
                print(f"marserve ends: {sentence}", file=sys.stderr)  # noqa: T201 - what the operator reads
                stop.asked.set()

        keep(stack, insist_on_loads())


def _do_nothing() -> None:
    """For a server without a last resort."""


def _listen(
    number: int,
    loop: asyncio.AbstractEventLoop,
    heard: Callable[[int], None],
    at_once: Callable[[], None] = _do_nothing,
) -> None:
    """Call `heard` on the loop when the signal comes, and `at_once` even if the loop does not run.

    The loop's own way would give the signal back to the system when it is closed, and one that comes then would kill
    what is ending well.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        at_once()
        if not loop.is_closed():
            loop.call_soon_threadsafe(heard, number)

    signal.signal(number, hear)


def _load_models(parts: Parts) -> Coroutine[Any, Any, Any]:
    """What reads the models of the start: a desired state goes before a snapshot, and that before `load_models`."""
    if parts.desired.place is not None:
        return parts.desired.start(parts.registry)
    if parts.restored is not None:
        return parts.registry.restore(parts.restored)
    return parts.registry.load_at_start(parts.settings.load_models)


async def _watch_places(parts: Parts, reading: asyncio.Task[Any]) -> None:
    """Watch once the models of the start are read: they go first."""
    await asyncio.wait([reading])
    await parts.watches.run(parts.reconciler.policies, parts.reconciler.let_go)
