"""Tests for what an agent tells the server of what its worker prints."""

from __future__ import annotations

import pytest

from marserve import agent_link
from marserve.node.agent import Agent
from marserve.telemetry.logs.worker_lines import WorkerLines

pytestmark = pytest.mark.anyio


class Server:
    """Takes an agent's messages."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def send(self, message: object) -> None:
        """One more."""
        self.said.append(message)

    def close(self) -> None:
        """The connection's end."""


async def test_lines_are_left_out_and_counted_while_the_server_does_not_keep_up() -> None:
    """A worker that prints a gigabyte costs its agent no memory."""
    agent, server = Agent(agent_link.AgentOrder("127.0.0.1", 1, "token"), "id", "node"), Server()
    agent.link = server  # type: ignore[assignment]

    def say(text: str) -> None:
        agent.write(WorkerLines("m", "1.0", "9000", "stdout", "INFO", [text]))

    try:
        say("first")
        agent.link_is_full(True)
        for number in range(1000):
            say(f"line {number}")
        assert len(server.said) == 1
        agent.link_is_full(False)
        say("last")
    finally:
        await agent._clear_up()

    assert server.said == [
        agent_link.Line("stdout", "INFO", ["first"]),
        agent_link.Line("stderr", "WARNING", ["1000 lines were left out: the server did not keep up"]),
        agent_link.Line("stdout", "INFO", ["last"]),
    ]
