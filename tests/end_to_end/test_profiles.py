"""Profiles of real servers under load: are they right, what they leave behind, and what happens when something ends."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.server import Server, make_archive, poll

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc"),
]

# 60 % products, 25 % sleep, 15 % Python, by counts that are found at the load. Not by a clock that is read between the
# products: that is a call of the kernel, which then prefers to take the processor away there, rather than
# in a product. The answer says what the first two took in truth, in milliseconds of the thread's own time.
MIXED = """
import time
import torch

torch.set_num_threads(1)
weights = torch.randn(640, 640)

def timed(step, times):
    began = time.thread_time()
    for _ in range(times):
        step()
    return time.thread_time() - began

def product():
    weights @ weights

def count():
    sum(range(200))

timed(product, 20)
products = max(1, round(0.030 / timed(product, 20) * 20))
counts = max(1, round(0.0075 / timed(count, 2000) * 2000))

def handle(data, context):
    if data is None:
        return None
    computed = timed(product, products)
    time.sleep(0.0125)
    counted = timed(count, counts)
    return [f"{computed * 1000} {counted * 1000}"] * len(data)
"""
MANY = """
import os
import torch

def handle(data, context):
    if data is None:
        return None
    value = torch.ones(4)
    for _ in range(1000):
        value = value + 1
    return [os.environ.get("KINETO_USE_DAEMON", "none")] * len(data)
"""
TOGETHER = """
import torch
import torch.distributed as dist

class Handler:
    def initialize(self, context):
        dist.init_process_group("gloo")

    def handle(self, data, context):
        share = torch.ones(200, 200)
        for _ in range(5):
            share = share @ share / 200
            dist.all_reduce(share)
        return ["done"] * len(data)
"""
COUNTED = """
import torch
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.device = torch.device("cpu")
        self.model = torch.nn.Linear(16, 16).eval()

    def preprocess(self, data):
        return torch.ones(len(data), 16)
"""
BUSY = [sys.executable, "-c", "while True: pass"]


@contextlib.contextmanager
def asked(server: Server, model: str, told: list[str] | None = None) -> Iterator[list[int]]:
    """Requests one after the other as long as the block runs; their statuses. `told` gets the answers."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answer = server.predict(model, "x")
            statuses.append(answer.status_code)
            if told is not None:
                told.append(answer.text)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield statuses
    finally:
        is_over.set()
        asking.join()


def profile(server: Server, model: str, told: list[str] | None = None, **query: Any) -> dict[str, Any]:
    """Make a profile under load; all requests must be answered meanwhile. `told` gets the answers."""
    with asked(server, model, told) as statuses:
        answer = server.client.post(f"{server.management}/models/{model}/profile", params=query, timeout=120)
    assert answer.status_code == 200, answer.text
    assert set(statuses) == {200}
    found: dict[str, Any] = answer.json()
    return found


@contextlib.contextmanager
def serving(folder: Path, source: str, **more: Any) -> Iterator[Server]:
    """A server with one worker of this handler, which has answered."""
    pytest.importorskip("torch")
    make_archive(folder / "m.mar", source, **more)
    settings = {"load_models": "m.mar", "default_workers_per_model": "1"}
    environment = {"KINETO_USE_DAEMON": "1", "OMP_NUM_THREADS": "1"}
    with Server(folder, entry="marserve", store=folder, settings=settings, environment=environment) as server:
        for _ in poll(60, "it answers"):
            if server.predict("m", "x").status_code == 200:
                break
        yield server


def test_the_parts_are_right_on_a_quiet_machine_and_beside_busy_loops(tmp_path: Path) -> None:
    """60 % products, 25 % sleep, 15 % Python: within 5 points of what is not waiting for a processor.

    What products and Python truly took in that time is told by the handler itself.
    """
    with serving(tmp_path, MIXED) as server:
        for loops in (0, psutil.cpu_count() or 1):
            busy = [subprocess.Popen(BUSY) for _ in range(loops)]
            try:
                told: list[str] = []
                made = profile(server, "m", told, requests=30, max_bytes=1 << 28)
            finally:
                for each in busy:
                    each.kill()
                    each.wait()
            computed, counted = (sum(map(float, each)) / len(each) for each in zip(*map(str.split, told), strict=True))
            true = computed + 12.5 + counted
            parts = {each["name"]: each["ms"] for each in made["parts"]}
            python = parts["python"] + parts["collections"]
            whole = parts["operators"] + parts["blocked"] + python
            shares = {
                "operators": parts["operators"] / whole,
                "sleep": parts["blocked"] / whole,
                "Python": python / whole,
            }
            assert shares == {  # of all but waiting
                "operators": pytest.approx(computed / true, abs=0.05),
                "sleep": pytest.approx(12.5 / true, abs=0.05),
                "Python": pytest.approx(counted / true, abs=0.05),
            }
            if not loops:
                assert shares == {
                    "operators": pytest.approx(0.60, abs=0.08),
                    "sleep": pytest.approx(0.25, abs=0.08),
                    "Python": pytest.approx(0.15, abs=0.08),
                }
            assert made["requests"] >= 30
            assert sum(each["share"] for each in made["parts"]) == pytest.approx(1, abs=0.001)


