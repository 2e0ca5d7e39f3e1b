"""Keys of runtimes through a real server: what is in force stands in describe, and what cannot be is refused."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
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
