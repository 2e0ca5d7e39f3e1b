"""A real server looks for a faster build beside what serves: it swaps in, and whatever ends, nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes import left_of
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.torch

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(64, 10)

    def forward(self, rows):
        for _ in range(80):  # small operators, which cost torch more than what they compute
            rows = torch.relu(rows * 0.99 + 0.01)
        return self.layer(rows)
"""
HANDLER = """
import time
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def preprocess(self, data):
        import torch
        time.sleep({pause})
        return torch.tensor([row.get("body") for row in data])

    def postprocess(self, data):
        return data.tolist()
"""
JSON = {"content-type": "application/json"}
BODY = [round(at / 64, 3) for at in range(64)]


def net_archive(path: Path, *, key: str, pause: float = 0.0) -> Path:
    """An eager model with 24 inputs of its own, each of which the handler takes so long for."""
    archive = make_archive(path, HANDLER.format(pause=pause), config=f"batchSize: 4\nmaxBatchDelay: 1\n{key}\n")
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest["model"]["modelFile"] = "net.py"
    members |= {"MAR-INF/MANIFEST.json": json.dumps(manifest).encode(), "net.py": NET.encode()}
    for at in range(24):
        members[f"in/{at}.json"] = json.dumps([each + at for each in BODY]).encode()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return archive


def standing(server: Server, model: str = "net") -> dict[str, Any]:
    """What describe says of the search."""
    found: dict[str, Any] = server.describe(model).get("optimising", {})
    return found


def until(server: Server, state: str, limit_s: float = 240.0, step: str = "") -> dict[str, Any]:
    """Wait for that state; what describe says then."""
    said: dict[str, Any] = {}
    for _ in poll(limit_s, f"{state} {step}"):
        said = standing(server)
        if said.get("state") == state and step in said.get("step", ""):
            break
        assert said.get("state") not in {"serves", "parent"} - {state}, said
    return said


def searching(server: Server) -> list[psutil.Process]:
    """The process that searches, and all that it started."""
    found: list[psutil.Process] = []
    for each in server.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "marserve.optimise.background.program" in each.cmdline():
                found += [each, *each.children(recursive=True)]
    return found


def half_made(state: Path) -> list[str]:
    """Folders that are not whole."""
    return [path.name for path in (state / "optimised").iterdir() if path.is_dir()]


@pytest.mark.system
@pytest.mark.timeout(400)  # searches have the lowest priority: on a busy machine they are slow
def test_whatever_ends_a_search_leaves_neither_a_process_nor_a_file(tmp_path: Path) -> None:
    """Its process is killed; its version leaves; the server is killed. The parent serves as long as there is one."""
    pytest.importorskip("torch")
    state = tmp_path / "state"
    server = Server(tmp_path, entry="marserve", settings={"state_folder": str(state), "optimise_share": "2"})
    net_archive(server.store / "net.mar", key="optimise: {inputs: in, candidates: [bf16]}", pause=1.0)
    with server:
        server.register("net.mar").raise_for_status()
        until(server, "builds", step="inputs through")
        family = searching(server)
        assert len(family) >= 2
        assert {each.nice() for each in family} == {19}
        family[0].kill()
        said = until(server, "parent", 20)
        assert said["why"].startswith("the search failed: the process that searches ended with signal 9")
        assert left_of(family, 10) == []
        assert half_made(state) == []
        assert server.predict("net", json.dumps(BODY), **JSON).status_code == 200

        server.client.delete(f"{server.management}/models/net").raise_for_status()
        server.register("net.mar").raise_for_status()
        until(server, "builds", step="inputs through")
        family = searching(server)
        server.client.delete(f"{server.management}/models/net").raise_for_status()
        assert left_of(family, 10) == []
        for _ in poll(10, "nothing half-made"):
            if not half_made(state):
                break

        server.register("net.mar").raise_for_status()
        until(server, "builds", step="inputs through")
        family = server.family()
        assert searching(server)
        # One that is stopped, as the share has it, ends as well.
        os.kill(searching(server)[-1].pid, signal.SIGSTOP)
        server.stop(check=False, number=signal.SIGKILL)
        assert left_of(family, 20) == []
        for _ in poll(10, "nothing half-made"):
            if not half_made(state):
                break


@pytest.mark.system
def test_as_torchserve_no_build_is_looked_for_and_describe_says_nothing_of_it(tmp_path: Path) -> None:
    """Its answers are the recorded ones."""
    server = Server(tmp_path, settings={"state_folder": str(tmp_path / "state")})
    source = "def handle(data, context):\n    return [b'x' for _ in data or []]\n"
    make_archive(server.store / "net.mar", source, config="optimise: {candidates: auto}\n")
    with server:
        server.register("net.mar").raise_for_status()

        assert "optimising" not in server.describe("net")
        assert server.client.get(f"{server.management}/models/net/optimise").status_code == 404
        assert not (tmp_path / "state" / "optimised").exists()


@contextlib.contextmanager
def asking(server: Server) -> Iterator[list[str]]:
    """Requests one after the other during the block; the answers that were none."""
    is_over = threading.Event()
    failed: list[str] = []

    def ask() -> None:
        while not is_over.is_set():
            answer = server.predict("net", json.dumps(BODY), **JSON)
            if answer.status_code != 200 or len(answer.json()) != 10:
                failed.append(answer.text)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield failed
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("build", ["onnx", "aot"])
def test_a_faster_build_swaps_in_while_requests_come_and_the_next_start_has_it(build: str, tmp_path: Path) -> None:
    """None is lost; native code that was built here serves without `trusted_models`."""
    pytest.importorskip("onnxscript" if build == "onnx" else "torch")
    settings = {"state_folder": str(tmp_path / "state"), "optimise_share": "1", "load_models": "net.mar"}
    settings |= {"default_workers_per_model": "1"}
    store = tmp_path / "store"
    store.mkdir()
    net_archive(store / "net.mar", key=f"optimise: {{inputs: in, candidates: [{build}]}}")
    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        for _ in poll(60, "the parent serves"):
            if server.worker_pids("net"):
                break
        before = server.predict("net", json.dumps(BODY), **JSON).json()
        with asking(server) as failed:
            said = until(server, "serves", 800)
            after = server.predict("net", json.dumps(BODY), **JSON).json()
        page = server.client.get(f"{server.metrics}/metrics").text
        report = server.client.get(f"{server.management}/models/net/optimise").json()
        workers = server.describe("net")["workers"]
        assert failed == []

    assert said["build"] == build
    assert max(abs(ours - theirs) for ours, theirs in zip(before, after, strict=True)) < 1e-3
    assert [worker["computesOn"] for worker in workers] == [build]
    assert f'marserve_workers_computing{{model="net",version="1.0",on="{build}"}} 1.0' in page
    assert f'marserve_build_ratio{{model="net",version="1.0",build="{build}",rows="1"}}' in page
    assert [row["passed"] for row in report["report"]["builds"]] == [True]

    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        assert until(server, "serves", 60)["isCached"]
        assert searching(server) == []
