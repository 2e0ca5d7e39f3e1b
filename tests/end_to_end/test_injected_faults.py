"""Some two hundred faults, injected into a real server, and what it says of the request that each of them made slow."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.ballast import make_ballast
from support.explained import explained
from support.plugin_packages import Installation
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.long

HANDLER = """
import gc
import json
import time

def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def handle(data, context):
    if data is None:
        return None
    answers = []
    for row in data:
        body = bytes(next(iter(row.values())))
        asked = json.loads(body) if body else {}
        time.sleep(asked.get("sleep", 0))
        spin(asked.get("spin", 0))
        for number in range(asked.get("print", 0)):
            print(number, "x" * 200)
        if asked.get("collect"):
            kept = [[number] for number in range(asked["collect"])]
            for each in kept:
                each.append(kept)
            gc.collect()
            gc.collect()
        answers.append("x")
    return answers
"""

STALLS = """
import time
from marserve.plugins import EndpointAnswer

class Stall:
    pattern = "stall"
    listener = "management"
    access = "open"

    async def answer(self, call):
        time.sleep(0.4)
        return EndpointAnswer("ok")
"""
EACH = 17
PLACE_MIB = 64


class Faults:
    """Makes single requests slow; each method returns the slow request's id. The model `m` has one worker.

    `small` is a server with memory for one of two models.
    """

    def __init__(self, server: Server, small: Server) -> None:
        self.server, self.small = server, small
        self.numbers = itertools.count()
        self.port = int(server.inference.rpartition(":")[2])

    def name(self) -> str:
        """A new id."""
        return f"slow-{next(self.numbers)}"

    def ask(self, name: str, model: str = "m", **asked: Any) -> None:
        """Send a request and wait for its answer."""
        answer = self.server.predict(model, json.dumps(asked), **{"X-Request-Id": name})
        assert answer.status_code == 200, answer.text

    def begin(self, name: str, **asked: Any) -> threading.Thread:
        """Send a request on a thread."""
        thread = threading.Thread(target=self.ask, args=(name,), kwargs=asked)
        thread.start()
        return thread

    def usual(self) -> None:
        """What requests usually are."""
        for _ in range(5):
            self.ask("usual")

    def slow_mate(self) -> str:
        """Two leave together, and the larger one takes long."""
        name = self.name()
        first = self.begin("blocks", sleep=0.1)
        time.sleep(0.04)  # the first one is with the worker by now
        threads = [first, self.begin(name), self.begin("mate", sleep=0.5, more="x" * 3000)]
        for thread in threads:
            thread.join()
        return name

    def handler(self) -> str:
        """Alone."""
        name = self.name()
        self.ask(name, sleep=0.3)
        return name

    def queue(self) -> str:
        """Behind one that takes long."""
        name = self.name()
        first = self.begin("before", sleep=0.4)
        time.sleep(0.04)  # the first one is with the worker by now
        self.ask(name)
        first.join()
        return name

    def loop_stalled(self) -> str:
        """A plug-in holds the server's loop."""
        name = self.name()
        thread = self.begin(name, sleep=0.05)
        time.sleep(0.02)  # it is with the worker by now
        self.server.client.get(f"{self.server.management}/stall")
        thread.join()
        return name

    def large_body(self) -> str:
        """Some 30 MB of JSON."""
        name = self.name()
        self.ask(name, more=["x" * 10_000] * 3_000)  # quickly parsed: reading it is most of the work
        return name

    def neighbour(self) -> str:
        """Others compute on all processors."""
        name = self.name()
        with hogs():
            self.ask(name, spin=0.15)
        return name

    def printing(self) -> str:
        """Far more lines than the log takes."""
        name = self.name()
        self.ask(name, print=20_000)
        return name

    def garbage_collection(self) -> str:
        """Cycles of many objects."""
        name = self.name()
        self.ask(name, collect=400_000)
        return name

    def slow_client(self) -> str:
        """A body byte by byte."""
        name = self.name()
        body = json.dumps({"more": "x" * 10}).encode()
        head = f"POST /predictions/m HTTP/1.1\r\nhost: localhost\r\nx-request-id: {name}\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
            for at in range(0, len(body), 4):
                time.sleep(0.05)  # what is slow here is the client
                client.sendall(body[at : at + 4])
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
        return name

    def eviction(self) -> str:
        """Two models, and memory for one of them."""
        name = self.name()
        for model in ("b0", "b1"):
            assert self.small.predict(model).status_code == 200
        assert self.small.predict("b0", b"", **{"X-Request-Id": name}).status_code == 200
        return name

    def cold_worker(self) -> str:
        """Its only worker was taken away, and comes back."""
        name, model = self.name(), f"{self.server.management}/models/cold"
        gone = self.server.client.put(model, params={"min_worker": 0, "max_worker": 0, "synchronous": "true"})
        assert gone.status_code == 200, gone.text
        assert self.server.client.put(model, params={"min_worker": 1, "max_worker": 1}).status_code == 202
        self.ask(name, "cold")
        return name

    def rollback(self) -> str:
        """A version is taken back while requests wait for it; one of these is chosen."""
        model = f"{self.server.management}/models/rolled"
        document = {"version": "2.0", "url": "m2.mar", "steps": [80, 100], "hold": 600}
        begun = self.server.client.post(f"{model}/rollout", json=document)
        assert begun.status_code == 202, begun.text
        for _ in poll(30, "it gets requests"):
            if self.server.client.get(f"{model}/rollout").json()["state"] == "running":
                break
        names = [self.name() for _ in range(12)]
        threads = [
            threading.Thread(target=self.ask, args=(name, "rolled"), kwargs={"sleep": 0.25 if number < 4 else 0.02})
            for number, name in enumerate(names)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.4)  # most wait for the new version's worker by now
        self.server.client.delete(f"{model}/rollout")
        for thread in threads:
            thread.join()
        for _ in poll(30, "version 2.0 is gone"):
            if self.server.client.get(f"{model}/2.0").status_code == 404:
                break
        moved = [name for name in names if "moved_from" in explained(self.server, name)]
        assert moved
        return moved[-1]


