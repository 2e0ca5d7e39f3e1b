"""A server's life: start, serve, end.

The start binds sockets first, so that a taken port is found before anything else is begun. It reads and loads the
models of the start, for a bounded time, and then accepts connections. The end is what `draining.py` does; then workers
and templates end and are reaped, and logs are written out. SIGTERM is taken here; before that,
`cli/server/foreground.py` ends the process at a signal.
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
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, Protocol

from marserve import __version__
from marserve.allocator import BY_SERVER, keep_large_blocks
from marserve.api.rest.late_routes import import_for_first_request
from marserve.app.building.access import AccessControl, prepare_access
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.from_settings import sampling_of
from marserve.app.building.metrics import watch_machine
from marserve.app.building.parts import Parts, build_parts
from marserve.app.building.snapshots import write_snapshots
from marserve.app.building.tasks import has_succeeded, keep
from marserve.app.draining import CLOSE_CONNECTIONS_S, Stop, drain, under_way
from marserve.app.grpc_ports import accept_grpc, bind_grpc
from marserve.app.hanging_calls import give_up_hanging
from marserve.app.last_resort import LastResort
from marserve.app.listeners import Listener, bind_listeners
from marserve.app.look import look_at_machine
from marserve.app.places import refuse_unusable
from marserve.app.preemption import Preemption, find_notices, notice_signal
from marserve.app.service_manager import ServiceManager
from marserve.app.terminal_log import ShownWorkerLog, TerminalLog
from marserve.errors import BadSettings, CallHangs
from marserve.machine.describe import Machine
from marserve.machine.start_watch import StartWatch
from marserve.machine.threads import DaemonThreads
from marserve.optional import reason
from marserve.registry.models import Registry
from marserve.settings import Settings, sources_report, startup_report
from marserve.telemetry.logs.log_limit import TELL_EVERY_S
from marserve.telemetry.logs.logs import Logs, configure_logs
from marserve.telemetry.loop_watch import LoopWatch
from marserve.telemetry.metrics.windows import SAMPLE_EVERY_S

log = logging.getLogger("marserve.app")

# Connections are accepted after so long, even if models of the start are still being loaded.
LOAD_MODELS_FIRST_S = 1.0
# How long the last snapshot may take.
LAST_SNAPSHOT_S = 10.0
# How long workers, and processes that handlers started, may take to end and be reaped.
LAST_WORKERS_S = 15.0
# When all of these limits are over by so much, the process is ended whatever hangs in it.
LAST_RESORT_AFTER_S = 5.0
# Threads for blocking calls. Python's own number (six on two cores) is fewer than downloads and archives that are
# unpacked may use at a time, and then other calls would wait for them, such as the end of a dead worker.
BLOCKING_THREADS = 32
# So many are begun at the start, so that a server that later meets a limit on threads can go on.
READY_THREADS = 4


def run(settings: Settings, watch: StartWatch | None = None, companion: Companion | None = None) -> int:
    """Serve until a signal to stop. Returns the exit status: 0 after an orderly stop, 1 if the start failed or a worker
    of a model with `onCrash: fail` crashed.

    `watch` watches the start, and is closed when the server is up. `companion` lives beside the server.

    A failed start is one sentence on standard error. Raises BadSettings, before anything is started, for folders that
    cannot be written.
    """
    refuse_unusable(settings)
    logs = configure_logs(
        folder=settings.log_location,
        format=settings.log_format,
        level=settings.log_level,
        has_request_ids=settings.access_log_request_id,
        has_line_ids=settings.log_request_ids,
        metrics_folder=settings.metrics_location,
        has_metrics=settings.metrics_mode != "prometheus",
        to_stdout=companion is None,
        with_own_paths=None if companion is None else companion.with_own_paths,
        sampling=sampling_of(settings),
    )
    if companion is not None:
        terminal = TerminalLog(companion.shorten)
        logs.workers = ShownWorkerLog(logs.workers, terminal, shows_tracebacks=companion.shows_tracebacks)
        logging.getLogger().addHandler(terminal)
    last_resort = LastResort(longest_stop_s(settings) + LAST_RESORT_AFTER_S)
    server = Server(settings, logs, last_resort, watch, companion)
    keep_large_blocks(BY_SERVER)
    try:
        _run_loop()(server.serve())
    except (CannotStart, BadSettings) as error:
        log.error("%s", error)
        print(f"marserve did not start: {error}", file=sys.stderr)  # noqa: T201 - for the operator
        return 1
    except RuntimeError as error:  # the loop needs one more thread to end its threads, which are daemons
        if not server.has_ended:
            raise
        log.warning("The event loop was not closed: %s", error)
    finally:
        logs.close()
        last_resort.close()
    return 1 if server.has_failed else 0


def _run_loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """The runner of the server's coroutine: uvloop's, else Python's own, which is slower."""
    try:
        from uvloop import run as run_on_uvloop
    except Exception as error:  # a broken uvloop may raise anything
        log.warning("The server runs on asyncio's own loop, which is slower: uvloop cannot be used (%s)", reason(error))
        return asyncio.run
    return run_on_uvloop


