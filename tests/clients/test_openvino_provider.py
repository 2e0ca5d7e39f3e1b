"""ONNX Runtime's provider of OpenVINO, in an environment of its own: it computes what the CPU's provider computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients.environments import Client

onnx = pytest.importorskip("onnx")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.clients


def test_a_session_runs_in_openvino_where_its_configuration_says_so(tmp_path: Path) -> None:
    """By `providers: [OpenVINO, CPU]`, which is refused where it does not begin."""
    client = Client.of("onnxruntime-openvino")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    dice = np.random.default_rng(1)
    weights = dice.normal(size=(8, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Relu", ["z"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 8])],
        [helper.make_tensor_value_info("y", kind, ["n", 4])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(tmp_path / "m.onnx"))
    rows = dice.normal(size=(5, 8)).astype(np.float32)

    found = client.run(tmp_path / "m.onnx", json.dumps(rows.tolist()))

    assert found["openvino"]["providers"] == ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
    assert found["cpu"]["providers"] == ["CPUExecutionProvider"]
    for each in found.values():
        assert np.allclose(each["seen"], np.maximum(rows @ weights, 0), rtol=1e-5, atol=1e-5)
