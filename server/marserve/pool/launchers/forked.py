"""Workers forked from a template: ready in milliseconds, and the model's memory is shared.

`Template` is the server's end of one template process (`worker/template.py` is the other). Its control connection
carries orders and, as ancillary data, the descriptors of the workers to be forked.

The author's code has run in a template, so the server checks its messages: it may name only its own children. The
server sees the end of a worker by its pidfd; from the template it needs only the wait status. A template that does not
fork within `FORK_TIMEOUT_S` is given up: it gets no more orders, its workers go on until the pool has replaced them by
those of another template, and it is ended after the last of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from marserve import wire
from marserve.errors import BadFrame
from marserve.machine.limits import process_limits
from marserve.messages import Exited, Fork, Forked, Load, NotLoaded, Preload, SetLevel, Stop, Templated, ToWorker
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.leftovers import Leftovers
from marserve.pool.launchers.process import (
    WorkerProcess,
    call_at_end,
    limit_threads,
    open_pidfd,
    parent_of,
    spawn,
)
from marserve.pool.worker_end.cause_of_death import Cause, Death, Evidence, classify_exit, death_of_load
from marserve.pool.worker_end.output import WorkerLog, WorkerOutput
from marserve.pool.worker_end.worker_levels import DEFAULT_LEVEL

# One thread before anything is imported: a numeric library's own pool would make forking unsafe.
SINGLE_THREADED = limit_threads(1)
FORK_TIMEOUT_S = 10.0
END_GRACE_S = 2.0
# How long after a worker's end its template may take to report the wait status.
STATUS_GRACE_S = 0.5
# How many ended processes that are not its workers a template may report.
MOST_STRANGERS = 10_000


class StartFailed(Exception):
    """A worker or template could not be started; `death` says why, `traceback` is the author's, or empty."""

    def __init__(self, death: Death, traceback: str = "") -> None:
        self.death, self.traceback = death, traceback
        super().__init__(death.detail)


class ForkedWorker(WorkerProcess):
    """A worker that a template forked: the template reaps it, and reports its wait status.

    `descriptor` is its pidfd, which this object closes at the end; None if the system has none: then the template's
    report alone says that the worker has ended.
    """

    def __init__(self, pid: int, template: Template, lineage: str, descriptor: int | None) -> None:
        super().__init__(pid, asyncio.get_running_loop().create_future(), lineage)
        self._template = template
        self._descriptor = descriptor
        self._status: int | None = None
        self._has_ended = descriptor is None
        self._timer: asyncio.TimerHandle | None = None
        if descriptor is not None:
            call_at_end(descriptor, self._ended)

    @property
    def has_lost_template(self) -> bool:
        """Whether its template does not answer."""
        return self._template.why_given_up != ""

    def _ended(self) -> None:
        """Its process has ended."""
        self._has_ended, self._descriptor = True, None
        if self._status is not None:
            self.conclude(self._status)
        else:
            self._timer = asyncio.get_running_loop().call_later(STATUS_GRACE_S, self.conclude, None)

    def see_status(self, status: int) -> None:
        """The template reports the wait status; it counts once the system has reported the end."""
        if self._status is None:
            self._status = status
            if self._has_ended:
                self.conclude(status)

    def conclude(self, status: int | None) -> None:
        """The worker has ended, or the kernel ends it with its template."""
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        self._template.forget(self)
        if not self.exited.done():
            self.exited.set_result(status)


