"""The main job, for real: archives in, predictions out, and nothing lost when something breaks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.server import Server, make_archive, poll

ECHO = """
import os, time
class Echo:
    def initialize(self, context):
        print("the handler is ready")
    def handle(self, data, context):
        answers = []
        for row in data:
            body = bytes(row["body"])
            if body.startswith(b"bad"):
                raise ValueError("a bad item")
            if body.startswith(b"die"):
                os._exit(17)
            if body.startswith(b"sleep"):
                time.sleep(0.05)
            answers.append(body + b" of %d" % len(data))
        return answers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the whole file, with the archives in its store."""
    folder = tmp_path_factory.mktemp("serving")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "echo.mar", ECHO)
    make_archive(store / "echo2.mar", ECHO.replace("of %d", "by the second of %d"), name="echo", version="2.0")
    make_archive(
        store / "batched.mar",
        ECHO,
        config="minWorkers: 1\nmaxWorkers: 1\nbatchSize: 16\nmaxBatchDelay: 500\nbatchPolicy: fixed\n",
    )
    make_archive(store / "twins.mar", ECHO, config="minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 5\n")
    with Server(folder, store=store, settings={"job_queue_size": "1000"}) as server:
        yield server


def test_an_archive_becomes_a_model_that_answers(server: Server) -> None:
    """Register, predict, describe, list, set another default, unregister: the main road."""
    assert server.register("echo.mar").json() == {
        "status": 'Model "echo" Version: 1.0 registered with 1 initial workers'
    }
    assert server.register("echo2.mar").status_code == 200

    first = server.predict("echo", b"hello")
    second = server.predict("echo/2.0", b"hello")

    assert (first.status_code, first.content) == (200, b"hello of 1")
    assert second.content == b"hello by the second of 1"
    server.client.put(f"{server.management}/models/echo/2.0/set-default").raise_for_status()
    assert server.predict("echo", b"hello").content == b"hello by the second of 1"
    listed = server.client.get(f"{server.management}/models").json()["models"]
    assert {"modelName": "echo", "modelUrl": "echo2.mar"} in listed
    server.client.delete(f"{server.management}/models/echo/1.0").raise_for_status()
    assert server.predict("echo/1.0", b"hello").status_code == 404
    server.client.delete(f"{server.management}/models/echo").raise_for_status()
    assert server.predict("echo", b"hello").json()["type"] == "ModelNotFoundException"


def test_a_bad_item_in_a_batch_of_16_fails_alone(server: Server) -> None:
    """Fifteen neighbours of an item whose handling raises are answered."""
    server.register("batched.mar").raise_for_status()
    bodies = [b"bad" if index == 5 else b"item %d" % index for index in range(16)]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: server.predict("batched", body), bodies))

    statuses = [answer.status_code for answer in answers]
    assert statuses == [503 if index == 5 else 200 for index in range(16)]
    assert answers[5].json() == {"code": 503, "type": "InternalServerException", "message": "Prediction failed"}
    assert all(answer.content.startswith(body) for body, answer in zip(bodies, answers, strict=True) if body != b"bad")


def test_a_request_that_kills_its_worker_costs_two_workers_and_no_neighbour(server: Server) -> None:
    """A poison gets its own error, is refused afterwards, and the rest of its batch is answered."""
    if "batched" not in [m["modelName"] for m in server.client.get(f"{server.management}/models").json()["models"]]:
        server.register("batched.mar").raise_for_status()
    restarts = server.describe("batched")["workers"][0]["restarts"]
    bodies = [b"die" if index == 7 else b"item %d" % index for index in range(16)]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: server.predict("batched", body), bodies))

    assert [answer.status_code for answer in answers] == [500 if index == 7 else 200 for index in range(16)]
    assert answers[7].json() == {"code": 500, "type": "InternalServerException", "message": "Worker died."}
    assert answers[7].headers["x-marserve-cause"] == "exit"
    again = server.predict("batched", b"die")
    assert again.status_code == 503
    assert int(again.headers["retry-after"]) > 0
    for _ in poll(5, "the worker is back"):
        worker = server.describe("batched")["workers"][0]
        if worker["status"] == "READY":
            break
    assert worker["restarts"] - restarts == 2


def test_kill_9_on_workers_under_load_loses_no_request(server: Server) -> None:
    """Every request is answered, and with its own body, while workers are killed every now and then."""
    server.register("twins.mar", initial_workers=2).raise_for_status()
    stop = threading.Event()
    wrong: list[str] = []
    answered = [0] * 8

    def send(number: int) -> None:
        with httpx.Client(timeout=20) as client:
            while not stop.is_set():
                body = b"sleep %d-%d" % (number, answered[number])
                answer = client.post(f"{server.inference}/predictions/twins", content=body)
                if answer.status_code != 200 or not answer.content.startswith(body + b" of"):
                    wrong.append(f"{answer.status_code} {answer.text}")
                answered[number] += 1

    threads = [threading.Thread(target=send, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for kill in range(5):
            before = list(answered)
            for _ in poll(10, "both workers are ready and every client was answered since the last kill"):
                pids = server.worker_pids("twins")
                if len(pids) == 2 and all(now >= then + 2 for now, then in zip(answered, before, strict=True)):
                    break
            os.kill(pids[kill % 2], signal.SIGKILL)
    finally:
        stop.set()
        for thread in threads:
            thread.join()

    assert not wrong, wrong[:3]
    assert sum(answered) > 50


def test_what_a_handler_prints_reaches_the_log_with_its_model_and_worker(server: Server) -> None:
    """`print` in a handler is a line of the model log."""
    if "twins" not in [m["modelName"] for m in server.client.get(f"{server.management}/models").json()["models"]]:
        server.register("twins.mar").raise_for_status()

    for _ in poll(5, "the line is in the log"):
        log = (server.folder / "logs" / "model_log.log").read_text()
        if "the handler is ready" in log:
            break

    line = next(line for line in log.splitlines() if "the handler is ready" in line)
    assert "twins_1.0" in log
    assert "MODEL_LOG - the handler is ready" in line


def test_a_stopping_server_answers_what_it_accepted(tmp_path: Path) -> None:
    """SIGTERM while requests run: each is answered, the server exits with 0 and leaves nothing."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "slow.mar", ECHO.replace("0.05", "0.5"), config="batchSize: 1\n")
    with Server(tmp_path, store=store) as server, ThreadPoolExecutor(4) as pool:
        server.register("slow.mar").raise_for_status()
        sent = [pool.submit(server.predict, "slow", b"sleep %d" % number) for number in range(4)]
        for _ in poll(5, "all four are accepted"):
            described = server.describe("slow")
            if described["runningRequests"] + described["jobQueueStatus"]["pendingRequests"] == 4:
                break

        server.stop()

        assert [future.result().status_code for future in sent] == [200] * 4
