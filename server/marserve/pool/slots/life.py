"""One worker process of a slot: its start, its messages, its end.

`Life` is the only class that ends a worker. `restart_policy.py` decides when the next one starts, and
`slot.py` starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from marserve.errors import BadFrame
from marserve.machine.limits import explain
from marserve.messages import (
    MAX_WARNINGS,
    Called,
    Checked,
    CheckpointRead,
    Counted,
    DeviceLost,
    DevicePeak,
    Health,
    Lengths,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    OutOfStep,
    Piece,
    Profiled,
    Raised,
    Request,
    Results,
    Returned,
    Warned,
    line_ids,
    shown_id,
)
from marserve.option_values import BUILDS
from marserve.pool.checks.certifier import Certifier
from marserve.pool.checks.profiles import Profiles
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Landed
from marserve.pool.dispatch.lengths.lengths import FROM_HANDLER
from marserve.pool.launchers.cgroups import WorkerCgroup
from marserve.pool.launchers.launcher import AnyLauncher, Launchers, StartFailed, WorkerEnds, WorkerProcess
from marserve.pool.options import PoolOptions
from marserve.pool.reservation import Reservations
from marserve.pool.slots.health_watch import HealthWatch
from marserve.pool.slots.response_limit import ResponseLimit
from marserve.pool.worker_end.cause_of_death import Cause, Death, Evidence, classify_exit, death_of_load, error_of
from marserve.pool.worker_end.client import WorkerClient
from marserve.pool.worker_end.output import WorkerLog, WorkerOutput
from marserve.shared_page import Page, create_page
from marserve.telemetry.metrics.counts import Flops, VersionMetrics
from marserve.wire import Body

log = logging.getLogger("marserve.pool")

# How long a worker that was asked to stop has to end before SIGTERM, and then before SIGKILL.
STOP_GRACE_S = 2.0
LAST_OUTPUT_S = 0.5
# How long a worker past its limit has after SIGTERM before SIGKILL. Its clients wait meanwhile. So it is at the end of
# a server that a second signal hurries.
TERM_GRACE_S = 0.25


@dataclass(kw_only=True)
class LifeContext:
    """What every worker of a version uses, and what it reports to.

    `batch_ended` is called after a batch or a check, `measured` with what a handler measured,
    `called` when it calls another model, with what takes the answer. `ask_health` asks a worker
    whether it is well. `declaration` is what the model declares, by the worker that loaded it
    last; None for nothing.
    """

    options: PoolOptions
    load: Load
    launchers: Launchers
    launcher: AnyLauncher
    threads: int
    log: WorkerLog
    metrics: VersionMetrics
    dispatcher: Dispatcher
    certifier: Certifier
    profiles: Profiles
    reservations: Reservations
    batch_ended: Callable[[], None]
    measured: Callable[[Metrics], None]
    called: Callable[[Request, Called, bytes, Callable[[Returned, bytes], None]], None]
    ask_health: Callable[[str, int], None]
    declaration: Mapping[str, Any] | None = None


class Life:
    """One worker process of a slot, from its descriptors to its wait status. Takes the worker's messages."""

    def __init__(
        self,
        context: LifeContext,
        key: str,
        slot_id: str,
        name: str,
        *,
        answered: Callable[[], None],
        due: Callable[[str], None],
        vain: int = 0,
    ) -> None:
        """`answered` is called after the first answer, `due` with the reason when the worker is to be replaced.

        `vain` is as for `WorkerHealth`.
        """
        self.key = key
        self.how = ""
        self.load_s = 0.0
        self.warm_up_s = 0.0
        self.device_bytes = 0
        self.warnings: list[str] = []
        self.warm_up_failure = ""
        self.computes_on = ""
        self.build_ratios: Mapping[str, float] = {}
        self.overlaps = False
        """Whether it preprocesses the next batch beside the one that computes."""
        self.engine = ""
        self.cpu_flags: tuple[str, ...] = ()
        self.checkpoint: CheckpointRead | None = None
        self.ready_at = 0.0
        self.requests = 0
        self.first_bytes = 0
        self.own_bytes = 0
        self.process: WorkerProcess | None = None
        self.known: Death | None = None
        self.traceback = ""
        self.is_ready = False
        self.ended = asyncio.Event()
        options = context.options
        self.output = WorkerOutput(options.model, options.version, slot_id, context.log, self._note_printing)
        self.client = WorkerClient(self, max_frame_bytes=context.load.max_answer_bytes * max(1, options.batch_size))
        self.due = due
        self.health: HealthWatch | None = None
        if options.health_interval_s:
            self.health = HealthWatch(options.health_interval_s, self._ask_health, vain)
        self._slot_id, self._name, self._answered = slot_id, name, answered
        self._context = context
        self._page: Page | None = None
        self._page_inode = 0
        self._loaded: asyncio.Future[Loaded | NotLoaded | None] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._hang_up: asyncio.TimerHandle | None = None
        self._has_answered = False
        self._runs_many = options.is_concurrent
        self._runs_in_steps = options.continuous_batching
        self._ended = 0
        self._limit = ResponseLimit(options.response_timeout_s)
        self._may_retry = True
        self._accused = 0
        self._sigkill: asyncio.TimerHandle | None = None
        self._cgroup: WorkerCgroup | None = None
        self._recycle_after = options.max_requests_per_worker or math.inf

    def _note_printing(self, began: float, ended: float, size: int) -> None:
        self._context.metrics.note("printing", ended, f"{self._name} printed {size >> 10} KiB", seconds=ended - began)

    # ------------------------------------------------------------------------------------------- its start

    async def start(self, gpu_id: int | None, devices: Sequence[int]) -> None:
        """Start the process and have the model loaded. Raises StartFailed."""
        context = self._context
        began = time.monotonic()
        limit_s = context.options.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._start(gpu_id, devices, limit)
        except TimeoutError:
            await context.launcher.give_up_loading()
            raise StartFailed(
                Death(Cause.STARTUP_TIMEOUT, f"the worker did not load the model within startupTimeout, {limit_s:g} s")
            ) from None
        except StartFailed:
            raise
        except Exception as error:
            if isinstance(error, OSError | RuntimeError) and (met := explain(error)):
                raise StartFailed(Death(Cause.LOAD_FAILED, f"no worker could be started: {met}")) from error
            log.exception("%s could not be started", self._name)
            raise StartFailed(Death(Cause.LOAD_FAILED, f"the worker could not be started: {error}")) from error
        self.is_ready = True
        now = self.ready_at = time.monotonic()
        context.metrics.note("load", now, f"{self._name} was started and loaded the model", seconds=now - began)
        context.dispatcher.open_lane(self.key, self.ready_at, overlaps=self.overlaps)
        if self.health is not None:
            self.health.start()

    async def _start(self, gpu_id: int | None, devices: Sequence[int], limit: asyncio.Timeout) -> None:
        context = self._context
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as ends:  # the worker has copies of its own by the time these are closed
            out, err = await self.output.open()
            ends.callback(os.close, out)
            ends.callback(os.close, err)
            page_descriptor = create_page()
            ends.callback(os.close, page_descriptor)
            self._page = Page(page_descriptor)
            self._page_inode = os.fstat(page_descriptor).st_ino
            wire_end = -1
            if not context.launcher.is_remote:
                ours, theirs = socket.socketpair()
                ends.enter_context(theirs)
                try:
                    await loop.create_connection(lambda: self.client, sock=ours)
                except BaseException:
                    ours.close()
                    raise
                wire_end = theirs.fileno()
            launched = await context.launcher.launch(
                self._slot_id,
                WorkerEnds(wire_end, out, err, page_descriptor),
                context.threads,
                self.output,
                devices,
                gpu_id,
                self.client,
            )
        self.process, self.how = launched.process, launched.how
        self.process.exited.add_done_callback(self._process_ended)
        if context.options.has_own_cores:
            ranks = max(1, context.options.ranks)
            cores = context.launchers.own_cores.give(self.process, context.threads * ranks)
            log.info("%s keeps to the processors %s", self._name, ", ".join(map(str, cores)) or "of the server")
        if context.launchers.cgroups is not None and context.options.max_worker_memory_bytes and self.pids:
            self._cgroup = context.launchers.cgroups.make(
                f"{context.options.model}-{context.options.version}-{self.key}", context.options.max_worker_memory_bytes
            )
            if self._cgroup is not None:
                for pid in self.pids:
                    self._cgroup.add(pid)
        # A template may have loaded the model in vain, so the worker's own load gets the whole limit again.
        limit.reschedule(loop.time() + context.options.startup_timeout_s)
        context.launchers.levels.join(context.options.model, self.client.set_level)
        if launched.needs_load:
            order = msgspec.structs.replace(context.load, gpu_id=gpu_id, threads=context.threads)
            self.client.load(launched.order(order))
        loaded = await asyncio.shield(self._loaded)
        if isinstance(loaded, Loaded) and await self.process.is_whole():
            self.load_s = launched.load_s if loaded.seconds == 0.0 else loaded.seconds
            self.warm_up_s, self.warnings = loaded.warm_up_s, loaded.warnings
            self.warm_up_failure = loaded.warm_up_failure
            self.computes_on = loaded.computes_on
            self.overlaps = loaded.overlaps and context.options.overlap_preprocess
            self.engine, self.cpu_flags = loaded.engine, tuple(loaded.cpu_flags)
            self.checkpoint = loaded.checkpoint
            self.build_ratios = loaded.build_ratios
            if refused := loaded.refused_build:
                context.metrics.builds_refused[refused if refused in BUILDS else "unknown"] += 1
            context.declaration = _declaration_of(loaded)
            self.device_bytes = loaded.device_bytes
            if context.metrics.tap is not None:
                context.metrics.tap.loaded(self._name, self.load_s)
            if loaded.has_length_of:
                context.dispatcher.offer_lengths()
            elif context.options.length_from == FROM_HANDLER:
                self.warnings = [
                    *self.warnings,
                    "lengthFrom: handler is not used: it has no length_of(row)",
                ]
            if self.health is not None and not loaded.has_health:
                self.health = None
                self.warnings = [*self.warnings, "healthInterval is not used: the handler has no health()"]
            log.info("%s loaded the model in %.3f s (%s)", self._name, self.load_s, self.how)
            if loaded.warm_up_s:
                log.info("%s warmed up in %.3f s", self._name, loaded.warm_up_s)
            for warning in self.warnings:
                log.warning("%s %s", self._name, warning)
            return
        if isinstance(loaded, NotLoaded):
            if len(self.pids) <= 1:
                raise StartFailed(death_of_load(loaded), loaded.traceback)
            self.process.rank_said(0, death_of_load(loaded), loaded.traceback)
        raise StartFailed(self.known or await self._how_it_ended(), self.traceback)

    def _process_ended(self, _: object) -> None:
        """The process is gone. Close its connection soon: a process that it left behind may hold that open."""
        assert self.process is not None
        reported = self.process.reported_death
        if reported is not None and self.known is None:
            self.known, self.traceback = reported
        self._hang_up = asyncio.get_running_loop().call_later(LAST_OUTPUT_S, self.client.close)

    async def _how_it_ended(self) -> Death:
        """Why a worker closed its connection while loading, with its last lines of output."""
        assert self.process is not None
        status = await self.process.wait(STOP_GRACE_S)
        await self.output.drained(LAST_OUTPUT_S)
        death = classify_exit(status, known=self.known, evidence=self._evidence(status))
        if self.known is not None:
            return death
        death = self.process.explain(death)
        tail = " | ".join(self.output.last_lines[-3:])
        return Death(death.cause, f"{death.detail}; it said: {tail}" if tail else death.detail, death.exit_code)

    # ------------------------------------------------------------------------------------------- its work

    def on_checked(self, message: Checked) -> None:
        """A check has ended."""
        self._check_ended(message.number)
        self._limit.heard_at = time.monotonic()
        self._context.certifier.on_checked(self.key, message)
        self._context.batch_ended()

    def _ask_health(self) -> int:
        """Ask the worker whether it is well. Returns the number of the loan, 0 without one."""
        assert self.health is not None
        dispatcher = self._context.dispatcher
        # With job tickets a request would be refused while the only worker is lent.
        takes_loans = not self._context.options.use_job_ticket
        number = dispatcher.borrow(self.key, time.monotonic()) if takes_loans else 0
        if not number:
            self.health.note_behind(dispatcher.flights(self.key))
        self._context.ask_health(self.key, number)
        return number

    def on_health(self, message: Health) -> None:
        """The handler has said whether the worker is well: replace it if it has said no too often."""
        if self.health is None:
            raise BadFrame("it speaks of its health, which it was not asked for")
        if message.number:
            self._check_ended(message.number)
        now = self._limit.heard_at = time.monotonic()
        was_failing = bool(self.health.health.failures)
        is_due = self.health.take(message)
        self._context.metrics.health_checks["failed" if message.failure else "passed"] += 1
        if message.failure and not was_failing:
            log.warning("%s is not well: %s", self._name, message.failure)
        elif was_failing and not message.failure:
            log.info("%s is well again", self._name)
        if message.number:
            self._context.dispatcher.end_loan(self.key, message.number, now)
        self._context.batch_ended()
        if is_due:
            self.due("unhealthy")

    def allow_batches_of(self, size: int) -> None:
        """Accept larger frames: batches of `size`, and so their answers, may be larger from now on."""
        self.client.take_frames_of(self._context.load.max_answer_bytes * size)

    def mark_cancelled(self, number: int, index: int) -> None:
        """Tell the worker that an item is not wanted: by the page, or by a message if it reads during batches."""
        if self._runs_many:
            self.client.cancel(number, index)
        elif self._page is not None:
            self._page.cancel(number, index)
            if self.process is not None:
                self.process.item_cancelled(number, index)

    def hold(self) -> None:
        """Read nothing more from the worker: it blocks at its next piece, once the socket is full."""
        self._limit.is_held = True
        self.client.pause_reading()

    def resume(self) -> None:
        """Read again. The response limit begins anew: the worker did not cause the wait."""
        self._limit.is_held = False
        self._limit.heard_at = self._limit.resumed_at = time.monotonic()
        self.client.resume_reading()

    def on_loaded(self, message: Loaded) -> None:
        """The model is loaded."""
        if not self._loaded.done():
            self._loaded.set_result(message)

    def on_not_loaded(self, message: NotLoaded) -> None:
        """Loading failed."""
        if not self._loaded.done():
            self._loaded.set_result(message)

    def on_results(self, ended: Sequence[tuple[Results, list[Body]]]) -> None:
        """Batches have ended. The worker gets its next ones before clients get answers: their sockets take longest."""
        now = self._limit.heard_at = time.monotonic()
        context, dispatcher = self._context, self._context.dispatcher
        if context.certifier.replays_on == self.key:
            for message, bodies in ended:
                self._replayed(message, bodies, now)
            return
        landed: list[Landed] = []
        try:
            for message, bodies in ended:
                self._check_ended(message.number)
                context.metrics.answer_bytes += sum(map(len, bodies))
                landed.append(
                    dispatcher.land(
                        self.key, message.number, message.handler_s, message.results, bodies, now, message.work
                    )
                )
        finally:  # if one of them is refused, those before it have ended all the same
            dispatcher.pump(now)
            self.client.flush()
            for batch in landed:
                dispatcher.tell(batch, now)
        self._note_answer()
        for (message, bodies), batch in zip(ended, landed, strict=True):
            self.requests += dispatcher.ended_in(batch) if self._runs_in_steps else len(message.results)
            if context.certifier.samples_batches:
                context.certifier.note(batch.flight, message, bodies)
        context.batch_ended()
        if self.requests >= self._recycle_after:
            self.due("requests")

    def _replayed(self, message: Results | Raised, bodies: Sequence[Body], now: float) -> None:
        """A batch that was run again has ended."""
        self._check_ended(message.number)
        self._context.certifier.on_replayed(self.key, message, bodies, now)
        self._note_answer()
        self._context.batch_ended()

    def on_raised(self, message: Raised) -> None:
        """The handler raised for a whole batch."""
        now = self._limit.heard_at = time.monotonic()
        if self._context.certifier.replays_on == self.key:
            self._replayed(message, (), now)
            return
        self._check_ended(message.number)
        flights = self._context.dispatcher.flights(self.key)
        self.requests += sum(len(flight.jobs) for flight in flights if flight.number == message.number)
        failed = self._context.dispatcher.raised(self.key, message, now)
        self._note_answer()
        if self.requests >= self._recycle_after:
            self.due("requests")
        if failed:
            self._log_failure([job.request for job in failed], message)
        self._context.batch_ended()

    def _log_failure(self, failed: Sequence[Request], message: Raised) -> None:
        """Log under the requests' ids why they failed, without a traceback for an error meant for the client."""
        is_answer = message.kind in ("prediction", "bad_input") and message.code < 500
        sentence = f"Request {', '.join(shown_id(request.id) for request in failed)}: {message.message}"
        self.output.log_failure(sentence, "" if is_answer else message.traceback, line_ids(failed))

    @property
    def running(self) -> list[Request]:
        """The requests that it works for."""
        begun = self._page.running[0] if self._page is not None else 0
        flights = self._context.dispatcher.flights(self.key)
        running = [flight for flight in flights if self._runs_many or flight.number <= begun]
        return [job.request for flight in running for job in flight.jobs]

    def on_piece(self, message: Piece, bodies: list[Body]) -> None:
        """A piece of a stream has come: the response limit begins anew."""
        now = self._limit.heard_at = time.monotonic()
        if self._context.certifier.replays_on == self.key:
            self._context.certifier.on_piece(self.key, message)
            return
        self._context.metrics.answer_bytes += sum(map(len, bodies))
        self._context.dispatcher.piece(self.key, message.number, message.results, bodies, now)

    def on_called(self, message: Called, bodies: list[Body]) -> None:
        """The handler calls another model, for a request that the worker has. Raises BadFrame if it has no such one."""
        certifier = self._context.certifier
        if certifier.replays_on == self.key and len(bodies) == 1:
            request = certifier.request_of(self.key, message)
            self._context.called(request, message, bytes(bodies[0]), self.client.answer_call)
            return
        flights = self._context.dispatcher.flights(self.key)
        flight = next((each for each in flights if each.number == message.number), None)
        if flight is None or message.index >= len(flight.jobs) or len(bodies) != 1:
            raise BadFrame(f"it calls a model for item {message.index} of batch {message.number}, which does not run")
        request = flight.jobs[message.index].request
        self._context.called(request, message, bytes(bodies[0]), self.client.answer_call)

    def _check_ended(self, number: int) -> None:
        """Raise BadFrame for an answer to a batch that, by the shared page, the worker has not run yet."""
        if self._runs_many:
            self._ended += 1
            number = self._ended  # they end in any order
        if self._page is None or self._page.finished < number:
            raise BadFrame(f"batch {number} is answered, though the worker has not ended it")

    def _count_sent(self) -> None:
        self._context.metrics.input_bytes += self.client.sent_bytes
        self.client.sent_bytes = 0

    def _note_answer(self) -> None:
        self._count_sent()
        if not self._has_answered:
            self._has_answered = True
            self._answered()

    def on_lengths(self, message: Lengths) -> None:
        """The handler has said how long some items are: the response limit of the batch behind begins anew."""
        self._limit.heard_at = time.monotonic()
        self._context.dispatcher.told_lengths(self.key, message.number, message.seconds, message.lengths)

    def on_profiled(self, message: Profiled, bodies: list[Body]) -> None:
        """It has ended a profile, which may have taken a while: the response limit of its batches begins anew."""
        self._limit.heard_at = time.monotonic()
        self._context.profiles.on_profiled(self.key, message, bodies)

    def on_metrics(self, message: Metrics) -> None:
        """What the handler measured."""
        self._context.measured(message)

    def on_out_of_step(self, message: OutOfStep) -> None:
        """The ranks did not end a call alike: end them, since their shared state cannot be trusted any more."""
        if self.known is None:
            self.traceback = message.traceback
        self.kill(Death(Cause.OUT_OF_STEP, message.detail))

    def on_device_peak(self, message: DevicePeak) -> None:
        """The worker uses more memory of its device than it did after its load."""
        self._context.reservations.peaked_on_device(message.device_bytes)

    def on_counted(self, message: Counted) -> None:
        """The model's FLOPs are counted: what its first worker says holds for all."""
        metrics = self._context.metrics
        if metrics.flops is None and self._context.options.peak_flops is not None:
            metrics.flops = Flops(*msgspec.structs.astuple(message))
            log.info("%s counted %.3g FLOPs a request (%s)", self._name, message.per_request, message.inputs)

    def on_warned(self, message: Warned) -> None:
        """Its handler has warnings for describe after its load."""
        for warning in message.warnings:
            if len(self.warnings) < MAX_WARNINGS and warning not in self.warnings:
                self.warnings = [*self.warnings, warning]
                log.warning("%s %s", self._name, warning)

    def on_device_lost(self, message: DeviceLost) -> None:
        """The worker's device is lost to it, since the batch of that number: end the worker."""
        if self.known is None:
            self.traceback = message.traceback
            self._accused = message.number
        self.kill(Death(Cause.DEVICE_LOST, message.detail))

    def on_broken(self, error: BadFrame) -> None:
        """The worker broke the protocol: end it, since none of its further messages can be trusted."""
        self.kill(Death(Cause.BAD_FRAME, f"the worker broke the protocol: {error}"))

    def on_closed(self) -> None:
        """The connection has ended."""
        self._closed.set()
        if not self._loaded.done():
            self._loaded.set_result(None)
        self.ended.set()

    def check_time(self, now: float) -> float | None:
        """End the worker if its oldest batch is past the response limit; else return when to look again."""
        dispatcher, page = self._context.dispatcher, self._page
        flights = dispatcher.flights(self.key)
        if self.health is not None and page is not None:
            heard_at, limit_s = self._limit.heard_at, self._context.options.response_timeout_s
            since = self.health.runs_since(flights, heard_at, in_any_order=self._runs_many)
            if since is not None:
                if now >= since + limit_s:
                    self.terminate(
                        Death(Cause.RESPONSE_TIMEOUT, f"no answer of health() in responseTimeout, {limit_s:g} s")
                    )
                    return None
                if not self._runs_many or not flights:  # batches behind it have not begun
                    return since + limit_s
        if not flights or page is None:
            return None
        quiet_since, is_asked = dispatcher.quiet_since(self.key), dispatcher.is_asked(self.key)
        found = self._limit.look(now, flights[0], page, self.pids, quiet_since=quiet_since, is_asked=is_asked)
        if not isinstance(found, Death):
            return found
        self._may_retry = False
        self.terminate(found)
        return None

    @property
    def name(self) -> str:
        """As logs name it."""
        return self._name

    @property
    def vain_for_heir(self) -> int:
        """As in `WorkerHealth`, for the worker that takes its place."""
        return self.health.health.vain_for_heir if self.health is not None else 0

    @property
    def is_failing(self) -> bool:
        """Whether its handler says that the worker is not well."""
        return self.health is not None and bool(self.health.health.failures)

    @property
    def pids(self) -> list[int]:
        """The worker's process, or those of its ranks; empty before the start."""
        return self.process.pids if self.process is not None else []

    def over_memory(self, own_bytes: int, limit_bytes: int) -> None:
        """End the worker: it holds more memory than it may, in a way that its own limit does not see."""
        self.kill(
            Death(
                Cause.OUT_OF_MEMORY,
                f"ended by the server: it held {own_bytes} bytes by itself, and maxWorkerMemory is {limit_bytes}",
            )
        )

    # ------------------------------------------------------------------------------------------- its end

    def retire(self, *, at_once: bool) -> None:
        """End when the batches in flight are done, or at once."""
        if self.health is not None:
            self.health.stop()
        is_idle = self._context.dispatcher.close_lane(self.key)
        if at_once or not self.is_ready or is_idle:
            self.stop()

    def stop(self) -> None:
        """Ask the worker to end: nothing is in flight any more, or its answers are not wanted."""
        self.known = self.known or Death(Cause.STOPPED, "stopped by the server")
        self.client.stop()
        if not self._loaded.done():
            self._loaded.set_result(None)
        self.ended.set()

    def kill(self, death: Death) -> None:
        """End the worker by force, for this reason."""
        self.known = self.known or death
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)
        self.client.close()

    def terminate(self, death: Death) -> None:
        """End the worker, for this reason: SIGTERM, and soon SIGKILL, to all of its process group."""
        self.known = self.known or death
        process = self.process
        if process is not None:
            process.signal_group(signal.SIGTERM)
            loop = asyncio.get_running_loop()
            self._sigkill = loop.call_later(TERM_GRACE_S, process.signal_group, signal.SIGKILL)
        self.client.close()

    async def finish(self) -> Death:
        """End and reap the process, and close its connection. Returns why it ended; `hand_back` must follow."""
        self.ended.set()
        if self.health is not None:
            self.health.stop()
        self._count_sent()
        self._context.launchers.levels.leave(self.client.set_level)
        status: int | None = None
        if self.process is not None:
            was_told = self.known is not None and self.known.cause is Cause.STOPPED
            hurry = asyncio.ensure_future(self._context.launchers.hurry.wait())
            ends: list[asyncio.Future[Any]] = [self.process.exited, hurry]
            limit_s = STOP_GRACE_S if was_told else LAST_OUTPUT_S
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            is_hurried = self._context.launchers.hurry.is_set()
            status = await self.process.end(TERM_GRACE_S if is_hurried else STOP_GRACE_S)
            await self._context.launcher.end_leftovers(self.process, self._page_inode)
            with contextlib.suppress(TimeoutError):  # what it wrote last is still on its way in
                async with asyncio.timeout(LAST_OUTPUT_S):
                    await self._closed.wait()
        for timer in (self._hang_up, self._sigkill):
            if timer is not None:
                timer.cancel()
        self.client.close()
        if self.known is None and status is not None and status not in (0, signal.SIGKILL):
            await self.output.settled(LAST_OUTPUT_S)  # its last words may say more than its exit status
        death = classify_exit(status, known=self.known, evidence=self._evidence(status))
        if self.known is None and self.process is not None:
            death = self.process.explain(death)
        if self._cgroup is not None:
            self._cgroup.remove()
        return death

    def _evidence(self, status: int | None) -> Evidence:
        was_killed = self.known is None and (status is None or status == signal.SIGKILL)
        in_own_group = was_killed and self._cgroup is not None and self._cgroup.was_killed
        was_here = self.process is None or not self.process.node  # on other nodes the agent sees kills for memory
        was_counted = was_killed and was_here and self._context.launchers.oom_kills.claim(time.monotonic())
        return Evidence(
            last_lines=self.output.last_errors,
            was_killed_for_memory=in_own_group or was_counted,
            memory_limit_bytes=self._context.options.max_worker_memory_bytes,
        )

    def hand_back(self, death: Death) -> None:
        """Give its requests back to the dispatcher, to be run elsewhere or failed."""
        begun = 0
        if self._page is not None:
            begun = max(self._page.running[0], self._page.finished)
            self._page.close()
            self._page = None
        error = error_of(death)
        self._context.dispatcher.died(
            self.key,
            begun,
            error,
            may_retry=self._may_retry,
            is_suspect=death.cause is not Cause.NODE_LOST,
            accused=self._accused,
            # What breaks the protocol, or is in another language, may not have written its page.
            began_oldest=death.cause is Cause.BAD_FRAME or bool(self._context.options.program),
            now=time.monotonic(),
        )
        self._context.certifier.lost(self.key, death.cause.value)
        self._context.profiles.lost(self.key, death.cause.value, death.detail)


def _declaration_of(loaded: Loaded) -> Mapping[str, Any] | None:
    """What the worker says that its model declares; None for nothing, and for what is no JSON object."""
    try:
        declaration = msgspec.json.decode(loaded.declaration) if loaded.declaration else None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return declaration if isinstance(declaration, dict) else None
