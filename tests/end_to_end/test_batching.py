"""Batches that can be trusted, through a real server: certificates, checks on demand, per-item errors, live changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.command_line import marserve
from support.server import Server, make_archive, poll

HANDLER = """
import time
from marserve_handlers.errors import PredictionException

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.02)
    answers = []
    for index, row in enumerate(data):
        body = row["body"] if isinstance(row["body"], str) else bytes(row["body"]).decode()
        if body == "bad":
            answers.append(PredictionException("this one is bad", 422))
        else:
            answers.append({"said": body.upper()})
    return answers
"""
SWAPPED = HANDLER.replace("return answers", "return answers[::-1]")
TEXTS = (
    HANDLER
    + """
def length_of(row):
    return int(bytes(row["body"]).decode().partition(" ")[2])
"""
)
GOAL_CONFIG = """
minWorkers: 1
maxWorkers: 1
batchPolicy: goal
latencyGoalMs: 400
lengthFrom: handler
paddingBudget: 0.2
"""
CONFIG = """
minWorkers: 1
maxWorkers: 1
batchSize: 8
maxBatchDelay: 20
warmUp: true
samples:
  - {text: one, contentType: text/plain}
  - file: sample.txt
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with a model that batches rightly, and one that does not."""
    folder = tmp_path_factory.mktemp("batching")
    store = folder / "store"
    store.mkdir()
    for name, source in (("right", HANDLER), ("swapped", SWAPPED)):
        make_archive(store / f"{name}.mar", source, config=CONFIG, **{"sample.txt": b"two"})
    make_archive(store / "texts.mar", TEXTS, config=GOAL_CONFIG)
    with Server(folder, store=store) as server:
        for name in ("right", "swapped", "texts"):
            server.register(f"{name}.mar").raise_for_status()
        yield server


def settled(server: Server, model: str) -> dict[str, Any]:
    """What describe says of a model's batches when it was checked."""
    for _ in poll(10, "the check is done"):
        batching: dict[str, Any] = server.describe(model)["batching"]
        if batching["certificate"] != "not checked" and "isChecking" not in batching:
            return batching
    raise AssertionError


def test_a_right_model_has_its_certificate_and_a_swapping_one_runs_one_by_one(server: Server) -> None:
    """Describe and the metrics say so; nobody gets another's answer."""
    right, swapped = settled(server, "right"), settled(server, "swapped")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: server.predict("swapped", f"w{number}"), range(16)))

    assert (right["certificate"], right["largestBatch"]) == ("passed", 8)
    assert right["warmUpSeconds"][0] > 0.05
    assert (swapped["certificate"], swapped["largestBatch"]) == ("failed", 1)
    assert "the answer of item" in swapped["differences"][0]["seen"]
    assert [answer.json() for answer in answers] == [{"said": f"W{number}"} for number in range(16)]
    metrics = server.client.get(f"{server.metrics}/metrics").text
    assert 'marserve_batch_checks_total{model="swapped",version="1.0",verdict="failed"} 1' in metrics


def test_marserve_check_shows_the_differences(server: Server, tmp_path: Path) -> None:
    """With the model's samples, and with others; the exit status tells."""
    sample = tmp_path / "three.txt"
    sample.write_text("three")

    right = marserve("check", "right", "--management", server.management)
    swapped = marserve("check", "swapped", "--management", server.management, "--json")
    others = marserve(*("check", "right", "--sample", sample, "--sample", sample), "--management", server.management)

    assert right.status == 0
    assert (swapped.status, swapped.document["passed"]) == (1, False)
    assert others.status == 0
    assert "note: all samples have the same answer: swapped answers cannot be seen" in others.out


def test_an_item_fails_alone_with_the_status_that_its_exception_says(server: Server) -> None:
    """Its mates are answered in the same batch."""
    settled(server, "right")
    bodies = ["bad" if index == 3 else f"item {index}" for index in range(8)]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: server.predict("right", body), bodies))

    assert [answer.status_code for answer in answers] == [422 if index == 3 else 200 for index in range(8)]
    assert answers[3].json()["message"] == "this one is bad"


def test_batches_are_formed_otherwise_without_a_restart(server: Server) -> None:
    """`marserve tune`, the management API, and describe after each."""
    settled(server, "right")
    pids = server.worker_pids("right")

    ran = marserve("tune", "right", "--batch-size", 4, "--max-batch-delay", 0, "--management", server.management)

    assert ran.status == 0
    described = server.describe("right")
    assert (described["batchSize"], described["maxBatchDelay"]) == (4, 0)
    assert described["batching"]["largestBatch"] == 4
    assert server.worker_pids("right") == pids

    put = server.client.put(f"{server.management}/models/right", params={"batch_size": 6, "max_batch_delay": 30})

    assert put.status_code == 200
    described = server.describe("right")
    assert (described["batchSize"], described["maxBatchDelay"]) == (6, 30)
    assert described["batching"]["largestBatch"] == 6
    assert server.worker_pids("right") == pids
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: server.predict("right", f"w{number}"), range(16)))
    assert [answer.json() for answer in answers] == [{"said": f"W{number}"} for number in range(16)]


def test_a_model_with_a_goal_says_what_it_learned_and_asked(server: Server) -> None:
    """Costs by length, as its handler says it; the metrics count what that took."""
    with ThreadPoolExecutor(16) as pool:
        bodies = [f"text{number} {900 if number % 2 else 30}".encode() for number in range(160)]
        answers = list(pool.map(lambda body: server.predict("texts", body), bodies))

    assert [answer.json() for answer in answers] == [{"said": body.decode().upper()} for body in bodies]
    goal = server.describe("texts")["goal"]
    assert goal["latencyGoalMs"] == 400
    assert goal["isKept"] in (True, False)
    assert {"lengthUpTo", "batchMs", "itemMs", "bySize"} <= set(goal["costs"][0])
    assert goal["lengths"]["from"] == "handler"
    assert goal["lengths"]["asked"] > 0
    assert 0 < goal["lengths"]["shareOfBusy"] < 0.1
    metrics = server.client.get(f"{server.metrics}/metrics").text
    counted = f'marserve_lengths_total{{model="texts",version="1.0",source="handler"}} {goal["lengths"]["asked"]}'
    assert counted in metrics
    took = re.search(r'marserve_length_seconds_total{model="texts",version="1\.0"} (\S+)', metrics)
    assert took is not None
    assert 0 < float(took[1]) < 60
