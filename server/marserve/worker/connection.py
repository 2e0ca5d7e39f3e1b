"""The blocking end of a worker's socket, to the server or to another rank: whole messages in and out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from socket import socket
from typing import Any

from marserve import wire
from marserve.messages import ToRank, ToServer

RECEIVE_BYTES = 256 * 1024


class Connection:
    """The blocking end of a socket. `decoder` reads what comes, what the server says if not given."""

    def __init__(self, sock: socket, decoder: wire.Decoder[Any] | None = None) -> None:
        self._sock = sock
        self._decoder = decoder or wire.worker_decoder()
        self._sock.setblocking(True)
        self._kept: list[tuple[Any, list[Any]]] = []
        self._sending = threading.Lock()  # beside the serving thread, the one that counts FLOPs sends

    def keep(self, message: Any, bodies: list[Any]) -> None:
        """Have `receive` return this message next: it came while the handler ran."""
        self._kept.append((message, bodies))

    def receive(self) -> list[tuple[Any, list[Any]]]:
        """Wait for the next messages. Raises EOFError when the other end is gone."""
        if self._kept:
            kept, self._kept = self._kept, []
            return kept
        while True:
            messages = self.receive_some()
            if messages:
                return messages

    def fileno(self) -> int:
        """The socket's descriptor, to wait until there is something to receive."""
        return self._sock.fileno()

    def receive_some(self) -> list[tuple[Any, list[Any]]]:
        """Read once, and return the complete messages. Raises EOFError when the other end is gone."""
        data = self._sock.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return self._decoder.feed(data)

    def send(self, message: ToServer | ToRank, bodies: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Write one message whole. Any thread may."""
        buffers = wire.encode(message, bodies)
        with self._sending:
            for buffer in buffers:
                self._sock.sendall(buffer)
