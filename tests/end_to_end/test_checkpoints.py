"""Weights apart from their model, through a real server: mapped, loaded, said, and refused."""

from __future__ import annotations

import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.archives import manifest
from support.checkpoints import save_dcp, save_in_pieces
from support.divided import build, divided_state, make_divided, parallel, source
from support.load_beside import LoadBeside
from support.object_stores import S3Server
from support.open_loop import count_by_status
from support.range_origin import range_origin
from support.server import Server, poll

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.system]

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.tensor([0.5, 0.25]), persistent=False)

    def forward(self, rows):
        return self.layer(rows) + self.shift
"""


def _archive(path: Path, checkpoint: str, folder: Path | None, *, model: str = MODEL, more: str = "") -> None:
    said = {"handler": "base_handler", "modelFile": "model.py", "configFile": "model-config.yaml"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", manifest(path.stem, **said))
        archive.writestr("model.py", model)
        archive.writestr("model-config.yaml", f"checkpoint: {checkpoint}\n{more}")
        for file in sorted(folder.iterdir()) if folder is not None else ():
            archive.write(file, f"{checkpoint}/{file.name}")


@pytest.mark.skipif(sys.platform != "linux", reason="ranks find each other on Linux's loopback")
@pytest.mark.timeout(120)
def test_ranks_answer_from_a_checkpoint_as_one_process_does(tmp_path: Path) -> None:
    """Saved by one, served by two; saved by two, served by one."""
    config = "minWorkers: 1\nmaxWorkers: 1\nsamples: [{json: [3, 1, 4, 1, 5]}]\n"
    with Server(tmp_path, entry="marserve") as server:
        store = server.store
        state = divided_state()
        whole = build(source())
        whole.load_state_dict(state)
        right = whole.eval()(torch.tensor([[1, 2, 3, 4]])).tolist()[0]
        for saved_by in (1, 2):
            save_in_pieces(store / f"by{saved_by}", state, saved_by)
        for name, saved_by, ranks in (("up", 1, 2), ("down", 2, 1)):
            said = f"{config}checkpoint: by{saved_by}\n" + (parallel(ranks) if ranks > 1 else "")
            make_divided(store / f"{name}.mar", said, has_weights=False)
        for name in ("up", "down"):
            server.register(f"{name}.mar").raise_for_status()
        answers = {
            name: server.predict(name, "[1, 2, 3, 4]", **{"Content-Type": "application/json"}).json()
            for name in ("up", "down")
        }
        described = server.describe("up")["workers"][0]

    for name in ("up", "down"):
        assert answers[name] == pytest.approx(right, abs=1e-5)
    assert described["engine"].endswith("divided over 2 ranks")
    assert 0 < described["checkpoint"]["bytes"] < sum(tensor.nbytes for tensor in state.values())


def test_a_prefix_of_a_store_is_fetched_once_for_all_servers_of_a_machine(s3: S3Server, tmp_path: Path) -> None:
    """Two servers, two versions: 1.05 times the checkpoint at most is read, and what else lies there is not."""
    pytest.importorskip("obstore")
    state = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}
    folder, bucket = save_in_pieces(tmp_path / "pieces", state, 2), s3.bucket()
    for file in folder.iterdir():
        bucket.put(f"net/{file.name}", file.read_bytes())
    bucket.put("net/old.bin", bytes(100_000))
    size = sum(file.stat().st_size for file in folder.iterdir())
    address = f"s3://{bucket.name}/net/"
    settings = {"allowed_urls": f"s3://{bucket.name}/.*", "download_cache": str(tmp_path / "cache")}
    fetched: list[float] = []
    answers = []

    for name in ("one", "two"):
        with Server(tmp_path / name, settings=settings, environment=s3.environment, entry="marserve") as server:
            for model in ("a", "b"):
                _archive(server.store / f"{model}.mar", address, None)
                server.register(f"{model}.mar").raise_for_status()
            answer = server.predict("a", "[1, 1, 1]", **{"Content-Type": "application/json"})
            answers.append(answer.json())
            _archive(server.store / "c.mar", "s3://elsewhere/net/", None)
            refused = server.register("c.mar")
            lines = httpx.get(f"{server.metrics}/metrics").text.splitlines()
            fetched += [float(line.split()[-1]) for line in lines if line.startswith("marserve_download_bytes_total")]

    assert answers == [[3.5, 3.25]] * 2
    assert size <= fetched[0] <= 1.05 * size
    assert fetched[1] == 0
    assert refused.status_code == 404
    assert "elsewhere" in refused.json()["message"]


def test_a_folder_of_the_web_is_fetched_by_its_index_and_mapped(tmp_path: Path) -> None:
    """Through redirects, as a hub answers; with a file missing it is refused by name."""
    from safetensors.torch import save_file

    state = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(state, 1)}
    with range_origin() as hub, range_origin() as store:
        for name, file in files.items():
            save_file({name: state[name]}, tmp_path / file)
            store.put(f"/blobs/{file}", (tmp_path / file).read_bytes())
            hub.redirects[f"/org/net/resolve/main/{file}"] = f"{store.url}/blobs/{file}"
        index = json.dumps({"metadata": {}, "weight_map": files}).encode()
        hub.put("/org/net/resolve/main/model.safetensors.index.json", index)
        hub.put("/org/half/model.safetensors.index.json", index)
        settings = {"allowed_urls": f"{hub.pattern},{store.pattern}"}
        with Server(tmp_path, settings=settings, entry="marserve") as server:
            for name, path in (("net", "net/resolve/main"), ("half", "half"), ("none", "none")):
                _archive(server.store / f"{name}.mar", f"{hub.url}/org/{path}/", None)
            server.register("net.mar").raise_for_status()
            refused = [server.register(f"{name}.mar") for name in ("half", "none")]
            answer = server.predict("net", "[1, 1, 1]", **{"Content-Type": "application/json"}).json()
            described = server.describe("net")["workers"][0]["checkpoint"]

    assert answer == [3.5, 3.25]
    assert described["mapped"] == 32
    assert [each.status_code for each in refused] == [400, 400]
    assert "model-1.safetensors: the answer was 404, and model.safetensors.index.json names it" in refused[0].text
    assert "none of model.safetensors.index.json (the answer was 404), .metadata (the" in refused[1].text


def test_a_model_is_filled_from_its_checkpoint_and_bad_ones_are_refused(tmp_path: Path) -> None:
    """Safetensors of the archive are mapped, also within `maxWorkerMemory`; a folder of the store is read."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    layer = torch.nn.Linear(3, 2)
    state = {f"layer.{name}": value for name, value in layer.state_dict().items()}
    store, safe = tmp_path / "store", tmp_path / "safe"
    store.mkdir()
    safe.mkdir()
    save_file(state, safe / "model.safetensors")
    save_dcp(store / "beside", state)
    _archive(store / "mapped.mar", "weights", safe, more="maxWorkerMemory: 1GiB\n")
    _archive(store / "read.mar", "beside", None)
    _archive(store / "other.mar", "weights", safe, model=MODEL.replace("Linear(3, 2)", "Linear(3, 4)"))
    (safe / "model.safetensors").write_bytes((safe / "model.safetensors").read_bytes()[:-1])
    _archive(store / "cut.mar", "weights", safe)
    right = (layer(torch.ones(1, 3)) + torch.tensor([0.5, 0.25])).tolist()[0]

    with Server(tmp_path, entry="marserve", store=store) as server:
        for name in ("mapped", "read"):
            server.register(f"{name}.mar").raise_for_status()
        refused = [server.register(f"{name}.mar") for name in ("cut", "other")]
        answers = [
            server.predict(name, json.dumps([1, 1, 1]), **{"Content-Type": "application/json"}).json()
            for name in ("mapped", "read")
        ]
        described: list[dict[str, Any]] = [server.describe(name)["workers"][0] for name in ("mapped", "read")]

    assert answers == [pytest.approx(right, abs=1e-6)] * 2
    assert [each["checkpoint"]["mapped"] for each in described] == [32, 0]
    assert all(each["checkpoint"]["bytes"] == 32 for each in described)
    assert all(each["checkpoint"]["secondsPerGB"] > 0 for each in described)
    assert refused[0].status_code == 400
    assert "model.safetensors: the bytes of 'layer.weight' end at" in refused[0].json()["message"]
    assert refused[1].status_code == 500
    assert "layer.weight has the shape [2, 3] in it and [4, 3] in the model" in refused[1].text


