"""Speaks for one worker on another machine than the server: starts it here, and relays between it and the server.

The agent connects to the server, is told what to start, gets the archive to where a worker can load it, and starts an
ordinary worker with the ordinary launchers, on a socket, a page and two pipes of this machine. From then on the bytes
of the worker's wire pass through unread (`link.py` has the records); beside them go what the worker has on its page,
what it prints, and how it ends. Without the server, heard by its beats, the worker and the agent end.

One agent stays for as many workers, one after the other, as its place is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, cast

import msgspec

from marserve import __version__, link
from marserve.errors import BadFrame, MarserveError
from marserve.messages import Load
from marserve.node.archives import USUAL_CACHE_BYTES, NodeArchives, Prepared, usual_folder
from marserve.page import Page, create_page
from marserve.pool.cause_of_death import Cause
from marserve.pool.launchers import Launched, Launcher, Launchers, StartFailed, WorkerEnds
from marserve.pool.memory import resident_bytes
from marserve.pool.output import Stream, WorkerOutput

log = logging.getLogger("marserve.node")

CONNECT_S = 10.0
LAST_OUTPUT_S = 0.3
END_GRACE_S = 1.0
# Two clocks that differ by less are one, and what differs is the way of the message.
SAME_CLOCK_S = 0.005
RELAY_BYTES = 256 * 1024


class LinkEnd(asyncio.Protocol):
    """The agent's end of the connection: records in and out, and whether the server is still heard."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._decoder: link.RecordDecoder[Any] = link.RecordDecoder(link.ToAgent)
        self._transport: asyncio.Transport | None = None
        self.heard_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on what has come."""
        self.heard_at = time.monotonic()
        try:
            for kind, held in self._decoder.feed(data):
                if kind == link.DATA_KIND:
                    self._agent.to_worker(held)
                elif kind == link.CONTROL_KIND:
                    self._agent.hear(held)
                elif kind == link.FILE_KIND:
                    self._agent.take_part(held)
                else:
                    raise BadFrame("a server sends no page")
        except BadFrame as error:
            log.error("the server broke the protocol: %s", error)
            self.close()

    def pause_writing(self) -> None:
        """The server does not keep up: read nothing more from the worker."""
        self._agent.link_is_full(True)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._agent.link_is_full(False)

    def connection_lost(self, error: Exception | None) -> None:
        """The server is gone."""
        self._transport = None
        self._agent.leave("the connection to the server has ended")

    def send(self, message: object) -> None:
        """Send one message; nothing once the connection has ended."""
        self.write([link.control(message)])

    def write(self, buffers: list[bytes]) -> None:
        """Send records."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(buffers))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


