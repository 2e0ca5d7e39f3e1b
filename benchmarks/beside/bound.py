"""A bound: as little as Python and uvicorn allow between a client's connection and a worker process.

    python bound.py PORT BATCH [WORK FOLDER]

The worker echoes, or does the WORK of `handlers/workload.py` whose model lies in FOLDER and encodes its answers as
marserve's worker does.

Requests are taken in the callbacks of uvicorn's parser and answered by one write, with no ASGI scope and no task; one
worker is forked and reached through a socket pair, two batches of at most BATCH at a time. It keeps what a model
server's bookkeeping costs at least (three histograms, a request id, TorchServe's headers, an access line), and has
nothing else: no routes, limits, deadlines, pipelining, streams, recovery. What marserve comes to beside it is what
all that costs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

AHEAD = 2  # batches with the worker
LINES_A_WRITE = 256
EDGES_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ANSWER = (
    b"HTTP/1.1 200 OK\r\n"
    b"Pragma: no-cache\r\nCache-Control: no-cache; no-store, must-revalidate, private\r\n"
    b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\nx-request-id: %s-%012x\r\ncontent-length: %d\r\n\r\n%s"
)
PREFIX = os.urandom(8).hex().encode()


class Seconds:
    """A histogram of spans."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.total = 0.0

    def observe(self, span: float) -> None:
        """Count a span."""
        self.counts[bisect_left(EDGES_S, span)] += 1
        self.total += span


def pack(bodies: list[bytes]) -> bytes:
    """One frame: how many bodies, their lengths, themselves."""
    count = len(bodies)
    return struct.pack(f"<I{count}I", count, *map(len, bodies)) + b"".join(bodies)


def unpack(data: bytes | bytearray) -> tuple[list[bytes], int] | None:
    """The bodies of the frame that `data` begins with and where it ends; None while it is not whole."""
    if len(data) < 4:
        return None
    (count,) = struct.unpack_from("<I", data)
    at = 4 + 4 * count
    if len(data) < at:
        return None
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    if len(data) < at + sum(lengths):
        return None
    bodies = []
    for length in lengths:
        bodies.append(bytes(data[at : at + length]))
        at += length
    return bodies, at


def echo(bodies: list[bytes]) -> list[bytes]:
    """No work at all."""
    return bodies


def open_answers(name: str, folder: str) -> Callable[[list[bytes]], list[bytes]]:
    """The work as a function from bodies to encoded answers."""
    from marserve.worker.outgoing import encode_value

    sys.path.append(str(Path(__file__).parents[1] / "handlers"))
    from workload import open_work

    answer = open_work(name, Path(folder))
    return lambda bodies: [encode_value(value)[0] for value in answer(bodies)]


def work(wire: socket.socket, answer: Callable[[list[bytes]], list[bytes]]) -> None:
    """The worker: every frame is answered with one of its answers, until there are no more."""
    held = bytearray()
    while data := wire.recv(1 << 18):
        held += data
        while (frame := unpack(held)) is not None:
            bodies, end = frame
            del held[:end]
            wire.sendall(pack(answer(bodies)))


class Pool(asyncio.Protocol):
    """The server's end of the worker: who waits, who is with it, and the figures."""

    def __init__(self, batch: int, output: int) -> None:
        self.batch, self.output = batch, output
        self.waiting: deque[Connection] = deque()
        self.flights: deque[tuple[list[Connection], float]] = deque()
        self.held = bytearray()
        self.lines: list[str] = []
        self.in_queue, self.in_worker, self.in_all = Seconds(), Seconds(), Seconds()

    def connection_made(self, transport: Any) -> None:
        """The worker can be written to."""
        self.transport = transport

    def send(self) -> None:
        """A batch leaves when the worker is idle, or when it is full and not too many are ahead of it."""
        while self.waiting and (not self.flights or (len(self.flights) < AHEAD and len(self.waiting) >= self.batch)):
            jobs = [self.waiting.popleft() for _ in range(min(self.batch, len(self.waiting)))]
            now = time.perf_counter()
            for job in jobs:
                self.in_queue.observe(now - job.began)
            self.flights.append((jobs, now))
            self.transport.write(pack([job.body for job in jobs]))

    def data_received(self, data: bytes) -> None:
        """Answer whole batches, and give the worker its next one first."""
        self.held += data
        while (frame := unpack(self.held)) is not None:
            bodies, end = frame
            del self.held[:end]
            jobs, sent = self.flights.popleft()
            self.send()
            now = time.perf_counter()
            for job, body in zip(jobs, bodies, strict=True):
                self.in_worker.observe(now - sent)
                self.in_all.observe(now - job.began)
                job.answer(body, now)
        if len(self.lines) >= LINES_A_WRITE:
            os.write(self.output, "".join(self.lines).encode())
            self.lines.clear()


class Connection(HttpToolsProtocol):
    """One client's connection; takes each request itself."""

    pool: Pool
    count = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self.fields: dict[bytes, bytes] = {}
        self.body = b""

    def on_url(self, url: bytes) -> None:
        """Its target."""
        self.target = url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers."""
        self.fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        """From here its time counts."""
        self.began = time.perf_counter()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self.body = self.body + body if self.body else body

    def on_message_complete(self) -> None:
        """It is whole: it waits for the worker."""
        Connection.count += 1
        self.number = Connection.count
        self.pool.waiting.append(self)
        self.pool.send()

    def answer(self, body: bytes, now: float) -> None:
        """Write the answer and note the access line."""
        if self.transport.is_closing():
            return
        self.transport.write(ANSWER % (PREFIX, self.number, len(body), body))
        peer = f"{self.client[0]}:{self.client[1]}" if self.client else ""
        spent_ms = (now - self.began) * 1e3
        self.pool.lines.append(f'/{peer} "POST {self.target.decode("latin-1")} HTTP/1.1" 200 {spent_ms:.0f}\n')


async def _no_application(scope: Any, receive: Any, send: Any) -> None:
    """Never called: connections answer for themselves."""


async def serve(port: int, batch: int, *words: str) -> None:
    """Fork the worker, which loads what it works with, and serve until told to stop."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        work(theirs, open_answers(*words) if words else echo)
        os._exit(0)
    theirs.close()
    pool = Connection.pool = Pool(batch, os.open(os.devnull, os.O_WRONLY))
    await asyncio.get_running_loop().create_connection(lambda: pool, sock=ours)
    config = uvicorn.Config(
        _no_application, host="127.0.0.1", port=port, http=Connection, loop="none", lifespan="off", access_log=False,
        log_level="warning",
    )  # fmt: skip
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
