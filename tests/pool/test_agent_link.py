"""Tests for the server's end of an agent's connection: who connects has to say who it is, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from marserve import __version__, agent_link
from marserve.pool.launchers.remote.remote import HELLO_S, AgentLink

pytestmark = pytest.mark.anyio


class Door:
    """Lets nobody in but who has the word, and keeps the list of who is there."""

    def __init__(self) -> None:
        self.inside: set[AgentLink] = set()

    def make(self) -> AgentLink:
        """A link for whoever connects next."""
        return AgentLink(self.inside.add, self._greet, self.inside.discard)

    def _greet(self, agent: AgentLink, hello: agent_link.Hello) -> str | None:
        return None if hello.token == "word" else "it has another word"


@pytest.fixture
async def connected() -> AsyncIterator[tuple[Door, AgentLink, socket.socket]]:
    """A link, its door, and the socket of whoever has connected."""
    door, (ours, theirs) = Door(), socket.socketpair()
    theirs.setblocking(False)
    transport, made = await asyncio.get_running_loop().create_connection(door.make, sock=ours)
    yield door, made, theirs
    transport.abort()
    theirs.close()


async def read_to_the_end(theirs: socket.socket) -> bytes:
    """What the server says until it closes, or breaks the connection off."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 65536), 10):
            said += data
    return said


def hello(token: str) -> bytes:
    """An agent's first message."""
    return agent_link.control(agent_link.Hello(token, __version__, "id", "node", 1))


async def test_who_does_not_say_who_it_is_is_sent_away(connected: tuple[Door, AgentLink, socket.socket]) -> None:
    """However busily it says a byte now and then."""
    door, agent, theirs = connected
    await asyncio.get_running_loop().sock_sendall(theirs, hello("word")[:5])
    assert door.inside == {agent}

    agent.look(agent.heard_at + HELLO_S - 1)
    assert door.inside == {agent}
    agent.heard_at += HELLO_S
    agent.look(agent.heard_at + 1)

    await read_to_the_end(theirs)
    assert door.inside == set()


async def test_who_has_the_wrong_word_hears_why_and_is_not_kept(
    connected: tuple[Door, AgentLink, socket.socket],
) -> None:
    """The connection ends, and nothing is looked after any more."""
    door, _, theirs = connected
    await asyncio.get_running_loop().sock_sendall(theirs, hello("key"))

    said = await read_to_the_end(theirs)

    assert b"it has another word" in said
    assert door.inside == set()


async def test_what_begins_with_something_else_is_no_agent(connected: tuple[Door, AgentLink, socket.socket]) -> None:
    """A stranger who sends what could only come later."""
    door, agent, theirs = connected
    await asyncio.get_running_loop().sock_sendall(theirs, agent_link.control(agent_link.AgentBeat(1)))

    await read_to_the_end(theirs)
    assert agent.is_lost
    assert door.inside == set()


async def test_who_has_said_hello_is_lost_when_it_falls_silent(
    connected: tuple[Door, AgentLink, socket.socket],
) -> None:
    """Sooner than a stranger."""
    door, agent, theirs = connected
    await asyncio.get_running_loop().sock_sendall(theirs, hello("word"))
    while agent.node != "node":
        await asyncio.sleep(0)

    agent.look(agent.heard_at + agent_link.SILENT_S - 0.1)
    assert door.inside == {agent}
    agent.look(agent.heard_at + agent_link.SILENT_S + 0.1)

    await read_to_the_end(theirs)
    assert door.inside == set()
