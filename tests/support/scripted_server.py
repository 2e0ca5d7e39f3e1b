"""A server that answers as it is told, byte by byte: for clients that meet broken, slow and odd ones."""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

LIMIT_S = 10.0


class Asked(NamedTuple):
    """A request that came: its line, its headers by names in lower case, its body."""

    line: str
    headers: dict[str, str]
    body: bytes


class Act(NamedTuple):
    """What is done with a request: bytes to send one after another, then the connection's end, or its next request.

    `holds` keeps the connection open, silent, until the client closes it.
    """

    pieces: Iterable[bytes]
    closes: bool = False
    holds: bool = False


def answer(status: int = 200, body: bytes = b"", **headers: str) -> Act:
    """A whole answer; names of headers have `_` for `-`."""
    return Act((head(status, **{"content_length": str(len(body)), **headers}) + body,))


def head(status: int = 200, **headers: str) -> bytes:
    """The head of an answer."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode()


def chunk(body: bytes) -> bytes:
    """A chunk of a body that is sent in chunks."""
    return b"%x\r\n%s\r\n" % (len(body), body)


class ScriptedServer:
    """Plays one act for each request, in order; a request beyond the last one closes its connection."""

    def __init__(self, acts: Sequence[Act], port: int = 0) -> None:
        self.asked: list[Asked] = []
        self.gone = threading.Event()
        """Set when a client has closed a connection that an act holds, or is still sending to."""
        self._acts: queue.SimpleQueue[Act] = queue.SimpleQueue()
        for act in acts:
            self._acts.put(act)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End it; its threads have ended then."""
        for each in (self._listener, *self.connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                headers = {}
                while (header := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode("latin-1").partition(":")
                    headers[name.strip().lower()] = value.strip()
                self.asked.append(Asked(line.decode("latin-1").strip(), headers, _body(reader, headers)))
                try:
                    act = self._acts.get_nowait()
                except queue.Empty:
                    return
                try:
                    for piece in act.pieces:
                        connection.sendall(piece)
                except OSError:
                    self.gone.set()
                    return
                if act.holds:
                    connection.settimeout(LIMIT_S)
                    reader.read(1)
                    self.gone.set()
                if act.closes or act.holds:
                    return


def _body(reader: object, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length", "")
    return reader.read(int(length)) if re.fullmatch("[0-9]+", length) else b""  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def scripted(*acts: Act, port: int = 0) -> Iterator[ScriptedServer]:
    """A server with these acts, until the block ends; on a free port unless one is given."""
    server = ScriptedServer(acts, port)
    try:
        yield server
    finally:
        server.close()
