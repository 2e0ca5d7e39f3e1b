"""Something else takes the machine: slower, and nothing else (RELIABILITY D8).

Every request has a number of its own and its answer is a digest of it, so that a wrong one is seen; the model's
`responseTimeout` is short, so that a worker that is merely slow could be taken for one that hangs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from support.open_loop import OpenLoop, Outcome, Shot, at_random, count_by_status, post
from support.server import Server, make_archive

pytestmark = pytest.mark.system

WORKING = """
import hashlib
def handle(data, context):
    return [work(bytes(row["body"])) for row in data] if data else None
def work(body):
    word = body
    for _ in range(5000):
        word = hashlib.sha256(word).digest()
    return word.hex()
"""
ROUNDS = 5000
RESPONSE_TIMEOUT_S = 3
RATE = 40.0

# Says when its memory is touched, page by page; then takes a core for itself.
EATER = """
import sys
hold = bytearray(b"x") * int(sys.argv[1])
print("up", flush=True)
while True:
    hold[0] = (hold[0] + 1) % 256
"""


def digest_of(body: bytes) -> str:
    """What the handler answers."""
    for _ in range(ROUNDS):
        body = hashlib.sha256(body).digest()
    return body.hex()


@contextmanager
def busy_machine(memory_bytes: int) -> Iterator[None]:
    """Every core taken by somebody else, who holds so much memory too."""
    cores = os.cpu_count() or 1
    command = [sys.executable, "-S", "-c", EATER, str(memory_bytes // cores)]
    eaters = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(cores)]
    try:
        for eater in eaters:
            assert eater.stdout is not None
            assert eater.stdout.readline() == b"up\n"
        yield
    finally:
        for eater in eaters:
            eater.kill()
            eater.communicate()


def serve_beside_others(tmp_path: Path, seconds: float, memory_bytes: int) -> None:
    """Requests at a rate that the machine can do by itself, while others take it."""
    config = f"minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nresponseTimeout: {RESPONSE_TIMEOUT_S}\n"
    with Server(tmp_path) as server:
        make_archive(server.store / "m.mar", WORKING, config=config)
        server.register("m.mar", initial_workers=2).raise_for_status()
        pids = server.worker_pids("m")
        port = urlsplit(server.inference).port
        assert port is not None
        dues = at_random(RATE, seconds, 8)
        shots = [Shot(due, str(number), post("m", b"%d" % number)) for number, due in enumerate(dues)]

        async def run() -> list[Outcome]:
            return await OpenLoop(port, patience_s=60.0).fire(shots)

        with busy_machine(memory_bytes):
            outcomes = asyncio.run(run())

        counts = count_by_status(outcomes)
        assert set(counts) <= {200, 503}
        assert counts[200] > 0.5 * len(outcomes)
        wrong = [
            outcome.shot.name
            for outcome in outcomes
            if outcome.status == 200 and outcome.body.decode() != digest_of(outcome.shot.name.encode())
        ]
        assert not wrong
        assert server.worker_pids("m") == pids
        assert "lastDeath" not in server.describe("m")
        page = server.client.get(f"{server.metrics}/metrics").text
        deaths = [line for line in page.splitlines() if line.startswith("marserve_worker_deaths_total{")]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in deaths) == 0


def test_a_busy_machine_makes_it_slower_and_nothing_else(tmp_path: Path) -> None:
    """No wrong answer, and no worker is taken for one that hangs."""
    serve_beside_others(tmp_path, 2.0, 200_000_000)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_machine_that_is_busy_for_a_minute_makes_it_slower_and_nothing_else(tmp_path: Path) -> None:
    """As long as the figure says, with half of the machine's memory; less where so much is not free."""
    memory = psutil.virtual_memory()

    serve_beside_others(tmp_path, 60.0, min(memory.total // 2, memory.available * 7 // 10))
