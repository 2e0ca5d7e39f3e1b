"""Workers that die, end to end: what the client, describe, the probes, the metrics and the exit status say of it."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from support.processes import left_of, living, until_blocking
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers' limits and processes are Linux's")

HANDLER = """
import os, time
if os.path.exists("broken"):
    print("the weights are gone", flush=True)
    raise FileNotFoundError("weights.bin")
open("here", "w").write(os.getcwd())
def handle(data, context):
    return [obey(bytes(row["body"])) for row in data] if data else None
def obey(body):
    word, _, value = body.partition(b" ")
    if word == b"take":
        return str(len(bytearray(int(value))))
    if word == b"exit":
        os._exit(int(value))
    if word == b"sleep":
        time.sleep(float(value))
    return str(os.getpid()) if word == b"pid" else os.getcwd() if word == b"where" else body
"""


def counted(server: Server, name: str, label: str) -> float:
    """The sum of a counter with this label on the metrics page."""
    page = server.client.get(f"{server.metrics}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_models_unpacked_folder_that_was_deleted_is_there_again_for_the_next_worker(tmp_path: Path) -> None:
    """The archive in the store has the same digest; the next request is answered."""
    with Server(tmp_path) as server:
        make_archive(server.store / "m.mar", HANDLER, config="workerStart: fresh\n")
        assert server.register("m.mar").status_code == 200
        folder = Path(server.predict("m", b"where").text)

        shutil.rmtree(folder)
        os.kill(server.worker_pids("m")[0], signal.SIGKILL)
        answer = server.predict("m", b"where")

        assert (answer.status_code, answer.text) == (200, str(folder))
        assert (folder / "here").read_text() == str(folder)


def test_two_of_four_workers_serve_and_say_so(tmp_path: Path) -> None:
    """Ready by the default rule, with a remark; not ready with `readinessRule: min`; the deaths are explained."""
    with Server(tmp_path) as server:
        for name, rule in (("some", "any"), ("most", "min")):
            config = f"minWorkers: 4\nmaxWorkers: 4\nworkerStart: fresh\nmaxRestarts: 1\nreadinessRule: {rule}\n"
            make_archive(server.store / f"{name}.mar", HANDLER, config=config)
            assert server.register(f"{name}.mar").status_code == 200
        assert server.client.get(f"{server.inference}/readyz").json() == {"status": "ready", "reasons": []}

        Path(server.predict("some", b"where").text, "broken").touch()
        for pid in server.worker_pids("some")[:2]:
            os.kill(pid, signal.SIGKILL)
        for _ in poll(20, "two workers are given up"):
            described = server.describe("some")
            if [worker["status"] for worker in described["workers"]].count("UNLOADING") == 2:
                break

        assert described["state"] == "degraded"
        assert {server.predict("some", b"x").status_code for _ in range(10)} == {200}
        ready = server.client.get(f"{server.inference}/readyz")
        assert ready.status_code == 200
        assert ready.json()["reasons"] == ['model "some" version 1.0 serves with 2 of 4 workers']
        death = described["lastDeath"]
        assert death["cause"] == "missing_file"
        assert "weights.bin" in death["traceback"]
        assert "the weights are gone" in death["lastLines"]
        assert counted(server, "marserve_worker_deaths_total", 'cause="killed"') == 2
        assert counted(server, "marserve_worker_deaths_total", 'cause="missing_file"') == 2

        Path(server.predict("most", b"where").text, "broken").touch()
        os.kill(server.worker_pids("most")[0], signal.SIGKILL)
        for _ in poll(20, "its readiness falls"):
            ready = server.client.get(f"{server.inference}/readyz")
            if ready.status_code == 503:
                break
        assert 'model "most" version 1.0 has 3 of 4 workers, and its readinessRule is min' in ready.json()["reasons"]
        assert server.predict("most", b"x").status_code == 200


def test_with_on_crash_fail_the_server_drains_and_ends_with_a_status(tmp_path: Path) -> None:
    """An orchestrator starts it again; what was accepted is answered first."""
    config = "minWorkers: 2\nmaxWorkers: 2\nonCrash: fail\nretryOnWorkerDeath: false\n"
    server = Server(tmp_path)
    server.start()
    process = server.process
    assert process is not None
    try:
        make_archive(server.store / "m.mar", HANDLER, config=config)
        assert server.register("m.mar").status_code == 200
        family = server.family()
        with concurrent.futures.ThreadPoolExecutor() as threads:
            slow = threads.submit(server.predict, "m", b"sleep 1")
            for _ in poll(5, "it runs"):
                if server.describe("m")["runningRequests"]:
                    break
            died = server.predict("m", b"exit 3")

            assert slow.result().status_code == 200
        assert (died.status_code, died.headers["x-marserve-cause"]) == (500, "exit")
        assert process.wait(20) == 1
        assert "onCrash is fail" in server.output()
        assert not left_of(family, 5)
    finally:
        server.stop(check=False)
        server.client.close()


def test_a_memory_limit_is_answered_with_507_and_the_worker_lives(tmp_path: Path) -> None:
    """`maxWorkerMemory` of the model over `max_worker_memory` of the server (RELIABILITY C6, its figures)."""
    with Server(tmp_path, settings={"max_worker_memory": "8GB"}) as server:
        make_archive(server.store / "m.mar", HANDLER, config="maxWorkerMemory: 1GB\n")
        assert server.register("m.mar").status_code == 200
        assert server.process is not None
        before = psutil.Process(server.process.pid).memory_info().rss
        pids = server.worker_pids("m")

        answer = server.predict("m", b"take 10000000000")

        assert (answer.status_code, answer.headers["x-marserve-cause"]) == (507, "out_of_memory")
        assert answer.json()["message"] == "Out of resources"
        assert server.predict("m", b"take 500000000").text == "500000000"
        assert server.worker_pids("m") == pids
        assert psutil.Process(server.process.pid).memory_info().rss - before < 30_000_000


def test_workers_are_recycled_without_a_failed_request(tmp_path: Path) -> None:
    """`maxRequestsPerWorker`; the counter says how often and why."""
    with Server(tmp_path) as server, httpx.Client() as client:
        make_archive(
            server.store / "m.mar", HANDLER, config="minWorkers: 1\nmaxWorkers: 1\nmaxRequestsPerWorker: 100\n"
        )
        assert server.register("m.mar").status_code == 200
        began = time.monotonic()
        pids, statuses = set(), set()

        while len(pids) < 3 and time.monotonic() - began < 20:
            answer = client.post(f"{server.inference}/predictions/m", content=b"pid")
            statuses.add(answer.status_code)
            pids.add(answer.text)

        assert statuses == {200}
        assert len(pids) == 3
        assert counted(server, "marserve_worker_recycles_total", 'reason="requests"') == 2
        assert "lastDeath" not in server.describe("m")


LEAVER = """
import os, signal, subprocess
def handle(data, context):
    return [leave(bytes(row["body"])) for row in data] if data else None
