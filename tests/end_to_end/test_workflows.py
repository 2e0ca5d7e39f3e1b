"""Workflows for real: a function, a model and a function in a row, under load, deaths, slow nodes and clients that go.

The middle node does what the request asks for; every node adds the request's id to what it hands on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from support.open_loop import OpenLoop, Outcome, Shot, count_by_status, evenly
from support.server import Server, make_archive, poll
from support.workflow_archives import write_war

NOTE = """
import json, os, time

def note(row, context, index):
    body = row["body"]
    seen = body if isinstance(body, dict) else json.loads(bytes(body))
    seen.setdefault("ids", []).append(context.get_request_id(index))
    seen.setdefault("pids", []).append(os.getpid())
    return seen
"""
MIDDLE = (
    NOTE
    + """
def handle(data, context):
    if data is None:
        return None
    out = []
    for index, row in enumerate(data):
        seen = note(row, context, index)
        if seen.get("do") == "die":
            os._exit(3)
        if seen.get("do") == "raise":
            raise ValueError("as asked")
        time.sleep(seen.get("sleep", 0))
        out.append(json.dumps(seen))
    return out
"""
)
SLOW = (
    NOTE
    + """
tried = []

def handle(data, context):
    if data is None:
        return None
    seen = note(data[0], context, 0)
    end = time.monotonic() + 30
    while not tried and not context.is_cancelled(0) and time.monotonic() < end:
        time.sleep(0.005)
    tried.append(context.is_cancelled(0))
    return [json.dumps({**seen, "cancelled": tried})]
"""
)
FUNCTIONS = (
    NOTE
    + """
def first(data, context):
    return None if data is None else [json.dumps(note(row, context, i)) for i, row in enumerate(data)]

last = first
"""
)
SPEC = """
models:
  timeout-ms: {timeout_ms}
  retry-attempts: 1
  middle:
    url: middle.mar
    min-workers: 2
    max-workers: 2
    batch-size: 4
    max-batch-delay: 5
dag:
  first: [middle]
  middle: [last]
"""
LONELY = """
models:
  timeout-ms: 1500
  retry-attempts: 1
  slow:
    url: slow.mar
    min-workers: 1
    max-workers: 1
    batch-size: 1
dag:
  first: [slow]
"""
QUEUE = 60
RATE = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two workflows of the same three nodes: one that is patient, one that is not."""
    with make_server(tmp_path_factory.mktemp("workflows"), job_queue_size=str(QUEUE)) as server:
        register(server, "patient.war")
        register(server, "hasty.war")
        yield server


def make_server(folder: Path, **settings: str) -> Server:
    """A server whose stores hold what the tests register."""
    store, workflows = folder / "store", folder / "workflows"
    store.mkdir()
    workflows.mkdir()
    make_archive(store / "middle.mar", MIDDLE)
    make_archive(store / "slow.mar", SLOW)
    write_war(workflows / "lonely.war", LONELY, FUNCTIONS)
    write_war(workflows / "patient.war", SPEC.format(timeout_ms=30_000), FUNCTIONS)
    write_war(workflows / "hasty.war", SPEC.format(timeout_ms=400), FUNCTIONS)
    return Server(folder, store=store, settings=settings, arguments=["--workflow-store", str(workflows)])


def register(server: Server, url: str) -> None:
    """Register a workflow."""
    answer = server.client.post(f"{server.management}/workflows", params={"url": url}, timeout=60)
    assert answer.status_code == 200, answer.text


def ask(server: Server, workflow: str, timeout_ms: int | None = None, **what: Any) -> httpx.Response:
    """Run a workflow once."""
    headers = {} if timeout_ms is None else {"x-marserve-timeout-ms": str(timeout_ms)}
    return server.client.post(f"{server.inference}/wfpredict/{workflow}", json=what, headers=headers, timeout=60)


def running(server: Server, workflow: str) -> int:
    """How many requests a workflow has on their way."""
    described = server.client.get(f"{server.management}/workflows/{workflow}").json()[0]
    count: int = described["runningRequests"]
    return count


def fire(server: Server, shots: list[Shot], while_firing: Callable[[], None] | None = None) -> list[Outcome]:
    """Send each request when it is due, and do something else meanwhile."""
    port = urlsplit(server.inference).port
    assert port is not None
    beside = threading.Thread(target=while_firing) if while_firing is not None else None
    if beside is not None:
        beside.start()
    try:
        return asyncio.run(OpenLoop(port, patience_s=60.0).fire(shots))
    finally:
        if beside is not None:
            beside.join()


