"""A large body is held once in the server and once in the worker, and nowhere later; a slow reader costs a piece."""

from __future__ import annotations

import hashlib
import shutil
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import psutil
import pytest

from marserve.api.http.large_answers import LEAVE_FREE_SHARE
from support.server import Server, make_archive, poll

MEASURE = """
class Measure:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        return [str(len(row["body"])) for row in data]
"""
BODY_BYTES = 40_000_000
# As many bytes as the request says, with its number in front: no two answers are alike.
LONG_ANSWER = """
def handle(data, context):
    return [answer(bytes(row["body"])) for row in data] if data else None
def answer(body):
    number, _, size = body.partition(b" ")
    return (number + b"." * 1024) * (int(size) // (1024 + len(number)))
"""
MIB = 1024 * 1024
SIP_BYTES = 4 * MIB


def peak_bytes(server: Server) -> int:
    """The most memory that the server's processes have had, added up."""
    lines = [Path(f"/proc/{process.pid}/status").read_text() for process in server.family()]
    return sum(int(text.split("VmHWM:")[1].split()[0]) * 1024 for text in lines)


def resident_bytes(server: Server) -> int:
    """The memory that the server's processes have now, added up."""
    return sum(process.memory_info().rss for process in server.family())


def test_a_large_body_costs_little_more_than_two_of_it(tmp_path: Path) -> None:
    """40 MB in, a few bytes out, three times: the peak stays at two copies, and then none is left."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "measure.mar", MEASURE)
    with Server(tmp_path, store=store, settings={"max_request_size": str(2 * BODY_BYTES)}) as server:
        server.register("measure.mar").raise_for_status()
        server.predict("measure", b"x" * 100)
        peak_before, resident_before = peak_bytes(server), resident_bytes(server)

        answers = [server.predict("measure", b"x" * BODY_BYTES) for _ in range(3)]

        assert [answer.text for answer in answers] == [str(BODY_BYTES)] * 3
        assert peak_bytes(server) - peak_before < 2.5 * BODY_BYTES
        for _ in poll(5, "none is left"):  # a worker lets go of a body a moment after it has answered
            if resident_bytes(server) - resident_before < 0.5 * BODY_BYTES:
                break


# ------------------------------------------------------------------------------------------- slow readers


class SlowReader:
    """A client that asks for a long answer and takes nothing of it until told to."""

    def __init__(self, server: Server, number: int, size: int) -> None:
        self.number, self.size = b"%03d" % number, size
        self.sipped_at = time.monotonic()
        self._file: BinaryIO | None = None
        self._left = self._taken = 0
        self._digest = hashlib.sha256()
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        self.sock.settimeout(60.0)
        self.sock.connect(("127.0.0.1", urlsplit(server.inference).port or 0))
        body = b"%b %d" % (self.number, size)
        self.sock.sendall(
            b"POST /predictions/long HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )

    def wait_for_head(self) -> None:
        """Until the answer has begun: its worker has done its part."""
        assert self.sock.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"

    def sip(self) -> None:
        """Take a little, as a slow client does: who takes nothing for a minute is cut off."""
        self._take(SIP_BYTES)
        self.sipped_at = time.monotonic()

    def read_all(self) -> str:
        """Take the rest of the answer; says what is wrong with it, nothing where it is right."""
        self._take(self.size)
        expected = (self.number + b"." * 1024) * (self.size // (1024 + len(self.number)))
        if self._taken != len(expected):
            return f"{self.number!r}: {self._taken} bytes of {len(expected)}"
        return "" if self._digest.digest() == hashlib.sha256(expected).digest() else f"{self.number!r}: other bytes"

    def _take(self, most: int) -> None:
        if self._file is None:
            self._file = self.sock.makefile("rb")
            while line := self._file.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    self._left = int(line.split(b":")[1])
        end = max(self._left - most, 0)
        while self._left > end and (piece := self._file.read(min(self._left - end, MIB))):
            self._digest.update(piece)
            self._taken += len(piece)
            self._left -= len(piece)


def slow_readers(tmp_path: Path, count: int, size: int, *, read: int, memory_bytes: int) -> None:
    """So many readers of so long an answer; the first `read` of them read it to the end at last.

    Bound by `large_answer_memory`: so much waits, and three times as much at most is on its way to disk.
    """
    disk = shutil.disk_usage(tmp_path)
    if disk.free < (needed := count * size + LEAVE_FREE_SHARE * disk.total):
        pytest.skip(
            f"the disk has {disk.free / 1e9:.0f} GB free, and answers need {needed / 1e9:.0f} GB, most to be left"
        )
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "long.mar", LONG_ANSWER, config="minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 20\n")
    settings = {"max_response_size": str(2 * size), "large_answer_memory": str(memory_bytes)}
    with Server(tmp_path, store=store, settings=settings) as server, ExitStack() as stack:
        server.register("long.mar").raise_for_status()
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        server.predict("long", b"0 1024")
        before = process.memory_info().rss
        peak = 0

        readers = []
        for number in range(count):
            for _ in poll(60, "the disk keeps up"):  # a disk that is far behind has answers cut, as it should
                if process.memory_info().rss - before < 2 * memory_bytes:
                    break
            for other in readers[:read]:
                if time.monotonic() - other.sipped_at > 15.0:
                    other.sip()
            reader = SlowReader(server, number, size)
            stack.callback(reader.sock.close)
            reader.wait_for_head()  # with one worker: it is free again, though nobody has read the one before
            readers.append(reader)
            peak = max(peak, process.memory_info().rss - before)
        began = time.monotonic()
        assert server.predict("long", b"0 1027").text == "0" + "." * 1024

        assert time.monotonic() - began < 1.0
        # The bound, and the answer that is just coming from its worker.
        assert peak < 4 * memory_bytes + 2 * size + 16 * MIB
        for _ in poll(10, "no more than a piece of each waits in memory"):
            if process.memory_info().rss - before < count * MIB + 16 * MIB:
                break
        wrong = [told for reader in readers[:read] if (told := reader.read_all())]
        assert wrong == [], server.output()


@pytest.mark.system
def test_slow_readers_of_long_answers_cost_no_more_than_a_piece_each(tmp_path: Path) -> None:
    """20 readers of 20 MB (RELIABILITY B5): the worker is free at once, memory is bounded, every byte arrives."""
    slow_readers(tmp_path, 20, 20_000_000, read=20, memory_bytes=32 * MIB)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_200_slow_readers_of_100_mb_cost_no_more_than_a_piece_each(tmp_path: Path) -> None:
    """The figure in full; 20 of them read it all, the others hang up."""
    slow_readers(tmp_path, 200, 100_000_000, read=20, memory_bytes=256 * MIB)


@pytest.mark.long
def test_four_hundred_bodies_at_once_keep_the_server_s_memory_within_the_bound(tmp_path: Path) -> None:
    """400 connections send 6.5 MB each to a server that may hold 64 MB: its memory grows by little more."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "measure.mar", MEASURE, config="minWorkers: 1\nmaxWorkers: 1\n")
    size, bound = 6_500_000, 64 * MIB
    with Server(tmp_path, store=store, settings={"max_bytes_in_flight": str(bound)}) as server:
        server.register("measure.mar").raise_for_status()
        server.predict("measure", b"x" * 100)
        before, highest = server.family()[0].memory_info().rss, 0
        address = urlsplit(server.inference)
        where = (address.hostname, address.port)
        ends: list[bytes] = []

        def send(number: int) -> None:
            head = b"POST /predictions/measure HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
            with socket.create_connection(where, timeout=60) as sock:
                with suppress(OSError):  # refused, and cut while it sent
                    sock.sendall(head + b"x" * size)
                try:
                    ends.append(sock.makefile("rb").readline()[9:12])
                except OSError:
                    ends.append(b"cut")

        threads = [threading.Thread(target=send, args=(number,)) for number in range(400)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            highest = max(highest, server.family()[0].memory_info().rss)
            assert server.predict("measure", b"x" * 100).text == "100"
            time.sleep(0.02)
        said = f"memory before {before / 1e6:.0f} MB, highest {highest / 1e6:.0f} MB, {Counter(ends)}"

        assert len(ends) == 400
        assert ends.count(b"200") > 0
        assert ends.count(b"503") > 0
        assert highest - before < 2 * bound, said
