"""A worker on another machine, as the pool sees it: a process like any other, and a transport for its client.

`AgentLink` is the server's end of the connection to one agent (`agent_link.py` has the messages, `node/agent.py` the
other end). Bytes for the worker's client are passed on unchanged; the worker's page is mirrored to the page here; lines
that it prints go to its output. An agent that is silent for `SILENT_S` is lost, and so is its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from marserve import agent_link
from marserve.errors import BadFrame
from marserve.messages import Load
from marserve.pool.launchers.forked import StartFailed
from marserve.pool.launchers.process import WorkerProcess
from marserve.pool.worker_end.cause_of_death import Cause, Death, read_cause
from marserve.pool.worker_end.client import WorkerClient
from marserve.pool.worker_end.output import WorkerOutput
from marserve.shared_page import Page

log = logging.getLogger("marserve.pool.launchers")

HELLO_S = 10.0
FILE_PART_BYTES = agent_link.MAX_FILE_PART_BYTES


class RemoteWorker(WorkerProcess):
    """One worker on another machine. `exited` is done when its agent has reported the end, or is lost."""

    def __init__(self, agent: AgentLink, page: int, output: WorkerOutput, client: WorkerClient) -> None:
        """`page` is the descriptor of the page on this machine, which the caller closes."""
        super().__init__(-1, asyncio.get_running_loop().create_future())
        self.node = agent.node
        self.remote_bytes = 0
        self.client = client
        self.hears = True
        self.started: agent_link.Started | None = None
        self._agent = agent
        self._page = Page(page)
        self._output = output
        self._death: Death | None = None

    @property
    def pids(self) -> list[int]:
        """Empty: it has no process on this machine."""
        return []

    @property
    def lineages(self) -> list[str]:
        """Empty: the agent ends what its worker leaves behind."""
        return []

    @property
    def reported_death(self) -> tuple[Death, str] | None:
        """Why it ended, if its wait status does not say so."""
        return None if self._death is None else (self._death, "")

    def load(self, order: Load) -> Load:
        """The order to load, with the paths on its machine."""
        if self.started is None:
            return order
        started = self.started
        return msgspec.structs.replace(
            order, model_dir=started.model_dir, import_paths=started.import_paths, metrics_file=started.metrics_file
        )

    def signal_group(self, number: int) -> None:
        """Have the agent send a signal to the worker's group."""
        if not self.exited.done():
            self._agent.send(agent_link.Signal(number))

    def item_cancelled(self, number: int, index: int) -> None:
        """Have the agent mark an item on the worker's own page."""
        self._agent.send(agent_link.CancelItem(number, index))

    # ------------------------------------------------------------------------------------------- the agent's news

    def see_page(self, running: int, since_s: float, finished: int) -> None:
        """Mirror the worker's page to the one here."""
        if not self.exited.done():
            self._page.mirror(running, time.monotonic() - since_s, finished)

    def see_line(self, message: agent_link.Line) -> None:
        """Log lines that the worker printed."""
        stream: Literal["stdout", "stderr"] = "stderr" if message.stream == "stderr" else "stdout"
        self._output.take(stream, message.level, message.texts, message.ids)

    def wire_closed(self) -> None:
        """The worker's wire has ended."""
        self.client.connection_lost(None)

    def see_exit(self, message: agent_link.WorkerExited) -> None:
        """The worker has ended and was reaped."""
        if message.was_killed_for_memory:
            self._death = Death(Cause.OUT_OF_MEMORY, f"the kernel of node {self.node} killed it for want of memory")
        self._end(message.status)

    def lose(self, why: str) -> None:
        """The agent is lost, and the worker with it. All batches sent so far may have run, so they count as begun."""
        self._death = Death(Cause.NODE_LOST, f"node {self.node}: {why}")
        if not self.exited.done() and self.client.last_sent:
            self._page.mirror(self.client.last_sent, time.monotonic(), 0)
        self._end(None)

    def abandon(self) -> None:
        """The worker was not started."""
        self._end(None)

    def _end(self, status: int | None) -> None:
        if self.exited.done():
            return
        self.exited.set_result(status)
        self._page.close()
        self.client.connection_lost(None)


