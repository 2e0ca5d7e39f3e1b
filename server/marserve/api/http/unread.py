"""Whether the system holds bytes of a connection that the event loop has not read yet.

Timers run before sockets are read. After a stall of the loop, a timer that closes idle connections comes before the
requests that arrived meanwhile, and closing a socket with unread bytes resets it: those requests would be lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes wait in the system for the loop; False where the transport has no socket any more."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0
    except OSError:
        return False
