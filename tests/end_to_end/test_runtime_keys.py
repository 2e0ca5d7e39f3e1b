"""Keys of runtimes through a real server: what is in force stands in describe, and what cannot be is refused."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from support.server import Server

pytestmark = pytest.mark.torch


def archive_of(folder: Path, name: str, config: str) -> str:
    """A TorchScript model of the base handler."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 1)).save(str(folder / "model.pt"))
    model = {"modelName": name, "serializedFile": "model.pt", "handler": "base_handler", "modelVersion": "1.0"}
    with zipfile.ZipFile(folder / f"{name}.mar", "w") as file:
        manifest = {"model": {**model, "configFile": "model-config.yaml"}, "archiverVersion": "0.1"}
        file.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        file.writestr("model-config.yaml", config)
        file.write(folder / "model.pt", "model.pt")
    return f"{name}.mar"


@pytest.mark.system
def test_threads_and_cores_of_a_model_go_before_the_servers(tmp_path: Path) -> None:
    """Describe has the engine, the processor's instructions, and the threads; TorchServe's describe has none of it."""
    store = tmp_path / "store"
    store.mkdir()
    good = archive_of(store, "good", "threads: {intra: 1, inter: 2}\ncpuPinning: cores\n")
    bad = [
        archive_of(store, "much", "threads: {intra: many}\n"),
        archive_of(store, "map", "pt2: {compile: 3}\n"),
    ]

    with Server(tmp_path, entry="marserve", store=store, settings={"worker_threads": "2"}) as server:
        refused = [server.register(name) for name in bad]
        server.register(good).raise_for_status()
        described = server.describe("good")
        (worker,) = described["workers"]
        pinned = psutil.Process(worker["pid"]).cpu_affinity() or []
        assert server.predict("good", "[0.5, 1.0]", **{"Content-Type": "application/json"}).status_code == 200

    assert [answer.status_code for answer in refused] == [400, 400]
    assert "threads of the model's configuration is {'intra': 'many'}; it must be a map" in refused[0].text
    assert "pt2.compile of the model's configuration is 3; it must be a map" in refused[1].text
    assert (described["threadsPerWorker"], described["threads"]) == (1, {"intra": 1, "inter": 2})
    assert described["cpuPinning"] == "cores"
    assert worker["engine"].startswith("torch 2.")
    assert worker["engine"].endswith(", TorchScript")
    assert worker["cpuFlags"][0] in ("x86_64", "aarch64", "arm64")
    assert len(pinned) == 1 or len(os.sched_getaffinity(0)) == 1


COUNTED = """
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def handle(self, data, context):
        super().handle(data, context)
        from torch._dynamo.utils import counters
        return [counters["stats"]["unique_graphs"]] * len(data)
"""
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(2, 1)

    def forward(self, rows):
        return self.out(rows)
"""


@pytest.mark.system
def test_a_model_that_pt2_compiles_has_every_batch_size_behind_it_when_it_is_ready(tmp_path: Path) -> None:
    """By its samples. Without them describe says that requests will wait."""
    pytest.importorskip("torch")
    store = tmp_path / "store"
    store.mkdir()
    batches = "batchSize: 3\nmaxBatchDelay: 2000\nbatchPolicy: fixed\nmaxWorkers: 1\nbatchCheck: 'off'\npt2: eager\n"
    for name, more in (("warm", "samples: [{json: [0.5, 1.0]}]\n"), ("cold", "")):
        model = {"modelName": name, "modelFile": "net.py", "handler": "handler.py", "modelVersion": "1.0"}
        with zipfile.ZipFile(store / f"{name}.mar", "w") as file:
            manifest = {"model": {**model, "configFile": "model-config.yaml"}, "archiverVersion": "0.1"}
            file.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
            file.writestr("model-config.yaml", batches + more)
            file.writestr("net.py", NET)
            file.writestr("handler.py", COUNTED)

    with Server(tmp_path, entry="marserve", store=store) as server:
        for name in ("warm", "cold"):
            server.register(f"{name}.mar").raise_for_status()
        described = {name: server.describe(name) for name in ("warm", "cold")}
        json_body = {"Content-Type": "application/json"}
        alone = server.predict("warm", "[0.5, 1.0]", **json_body).text
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(server.predict, "warm", "[0.5, 1.0]", **json_body) for _ in range(3)]
        together = [answer.result().text for answer in asked]

    assert together == [alone] * 3
    assert int(alone) >= 2  # of one row, and of more
    assert described["warm"]["batching"]["warmUpSeconds"][0] > 0
    said = {name: "\n".join(document.get("warnings", [])) for name, document in described.items()}
    assert "pt2" not in said["warm"]
    assert "pt2 compiles the model when its first requests come" in said["cold"]
