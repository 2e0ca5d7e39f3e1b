"""Tests for a worker's end of a socket: whole messages in and out."""

from __future__ import annotations

import threading

import pytest

from marserve.messages import Lengths, Stop
from marserve.worker.connection import Connection


class Socket:
    """A socket that gives these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.written, self.is_blocking = list(pieces), bytearray(), False

    def setblocking(self, flag: bool) -> None:
        """As a socket's."""
        self.is_blocking = flag

    def fileno(self) -> int:
        """A descriptor."""
        return 42

    def recv(self, size: int) -> bytes:
        """The next piece; nothing at the end."""
        assert size == 256 * 1024
        return self.pieces.pop(0) if self.pieces else b""

    def sendall(self, data: bytes) -> None:
        """What is written."""
        self.written += data


def test_a_connection_waits_for_whole_messages_and_ends_with_the_server() -> None:
    """Half a message is none; what is sent is sent whole."""
    frame = b"mW\x01\x00\x06\x00\x00\x00\x00\x00\x00\x00" + bytes(8) + b"\x91\xa4stop"
    sock = Socket(frame[:7], frame[7:] + frame)
    connection = Connection(sock)  # type: ignore[arg-type]

    assert sock.is_blocking
    assert connection.fileno() == 42
    assert connection.receive() == [(Stop(), []), (Stop(), [])]
    with pytest.raises(EOFError):
        connection.receive()
    with pytest.raises(EOFError):
        connection.receive_some()
    connection.send(Lengths(1, 0.5, []))
    assert bytes(sock.written).startswith(b"mW")


def test_two_threads_that_send_do_not_mix_their_frames() -> None:
    """A message of several buffers is whole, though another thread sends between two writes."""

    class Slow(Socket):
        """Lets the other thread run after each write."""

        def sendall(self, data: bytes) -> None:
            """Written, then given up."""
            super().sendall(data)
            first.set()
            second.wait(0.2)

    first, second = threading.Event(), threading.Event()
    sock = Slow()
    connection = Connection(sock)  # type: ignore[arg-type]
    body = bytes(1 << 20)

    def send_too() -> None:
        first.wait(10)
        connection.send(Stop())  # type: ignore[arg-type]
        second.set()

    thread = threading.Thread(target=send_too)
    thread.start()
    connection.send(Stop(), [body])  # type: ignore[arg-type]
    thread.join()

    assert len(sock.written) > len(body)
    assert bytes(sock.written).count(b"mW") == 2
    assert bytes(sock.written).rindex(b"mW") >= len(body)