class RemoteTransport(asyncio.Transport):
    """The transport of a worker's client. Closing it separates client and worker; the agent's connection stays."""

    def __init__(self, agent: AgentLink, worker: RemoteWorker) -> None:
        super().__init__()
        self._agent, self._worker = agent, worker
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a frame, or a part of one."""
        if not self._is_closing:
            self._agent.write_data([data])

    def writelines(self, list_of_data: Any) -> None:
        """Send a frame in parts."""
        if not self._is_closing:
            self._agent.write_data(list_of_data)

    def pause_reading(self) -> None:
        """Have the agent read nothing more from the worker; bytes under way still come."""
        self._agent.send(agent_link.Hold())

    def resume_reading(self) -> None:
        """Have the agent read again."""
        self._agent.send(agent_link.Resume())

    def is_closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._is_closing or self._worker.exited.done()

    def abort(self) -> None:
        """Pass nothing on any more, in either direction."""
        if not self._is_closing:
            self._is_closing = True
            self._worker.hears = False
            asyncio.get_running_loop().call_soon(self._worker.client.connection_lost, None)

    close = abort


class AgentLink(asyncio.Protocol):
    """The server's end of one connection, from `on_made` to `on_lost`, or until `on_hello` refuses it with a sentence.

    `look` ends a connection that has sent no hello within `HELLO_S` seconds.
    """

    def __init__(
        self,
        on_made: Callable[[AgentLink], None],
        on_hello: Callable[[AgentLink, agent_link.Hello], str | None],
        on_lost: Callable[[AgentLink], None],
    ) -> None:
        self.node, self.node_id, self.agent_pid = "", "", 0
        self.heard_at = self._made_at = time.monotonic()
        self.is_lost = False
        self.worker: RemoteWorker | None = None
        self.archive: agent_link.ArchiveRef | None = None
        self._on_made, self._on_hello, self._on_lost = on_made, on_hello, on_lost
        self._has_said_hello = False
        self._decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToLinkServer)
        self._transport: asyncio.Transport | None = None
        self._starting: asyncio.Future[agent_link.Started] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    # ------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected, and must send a hello soon."""
        self._transport = cast("asyncio.Transport", transport)
        self._on_made(self)
        self.heard_at = self._made_at = time.monotonic()
        self.beat(self.heard_at)

    def beat(self, now: float) -> None:
        """Send the agent a beat."""
        self.send(agent_link.ServerBeat(now))

    def look(self, now: float) -> None:
        """Lose an agent that has been silent for too long."""
        if not self._has_said_hello:
            if now - self._made_at > HELLO_S:
                self.lose("it has sent no hello")
            return
        silent_s = now - self.heard_at
        if silent_s > agent_link.SILENT_S:
            self.lose(f"nothing was heard from it for {silent_s:.1f} s")

    def lose(self, why: str) -> None:
        """The agent is lost: end the connection and everything that depends on it."""
        if self.is_lost:
            return
        self.is_lost = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._decoder.forget()
        if self._sending is not None:
            self._sending.cancel()
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(StartFailed(Death(Cause.NODE_LOST, f"node {self.node}: {why}")))
        if self.worker is not None:
            log.warning("node %s: %s", self.node, why)
            self.worker.lose(why)
        self._on_lost(self)

    def leave(self, reason: str = "") -> None:
        """Send the agent away: it has no more work."""
        self.send(agent_link.Leave(reason))
        if not self.is_lost and self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        self.lose("its connection has ended" if error is None else f"its connection broke: {error}")

    def pause_writing(self) -> None:
        """The agent does not keep up."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._may_write.set()

    def send(self, message: object) -> None:
        """Send one message; nothing once the agent is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(agent_link.control(message))

    def write_data(self, buffers: list[bytes | bytearray | memoryview]) -> None:
        """Send bytes to the worker."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        size = sum(map(len, buffers))
        if size < FILE_PART_BYTES:
            transport.write(b"".join((agent_link.HEADER.pack(agent_link.DATA_KIND, size), *buffers)))
            return
        for buffer in buffers:  # each is at most as long as a body, which fits into a record
            transport.write(agent_link.HEADER.pack(agent_link.DATA_KIND, len(buffer)))
            transport.write(buffer)

    def data_received(self, data: bytes) -> None:
        """Handle the records that have come."""
        self.heard_at = time.monotonic()
        try:
            for kind, held in self._decoder.feed(data):
                worker = self.worker
                if kind == agent_link.DATA_KIND:
                    if worker is not None and worker.hears:
                        worker.client.data_received(held)
                elif kind == agent_link.PAGE_KIND:
                    if worker is not None:
                        worker.see_page(*held)
                elif kind == agent_link.CONTROL_KIND:
                    self._hear(held)
                else:
                    raise BadFrame("an agent sends no files")
        except BadFrame as error:
            self.lose(f"it broke the protocol: {error}")

    def _hear(self, message: object) -> None:
        if not self._has_said_hello:
            if not isinstance(message, agent_link.Hello):
                raise BadFrame("the first message is no hello")
            self._greet(message)
            return
        worker = self.worker
        if isinstance(message, agent_link.WantArchive):
            self._sending = asyncio.create_task(self._send_archive(message.sha256))
        elif isinstance(message, agent_link.Started):
            if self._starting is not None and not self._starting.done():
                self._starting.set_result(message)
        elif isinstance(message, agent_link.NotStarted):
            self._not_started(message)
        elif worker is None:
            return
        elif isinstance(message, agent_link.Line):
            worker.see_line(message)
        elif isinstance(message, agent_link.AgentBeat):
            worker.remote_bytes = message.memory_bytes
        elif isinstance(message, agent_link.WireClosed):
            worker.wire_closed()
        elif isinstance(message, agent_link.WorkerExited):
            self.worker = None
            worker.see_exit(message)

    def _greet(self, message: agent_link.Hello) -> None:
        self._has_said_hello = True
        self.node, self.node_id, self.agent_pid = message.node, message.node_id, message.pid
        refusal = self._on_hello(self, message)
        if refusal is not None:
            log.warning("an agent on %s is refused: %s", self.node, refusal)
            self.leave(refusal)
            self.is_lost = True
            self._on_lost(self)

    # ------------------------------------------------------------------------------------------- a worker's start

    async def start(self, order: agent_link.Start, worker: RemoteWorker) -> agent_link.Started:
        """Have the agent start a worker. Raises StartFailed."""
        if self.is_lost:
            raise StartFailed(Death(Cause.NODE_LOST, f"node {self.node} was lost"))
        self.worker, self.archive = worker, order.archive
        starting = self._starting = asyncio.get_running_loop().create_future()
        worker.client.connection_made(RemoteTransport(self, worker))
        self.send(order)
        try:
            started: agent_link.Started = await starting
        except BaseException:
            if self.worker is worker and not worker.exited.done():
                worker.signal_group(9)
            raise
        finally:
            self._starting = None
        worker.pid, worker.started = started.pid, started
        return started

    def _not_started(self, message: agent_link.NotStarted) -> None:
        death = Death(read_cause(message.cause), message.detail, message.exit_code)
        self.worker = None
        if self._starting is not None and not self._starting.done():
            self._starting.set_exception(StartFailed(death, message.traceback))

    async def _send_archive(self, sha256: str) -> None:
        """Send the file of the model's archive, and only that."""
        ref, reason = self.archive, ""
        if ref is None or ref.sha256 != sha256 or not ref.path:
            reason = "the server has no file of it"
        else:
            try:
                with await asyncio.to_thread(Path(ref.path).open, "rb") as file:
                    while part := await asyncio.to_thread(file.read, FILE_PART_BYTES):
                        await self._may_write.wait()
                        if self._transport is None:
                            return
                        self._transport.write(agent_link.HEADER.pack(agent_link.FILE_KIND, len(part)) + part)
            except OSError as error:
                reason = f"the server cannot read it: {error.strerror}"
        with contextlib.suppress(RuntimeError):
            self.send(agent_link.ArchiveEnd(reason))