def leave(word):
    if word == b"program":
        return str(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    pid = os.fork()
    if pid:
        return str(pid)
    os.setsid()
    signal.pause()
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_what_a_worker_started_does_not_outlive_a_killed_server(tmp_path: Path, is_stopped: bool) -> None:
    """Though it has left the worker's process group, and nobody is told of SIGKILL: the templates see to it."""
    server = Server(tmp_path)
    server.start()
    try:
        for name, start in (("forked", "fork"), ("fresh", "fresh")):
            make_archive(server.store / f"{name}.mar", LEAVER, config=f"workerStart: {start}\n")
            assert server.register(f"{name}.mar").status_code == 200
        left = [int(server.predict(name, word).text) for name in ("forked", "fresh") for word in (b"program", b"fork")]
        family = server.family()
        assert server.process is not None
        assert living(left) == set(left)
        if is_stopped:
            for process in family[1:]:
                process.suspend()

        server.process.kill()
        server.process.wait()

        until_blocking(lambda: not living(left), "what it started is gone", timeout_s=3.0)
        assert not left_of(family, 2)
    finally:
        server.stop(check=False)
        server.client.close()


def test_what_a_worker_started_ends_with_its_model_and_with_the_server(tmp_path: Path) -> None:
    """Unregistering a model leaves its neighbour's processes alone."""
    with Server(tmp_path) as server:
        left = {}
        for name in ("one", "two"):
            make_archive(server.store / f"{name}.mar", LEAVER)
            assert server.register(f"{name}.mar").status_code == 200
            left[name] = [int(server.predict(name, word).text) for word in (b"program", b"fork")]

        assert server.client.delete(f"{server.management}/models/one").status_code == 200

        until_blocking(lambda: not living(left["one"]), "what it started is gone", timeout_s=3.0)
        assert living(left["two"]) == set(left["two"])
    assert not living(left["two"])