def longest_stop_s(settings: Settings) -> float:
    """How long the end may take, from the signal to the end of the last process, in seconds."""
    return settings.drain_delay + settings.drain_timeout + CLOSE_CONNECTIONS_S + LAST_SNAPSHOT_S + LAST_WORKERS_S


async def tell_left_out(logs: Logs) -> None:
    """Have the logs report regularly how many records caused by clients were left out; never returns."""
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        logs.tell_left_out(time.monotonic())


class Companion(Protocol):
    """Work of a command beside the server that it runs."""

    binds_grpc: bool
    """Whether the gRPC ports are bound."""
    shows_tracebacks: bool
    """Whether the terminal is shown tracebacks of failed requests whole."""

    def shorten(self, text: str) -> str:
        """What a terminal is shown of a line of the logs; empty for nothing."""

    def with_own_paths(self, text: str) -> str:
        """A text of the logs, or a traceback for a client, with the author's files in the place of their copies."""

    def finishing(self, requests: int, limit_s: float) -> None:
        """Called once, on any thread, when a stop is asked for while requests are under way. May block.

        They are answered for `limit_s` at most.
        """

    async def live(self, parts: Parts, listeners: Sequence[Listener], reading: asyncio.Task[Any], stop: Stop) -> None:
        """Called when connections are accepted; cancelled after the server has drained. `reading` reads the models."""


async def sample_figures(registry: Registry) -> None:
    """Sample the counts of all versions regularly; never returns."""
    while True:
        await registry.sample_figures(time.monotonic())
        await asyncio.sleep(SAMPLE_EVERY_S)


