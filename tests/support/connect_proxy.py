"""An HTTP proxy that lets everything through (CONNECT alone) and notes where to."""

from __future__ import annotations

import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PIECE_BYTES = 1 << 16


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.asked: list[str] = []


class _Tunnel(socketserver.StreamRequestHandler):
    """One connection, until either end closes it."""

    server: _Server

    def handle(self) -> None:
        """Read the request, connect, and carry bytes both ways."""
        words = self.rfile.readline().decode("latin-1").split()
        while self.rfile.readline().strip():
            pass
        if len(words) < 2 or words[0] != "CONNECT":
            self.wfile.write(b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")
            return
        self.server.asked.append(words[1])
        host, _, port = words[1].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as there:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            other = {self.connection: there, there: self.connection}
            while True:
                for ready in select.select(list(other), [], [])[0]:
                    piece = ready.recv(PIECE_BYTES)
                    if not piece:
                        return
                    other[ready].sendall(piece)


@contextmanager
def connect_proxy() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the places (`host:port`) that it was asked for so far; it runs while the block does."""
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", server.asked
        finally:
            server.shutdown()
            thread.join()
