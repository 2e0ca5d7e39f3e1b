"""Starts one worker on a machine other than the server's, and relays between the worker and the server.

The agent connects to the server (`server_end.py`) and receives an order to start a worker. It gets the archive to where
the worker can load it (`starting.py`, `archives.py`), and starts an ordinary worker with the ordinary launchers, on a
socket, a page and two pipes of this machine (`worker_run.py`). From then on it passes the bytes of the worker's wire
through unread (`agent_link.py` has the records). Beside them it sends the content of the worker's page, what the worker
prints, and how it ends. When the server's beats stop, the agent ends its worker and itself.

One agent serves several workers, one after the other, for as long as its place in the cluster is reserved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from marserve import __version__, agent_link
from marserve.errors import MarserveError
from marserve.node.archives import NodeUnfit
from marserve.node.server_end import ServerEnd, client_context
from marserve.node.starting import Starter
from marserve.node.worker_run import END_GRACE_S, WorkerRun
from marserve.pool.launchers.launcher import StartFailed
from marserve.pool.worker_end.cause_of_death import Cause
from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.worker_lines import WorkerLines

log = logging.getLogger("marserve.node")

CONNECT_S = 10.0
# Clocks that differ by less are taken as one: the difference is the time that the message took.
SAME_CLOCK_S = 0.005


class Agent:
    """One agent. `run` returns the reason why it ended."""

    def __init__(self, order: agent_link.AgentOrder, node_id: str, node: str) -> None:
        """`node_id` and `node` are the cluster's and the readable name of this machine."""
        self._order, self._node_id, self._node = order, node_id, node
        self.link = ServerEnd(self)
        self._left: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._run: WorkerRun | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starter = Starter(order, self, lambda sha256: self.link.send(agent_link.WantArchive(sha256)))
        self._clocks: deque[float] = deque(maxlen=16)
        self._is_link_full = False
        self._lines_left_out = 0
        self.budget = OutputBudget()
        self.clock_ahead_s = 0.0

    async def run(self) -> str:
        """Serve until the server is gone or asks for the end."""
        loop = asyncio.get_running_loop()
        where = f"{self._order.host}:{self._order.port}"
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    context = client_context(self._order)
                    await loop.create_connection(
                        lambda: self.link,
                        self._order.host,
                        self._order.port,
                        ssl=context,
                        server_hostname=agent_link.SERVER_NAME if context is not None else None,
                    )
            except ssl.SSLCertVerificationError as error:
                return f"another server than its own answers at {where} (ray_advertise): {error.verify_message}"
            except (OSError, TimeoutError) as error:
                return f"the server could not be reached from this node at {where} (ray_advertise): {error!r}"
            self.link.send(agent_link.Hello(self._order.token, __version__, self._node_id, self._node, os.getpid()))
            beats = asyncio.create_task(self._beat())
            try:
                return await self._left
            finally:
                beats.cancel()
        finally:
            await self._clear_up()

    async def _beat(self) -> None:
        """Send beats, and check that the server's beats still come."""
        said_at = looked_at = time.monotonic()
        while True:
            await asyncio.sleep(agent_link.LOOK_S)
            now = time.monotonic()
            was_away = (
                now - looked_at > agent_link.BEAT_S
            )  # this machine was suspended: messages that came are still to be read
            looked_at = now
            if now - said_at >= agent_link.BEAT_S:
                said_at = now
                records = [
                    agent_link.control(agent_link.AgentBeat(self._run.memory_bytes if self._run is not None else 0))
                ]
                if self._run is not None:
                    records.insert(0, self._run.page_record())
                self.link.write(records)
            if not was_away and now - self.link.heard_at > agent_link.PATIENT_S:
                self.leave(f"the server has said nothing for {now - self.link.heard_at:.1f} s")

    def leave(self, reason: str) -> None:
        """End, for this reason."""
        if not self._left.done():
            self._left.set_result(reason)

    async def _clear_up(self) -> None:
        self._starter.give_up()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._run is not None:
            await self._run.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_GRACE_S)
        await self._starter.close()
        self.link.close()

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until its end."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------- what the server says

    def hear(self, message: object) -> None:
        """Handle one message of the server."""
        run = self._run
        if isinstance(message, agent_link.ServerBeat):
            self._note_clock(message.now)
        elif isinstance(message, agent_link.Start):
            if self._starting is None and run is None:
                self._starting = asyncio.create_task(self._start(message))
        elif isinstance(message, agent_link.ArchiveEnd):
            self._starter.receiver.end(message.reason)
        elif isinstance(message, agent_link.Leave):
            self.leave(message.reason or "the server wants nothing more")
        elif isinstance(message, agent_link.Signal) and run is None and self._starting is not None:
            self._starting.cancel()
        elif run is None:
            return
        elif isinstance(message, agent_link.Signal):
            run.signal(message.number)
        elif isinstance(message, agent_link.CancelItem):
            run.cancel(message.number, message.index)
        elif isinstance(message, agent_link.Hold | agent_link.Resume):
            run.stop_reading("held", isinstance(message, agent_link.Hold))

    def to_worker(self, data: bytes) -> None:
        """Send bytes to the worker; drop them if it has ended."""
        if self._run is not None:
            self._run.to_worker(data)

    def take_part(self, data: bytes) -> None:
        """Store a part of the archive."""
        self._starter.receiver.take(data)

    def link_is_full(self, is_full: bool) -> None:
        """Stop reading from the worker while the connection to the server is full."""
        self._is_link_full = is_full
        if self._run is not None:
            self._run.stop_reading("full", is_full)
        if not is_full and self._lines_left_out:
            count, self._lines_left_out = self._lines_left_out, 0
            self.link.send(
                agent_link.Line("stderr", "WARNING", [f"{count} lines were left out: the server did not keep up"])
            )

    def _note_clock(self, server_now: float) -> None:
        """Take the highest of the last differences: its message was the quickest."""
        self._clocks.append(server_now - time.monotonic())
        ahead = max(self._clocks)
        self.clock_ahead_s = ahead if abs(ahead) > SAME_CLOCK_S else 0.0
        if self._run is not None:
            self._run.set_clock_ahead(self.clock_ahead_s)

    # ------------------------------------------------------------------------------------------- starting

    async def _start(self, order: agent_link.Start) -> None:
        try:
            self.link.send(await self._start_worker(order))
        except StartFailed as failure:
            death = failure.death
            self.link.send(agent_link.NotStarted(death.cause.value, death.detail, failure.traceback, death.exit_code))
        except asyncio.CancelledError:
            self.link.send(agent_link.NotStarted(Cause.KILLED.value, "its start was given up"))
            if not self._left.done():
                return
            raise
        except NodeUnfit as error:
            self.link.send(agent_link.NotStarted(Cause.NODE_UNFIT.value, f"on node {self._node}: {error}"))
        except (MarserveError, OSError) as error:
            self.link.send(agent_link.NotStarted(Cause.LOAD_FAILED.value, f"on node {self._node}: {error}"))
        except Exception as error:
            log.exception("the worker could not be started")
            self.link.send(agent_link.NotStarted(Cause.LOAD_FAILED.value, f"on node {self._node}: {error!r}"))
        finally:
            self._starting = None

    async def _start_worker(self, order: agent_link.Start) -> agent_link.Started:
        load, launcher = await self._starter.prepare(order)
        run = WorkerRun(self)
        run.stop_reading("full", self._is_link_full)
        self._run = run
        try:
            launched = await run.start(order, launcher)
        except BaseException:
            self._run = None
            run.close()
            raise
        return agent_link.Started(
            launched.process.pid,
            launched.how,
            launched.needs_load,
            launched.load_s,
            load.model_dir,
            load.import_paths,
            load.metrics_file,
            launcher.warnings,
        )

    # ------------------------------------------------------------------------------------------- the worker

    def write(self, lines: WorkerLines) -> None:
        """Send what the worker or its template prints; drop it while the server does not keep up."""
        if self._is_link_full:
            self._lines_left_out += len(lines.texts)
        else:
            self.link.send(agent_link.Line(lines.stream, lines.level, list(lines.texts), lines.ids))

    def was_killed_for_memory(self) -> bool:
        """Whether the kernel of this machine has killed for memory just now."""
        return self._starter.was_killed_for_memory()

    def run_ended(self, run: WorkerRun) -> None:
        """Note that the worker has ended; the server may order another."""
        if self._run is run:
            self._run = None


def run_agent(order: bytes, node_id: str, node: str) -> str:
    """Run one agent to its end on its own event loop; returns the reason why it ended. `order` is an `AgentOrder`."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    read = msgspec.msgpack.decode(order, type=agent_link.AgentOrder)

    async def run() -> str:
        return await Agent(read, node_id, node).run()

    try:
        import uvloop
    except ImportError:  # not everywhere
        return asyncio.run(run())
    return uvloop.run(run())
