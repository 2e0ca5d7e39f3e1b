"""Clients that hang up, wherever their request is: nothing is left of it, and the worker is free again."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from support.open_loop import post
from support.server import Server, make_archive, poll

PATIENT = """
import time
from marserve_handlers.context import send_intermediate_predict_response

class Patient:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return self.until_cancelled(context)
        body = bytes(data[0]["body"])
        if body == b"until cancelled":
            return self.until_cancelled(context)
        if body.startswith(b"stream"):
            return self.stream(body, data, context)
        time.sleep(0.002)
        return [b"done"] * len(data)

    def until_cancelled(self, context):
        print("RUNS")
        end = time.monotonic() + 20
        while not context.is_cancelled(0) and time.monotonic() < end:
            time.sleep(0.002)
        print("NOTICED" if context.is_cancelled(0) else "NEVER TOLD")
        return [b"late"]

    def stream(self, body, data, context):
        pieces, size = (int(word) for word in body.split()[1:])
        try:
            for number in range(pieces):
                send_intermediate_predict_response([b"p" * size] * len(data), None, "", 200, context)
                print(f"SENT {number + 1} AT {time.monotonic():.3f}")
        except Exception as error:
            print(f"STREAM ENDED BY {type(error).__name__}, cancelled: {context.is_cancelled(0)}")
            raise
        return [b"end"] * len(data)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One model, two workers, batches of four."""
    folder = tmp_path_factory.mktemp("cancels")
    store = folder / "store"
    store.mkdir()
    make_archive(
        store / "patient.mar",
        PATIENT,
        config="minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 5\njobQueueSize: 2000\n",
    )
    with Server(folder, store=store) as server:
        server.register("patient.mar").raise_for_status()
        yield server


def address(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def connect(url: str, *, receive_bytes: int | None = None) -> socket.socket:
    """A connection, with a small window if wished."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(10.0)
    sock.connect(address(url))
    return sock