class WorkerEnd(asyncio.Protocol):
    """The agent's end of the worker's wire: what comes goes on to the server, with what the page says by then."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._stops: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to relay."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on. A worker writes its page before it answers, so the page goes first."""
        self._run.from_worker(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The worker has closed its wire."""
        self._transport = None
        self._run.wire_closed()

    def write(self, data: bytes) -> None:
        """To the worker."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def stop_reading(self, why: str, stops: bool) -> None:
        """Read nothing while there is any reason not to."""
        was_stopped = bool(self._stops)
        (self._stops.add if stops else self._stops.discard)(why)
        if self._transport is None or was_stopped == bool(self._stops):
            return
        if self._stops:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection at once."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


class WorkerRun:
    """One worker of the agent's, from its descriptors to its wait status."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._end = WorkerEnd(self)
        self._page: Page | None = None
        self._page_inode = 0
        self._output: WorkerOutput | None = None
        self.launched: Launched | None = None
        self.ended = asyncio.Event()

    async def start(self, order: link.Start, launcher: Launcher) -> Launched:
        """Start the process. Raises StartFailed and OSError."""
        loop = asyncio.get_running_loop()
        model = order.load
        output = self._output = WorkerOutput(model.model, model.version, order.worker_id, self._agent)
        with contextlib.ExitStack() as ends:
            out, err = await output.open()
            ends.callback(os.close, out)
            ends.callback(os.close, err)
            page = create_page()
            ends.callback(os.close, page)
            self._page = Page(page)
            self._page_inode = os.fstat(page).st_ino
            self._page.set_clock_ahead(self._agent.clock_ahead_s)
            ours, theirs = socket.socketpair()
            ends.enter_context(theirs)
            try:
                await loop.create_connection(lambda: self._end, sock=ours)
            except BaseException:
                ours.close()
                raise
            launched = await launcher.launch(
                order.worker_id,
                WorkerEnds(theirs.fileno(), out, err, page),
                order.threads,
                output,
            )
        self.launched = launched
        launched.process.exited.add_done_callback(lambda _: self._agent.keep(self._see_out(launcher)))
        return launched

    @property
    def memory_bytes(self) -> int:
        """What the worker holds."""
        return sum(map(resident_bytes, self.launched.process.pids)) if self.launched is not None else 0

    def page_record(self) -> bytes:
        """What the worker has on its page now."""
        if self._page is None:
            return link.page_record(0, 0.0, 0)
        running, began = self._page.running
        return link.page_record(running, max(0.0, time.monotonic() - began) if running else 0.0, self._page.finished)

    def from_worker(self, data: bytes) -> None:
        """Hand bytes of the worker's on."""
        head = link.HEADER.pack(link.DATA_KIND, len(data))
        self._agent.link.write([self.page_record(), head, data])

    def to_worker(self, data: bytes) -> None:
        """Hand bytes of the server's on."""
        self._end.write(data)

    def stop_reading(self, why: str, stops: bool) -> None:
        """Read nothing from the worker while there is any reason not to."""
        self._end.stop_reading(why, stops)

    def cancel(self, number: int, index: int) -> None:
        """Mark an item as cancelled."""
        if self._page is not None:
            self._page.cancel(number, index)

    def set_clock_ahead(self, seconds: float) -> None:
        """The server's clock, as it is known now."""
        if self._page is not None:
            self._page.set_clock_ahead(seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the worker's group."""
        if self.launched is not None:
            self.launched.process.signal_group(number)

    def wire_closed(self) -> None:
        """The worker hears and says nothing more: the server should know at once."""
        self._agent.link.write([self.page_record(), link.control(link.WireClosed())])

    async def _see_out(self, launcher: Launcher) -> None:
        """Tell the server how the worker ended, its last words first; then clear up."""
        launched, output = self.launched, self._output
        assert launched is not None
        assert output is not None
        process = launched.process
        status = process.exited.result()
        was_killed = (status is None or status == signal.SIGKILL) and self._agent.was_killed_for_memory()
        await output.drained(LAST_OUTPUT_S)
        self._agent.link.write([self.page_record(), link.control(link.WorkerExited(status, was_killed))])
        self._agent.run_ended(self)
        await launcher.end_leftovers(process, self._page_inode)
        self.close()

    def close(self) -> None:
        """Let go of what is this machine's."""
        self._end.close()
        if self._page is not None:
            self._page.close()
            self._page = None
        self.ended.set()

    async def end(self) -> None:
        """End the worker, and wait for it: nobody wants it any more."""
        if self.launched is not None:
            await self.launched.process.end(END_GRACE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), END_GRACE_S + LAST_OUTPUT_S)
        if self._output is not None:
            await self._output.drained(LAST_OUTPUT_S)
        self.close()


class Agent:
    """One agent. `run` returns why it left."""

    def __init__(self, order: link.AgentOrder, node_id: str, node: str) -> None:
        """`node_id` and `node` are how the cluster and people call this machine."""
        self._order, self._node_id, self._node = order, node_id, node
        self.link = LinkEnd(self)
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._run: WorkerRun | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._launchers: Launchers | None = None
        self._launcher: tuple[link.Start, Launcher] | None = None
        self._prepared: Prepared | None = None
        self._prepared_sha256 = ""
        self._stop = threading.Event()
        self._file: Any = None
        self._file_ended: asyncio.Future[str] | None = None
        self._clocks: deque[float] = deque(maxlen=16)
        self.clock_ahead_s = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="marserve-agent-"))

    async def run(self) -> str:
        """Serve until the server is gone or wants nothing more."""
        loop = asyncio.get_running_loop()
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    context = client_context(self._order)
                    await loop.create_connection(
                        lambda: self.link,
                        self._order.host,
                        self._order.port,
                        ssl=context,
                        server_hostname=link.SERVER_NAME if context is not None else None,
                    )
            except (OSError, TimeoutError) as error:
                where = f"{self._order.host}:{self._order.port}"
                return f"the server could not be reached from this node at {where} (ray_advertise): {error!r}"
            self.link.send(link.Hello(self._order.token, __version__, self._node_id, self._node, os.getpid()))
            beats = asyncio.create_task(self._beat())
            try:
                return await self._left
            finally:
                beats.cancel()
        finally:
            await self._clear_up()

    async def _beat(self) -> None:
        """Say that we are there, and look whether the server is."""
        said_at = looked_at = time.monotonic()
        while True:
            await asyncio.sleep(link.LOOK_S)
            now = time.monotonic()
            was_away = now - looked_at > link.BEAT_S  # this machine did not let us run: what came is still to be read
            looked_at = now
            if now - said_at >= link.BEAT_S:
                said_at = now
                records = [link.control(link.AgentBeat(self._run.memory_bytes if self._run is not None else 0))]
                if self._run is not None:
                    records.insert(0, self._run.page_record())
                self.link.write(records)
            if not was_away and now - self.link.heard_at > link.PATIENT_S:
                self.leave(f"the server has said nothing for {now - self.link.heard_at:.1f} s")

    def leave(self, reason: str) -> None:
        """End, for this reason."""
        if not self._left.done():
            self._left.set_result(reason)

    async def _clear_up(self) -> None:
        self._stop.set()
        if self._file_ended is not None and not self._file_ended.done():
            self._file_ended.set_result("the server has gone")
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._run is not None:
            await self._run.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_GRACE_S)
        if self._launcher is not None:
            await self._launcher[1].close()
        if self._launchers is not None:
            await self._launchers.close()
        if self._prepared is not None:
            self._prepared.release()
        self.link.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep(self, coroutine: Any) -> None:
        """Run something beside."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------- what the server says

    def hear(self, message: object) -> None:
        """One message of the server's."""
        run = self._run
        if isinstance(message, link.ServerBeat):
            self._note_clock(message.now)
        elif isinstance(message, link.Start):
            if self._starting is None and run is None:
                self._starting = asyncio.create_task(self._start(message))
        elif isinstance(message, link.ArchiveEnd):
            if self._file_ended is not None and not self._file_ended.done():
                self._file_ended.set_result(message.reason)
        elif isinstance(message, link.Leave):
            self.leave(message.reason or "the server wants nothing more")
        elif isinstance(message, link.Signal) and run is None and self._starting is not None:
            self._starting.cancel()
        elif run is None:
            return
        elif isinstance(message, link.Signal):
            run.signal(message.number)
        elif isinstance(message, link.CancelItem):
            run.cancel(message.number, message.index)
        elif isinstance(message, link.Hold | link.Resume):
            run.stop_reading("held", isinstance(message, link.Hold))

    def to_worker(self, data: bytes) -> None:
        """Bytes for the worker; for one that has ended they are nobody's."""
        if self._run is not None:
            self._run.to_worker(data)

    def link_is_full(self, is_full: bool) -> None:
        """Whether the server keeps up with what the worker says."""
        if self._run is not None:
            self._run.stop_reading("full", is_full)

    def _note_clock(self, server_now: float) -> None:
        """The highest of the last differences is the one whose message was the quickest."""
        self._clocks.append(server_now - time.monotonic())
        ahead = max(self._clocks)
        self.clock_ahead_s = ahead if abs(ahead) > SAME_CLOCK_S else 0.0
        if self._run is not None:
            self._run.set_clock_ahead(self.clock_ahead_s)

    # ------------------------------------------------------------------------------------------- starting

    async def _start(self, order: link.Start) -> None:
        try:
            self.link.send(await self._start_worker(order))
        except StartFailed as failure:
            death = failure.death
            self.link.send(link.NotStarted(death.cause.value, death.detail, failure.traceback, death.exit_code))
        except asyncio.CancelledError:
            self.link.send(link.NotStarted(Cause.KILLED.value, "its start was given up"))
            if not self._left.done():
                return
            raise
        except (MarserveError, OSError) as error:
            self.link.send(link.NotStarted(Cause.LOAD_FAILED.value, f"on node {self._node}: {error}"))
        except Exception as error:
            log.exception("the worker could not be started")
            self.link.send(link.NotStarted(Cause.LOAD_FAILED.value, f"on node {self._node}: {error!r}"))
        finally:
            self._starting = None

    async def _start_worker(self, order: link.Start) -> link.Started:
        folder = await self._prepare(order.archive)
        load = translate(order.load, folder, self._write_metrics(order.metrics))
        launcher = await self._launcher_for(order, load)
        run = WorkerRun(self)
        self._run = run
        try:
            launched = await run.start(order, launcher)
        except BaseException:
            self._run = None
            run.close()
            raise
        return link.Started(
            launched.process.pid,
            launched.how,
            launched.needs_load,
            launched.load_s,
            load.model_dir,
            load.import_paths,
            load.metrics_file,
            launcher.warnings,
        )

    async def _launcher_for(self, order: link.Start, load: Load) -> Launcher:
        """The launcher of the last worker if this one is alike, with its template; else a new one."""
        key = msgspec.structs.replace(order, worker_id="")
        if self._launcher is not None:
            if self._launcher[0] == key:
                return self._launcher[1]
            await self._launcher[1].close()
            self._launcher = None
        if self._launchers is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
            environment |= order.environment
            self._launchers = Launchers(environment, self)
            self._launchers.watch_kills()
        launcher = Launcher(self._launchers, load, cast("Any", order.worker_start), uses_devices=bool(order.devices))
        self._launcher = (key, launcher)
        return launcher

    def _write_metrics(self, content: str | None) -> str | None:
        if content is None:
            return None
        path = self._folder / "metrics.yaml"
        path.write_text(content, "utf-8")
        return str(path)

    async def _prepare(self, ref: link.ArchiveRef) -> Path:
        if self._prepared is not None and self._prepared_sha256 == ref.sha256:
            return self._prepared.folder
        loop = asyncio.get_running_loop()

        def receive(path: Path) -> None:
            asyncio.run_coroutine_threadsafe(self._receive(ref, path), loop).result()

        def prepare() -> Prepared:
            folder = Path(self._order.cache) if self._order.cache else usual_folder()
            archives = NodeArchives(folder, self._order.cache_bytes or USUAL_CACHE_BYTES)
            return archives.prepare(ref, receive, self._stop)

        prepared = await asyncio.to_thread(prepare)
        if self._prepared is not None:
            self._prepared.release()
        self._prepared, self._prepared_sha256 = prepared, ref.sha256
        return prepared.folder

    async def _receive(self, ref: link.ArchiveRef, path: Path) -> None:
        """Have the server send the archive into this file. Raises MarserveError."""
        self._file_ended = asyncio.get_running_loop().create_future()
        with path.open("wb") as self._file:
            self.link.send(link.WantArchive(ref.sha256))
            try:
                reason = await self._file_ended
            finally:
                self._file = self._file_ended = None
        if reason:
            raise MarserveError(f"{ref.name} cannot be had on this node: {reason}")

    def take_part(self, data: bytes) -> None:
        """A part of the archive."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            if self._file_ended is not None and not self._file_ended.done():
                self._file_ended.set_result(f"it cannot be written: {error}")

    # ------------------------------------------------------------------------------------------- the worker

    def line(self, model: str, version: str, worker_id: str, stream: Stream, level: str, text: str) -> None:
        """What the worker, or its template, prints."""
        self.link.send(link.Line(stream, level, text))

    def was_killed_for_memory(self) -> bool:
        """Whether the kernel of this machine has killed for memory just now."""
        if self._launchers is None or not self._launchers.oom_kills.can_be_seen:
            return False
        self._launchers.oom_kills.look(time.monotonic())
        return self._launchers.oom_kills.claim(time.monotonic())

    def run_ended(self, run: WorkerRun) -> None:
        """The worker has ended; another may be asked for."""
        if self._run is run:
            self._run = None


def translate(load: Load, folder: Path, metrics_file: str | None) -> Load:
    """An order to load that names this machine's paths: those inside the archive move with it."""
    theirs = Path(load.model_dir)
    moved = [
        str(folder / Path(path).relative_to(theirs)) if Path(path).is_relative_to(theirs) else path
        for path in load.import_paths
    ]
    return msgspec.structs.replace(load, model_dir=str(folder), import_paths=moved, metrics_file=metrics_file)


def client_context(order: link.AgentOrder) -> ssl.SSLContext | None:
    """What the agent shows, and whom it believes; None where the connection is plain."""
    if not order.authority:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=order.authority)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # the standard library reads keys from files only
        file.write(order.certificate + order.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def run_agent(order: bytes, node_id: str, node: str) -> str:
    """Run one agent to its end on an event loop of its own; returns why it left. `order` is an `AgentOrder`."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    read = msgspec.msgpack.decode(order, type=link.AgentOrder)

    async def run() -> str:
        return await Agent(read, node_id, node).run()

    try:
        import uvloop
    except ImportError:  # not everywhere
        return asyncio.run(run())
    return uvloop.run(run())
