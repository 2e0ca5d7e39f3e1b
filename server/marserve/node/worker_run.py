"""One worker of an agent's: its socket, page and pipes on this machine, and the relay between it and the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from marserve import agent_link as link
from marserve.node.server_end import ServerEnd
from marserve.pool.launchers.launcher import Launched, Launcher, WorkerEnds
from marserve.pool.worker_end.memory import resident_bytes
from marserve.pool.worker_end.output import WorkerLog, WorkerOutput
from marserve.shared_page import Page, create_page

LAST_OUTPUT_S = 0.3
END_GRACE_S = 1.0


class RunOwner(WorkerLog, Protocol):
    """The agent as its worker's run sees it: takes the worker's lines, and sends to the server."""

    link: ServerEnd
    clock_ahead_s: float

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until its end."""

    def was_killed_for_memory(self) -> bool:
        """Whether the kernel of this machine has killed for memory just now."""

    def run_ended(self, run: WorkerRun) -> None:
        """The worker has ended."""


class WorkerEnd(asyncio.Protocol):
    """The agent's end of the worker's wire: passes received bytes to the server, after the page's present content."""

    def __init__(self, run: WorkerRun) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._stops: set[str] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to relay."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on. A worker writes its page before it answers, so the page goes first."""
        self._run.from_worker(data)

    def begin(self) -> None:
        """Apply a pause ordered before it was connected. Not in `connection_made`: uvloop forgets a pause there."""
        if self._transport is not None and self._stops:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """The worker has closed its wire."""
        self._transport = None
        self._run.wire_closed()

    def write(self, data: bytes) -> None:
        """Send to the worker."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def stop_reading(self, why: str, stops: bool) -> None:
        """Add or remove a reason to stop; nothing is read while there is one."""
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

    def __init__(self, agent: RunOwner) -> None:
        self._agent = agent
        self._end = WorkerEnd(self)
        self._page: Page | None = None
        self._page_inode = 0
        self._output: WorkerOutput | None = None
        self._is_over = False
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
            self._end.begin()
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
        """The memory that the worker holds."""
        return sum(map(resident_bytes, self.launched.process.pids)) if self.launched is not None else 0

    def page_record(self) -> bytes:
        """The present content of the worker's page."""
        if self._page is None:
            return link.page_record(0, 0.0, 0)
        running, began = self._page.running
        return link.page_record(running, max(0.0, time.monotonic() - began) if running else 0.0, self._page.finished)

    def from_worker(self, data: bytes) -> None:
        """Pass the worker's bytes on. Once the server knows of its end it would take them for the next worker's."""
        if self._is_over:
            return
        head = link.HEADER.pack(link.DATA_KIND, len(data))
        self._agent.link.write([self.page_record(), head, data])

    def to_worker(self, data: bytes) -> None:
        """Pass the server's bytes on."""
        self._end.write(data)

    def stop_reading(self, why: str, stops: bool) -> None:
        """Add or remove a reason to stop; nothing is read from the worker while there is one."""
        self._end.stop_reading(why, stops)

    def cancel(self, number: int, index: int) -> None:
        """Mark an item as cancelled."""
        if self._page is not None:
            self._page.cancel(number, index)

    def set_clock_ahead(self, seconds: float) -> None:
        """Set the difference of the server's clock, as it is known now."""
        if self._page is not None:
            self._page.set_clock_ahead(seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the worker's group."""
        if self.launched is not None:
            self.launched.process.signal_group(number)

    def wire_closed(self) -> None:
        """Report at once that the worker has closed its wire, unless the server knows of its end."""
        if self._is_over:
            return
        self._agent.link.write([self.page_record(), link.control(link.WireClosed())])

    async def _see_out(self, launcher: Launcher) -> None:
        """Report to the server the worker's last lines and then how it ended; then clean up."""
        launched, output = self.launched, self._output
        assert launched is not None
        assert output is not None
        process = launched.process
        status = process.exited.result()
        was_killed = (status is None or status == signal.SIGKILL) and self._agent.was_killed_for_memory()
        await output.drained(LAST_OUTPUT_S)
        self._is_over = True
        self._agent.link.write([self.page_record(), link.control(link.WorkerExited(status, was_killed))])
        self._agent.run_ended(self)
        await launcher.end_leftovers(process, self._page_inode)
        self.close()

    def close(self) -> None:
        """Close this machine's socket, page and pipes."""
        self._is_over = True
        self._end.close()
        if self._page is not None:
            self._page.close()
            self._page = None
        self.ended.set()

    async def end(self) -> None:
        """End the worker, which is no longer wanted, and wait for its end."""
        if self.launched is not None:
            await self.launched.process.end(END_GRACE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_GRACE_S + LAST_OUTPUT_S):
                    await self.ended.wait()
        if self._output is not None:
            await self._output.drained(LAST_OUTPUT_S)
        self.close()