def reset(sock: socket.socket) -> None:
    """Hang up hard."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture(autouse=True)
def spoken(server: Server) -> int:
    """How much the server had printed before the test."""
    return len(server.output())


def wait_for(server: Server, words: str, spoken: int, limit_s: float = 5.0) -> None:
    """Until a worker has printed it, after the first `spoken` letters."""
    for _ in poll(limit_s, f"{words} in the output"):
        if words in server.output()[spoken:]:
            return


def wait_until_idle(server: Server, limit_s: float = 5.0) -> None:
    """Until nothing waits and nothing runs."""
    for _ in poll(limit_s, "nothing waits and nothing runs"):
        described = server.describe("patient")
        if described["jobQueueStatus"]["pendingRequests"] == 0 and described["runningRequests"] == 0:
            return


def test_a_thousand_random_cancels_leave_nothing_behind(server: Server) -> None:
    """Waiting, grouped, running or just answered: whenever the client goes. One in five would run until then."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    dice = random.Random(11)

    async def cancel_one(delay_s: float) -> None:
        reader, writer = await asyncio.open_connection(*address(server.inference))
        try:
            writer.write(post("patient", b"plain" if dice.random() < 0.8 else b"until cancelled"))
            with_answer = asyncio.ensure_future(reader.read(1))
            await asyncio.wait([with_answer], timeout=delay_s)
            with_answer.cancel()
        finally:
            writer.transport.abort()

    async def cancel(count: int) -> None:
        for _ in range(count // 50):
            await asyncio.gather(*(cancel_one(dice.random() * 0.03) for _ in range(50)))

    asyncio.run(cancel(100))
    wait_until_idle(server)
    descriptors, threads, memory = process.num_fds(), process.num_threads(), process.memory_info().rss

    asyncio.run(cancel(1000))

    wait_until_idle(server)
    for _ in poll(5, "descriptors are closed"):
        if process.num_fds() <= descriptors:
            break
    assert process.num_threads() <= threads
    assert process.memory_info().rss < memory + 8e6
    assert server.predict("patient", b"plain").content == b"done"
    page = httpx.get(f"{server.metrics}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("marserve_cancelled_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) > 100


def test_a_running_request_is_told_that_its_client_has_gone(server: Server, spoken: int) -> None:
    """And its worker answers others again."""
    sock = connect(server.inference)
    sock.sendall(post("patient", b"until cancelled"))
    wait_for(server, "RUNS", spoken)

    reset(sock)

    wait_for(server, "NOTICED", spoken)
    wait_until_idle(server)
    assert server.predict("patient", b"plain").content == b"done"


def test_whoever_hangs_up_on_a_describe_ends_the_question_to_the_handler(server: Server, spoken: int) -> None:
    """The way through the application is no other."""
    sock = connect(server.management)
    sock.sendall(b"GET /models/patient?customized=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_for(server, "RUNS", spoken)

    reset(sock)

    wait_for(server, "NOTICED", spoken)
    wait_until_idle(server)


def test_a_describe_has_a_deadline_like_a_prediction(server: Server, spoken: int) -> None:
    """504 when it passes, and the handler hears of it; a value that is none is 400."""
    url = f"{server.management}/models/patient?customized=true"

    late = server.client.get(url, headers={"x-marserve-timeout-ms": "1000"})
    wrong = server.client.get(url, headers={"X-Marserve-Timeout-Ms": "soon"})

    assert (late.status_code, late.headers["x-marserve-cause"]) == (504, "deadline")
    assert wrong.status_code == 400
    assert "x-marserve-timeout-ms is 'soon'" in wrong.json()["message"]
    wait_for(server, "NOTICED", spoken)


@pytest.mark.parametrize("how", ["resets", "stops, then resets"])
def test_a_reader_that_goes_in_the_middle_of_a_stream_ends_the_generator(server: Server, spoken: int, how: str) -> None:
    """Within a second, whether the generator was running or waiting for it (RELIABILITY B9); the worker is reused."""
    pids = server.worker_pids("patient")
    sock = connect(server.inference, receive_bytes=4096)
    sock.sendall(post("patient", b"stream 100000 10000"))
    sock.recv(100)
    if how == "stops, then resets":
        time.sleep(0.3)  # the time in which nothing is read is what is tested

    reset(sock)
    began = time.monotonic()

    wait_for(server, "STREAM ENDED BY NobodyWaits, cancelled: True", spoken, limit_s=3.0)
    assert time.monotonic() - began < 3.0
    wait_until_idle(server)
    assert server.predict("patient", b"plain").content == b"done"
    assert server.worker_pids("patient") == pids


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_thousand_readers_that_go_in_the_middle_of_a_stream_leave_nothing_behind(server: Server) -> None:
    """Some stop reading before they go, some do not (RELIABILITY B9)."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    pids = server.worker_pids("patient")
    dice = random.Random(12)

    def cut(times: int) -> None:
        for _ in range(times):
            sock = connect(server.inference, receive_bytes=4096)
            sock.sendall(post("patient", b"stream 100000 10000"))
            sock.recv(100)
            time.sleep(dice.choice([0.0, 0.0, 0.01, 0.05]))
            reset(sock)
        wait_until_idle(server)

    cut(50)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    cut(1000)

    for _ in poll(5, "descriptors are closed"):
        if process.num_fds() <= descriptors:
            break
    assert process.memory_info().rss < memory + 8e6
    assert server.worker_pids("patient") == pids


def test_a_slow_reader_slows_its_generator_and_gets_every_byte(server: Server, spoken: int) -> None:
    """Of a stream of 30 MB only little is ever held for a client that does not read (RELIABILITY B5)."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    server.predict("patient", b"plain")
    memory = process.memory_info().rss
    sock = connect(server.inference, receive_bytes=4096)
    sock.sendall(post("patient", b"stream 3000 10000", Connection="close"))
    first = sock.recv(100)
    sent = -1
    while sent != server.output().count("SENT ", spoken):  # until the generator has come to a stop
        sent = server.output().count("SENT ", spoken)
        time.sleep(0.3)

    assert 0 < sent < 500
    assert process.memory_info().rss < memory + 4e6
    assert server.predict("patient", b"plain").content == b"done"  # by the other worker
    received, tail = len(first), b""
    with sock:
        while piece := sock.recv(65536):
            received += len(piece)
            tail = (tail + piece)[-32:]
    assert received > 3000 * 10_000
    assert tail.endswith(b"3\r\nend\r\n0\r\n\r\n")
    wait_until_idle(server)
