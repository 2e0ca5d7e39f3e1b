"""Workers forked from a template: ready in milliseconds, and the model's memory is shared.

`Template` is the server's end of one template process (`worker/template.py` is the other). Its control connection
carries orders and, as ancillary data, the descriptors of the workers to be forked.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from collections.abc import Mapping
from typing import Any

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import Exited, Fork, Forked, Load, NotLoaded, Preload, Stop, Templated, ToWorker
from marserve.pool.cause_of_death import Cause, Death, classify_exit
from marserve.pool.launchers.endpoints import WorkerEnds
from marserve.pool.launchers.process import WorkerProcess, spawn
from marserve.pool.output import WorkerLog, WorkerOutput

# One thread before anything is imported: a numeric library's own pool would make forking unsafe.
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FORK_TIMEOUT_S = 10.0
END_GRACE_S = 2.0


class StartFailed(Exception):
    """A worker or template could not be started; `death` says why, `traceback` is the author's, or empty."""

    def __init__(self, death: Death, traceback: str = "") -> None:
        self.death, self.traceback = death, traceback
        super().__init__(death.detail)


class Template:
    """One template process. `await open(...)` once, then `fork` as often as wanted, `close` at the end."""

    def __init__(self, model: str, version: str, environment: Mapping[str, str], log: WorkerLog) -> None:
        self._environment = environment
        self._output = WorkerOutput(model, version, "template", log)
        self._decoder = wire.server_decoder()
        self._process: WorkerProcess | None = None
        self._control: socket.socket | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._forks: dict[str, asyncio.Future[int]] = {}
        self._children: dict[int, asyncio.Future[int | None]] = {}
        self._exits_early: dict[int, int] = {}
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
        ours, theirs = socket.socketpair()
        out, err = await self._output.open()
        try:
            self._process = spawn(
                ["template", str(os.getpid()), str(theirs.fileno())],
                {**self._environment, **SINGLE_THREADED},
                pass_fds=(theirs.fileno(),),
                out=out,
                err=err,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(out)
            os.close(err)
        self._control = ours
        self._answer = loop.create_future()
        loop.add_reader(ours.fileno(), self._readable)
        self._process.exited.add_done_callback(lambda _: self._ended())
        try:
            self._send(order)
            answer = await self._answer
            if isinstance(answer, Templated):
                self.is_open = True
                self.load_s = answer.seconds
                return answer
            status = await asyncio.shield(self._process.exited)
            await self._output.drained(1.0)
            if isinstance(answer, NotLoaded):
                raise StartFailed(Death(_cause(answer.kind), answer.message), answer.traceback)
            death = classify_exit(status)
            tail = " | ".join(self._output.last_lines[-3:])
            raise StartFailed(Death(death.cause, f"{death.detail}{': ' + tail if tail else ''}"))
        except BaseException:
            await self.close()
            raise

    async def fork(self, worker_id: str, ends: WorkerEnds, threads: int) -> WorkerProcess:
        """Fork a worker on these ends. Raises StartFailed when the template cannot."""
        loop = asyncio.get_running_loop()
        if not self.is_open or self._control is None:
            raise StartFailed(Death(Cause.KILLED, "the template that workers are forked from is gone"))
        forked: asyncio.Future[int] = loop.create_future()
        self._forks[worker_id] = forked
        try:
            order = Fork(worker_id, random.SystemRandom().getrandbits(63), threads)
            self._send(order, (ends.wire, ends.out, ends.err, ends.page))
            pid = await asyncio.wait_for(forked, FORK_TIMEOUT_S)
        except (TimeoutError, OSError) as error:
            raise StartFailed(Death(Cause.STARTUP_TIMEOUT, f"the template did not fork: {error!r}")) from error
        finally:
            self._forks.pop(worker_id, None)
        exited: asyncio.Future[int | None] = loop.create_future()
        if pid in self._exits_early:
            exited.set_result(self._exits_early.pop(pid))
        elif not self.is_open:
            exited.set_result(None)
        else:
            self._children[pid] = exited
        return WorkerProcess(pid, exited)

    async def close(self) -> None:
        """End the template; workers forked from it end with it."""
        self.is_open = False
        if self._process is not None and not self._process.exited.done():
            if self._control is not None:
                try:
                    self._send(Stop())
                except OSError:
                    self._process.signal_group(signal.SIGKILL)
            done, _ = await asyncio.wait([self._process.exited], timeout=END_GRACE_S)
            if not done:
                self._process.signal_group(signal.SIGKILL)
                await asyncio.wait([self._process.exited])
        self._drop_control()
        await self._output.drained(1.0)

    def _send(self, order: ToWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Write an order. Blocking, on purpose: orders are small, and a template does nothing but read them."""
        control = self._control
        if control is None:
            raise BrokenPipeError
        buffers = wire.encode(order)
        if descriptors:
            sent = socket.send_fds(control, [buffers[0]], list(descriptors))
            control.sendall(memoryview(buffers[0])[sent:])
        else:
            control.sendall(buffers[0])

    def _readable(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop_control()
            return
        try:
            for message, _ in self._decoder.feed(data):
                self._hear(message)
        except BadFrame:
            if self._process is not None:
                self._process.signal_group(signal.SIGKILL)

    def _hear(self, message: object) -> None:
        if isinstance(message, Templated | NotLoaded):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, Forked):
            waiting = self._forks.get(message.worker_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.pid)
        elif isinstance(message, Exited):
            child = self._children.pop(message.pid, None)
            if child is None:
                self._exits_early[message.pid] = message.status
            elif not child.done():
                child.set_result(message.status)

    def _ended(self) -> None:
        """The template has ended, and with it (by the kernel) every worker it forked."""
        self.is_open = False
        self._drop_control()
        for child in self._children.values():
            if not child.done():
                child.set_result(None)
        self._children.clear()
        for waiting in self._forks.values():
            if not waiting.done():
                waiting.set_exception(StartFailed(Death(Cause.KILLED, "the template ended while it forked")))
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _drop_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None


def _cause(kind: str) -> Cause:
    try:
        return Cause(kind)
    except ValueError:
        return Cause.LOAD_FAILED
