"""Tests for the certificates between server and agents: each side shows one of this server's, or is not spoken with."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from marserve.agent_link import SERVER_NAME, AgentOrder
from marserve.node.server_end import client_context
from marserve.pool.launchers.remote.authority import Authority


def order(authority: Authority, believed: Authority | None = None) -> AgentOrder:
    """What an agent of this server is given."""
    certificate, key = authority.issue("agent-1")
    return AgentOrder("127.0.0.1", 1, "token", (believed or authority).certificate, certificate, key)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """One byte from a server to a client. Raises what the client raises."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as wrapped:
                wrapped.sendall(b"x")
        except OSError:  # refused, as the client says
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=SERVER_NAME) as wrapped:
            return wrapped.recv(1)
    finally:
        ours.close()
        thread.join()


def test_server_and_agent_believe_each_other() -> None:
    """Both have certificates of one authority."""
    authority = Authority()
    client = client_context(order(authority))

    assert client is not None
    assert shake_hands(authority.server_context(), client) == b"x"


def test_an_agent_of_another_server_is_not_let_in() -> None:
    """It believes us, and shows somebody else's certificate."""
    ours, other = Authority(), Authority()
    client = client_context(order(other, believed=ours))

    assert client is not None
    with pytest.raises(ssl.SSLError):
        assert shake_hands(ours.server_context(), client) == b"x"


def test_an_agent_does_not_believe_another_server() -> None:
    """Whoever listens at the server's address must show its certificate."""
    ours, other = Authority(), Authority()
    client = client_context(order(ours))

    assert client is not None
    with pytest.raises(ssl.SSLError):
        shake_hands(other.server_context(), client)


def test_whoever_shows_nothing_is_not_let_in() -> None:
    """A port scanner gets a handshake, and no further."""
    authority = Authority()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(cadata=authority.certificate)

    with pytest.raises(ssl.SSLError):
        assert shake_hands(authority.server_context(), client) == b"x"


def test_an_agent_cannot_play_the_server() -> None:
    """Its certificate is for clients: a second agent does not take it for the server's."""
    authority = Authority()
    certificate_order = order(authority)
    client = client_context(certificate_order)
    posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(certificate_order.certificate + certificate_order.key)
        file.flush()
        posing.load_cert_chain(file.name)

    assert client is not None
    with pytest.raises(ssl.SSLError):
        shake_hands(posing, client)
