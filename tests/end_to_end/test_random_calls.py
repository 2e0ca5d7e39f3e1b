"""Random management calls from many threads while models are asked: the server ends where the accepted calls lead."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.server import Server, make_archive, poll

pytestmark = pytest.mark.system

HANDLER = """
def handle(data, context):
    return [b"here"] * len(data or [])
"""
MODELS = ("a", "b", "c")
OWN = 2  # versions of each model that a thread has to itself

DOCUMENTED = {
    "register": {200, 409},
    "unregister": {200, 403, 404, 409},
    "scale": {200, 202, 206, 404},
    "default": {200, 404},
    "describe": {200, 404},
    "list": {200},
}


@dataclass
class Caller:
    """One thread: its versions are its alone, so what becomes of them is known whatever the others do.

    `versions` are those that it has registered, with their workers.
    """

    server: Server
    number: int
    calls: int
    seed: int
    versions: dict[tuple[str, str], int] = field(default_factory=dict)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Make all calls."""
        chance = random.Random(self.seed * 1000 + self.number)
        with httpx.Client(base_url=self.server.management, timeout=60) as client:
            for _ in range(self.calls):
                model = chance.choice(MODELS)
                version = f"{self.number}.{chance.randrange(OWN)}"
                call = chance.choices(
                    ["register", "unregister", "scale", "default", "describe", "list"], [5, 4, 3, 2, 3, 1]
                )
                self._call(client, call[0], model, version, chance.randint(1, 2))

    def _call(self, client: httpx.Client, call: str, model: str, version: str, workers: int) -> None:
        path, key = f"/models/{model}/{version}", (model, version)
        if call == "register":
            query = {"url": f"{model}-{version}.mar", "initial_workers": str(workers), "synchronous": "true"}
            answer = client.post("/models", params=query)
        elif call == "unregister":
            answer = client.delete(path)
        elif call == "scale":
            answer = client.put(path, params={"min_worker": workers, "synchronous": "true"})
        elif call == "default":
            answer = client.put(f"{path}/set-default")
        else:
            answer = client.get(path if call == "describe" else "/models")
        self.statuses[call, answer.status_code] += 1
        was_there = key in self.versions
        if answer.status_code not in DOCUMENTED[call]:
            self.wrong.append(f"{call} {path}: {answer.status_code} {answer.text[:300]}")
        says_there = answer.status_code != (200 if call == "register" else 404)
        if call != "list" and says_there != was_there:
            self.wrong.append(f"{call} {path} got {answer.status_code}, and it was {'' if was_there else 'not '}there")
        if call == "register" and answer.status_code == 200:
            self.versions[key] = workers
        elif call == "unregister" and answer.status_code == 200:
            self.versions.pop(key, None)
        elif call == "scale" and answer.status_code < 300:
            self.versions[key] = workers


@dataclass
class Asking:
    """Requests to all models without end; what they may get while versions come and go is known."""

    server: Server
    statuses: Counter[int] = field(default_factory=Counter)
    is_over: bool = False

    def run(self) -> None:
        """Ask until told to stop."""
        number = 0
        with httpx.Client(timeout=60) as client:
            while not self.is_over:
                number += 1
                answer = client.post(f"{self.server.inference}/predictions/{MODELS[number % 3]}", content=b"x")
                self.statuses[answer.status_code] += 1


def open_files(process: psutil.Process) -> int:
    """The server's descriptors."""
    return process.num_fds()


def run_random_calls(folder: Path, threads: int, calls: int, seed: int) -> None:
    """So many threads with so many calls each; then the server has what they left, and nothing more."""
    with Server(folder, entry="marserve", settings={"unregister_model_timeout": "20"}) as server:
        for model in MODELS:
            for number in range(threads):
                for own in range(OWN):
                    version = f"{number}.{own}"
                    make_archive(server.store / f"{model}-{version}.mar", HANDLER, name=model, version=version)
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        # Once round: what is opened once for good is open then.
        for model in MODELS:
            assert server.register(f"{model}-0.0.mar", initial_workers=2).status_code == 200
            assert server.predict(model).status_code == 200
            assert server.client.delete(f"{server.management}/models/{model}").status_code == 200
        processes, before = len(process.children(recursive=True)), open_files(process)
        callers = [Caller(server, number, calls, seed) for number in range(threads)]
        asking = [Asking(server) for _ in range(2)]
        running = [threading.Thread(target=each.run, daemon=True) for each in (*asking, *callers)]
        for thread in running:
            thread.start()
        for thread in running[len(asking) :]:
            thread.join(1800)
            assert not thread.is_alive()
        for each in asking:
            each.is_over = True
        for thread in running[: len(asking)]:
            thread.join(60)
            assert not thread.is_alive()

        wrong = [sentence for caller in callers for sentence in caller.wrong]
        assert wrong == [], f"seed {seed}: {wrong[:10]}"
        assert server.process.poll() is None
        statuses = sum((each.statuses for each in asking), Counter[int]())
        assert set(statuses) <= {200, 404, 503}, statuses
        assert statuses[200] > 0
        expected = {key: workers for caller in callers for key, workers in caller.versions.items()}
        check(server, expected)
        for model in MODELS:
            remove_all(server, model, [version for name, version in expected if name == model])
        settle(process, processes)
        for _ in poll(20, f"as many open files as before, {before}"):
            if open_files(process) <= before + 2:  # connections that clients have just closed
                break
        assert not [child for child in process.children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]


def check(server: Server, expected: dict[tuple[str, str], int]) -> None:
    """The server has these versions with these workers; each model has one default, which is one of them."""
    listed = {each["modelName"] for each in server.client.get(f"{server.management}/models").json()["models"]}
    assert listed == {model for model, _ in expected}
    for model in listed:
        described: list[dict[str, Any]] = server.client.get(f"{server.management}/models/{model}/all").json()
        found = {each["modelVersion"]: each["minWorkers"] for each in described}
        assert found == {version: workers for (name, version), workers in expected.items() if name == model}
        assert sum(each["isDefault"] for each in described) == 1
        for each in described:
            assert len([one for one in each["workers"] if one["status"] == "READY"]) == each["minWorkers"]


def remove_all(server: Server, model: str, versions: list[str]) -> None:
    """Unregister all versions of a model, the default last."""
    if not versions:
        return
    default = server.describe(model)["modelVersion"]
    for version in sorted(versions, key=lambda each: each == default):
        answer = server.client.delete(f"{server.management}/models/{model}/{version}")
        assert answer.status_code == 200, answer.text


def settle(process: psutil.Process, most: int) -> None:
    """Wait until the server has no more processes below it than that."""
    for _ in poll(30, f"no more than {most} processes are left"):
        if len(process.children(recursive=True)) <= most:
            return


@pytest.mark.timeout(300)
def test_random_calls_end_where_the_accepted_ones_lead(tmp_path: Path) -> None:
    """Six threads with sixteen calls each."""
    run_random_calls(tmp_path, threads=6, calls=16, seed=6)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_random_calls_end_where_the_accepted_ones_lead(tmp_path: Path) -> None:
    """Sixteen threads with 256 calls each."""
    run_random_calls(tmp_path, threads=16, calls=256, seed=66)
