"""Devices that workers were given, used for real, by torch and by ONNX Runtime (`make test-gpu`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.server import Server, make_archive, poll

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.timeout(300)]

FALLS_BACK = """
import torch
class Handler:
    def initialize(self, context):
        is_there = torch.cuda.is_available() and context.system_properties["gpu_id"] is not None
        self.device = torch.device("cuda:0" if is_there else "cpu")
    def handle(self, rows, context):
        return [str(torch.ones(2, device=self.device).device)] * len(rows)
"""

SUM = """
import numpy
from marserve_handlers.base import BaseHandler
class Handler(BaseHandler):
    def initialize(self, context):
        context.manifest["model"]["serializedFile"] = "m.onnx"
        super().initialize(context)
    def preprocess(self, data):
        return numpy.ones((len(data), 2), dtype=numpy.float32)
"""


def gpu_runtime() -> None:
    """Skip where ONNX Runtime is the build for processors."""
    pytest.importorskip("onnx", reason="makes the model")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime-gpu")
    devices = {"CUDAExecutionProvider", "MIGraphXExecutionProvider", "ROCMExecutionProvider"}
    if not devices & set(runtime.get_available_providers()):
        pytest.skip(
            f"onnxruntime {runtime.__version__} has no provider for devices: install onnxruntime-gpu in its place"
        )


def sum_archive(store: Path, config: str = "") -> None:
    """An ONNX model that adds its input to itself."""
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    tensors = [helper.make_tensor_value_info(name, kind, ["n", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    make_archive(store / "m.mar", SUM, config=config, **{"m.onnx": model.SerializeToString()})


def test_a_device_that_torch_can_use_is_used(tmp_path: Path) -> None:
    """The check itself opens no way to the processor."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", FALLS_BACK, config="deviceIds: [0]\n")
        server.register("m.mar").raise_for_status()

        assert server.predict("m").text == "cuda:0"
        assert not server.describe("m").get("warnings")


def test_a_torch_that_sees_no_device_fails_the_load(tmp_path: Path) -> None:
    """What a driver that is too old looks like from here: the model hides the devices from its own process."""
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'; os.environ['HIP_VISIBLE_DEVICES'] = '-1'\n"
    with Server(tmp_path, entry="marserve") as server:
        config = "deviceIds: [0]\nworkerStart: fresh\n"
        make_archive(server.store / "m.mar", hidden + FALLS_BACK, config=config)

        answer = server.register("m.mar")

        assert answer.status_code == 500
        said = "".join(file.read_text() for file in tmp_path.rglob("*.log"))
        assert "given device 0, which torch" in said


def test_an_onnx_model_computes_on_its_workers_device(tmp_path: Path) -> None:
    """Describe names the provider."""
    gpu_runtime()
    with Server(tmp_path, entry="marserve") as server:
        sum_archive(server.store, "deviceIds: [0]\n")
        server.register("m.mar").raise_for_status()

        assert server.predict("m").json() == [2.0, 2.0]
        (worker,) = server.describe("m")["workers"]
        assert worker["computesOn"].split("ExecutionProvider")[0] in ("CUDA", "MIGraphX", "ROCM")


HUNGRY = """
import torch
class Handler:
    def initialize(self, context):
        self.device = f"cuda:{context.system_properties['gpu_id']}"
        self.weights = torch.ones(1, device=self.device)
    def handle(self, rows, context):
        torch.empty(len(rows) << 28, dtype=torch.uint8, device=self.device)
        return [b"served"] * len(rows)
"""


def test_what_a_full_batch_takes_is_learned(tmp_path: Path) -> None:
    """256 MiB a row, none of which was taken when the model was loaded."""
    with Server(tmp_path, entry="marserve") as server:
        config = "deviceIds: [0]\nbatchSize: 4\nmaxBatchDelay: 3000\nbatchPolicy: fixed\n"
        make_archive(server.store / "m.mar", HUNGRY, config=config)
        server.register("m.mar").raise_for_status()
        before = server.describe("m")["deviceMemory"]["neededBytes"]

        with ThreadPoolExecutor(4) as clients:
            assert [answer.text for answer in clients.map(lambda _: server.predict("m"), range(4))] == ["served"] * 4

        for _ in poll(10, "it is learned"):
            if server.describe("m")["deviceMemory"]["neededBytes"] >= before + (3 << 28):
                break