class Template:
    """One template process. `await open(...)` once, then `fork` as often as wanted, `close` at the end.

    `why_given_up` is a sentence once the template has not answered an order to fork; else empty.
    """

    def __init__(
        self, model: str, version: str, environment: Mapping[str, str], log: WorkerLog, leftovers: Leftovers
    ) -> None:
        self._environment = environment
        self._leftovers = leftovers
        self._lineage = leftovers.child()
        self._lineages: dict[str, str] = {}
        self._output = WorkerOutput(model, version, "template", log)
        self._decoder = wire.template_decoder()
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._forks: dict[str, asyncio.Future[WorkerProcess]] = {}
        self._fork_numbers = count(1)
        self._children: dict[int, ForkedWorker] = {}
        self._is_childless = asyncio.Event()
        self._strangers = 0
        self._broken: Death | None = None
        self._unsent = memoryview(b"")
        self.is_open = False
        self.why_given_up = ""
        self.load_s = 0.0

    @property
    def pid(self) -> int:
        """The template's process id, -1 before it has one."""
        return self._process.pid if self._process is not None else -1

    async def open(self, order: Load | Preload, level: str = DEFAULT_LEVEL) -> Templated:
        """Start the process and have it load (or import). Raises StartFailed; there is nothing to close then.

        `level` is that of its logging while it loads; a worker that it forks gets its own. The caller bounds the wait:
        when cancelled, the process is ended all the same.
        """
        loop = asyncio.get_running_loop()
        process = self._process = await self._spawn()
        self._answer = loop.create_future()
        process.exited.add_done_callback(lambda _: self._ended())
        try:
            self._unsent = memoryview(b"".join([*wire.encode(SetLevel(level.upper())), *wire.encode(order)]))
            assert self._control is not None
            loop.add_reader(self._control.fileno(), self._readable)
            loop.add_writer(self._control.fileno(), self._writable)
            answer = await self._answer
            if isinstance(answer, Templated):
                self.is_open = True
                self.load_s = answer.seconds
                return answer
            status = await process.wait(END_GRACE_S)
            await self._output.drained(1.0)
            if isinstance(answer, NotLoaded):
                raise StartFailed(death_of_load(answer), answer.traceback)
            if self._broken is not None:
                raise StartFailed(self._broken)
            death = classify_exit(status, evidence=Evidence(self._output.last_errors))
            tail = " | ".join(self._output.last_lines[-3:])
            raise StartFailed(Death(death.cause, f"{death.detail}{': ' + tail if tail else ''}", death.exit_code))
        except BaseException:
            process.signal_group(signal.SIGKILL)  # first and without waiting: a second cancel may interrupt `close`
            await self.close()
            raise

    async def _spawn(self) -> WorkerProcess:
        with contextlib.ExitStack() as ends:
            out, err = await self._output.open()
            ends.callback(os.close, out)
            ends.callback(os.close, err)
            ours, theirs = socket.socketpair()
            ends.enter_context(theirs)
            ours.setblocking(False)
            try:
                process = spawn(
                    ["template", str(os.getpid()), str(theirs.fileno())],
                    {**self._environment, **SINGLE_THREADED},
                    pass_fds=(theirs.fileno(),),
                    out=out,
                    err=err,
                    lineage=self._lineage,
                )
            except BaseException:
                ours.close()
                raise
        self._control = ours
        return process

    async def fork(
        self, worker_id: str, ends: WorkerEnds, threads: int, *, more: Sequence[int] = (), seed: int | None = None
    ) -> WorkerProcess:
        """Fork a worker on these ends. Raises StartFailed; the template may have been given up then.

        `more` are the further descriptors of a rank of a group; `seed` is that of its random numbers (None: a new one).
        """
        if not self.is_open:
            raise StartFailed(Death(Cause.KILLED, "the template that workers are forked from is gone"))
        forked: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        name = f"{worker_id}/{next(self._fork_numbers)}"  # a late answer must not meet another order
        self._forks[name] = forked
        lineage = self._lineages[name] = self._leftovers.child(self._lineage.rsplit("/", 1)[1])
        try:
            own_seed = random.SystemRandom().getrandbits(63) if seed is None else seed
            order = Fork(name, own_seed, threads, len(more), lineage)
            self._send(order, (ends.wire, ends.out, ends.err, ends.page, *more))
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await forked
        except (TimeoutError, BlockingIOError) as error:
            self._give_up(f"did not fork a worker within {FORK_TIMEOUT_S:g} s")
            reason = f"the template that it is forked from (process {self.pid}) {self.why_given_up}; it is replaced"
            raise StartFailed(Death(Cause.STARTUP_TIMEOUT, reason)) from error
        except OSError as error:
            raise StartFailed(Death(Cause.KILLED, f"the template cannot be reached: {error}")) from error
        finally:
            del self._forks[name], self._lineages[name]

    def kill(self) -> None:
        """End the process by force; a waiting `open` raises StartFailed."""
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    def _give_up(self, why: str) -> None:
        """Send the template no more orders: it is stopped or deadlocked."""
        self.is_open = False
        self.why_given_up = why

    async def fade(self) -> None:
        """End a template that was given up once the last worker that it forked has ended.

        When cancelled, it is ended at once.
        """
        try:
            while self._children:
                self._is_childless.clear()
                await self._is_childless.wait()
        finally:
            self.kill()
            await self.close()

    async def close(self) -> None:
        """End the template; workers forked from it end with it."""
        self.is_open = False
        if self._process is not None and not self._process.exited.done():
            try:
                if self.why_given_up:
                    raise BrokenPipeError("it reads no orders")
                self._send(Stop())
                await self._process.wait(END_GRACE_S)
            except OSError:
                await self._process.wait(0.0)
            except asyncio.CancelledError:
                self._process.signal_group(signal.SIGKILL)
                raise
        self._drop_control()
        await self._output.drained(1.0)

    def _send(self, order: ToWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Write a short order without waiting: a template always reads its orders. Raises OSError if it does not."""
        if self._control is None:
            raise BrokenPipeError("the template is gone")
        data = b"".join(wire.encode(order))
        sent = socket.send_fds(self._control, [data], list(descriptors)) if descriptors else self._control.send(data)
        if sent < len(data):
            raise BlockingIOError("the template does not read its orders")

    def _writable(self) -> None:
        """Send the rest of the first order; a long one takes until the new interpreter reads it."""
        assert self._control is not None
        try:
            self._unsent = self._unsent[self._control.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it has ended already, which its exit will show
            self._unsent = memoryview(b"")
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _readable(self) -> bool:
        """Read and handle what has come; returns whether there may be more."""
        if self._control is None:
            return False
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._drop_control()
            return False
        try:
            for message, _ in self._decoder.feed(data):
                self._hear(message)
        except BadFrame as error:
            self._broken = Death(Cause.BAD_FRAME, f"the template broke the protocol: {error}")
            if self._process is not None:
                self._process.signal_group(signal.SIGKILL)
            self._drop_control()
            return False
        return True

    def _hear(self, message: object) -> None:
        if isinstance(message, Templated | NotLoaded):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, Forked):
            self._hear_of_worker(message)
        elif isinstance(message, Exited):
            child = self._children.get(message.pid)
            if child is not None:
                child.see_status(message.status)
                return
            self._strangers += 1  # children that the author's code had started while loading
            if self._strangers > MOST_STRANGERS:
                raise BadFrame("a template speaks without end of processes that are not its workers")
        else:
            raise BadFrame(f"a template sent {type(message).__name__}")

    def _hear_of_worker(self, message: Forked) -> None:
        """A worker was forked, or could not be. Raises BadFrame for a process that is not the template's child."""
        self._strangers = 0
        waiting = self._forks.get(message.worker_id)
        is_awaited = waiting is not None and not waiting.done()
        pid = message.pid
        if not pid:
            if waiting is not None and is_awaited:
                why = f"no worker could be started: the system would not fork one ({process_limits()})"
                waiting.set_exception(StartFailed(Death(Cause.LOAD_FAILED, why)))
            return
        # The server sends signals to a process that a template names, and to its group.
        descriptor = open_pidfd(pid)
        parent = parent_of(pid)
        if pid in self._children or (parent is not None and parent != self.pid):
            if descriptor is not None:
                os.close(descriptor)
            raise BadFrame(f"a template says that process {pid} is its worker, whose parent is {parent}")
        child = ForkedWorker(pid, self, self._lineages.get(message.worker_id, ""), descriptor)
        self._children[pid] = child
        if waiting is not None and is_awaited:  # else its wire is closed, and it ends by itself
            waiting.set_result(child)

    def forget(self, child: ForkedWorker) -> None:
        """One of its workers has ended."""
        if self._children.get(child.pid) is child:
            del self._children[child.pid]
        if not self._children:
            self._is_childless.set()

    def _ended(self) -> None:
        """The template has ended, and with it (by the kernel) every worker it forked."""
        self.is_open = False
        while self._readable():  # its last messages, a failed load above all
            pass
        self._drop_control()
        for child in list(self._children.values()):
            with contextlib.suppress(OSError):  # only this ends what a worker left in its process group
                os.killpg(child.pid, signal.SIGKILL)
            child.conclude(None)
        self._leftovers.ask(self._lineage)
        for waiting in self._forks.values():
            if not waiting.done():
                waiting.set_exception(StartFailed(Death(Cause.KILLED, "the template ended while it forked")))
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _drop_control(self) -> None:
        if self._control is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control.fileno())
            loop.remove_writer(self._control.fileno())
            self._control.close()
            self._control = None
