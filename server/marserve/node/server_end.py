"""The agent's end of its connection to the server: sends and receives records, notes when it last heard the server."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
import time
from typing import Any, Protocol, cast

from marserve import agent_link
from marserve.errors import BadFrame

log = logging.getLogger("marserve.node")


# A protocol: the agent is built upon its end of the connection.
class Listener(Protocol):
    """Receives the server's messages."""

    def hear(self, message: object) -> None:
        """Handle one message."""

    def to_worker(self, data: bytes) -> None:
        """Bytes for the worker."""

    def take_part(self, data: bytes) -> None:
        """A part of an archive."""

    def link_is_full(self, is_full: bool) -> None:
        """Stop sending, or go on: whether the connection to the server is full."""

    def leave(self, reason: str) -> None:
        """The connection has ended."""


class ServerEnd(asyncio.Protocol):
    """Sends records once it is connected, and passes received ones to its listener."""

    def __init__(self, agent: Listener) -> None:
        self._agent = agent
        self._decoder: agent_link.RecordDecoder[Any] = agent_link.RecordDecoder(agent_link.ToAgent)
        self._transport: asyncio.Transport | None = None
        self.heard_at = time.monotonic()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass received records on."""
        self.heard_at = time.monotonic()
        try:
            for kind, held in self._decoder.feed(data):
                if kind == agent_link.DATA_KIND:
                    self._agent.to_worker(held)
                elif kind == agent_link.CONTROL_KIND:
                    self._agent.hear(held)
                elif kind == agent_link.FILE_KIND:
                    self._agent.take_part(held)
                else:
                    raise BadFrame("a server sends no page")
        except BadFrame as error:
            log.error("the server broke the protocol: %s", error)
            self.close()

    def pause_writing(self) -> None:
        """The server does not keep up: stop reading from the worker."""
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
        self.write([agent_link.control(message)])

    def write(self, buffers: list[bytes]) -> None:
        """Send records."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(buffers))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


def client_context(order: agent_link.AgentOrder) -> ssl.SSLContext | None:
    """The agent's certificate and the authority that it trusts; None for a connection without TLS."""
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
