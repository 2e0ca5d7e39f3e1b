"""Whether the system holds bytes of a connection that the event loop has not read yet.

The loop runs timers before it reads sockets. After a stall, a timer that closes idle connections runs before the
requests that arrived meanwhile are read. Closing a socket with unread bytes resets it, and those requests are lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios


def has_unread(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes wait in the system for the loop; False if the transport has no socket any more."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder) > 0
    except OSError:
        return False
