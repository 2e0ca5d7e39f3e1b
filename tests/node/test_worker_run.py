"""Tests for one worker of an agent's: what the server hears of it, and that the next one is never taken for it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from marserve import agent_link
from marserve.messages import Load
from marserve.node.agent import Agent
from marserve.node.worker_run import WorkerRun
from marserve.pool.launchers.launcher import Launched, WorkerEnds
from marserve.pool.launchers.process import WorkerProcess
from marserve.telemetry.logs.output_budget import OutputBudget

pytestmark = pytest.mark.anyio

START = agent_link.Start(
    "9000", Load("m", "1.0", "/m", "h.py", None, None, 1), "spawn", 1, agent_link.ArchiveRef("0" * 64, "m.mar"), {}
)


class Wire:
    """Takes what an agent sends, as what the server reads."""

    def __init__(self) -> None:
        self.said: list[tuple[int, Any]] = []
        self._decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToLinkServer)

    def write(self, buffers: list[bytes]) -> None:
        """Some records."""
        self.said.extend(self._decoder.feed(b"".join(buffers)))

    @property
    def messages(self) -> list[object]:
        """The messages among them."""
        return [held for kind, held in self.said if kind == agent_link.CONTROL_KIND]

    @property
    def data(self) -> bytes:
        """The worker's bytes among them."""
        return b"".join(held for kind, held in self.said if kind == agent_link.DATA_KIND)


class Owner:
    """Stands in for the agent."""

    clock_ahead_s = 0.0

    def __init__(self) -> None:
        self.link: Any = Wire()
        self.budget = OutputBudget()
        self.tasks: list[asyncio.Task[None]] = []

    def keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it."""
        self.tasks.append(asyncio.create_task(coroutine))

    def was_killed_for_memory(self) -> bool:
        """It was not."""
        return False

    def run_ended(self, run: WorkerRun) -> None:
        """Nobody is told."""

    def write(self, *_: object) -> None:
        """Nothing is printed."""


class ForkingLauncher:
    """Starts a worker whose child holds its wire when it has ended; `left` is done when that is ended, too."""

    def __init__(self) -> None:
        self.process = WorkerProcess(0, asyncio.get_running_loop().create_future())
        self.left = asyncio.Event()
        self.wire: socket.socket | None = None

    async def launch(self, worker_id: str, ends: WorkerEnds, threads: int, output: object) -> Launched:
        """Keep the worker's end of the wire."""
        self.wire = socket.socket(fileno=os.dup(ends.wire))
        return Launched(self.process, needs_load=True, how="here")

    async def end_leftovers(self, process: WorkerProcess, page_inode: int) -> None:
        """Wait until the child is gone."""
        await self.left.wait()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


async def ended(owner: Owner, launcher: ForkingLauncher) -> None:
    """The worker's end, and what is done at it."""
    launcher.left.set()
    launcher.process.exited.set_result(9)
    await until(lambda: bool(owner.tasks))
    await asyncio.gather(*owner.tasks)


async def test_what_a_workers_child_does_to_the_wire_is_no_news_after_the_workers_end() -> None:
    """By then the server may have asked for another worker, which it would take it for."""
    owner, launcher = Owner(), ForkingLauncher()
    run = WorkerRun(owner)
    await run.start(START, launcher)  # type: ignore[arg-type]
    assert launcher.wire is not None
    launcher.wire.send(b"answer")
    await until(lambda: owner.link.data == b"answer")

    launcher.process.exited.set_result(9)
    await until(lambda: agent_link.WorkerExited(9, False) in owner.link.messages)
    launcher.wire.send(b"late")
    launcher.wire.close()
    await until(lambda: run._end._transport is None)
    launcher.left.set()
    await asyncio.gather(*owner.tasks)

    kind, last = owner.link.said[-1]
    assert (kind, last) == (agent_link.CONTROL_KIND, agent_link.WorkerExited(9, False))


async def test_a_worker_that_closes_its_wire_is_told_of_at_once() -> None:
    """Before it has ended."""
    owner, launcher = Owner(), ForkingLauncher()
    run = WorkerRun(owner)
    await run.start(START, launcher)  # type: ignore[arg-type]
    assert launcher.wire is not None

    launcher.wire.close()
    await until(lambda: bool(owner.link.messages))

    assert owner.link.messages == [agent_link.WireClosed()]
    await ended(owner, launcher)


async def test_a_start_that_fails_says_nothing_of_a_wire() -> None:
    """The server has given the link to the next one."""
    owner, launcher = Owner(), ForkingLauncher()
    run = WorkerRun(owner)
    await run.start(START, launcher)  # type: ignore[arg-type]
    assert launcher.wire is not None

    run.close()
    launcher.wire.settimeout(10)
    assert await asyncio.to_thread(launcher.wire.recv, 1) == b""
    launcher.wire.close()

    assert owner.link.said == []
    await ended(owner, launcher)


async def test_a_worker_that_starts_while_the_link_is_full_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hears of a full link once; all that is read meanwhile would lie in its memory."""
    agent = Agent(agent_link.AgentOrder("127.0.0.1", 1, "token"), "id", "node")
    launcher, wire = ForkingLauncher(), Wire()
    agent.link = wire  # type: ignore[assignment]

    async def prepare(order: agent_link.Start) -> tuple[Load, ForkingLauncher]:
        return order.load, launcher

    monkeypatch.setattr(agent._starter, "prepare", prepare)
    monkeypatch.setattr(ForkingLauncher, "warnings", [], raising=False)
    agent.link_is_full(True)
    await agent._start_worker(START)
    run = agent._run
    assert run is not None
    assert launcher.wire is not None
    assert run._end._transport is not None

    assert not run._end._transport.is_reading()
    launcher.wire.send(b"answer")
    agent.link_is_full(False)
    await until(lambda: wire.data == b"answer")

    launcher.wire.close()
    launcher.left.set()
    launcher.process.exited.set_result(0)
    await run.ended.wait()
    monkeypatch.undo()
    agent._starter.give_up()
    await agent._starter.close()
