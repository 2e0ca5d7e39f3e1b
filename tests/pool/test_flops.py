"""FLOPs of a served model, its share of a peak, and the share of the time that workers are busy."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from marserve.messages import FLOPS_WATCHED_BATCHES, Answer
from support.processes import until
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

MLP = """
import torch
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).eval()
        self.device = torch.device("cpu")

    def preprocess(self, data):
        return torch.rand(len(data), 64)
"""
MLP_ROW = 2 * (64 * 128 + 128 * 10)


def counting(folder: Path, source: str, peak: float = 1e9, **options: Any) -> RunningPool:
    """A pool that counts, beside a given peak."""
    return RunningPool(folder, source, load={"peak_flops": {"": peak}}, peak_flops={"": peak}, **options)


async def ask_until_counted(running: RunningPool) -> None:
    """As many requests as are watched and one more; the worker tells what it counted without a further one."""
    for number in range(FLOPS_WATCHED_BATCHES + 1):
        assert running.pool.described["flops"] == {"state": "waiting for batches"}, number
        assert isinstance(await running.ask(b"x"), Answer)
    assert running.pool.described["flops"]["state"] in ("counting", "counted")
    await until(lambda: running.metrics.flops is not None, "it is counted", timeout_s=100)


@pytest.mark.torch
@pytest.mark.system
async def test_a_served_model_is_counted_exactly_and_its_utilisation_is_of_the_last_minute(tmp_path: Path) -> None:
    """2 m n k a request, whatever the batch; by the requests that were sent, over the peak of its workers."""
    async with counting(tmp_path, MLP, batch_size=4) as running:
        await running.start()
        metrics = running.metrics
        metrics.sample(began := time.monotonic())
        await ask_until_counted(running)
        batches, requests, _ = metrics.windows.batches(time.monotonic(), metrics.batch_sizes) or (0, 0, 0)
        share = metrics.read_gauges().flops_utilisation
        seconds = time.monotonic() - began

        flops = metrics.flops
        assert flops is not None
        assert (flops.per_batch, flops.per_request, flops.peak) == (0.0, float(MLP_ROW), 1e9)
        assert flops.inputs == "argument 1 float32 [n, 64]"
        assert batches == requests == metrics.requests
        assert share == pytest.approx(requests * MLP_ROW / seconds / 1e9, rel=0.2)
        assert running.pool.described["flops"]["state"] == "counted"
        assert running.pool.described["flops"]["perRequest"] == MLP_ROW


async def test_a_handler_without_a_model_has_no_figure_and_says_why(tmp_path: Path) -> None:
    """In describe's warnings; its requests are answered as ever."""
    source = "def handle(data, context):\n    return ['ok'] * len(data) if data else None\n"
    async with counting(tmp_path, source) as running:
        await running.start()

        assert await running.ask_body(b"x") == b"ok"
        assert running.pool.warnings == [
            "FLOPs are not counted: the handler holds no module of torch and no session of ONNX Runtime"
        ]
        assert running.metrics.read_gauges().flops_utilisation is None
        assert running.pool.described["flops"] == {"state": "not counted"}


@pytest.mark.torch
@pytest.mark.system
async def test_why_a_model_is_not_counted_comes_without_a_further_request(tmp_path: Path) -> None:
    """The sentence reaches describe as soon as it is known."""
    source = MLP.replace(
        "self.model = ", "class Inside(torch.nn.Sequential): pass\n        self.model = Inside("
    ).replace(".eval()", ").eval()")
    async with counting(tmp_path, source) as running:
        await running.start()
        for _ in range(FLOPS_WATCHED_BATCHES + 1):
            assert isinstance(await running.ask(b"x"), Answer)
        await until(lambda: running.pool.warnings, "the reason")

        assert running.pool.warnings[0].startswith("FLOPs are not counted: the model cannot be given to the process")
        assert running.pool.described["flops"] == {"state": "not counted"}


@pytest.mark.system
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
async def test_the_busy_share_is_what_the_handler_measures_itself(tmp_path: Path, share: float) -> None:
    """Within three points, of a worker that is busy for that part of five seconds."""
    source = """
import time
def handle(data, context):
    if data is None:
        return None
    began = time.monotonic()
    time.sleep(float(bytes(data[0]["body"])))
    return [str(time.monotonic() - began)]
"""
    async with RunningPool(tmp_path, source) as running:
        await running.start()
        metrics = running.metrics
        await running.ask(b"0.01")
        metrics.sample(began := time.monotonic())
        busy_s = 0.0
        for number in range(20):
            await asyncio.sleep(max(0.0, began + number * 0.25 - time.monotonic()))
            busy_s += json.loads(await running.ask_body(str(0.25 * share).encode()))
        await asyncio.sleep(max(0.0, began + 5 - time.monotonic()))
        told = metrics.read_gauges().busy_ratio
        seconds = time.monotonic() - began

        assert told == pytest.approx(busy_s / seconds, abs=0.03)


async def test_a_worker_that_tells_twice_or_no_number_is_ended(tmp_path: Path) -> None:
    """What a worker says is not trusted."""
    source = """
from marserve.messages import Counted
from marserve.worker.connection import Connection
import gc
def handle(data, context):
    if data:
        [connection] = [each for each in gc.get_objects() if type(each) is Connection]
        connection.send(Counted(0.0, float(bytes(data[0]["body"])), 1e9, "float32", ""))
        return ["ok"]
"""
    async with counting(tmp_path, source) as running:
        await running.start()
        assert await running.ask_body(b"5") == b"ok"
        flops = running.metrics.flops

        await running.ask(b"6")
        await until(lambda: running.pool.last_death is not None, "the end of the worker that told twice")
        assert running.pool.last_death is not None
        assert running.pool.last_death.cause == "bad_frame"
        await running.ask(b"-1")

        assert flops is not None
        assert running.metrics.flops == flops
