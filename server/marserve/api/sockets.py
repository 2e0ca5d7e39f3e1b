"""Finds and binds the address of a listener over TCP. What listens on it is its owner's."""

from __future__ import annotations

import socket
from typing import Any


def resolve(host: str, port: int) -> tuple[Any, ...]:
    """Family, kind, protocol, name and socket address of where to listen: the host's first one. Raises OSError."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the host's first address, which does not listen yet. Raises OSError.

    Until one listens, others may bind the same port: `listen` says so.
    """
    family, kind, protocol, _, where = resolve(host, port)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except BaseException:
        sock.close()
        raise
    return sock


def listen(sock: socket.socket, backlog: int) -> None:
    """Listen on a bound socket, before a loop's server is made of it.

    Raises OSError if one that was bound at the same time listens already: uvloop's `create_server` tells nobody, and no
    connection would ever come.
    """
    sock.listen(backlog)