def request(workflow: str, **what: Any) -> bytes:
    """The bytes of one request."""
    body = json.dumps(what).encode()
    return f"POST /wfpredict/{workflow} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_one_request_id_goes_through_three_processes_and_back_to_the_client(server: Server) -> None:
    """Functions run in workers of their own, never in the server."""
    answer = ask(server, "patient", n=5)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    seen = answer.json()
    assert seen["n"] == 5
    assert seen["ids"] == [answer.headers["x-request-id"]] * 3
    assert len(set(seen["pids"])) == 3
    assert server.process is not None
    assert server.process.pid not in seen["pids"]


def test_requests_of_nodes_are_no_requests_of_clients(server: Server) -> None:
    """TorchServe's counter knows clients; marserve's own counts both."""
    assert ask(server, "patient", n=5).status_code == 200

    lines = server.client.get(f"{server.metrics}/metrics").text.splitlines()

    of_middle = [line for line in lines if 'model_name="patient__middle"' in line or 'model="patient__middle"' in line]
    assert any(line.startswith("marserve_requests_total") for line in of_middle)
    assert not any(line.startswith("ts_inference_requests_total") for line in of_middle)


def test_what_can_be_asked_of_a_workflow_is_told(server: Server) -> None:
    """`OPTIONS`, and the description of both listeners."""
    told = server.client.options(f"{server.inference}/wfpredict/patient").json()
    inference = server.client.get(f"{server.inference}/api-description").json()
    management = server.client.get(f"{server.management}/api-description").json()

    assert list(told["paths"]) == ["/wfpredict/patient"]
    assert "/wfpredict/{workflow_name}" in inference["paths"]
    assert {"get", "delete"} <= set(management["paths"]["/workflows/{workflow_name}"])
    assert {"get", "post"} <= set(management["paths"]["/workflows"])


def test_fifty_requests_a_second_are_answered_while_workers_of_the_middle_node_are_killed(server: Server) -> None:
    """Nothing is lost and nothing hangs: the requests of a dead worker are run again.

    The queue has room for what comes in a second in which a busy machine does nothing.
    """
    shots = [Shot(due, "quick", request("patient", n=number)) for number, due in enumerate(evenly(QUEUE - 10, 3.0))]
    killed: list[int] = []

    def kill() -> None:
        for _ in range(2):
            time.sleep(0.9)
            pids = server.worker_pids("patient__middle")
            if pids:
                killed.append(pids[0])
                psutil.Process(pids[0]).send_signal(signal.SIGKILL)

    outcomes = fire(server, shots, kill)

    assert count_by_status(outcomes) == {200: len(shots)}, [each.body for each in outcomes if each.status != 200]
    assert [json.loads(outcome.body)["n"] for outcome in outcomes] == list(range(len(shots)))
    assert killed
    assert running(server, "patient") == 0


@pytest.mark.parametrize(("what", "cause"), [("raise", "handler"), ("die", None)])
def test_a_node_that_fails_is_named_and_the_workflow_goes_on(server: Server, what: str, cause: str | None) -> None:
    """A handler that raises, a request that kills its workers: 500, and the next request is answered."""
    answer = ask(server, "patient", do=what)

    assert answer.status_code == 500
    assert answer.json() == {"code": 500, "type": "InternalServerException", "message": "Error executing middle"}
    assert answer.headers["x-marserve-cause"] == cause or cause is None
    assert ask(server, "patient", n=1).status_code == 200


def test_a_slow_node_costs_its_attempts_and_no_more(server: Server) -> None:
    """Both attempts end after their time-out; the client is told, and requests behind it are answered."""
    began = time.monotonic()
    answer = ask(server, "hasty", sleep=2.0)

    assert (answer.status_code, answer.json()["message"]) == (500, "Error executing middle")
    assert answer.headers["x-marserve-cause"] == "node_timeout"
    assert 0.8 <= time.monotonic() - began < 2.0 * 3
    for _ in poll(30, "the slow workers are done"):
        if ask(server, "hasty", n=1).status_code == 200:
            break