@contextlib.contextmanager
def hogs() -> Iterator[None]:
    """Processes that compute without end, three for each processor."""
    context = multiprocessing.get_context("fork")
    count = 3 * len(os.sched_getaffinity(0))
    running = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """A server with all that the faults need."""
    folder = tmp_path_factory.mktemp("faults")
    plugins = Installation(folder)
    plugins.install("stalls", STALLS, {"marserve.endpoints": {"stall": "{module}:Stall"}})
    store = folder / "store"
    store.mkdir()
    make_archive(store / "m.mar", HANDLER)
    make_archive(store / "m2.mar", HANDLER, name="rolled", version="2.0", config="maxWorkers: 1\nbatchSize: 1\n")
    make_ballast(store / "b.mar", held_mib=16, memory=f"{PLACE_MIB}MiB", load="on_demand")
    settings = {"model_memory": f"{PLACE_MIB}MiB", "least_residence": "0"}
    large = {"max_request_size": str(64 << 20)}
    environment = {"PYTHONPATH": str(plugins.folder)}
    (folder / "small").mkdir()
    with (
        Server(folder, entry="marserve", store=store, settings=large, environment=environment) as server,
        Server(folder / "small", entry="marserve", store=store, settings=settings) as small,
    ):
        for model in ("m", "cold", "rolled"):
            batch_size = 1 if model == "rolled" else 4
            answer = server.register("m.mar", model_name=model, initial_workers=1, batch_size=batch_size)
            assert answer.status_code == 200, answer.text
        for number in range(2):
            assert small.register("b.mar", model_name=f"b{number}").status_code == 200
        made = Faults(server, small)
        made.usual()
        yield made


@pytest.mark.timeout(1200)
def test_of_two_hundred_faults_at_least_nineteen_of_twenty_are_named_right(
    faults: Faults, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn in any order; each is the cause of most of a request's time. How many were named right is printed."""
    kinds: list[Callable[[], str]] = [
        faults.slow_mate,
        faults.handler,
        faults.queue,
        faults.cold_worker,
        faults.rollback,
        faults.loop_stalled,
        faults.large_body,
        faults.neighbour,
        faults.printing,
        faults.garbage_collection,
        faults.slow_client,
        faults.eviction,
    ]
    drawn = [kind for kind in kinds for _ in range(EACH)]
    random.Random(7).shuffle(drawn)
    wrong: Counter[tuple[str, str]] = Counter()
    whys: list[str] = []
    for kind in drawn:
        faults.usual()
        name = kind()
        found = explained(faults.small if kind == faults.eviction else faults.server, name)
        if found["cause"] != kind.__name__:
            wrong[kind.__name__, found["cause"]] += 1
            whys.append(f"{kind.__name__}: {found['cause']}, {found['why']}; also {found['also']}")

    named = len(drawn) - sum(wrong.values())
    with capsys.disabled():
        sys.stdout.write(f"\n{named} of {len(drawn)} faults named right ({named / len(drawn):.1%}); wrong: {whys}\n")
    assert sum(wrong.values()) <= len(drawn) // 20, (wrong, whys)