def test_a_profile_leaves_little_memory_and_the_users_variable(tmp_path: Path) -> None:
    """Two thousand operators a batch, as many batches as fit: at most 16 MiB are left in the worker."""
    with serving(tmp_path, MANY) as server:
        [pid] = server.worker_pids("m")
        assert server.predict("m", "x").text == "1"
        for _ in range(20):
            server.predict("m", "x")
        before = psutil.Process(pid).memory_info().rss

        made = profile(server, "m", requests=20)

        left = psutil.Process(pid).memory_info().rss - before
        assert left <= 16 << 20
        assert 1 <= made["recordedBatches"] < made["batches"]
        trace = server.client.get(f"{server.management}/models/m/profile/trace").content
        events = json.loads(gzip.decompress(trace))["traceEvents"]
        assert sum(each.get("cat") == "cpu_op" for each in events) >= 1000 * made["recordedBatches"]


def test_the_ranks_of_a_group_are_told_apart(tmp_path: Path) -> None:
    """What each communicated and computed, by its own trace."""
    config = "parallelType: tp\ntorchrun:\n  nproc-per-node: 2\nminWorkers: 1\nmaxWorkers: 1\n"
    with serving(tmp_path, TOGETHER, config=config) as server:
        made = profile(server, "m", requests=5)

    assert [each["rank"] for each in made["ranks"]] == [0, 1]
    for each in made["ranks"]:
        assert each["collectives"]["gloo:all_reduce"] >= 5
        assert each["communicationMs"] > 0
        assert each["computeMs"] > 0
        assert each["communicationMs"] + each["computeMs"] - each["overlapMs"] + each["idleMs"] == pytest.approx(
            each["windowMs"], abs=0.05
        )


@pytest.mark.long  # whose target installs it
def test_py_spy_sees_the_handlers_python(tmp_path: Path) -> None:
    """Or there is a reason why it may not."""
    with serving(tmp_path, MIXED) as server:
        made = profile(server, "m", seconds=2)

    if "pythonStacks" not in made:
        assert "py-spy" in made["noPython"]
        pytest.skip(made["noPython"])
    names = {name.partition(" ")[0] for stack in made["pythonStacks"] for name in stack["names"]}
    assert {"handle", "timed"} <= names


@pytest.mark.timeout(400)  # a process of low priority loads torch, on a machine that may be busy
def test_a_profile_shows_the_batches_alone_while_flops_are_counted(tmp_path: Path) -> None:
    """Nothing is counted as long as it runs; a count that had begun is another process's, and comes without a call."""

    def flops() -> dict[str, Any]:
        [described] = server.client.get(f"{server.management}/models/m").json()
        found: dict[str, Any] = described["flops"]
        return found

    with serving(tmp_path, COUNTED, config="peakFlops: 1.0e+12\n") as server:
        before = flops()
        first = profile(server, "m", requests=30)
        meanwhile = flops()
        for _ in range(10):
            assert server.predict("m", "x").status_code == 200
        second = profile(server, "m", requests=30)
        for _ in poll(300, "the count is there"):
            if (after := flops())["state"] == "counted":
                break

    assert before == {"state": "waiting for batches"}
    assert meanwhile == {"state": "counting"}
    assert after["perRequest"] == 2 * 16 * 16
    for made in (first, second):
        names = {each["name"] for each in made["operators"]}
        assert "aten::addmm" in names
        of_linear = {
            "linear",
            "addmm",
            "expand",
            "as_strided",
            "transpose",
            "t",
            "resolve_conj",
            "resolve_neg",
            "copy_",
        }
        of_input = {"ones", "fill_", "empty", "to"}
        assert {name.removeprefix("aten::") for name in names} <= of_linear | of_input
        assert made["batches"] == 30


def test_what_ends_meanwhile_ends_the_profile(tmp_path: Path) -> None:
    """A client that goes away; a worker that dies; a version that is unregistered: each with its cause."""
    with serving(tmp_path, MIXED) as server:
        at = f"{server.management}/models/m/profile"

        with pytest.raises(httpx.ReadTimeout):
            server.client.post(at, params={"seconds": 100}, timeout=1.0)
        for _ in poll(20, "no profile is made"):
            if not server.client.get(at).json()["isRunning"]:
                break

        answers: list[httpx.Response] = []

        def make() -> None:
            answers.append(httpx.post(at, params={"seconds": 100}, timeout=100))

        for end in ("kill", "unregister"):
            for _ in poll(60, "a worker"):
                if server.predict("m", "x").status_code == 200:
                    break
            making = threading.Thread(target=make)
            making.start()
            for _ in poll(20, "a profile"):
                if server.client.get(at).json()["isRunning"]:
                    break
            assert server.client.post(at).status_code == 409
            if end == "kill":
                psutil.Process(server.worker_pids("m")[0]).kill()
            else:
                assert server.client.delete(f"{server.management}/models/m").status_code == 200
            making.join()

    assert [each.status_code for each in answers] == [409, 409]
    assert "ended meanwhile (killed" in answers[0].json()["message"]
    assert "unregistered" in answers[1].json()["message"]