def test_an_attempt_that_timed_out_is_cancelled_in_its_worker_and_frees_it_for_the_retry(server: Server) -> None:
    """With one worker, whose handler blocks until it hears that its request is cancelled, the retry is answered."""
    register(server, "lonely.war")
    try:
        answer = ask(server, "lonely", n=1)
    finally:
        server.client.delete(f"{server.management}/workflows/lonely")

    assert answer.status_code == 200, answer.text
    assert answer.json()["cancelled"] == [True, False]
    assert len(set(answer.json()["ids"])) == 1


def test_the_clients_deadline_is_one_for_all_nodes(server: Server) -> None:
    """504 when it passes, whatever the nodes' own time-outs are."""
    answer = ask(server, "patient", timeout_ms=300, sleep=1.5)

    assert (answer.status_code, answer.json()["type"]) == (504, "RequestTimeoutException")
    assert running(server, "patient") == 0


def test_a_client_that_hangs_up_leaves_nothing_on_its_way(server: Server) -> None:
    """Its node is cancelled, the next one never begins."""
    port = urlsplit(server.inference).port
    with socket.create_connection(("127.0.0.1", port or 0)) as client:
        client.sendall(request("patient", sleep=1.5))
        for _ in poll(30, "the request is on its way"):
            if running(server, "patient") == 1:
                break

    for _ in poll(30, "it is given up"):
        if running(server, "patient") == 0:
            break
    assert ask(server, "patient", n=1).status_code == 200


def test_more_than_a_workflow_can_take_is_refused_at_once_and_the_rest_answered(server: Server) -> None:
    """One step's overload is the caller's 503, not a hang: the bound at the door holds for every node behind it."""
    shots = [Shot(0.0, "slow", request("patient", n=number, sleep=0.05)) for number in range(3 * QUEUE)]

    outcomes = fire(server, shots)

    counts = count_by_status(outcomes)
    assert set(counts) == {200, 503}
    assert counts[200] >= QUEUE
    assert all(outcome.retry_after is not None for outcome in outcomes if outcome.status == 503)
    assert running(server, "patient") == 0


def test_what_is_on_its_way_is_answered_while_the_server_stops(tmp_path: Path) -> None:
    """The nodes that it has not reached yet still take it."""
    server = make_server(tmp_path)
    server.start()
    try:
        register(server, "patient.war")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask, server, "patient", sleep=1.0)
            for _ in poll(30, "the request is on its way"):
                if running(server, "patient") == 1:
                    break
            server.stop()
            assert asked.result().status_code == 200
    finally:
        server.stop(check=False)
        server.client.close()


def test_a_workflow_and_its_workers_are_gone_when_it_is_unregistered(tmp_path: Path) -> None:
    """And its name can be used again."""
    with make_server(tmp_path) as server:
        for _ in range(2):
            register(server, "patient.war")
            assert ask(server, "patient", n=1).status_code == 200
            pids = [pid for node in ("first", "middle", "last") for pid in server.worker_pids(f"patient__{node}")]

            answer = server.client.delete(f"{server.management}/workflows/patient")

            assert answer.json() == {"status": 'Workflow "patient" unregistered'}
            assert not any(psutil.pid_exists(pid) for pid in pids)
            assert ask(server, "patient", n=1).status_code == 404
        assert server.client.get(f"{server.management}/models").json() == {"models": []}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_twenty_seconds_of_a_hundred_requests_a_second_with_deaths_slow_nodes_and_clients_that_go(
    server: Server,
) -> None:
    """Every request that somebody waits for is answered, in bounded time, and nothing is left on its way."""
    seconds = 20.0
    shots = [Shot(due, "quick", request("patient", n=number)) for number, due in enumerate(evenly(RATE, seconds))]
    shots += [Shot(due, "slow", request("hasty", sleep=0.6)) for due in evenly(1, seconds)]
    port = urlsplit(server.inference).port or 0
    end = time.monotonic() + seconds

    def disturb() -> None:
        turn = 0
        while time.monotonic() < end:
            time.sleep(0.5)
            turn += 1
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(request("patient", sleep=0.2))
            if turn % 4 == 0:
                for pid in server.worker_pids("patient__middle")[:1]:
                    os.kill(pid, signal.SIGKILL)

    outcomes = fire(server, shots, disturb)

    quick = [outcome for outcome in outcomes if outcome.shot.name == "quick"]
    assert count_by_status(quick) == {200: len(quick)}
    assert set(count_by_status([o for o in outcomes if o.shot.name == "slow"])) <= {500, 503}
    for _ in poll(30, "nothing is on its way"):
        if running(server, "patient") == running(server, "hasty") == 0:
            break
