"""Workers forked from a template: ready in milliseconds, and the model's memory is shared.

`Template` is the server's end of one template process (`worker/template.py` is the other). Its control connection
carries orders and, as ancillary data, the descriptors of the workers to be forked.
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
from marserve.messages import Exited, Fork, Forked, Load, NotLoaded, Preload, Stop, Templated, ToWorker
from marserve.pool.cause_of_death import Cause, Death, Evidence, classify_exit, death_of_load
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.leftovers import Leftovers
from marserve.pool.launchers.process import WorkerProcess, limit_threads, spawn
from marserve.pool.output import WorkerLog, WorkerOutput

# One thread before anything is imported: a numeric library's own pool would make forking unsafe.
SINGLE_THREADED = limit_threads(1)
FORK_TIMEOUT_S = 10.0
END_GRACE_S = 2.0


class StartFailed(Exception):
    """A worker or template could not be started; `death` says why, `traceback` is the author's, or empty."""

    def __init__(self, death: Death, traceback: str = "") -> None:
        self.death, self.traceback = death, traceback
        super().__init__(death.detail)


class Template:
    """One template process. `await open(...)` once, then `fork` as often as wanted, `close` at the end."""

    def __init__(
        self, model: str, version: str, environment: Mapping[str, str], log: WorkerLog, leftovers: Leftovers
    ) -> None:
        self._environment = environment
        self._leftovers = leftovers
        self._lineage = leftovers.child()
        self._lineages: dict[str, str] = {}
        self._output = WorkerOutput(model, version, "template", log)
        self._decoder = wire.server_decoder()
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._forks: dict[str, asyncio.Future[WorkerProcess]] = {}
        self._fork_numbers = count(1)
        self._children: dict[int, asyncio.Future[int | None]] = {}
        self._unsent = memoryview(b"")
        self.is_open = False
        self.load_s = 0.0

    @property
    def pid(self) -> int:
        """The template's process id, -1 before it has one."""
        return self._process.pid if self._process is not None else -1

    async def open(self, order: Load | Preload) -> Templated:
        """Start the process and have it load (or import). Raises StartFailed; there is nothing to close then.

        The caller bounds the wait: when cancelled, the process is ended all the same.
        """
        loop = asyncio.get_running_loop()
        process = self._process = await self._spawn()
        self._answer = loop.create_future()
        process.exited.add_done_callback(lambda _: self._ended())
        try:
            self._unsent = memoryview(b"".join(wire.encode(order)))
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
            death = classify_exit(status, evidence=Evidence(self._output.last_lines))
            tail = " | ".join(self._output.last_lines[-3:])
            raise StartFailed(Death(death.cause, f"{death.detail}{': ' + tail if tail else ''}", death.exit_code))
        except BaseException:
            process.signal_group(signal.SIGKILL)  # first, and without waiting: who cancels us may do so again
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
        """Fork a worker on these ends. Raises StartFailed when the template cannot.

        `more` are the further descriptors of a rank of a group; `seed` is that of its random numbers (None: a new one).
        """
        if not self.is_open:
            raise StartFailed(Death(Cause.KILLED, "the template that workers are forked from is gone"))
        forked: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        name = f"{worker_id}/{next(self._fork_numbers)}"  # an answer that comes too late must find nobody else waiting
        self._forks[name] = forked
        lineage = self._lineages[name] = self._leftovers.child(self._lineage.rsplit("/", 1)[1])
        try:
            own_seed = random.SystemRandom().getrandbits(63) if seed is None else seed
            order = Fork(name, own_seed, threads, len(more), lineage)
            self._send(order, (ends.wire, ends.out, ends.err, ends.page, *more))
            return await asyncio.wait_for(forked, FORK_TIMEOUT_S)
        except TimeoutError as error:
            reason = f"the template did not fork within {FORK_TIMEOUT_S:g} s"
            raise StartFailed(Death(Cause.STARTUP_TIMEOUT, reason)) from error
        except OSError as error:
            raise StartFailed(Death(Cause.KILLED, f"the template cannot be reached: {error}")) from error
        finally:
            del self._forks[name], self._lineages[name]

    def kill(self) -> None:
        """End the process by force; whoever waits for `open` hears that it failed."""
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    async def close(self) -> None:
        """End the template; workers forked from it end with it."""
        self.is_open = False
        if self._process is not None and not self._process.exited.done():
            try:
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
        """Write a short order, without waiting: a template does nothing but read them. Raises OSError if it cannot."""
        if self._control is None:
            raise BrokenPipeError("the template is gone")
        data = b"".join(wire.encode(order))
        sent = socket.send_fds(self._control, [data], list(descriptors)) if descriptors else self._control.send(data)
        if sent < len(data):
            raise BlockingIOError("the template does not read its orders")

    def _writable(self) -> None:
        """Send on what is left of the first order: a long one waits for the new interpreter to read it."""
        assert self._control is not None
        try:
            self._unsent = self._unsent[self._control.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it has ended already, as its exit will say
            self._unsent = memoryview(b"")
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _readable(self) -> bool:
        """Take what has come; says whether there may be more at once."""
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
        except BadFrame:
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
            waiting = self._forks.get(message.worker_id)
            if message.pid <= 0:
                if waiting is not None and not waiting.done():
                    waiting.set_exception(StartFailed(Death(Cause.LOAD_FAILED, "the system would not fork a worker")))
                return
            exited: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self._children[message.pid] = exited
            if waiting is not None and not waiting.done():  # else its wire is closed by now, and it ends by itself
                waiting.set_result(WorkerProcess(message.pid, exited, self._lineages[message.worker_id]))
        elif isinstance(message, Exited):
            child = self._children.pop(message.pid, None)
            if child is not None and not child.done():
                child.set_result(message.status)

    def _ended(self) -> None:
        """The template has ended, and with it (by the kernel) every worker it forked."""
        self.is_open = False
        while self._readable():  # what it said last, a failed load above all
            pass
        self._drop_control()
        for pid, child in self._children.items():
            with contextlib.suppress(OSError):  # what a worker left in its process group has nobody else to end it
                os.killpg(pid, signal.SIGKILL)
            if not child.done():
                child.set_result(None)
        self._children.clear()
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