class Server:
    """One server process, from start to end."""

    def __init__(
        self,
        settings: Settings,
        logs: Logs,
        last_resort: LastResort | None = None,
        watch: StartWatch | None = None,
        companion: Companion | None = None,
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._companion = companion
        self._is_up = asyncio.Event()
        self._on_signal = last_resort.on_signal if last_resort is not None else _do_nothing
        self._logs = logs
        self._stop = Stop()
        self.has_ended = False
        """Whether all parts that were begun have ended in order."""

    @property
    def has_failed(self) -> bool:
        """Whether a model ended the server: it crashed with `onCrash: fail`, or failed to load under `strict_start`."""
        return self._stop.has_failed

    async def serve(self) -> None:
        """Run from start to end. Raises CannotStart or BadSettings, and then leaves nothing behind."""
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
        binds_grpc = self._companion is None or self._companion.binds_grpc
        preemption = Preemption(find_notices(settings), settings.preemption_interval, stop.on_notice)
        stack.callback(preemption.stop)
        parts = await build_parts(settings, self._logs, machine, access, stack, stop.on_crash, stop.hurry)
        listeners = bind_listeners(parts)
        for listener in listeners:
            stack.callback(listener.close)
        grpc_listeners = bind_grpc(parts) if binds_grpc else []
        for grpc_listener in grpc_listeners:
            stack.push_async_callback(grpc_listener.stop)
        keep(stack, tell_left_out(self._logs))
        keep(stack, sample_figures(parts.registry))
        await access.write_tokens(stack)
        preemption.start()
        if not settings.disable_system_metrics:
            keep(stack, watch_machine(settings, parts.device_watch, parts.metrics))
        reading = keep(stack, _load_models(parts))
        keep(stack, parts.desired.watch(reading))
        await wait_for_models(parts.registry, reading, stop.asked, LOAD_MODELS_FIRST_S)
        gc.collect()  # before connections are accepted, as it stops everything
        gc.freeze()  # objects of the start stay, so that collections on the hot path can skip them
        gc.enable()  # the caller may have disabled it for the start
        if settings.strict_start:
            await self._insist_on_models(parts.registry, reading, stack)
        for listener in listeners:
            await listener.accept()
            log.info("%s API listens on %s", " and ".join(listener.names), listener.address)
        for grpc_listener in grpc_listeners:
            await accept_grpc(grpc_listener)
            log.info("%s API listens on %s", grpc_listener.name, grpc_listener.address)
        # Not before: while nothing is served, imports and collections may hold the loop.
        watch = LoopWatch(parts.loop_lag, stuck_after_s=settings.abort_when_stuck, flush=self._logs.close)
        watch.start()
        stack.callback(watch.stop)
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
        if self._companion is not None:
            keep(stack, self._companion.live(parts, listeners, reading, stop))
        keep(stack, asyncio.to_thread(import_for_first_request))
        manager = ServiceManager(os.environ)
        manager.is_serving(" and ".join(str(listener.address) for listener in listeners))
        await stop.asked.wait()
        manager.is_stopping(longest_stop_s(settings))
        if self._companion is not None and stop.first_signal is not None and (requests := under_way(parts)):
            limit_s = settings.drain_delay + settings.drain_timeout
            # On a thread: a terminal may take nothing.
            keep(stack, asyncio.to_thread(self._companion.finishing, requests, limit_s))
        await drain(parts, stop, listeners, grpc_listeners)
        if parts.snapshots is not None and has_succeeded(reading):
            # If the models of the start were not all read, the earlier snapshot is better.
            last = parts.snapshots.write("shutdown", parts.registry.snapshot())
            await stop.unless_hurried(last, LAST_SNAPSHOT_S)

    async def _insist_on_models(
        self, registry: Registry, reading: asyncio.Task[Any], stack: contextlib.AsyncExitStack
    ) -> None:
        """With `strict_start`: wait until all models of the start are registered, before connections are accepted.

        Raises CannotStart for a model that cannot be registered. One that later cannot be loaded ends the server.
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
                print(f"marserve ends: {sentence}", file=sys.stderr)  # noqa: T201 - for the operator
                stop.asked.set()

        keep(stack, insist_on_loads())


async def wait_for_models(
    registry: Registry, reading: asyncio.Task[Any], stop_asked: asyncio.Event, limit_s: float
) -> None:
    """Wait for models before accepting connections, `limit_s` at most: another server may answer clients until then.

    Ends at once when a stop is asked for.
    """

    async def load() -> None:
        await asyncio.wait([reading])
        await registry.wait_for_loads()

    waiting = [asyncio.ensure_future(load()), asyncio.ensure_future(stop_asked.wait())]
    await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _do_nothing() -> None:
    """The default of `_listen`: no last resort."""


def _listen(
    number: int,
    loop: asyncio.AbstractEventLoop,
    heard: Callable[[int], None],
    at_once: Callable[[], None] = _do_nothing,
) -> None:
    """Call `heard` on the loop when the signal comes, and `at_once` even if the loop does not run.

    The loop's own handlers give the signal back to the system when the loop closes, so that a signal then would kill a
    process that is ending in order.
    """

    def hear(number: int, frame: FrameType | None) -> None:
        at_once()
        if not loop.is_closed():
            loop.call_soon_threadsafe(heard, number)

    signal.signal(number, hear)


def _load_models(parts: Parts) -> Coroutine[Any, Any, Any]:
    """Load the models of the start: of a desired state, else of a snapshot, else of `load_models`."""
    if parts.desired.place is not None:
        return parts.desired.start(parts.registry)
    if parts.restored is not None:
        return parts.registry.restore(parts.restored)
    return parts.registry.load_at_start(parts.settings.load_models)


async def _watch_places(parts: Parts, reading: asyncio.Task[Any]) -> None:
    """Start the watches once the models of the start are read."""
    await asyncio.wait([reading])
    await parts.watches.run(parts.reconciler.policies, parts.reconciler.let_go)