ANSWERS = """
import torch
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def preprocess(self, data):
        return torch.ones(len(data), 3)

    def postprocess(self, output):
        return [f"{row[0]:g}" for row in output.tolist()]
"""


def test_another_checkpoint_in_the_document_swaps_without_losing_a_request(tmp_path: Path) -> None:
    """Planned, applied, and undone from what is kept; a place that is none changes nothing."""
    store = tmp_path / "store"
    store.mkdir()
    for name, weight in (("one", 1.0), ("two", 2.0)):
        save_dcp(store / name, {"layer.weight": torch.full((2, 3), weight), "layer.bias": torch.zeros(2)})
    with zipfile.ZipFile(store / "net.mar", "w") as archive:
        said = {"handler": "handler.py:Handler", "modelFile": "model.py"}
        archive.writestr("MAR-INF/MANIFEST.json", manifest("net", **said))
        archive.writestr("model.py", MODEL)
        archive.writestr("handler.py", ANSWERS)

    def document(checkpoint: str) -> str:
        version = {"url": "net.mar", "workers": 1, "checkpoint": checkpoint}
        return json.dumps({"models": {"net": {"versions": {"1.0": version}}}})

    (tmp_path / "models.yaml").write_text(document("one"))
    words = ["--desired-state", str(tmp_path / "models.yaml")]
    settings = {"log_location": str(tmp_path / "logs"), "job_queue_size": "10000"}
    with Server(tmp_path, entry="marserve", store=store, arguments=words, settings=settings) as server:
        address = f"{server.management}/desired-state"
        for _ in poll(60, "the server is ready"):
            if server.client.get(f"{server.inference}/readyz").status_code == 200:
                break
        planned = server.client.post(f"{address}/plan", content=document("two")).json()["steps"]
        nowhere = server.client.put(address, content=document("three"))
        with LoadBeside(int(server.inference.rsplit(":", 1)[1]), "net", 50, 1) as load:
            server.client.put(address, content=document("two")).raise_for_status()
            applied, between = server.describe("net")["declared"], server.predict("net").text
            undone = server.client.post(f"{address}/undo")
            undone_at = time.monotonic() - load.started_at
        now = server.client.get(f"{address}/document").text

    assert next((step["step"], step.get("detail")) for step in planned) == ("load", "net.mar, checkpoint two")
    assert nowhere.status_code == 400
    assert "checkpoint of the desired state is three, and neither the archive nor" in nowhere.json()["message"]
    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    assert {outcome.body for outcome in load.outcomes} == {b"3.5", b"6.5"}
    assert {each.body for each in load.outcomes if each.sent_s > undone_at + 0.3} == {b"3.5"}
    assert (applied["checkpoint"], between) == ("two", "6.5")
    assert [step.get("isLoaded") for step in undone.json()["steps"] if step["step"] == "load"] == [True]
    assert "checkpoint: one" in now
