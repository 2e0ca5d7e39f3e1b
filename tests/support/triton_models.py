"""Model repositories of Triton's, made of small ONNX and TorchScript models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, tuple[str, list[int | str]]]


def write_config(root: Path, model: str, text: str) -> None:
    """`MODEL/config.pbtxt` with this text."""
    (root / model).mkdir(parents=True, exist_ok=True)
    (root / model / "config.pbtxt").write_text(text)


def write_onnx(path: Path, nodes: list[tuple[str, list[str], list[str]]], inputs: Tensors, outputs: Tensors) -> Path:
    """An ONNX model of such nodes: operator, inputs, outputs. A tensor is its type (`FLOAT`) and its sizes."""
    import onnx  # late: optional

    helper = onnx.helper

    def values(tensors: Tensors) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, getattr(onnx.TensorProto, kind), sizes)
            for name, (kind, sizes) in tensors.items()
        ]

    graph = helper.make_graph([helper.make_node(*node) for node in nodes], "graph", values(inputs), values(outputs))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write_negative(root: Path, model: str = "negative", version: int = 1, *, rows: int | str = "n") -> Path:
    """A version of an ONNX model with the input `x` [rows, 2], and `minus` and `size` of it as outputs."""
    sizes: list[int | str] = [rows, 2]
    ends: Tensors = {"minus": ("FLOAT", sizes), "size": ("FLOAT", sizes)}
    nodes = [("Neg", ["x"], ["minus"]), ("Abs", ["x"], ["size"])]
    return write_onnx(root / model / str(version) / "model.onnx", nodes, {"x": ("FLOAT", sizes)}, ends)


def write_torchscript(path: Path, function: Callable[..., Any], *examples: Any) -> Path:
    """A function of tensors, traced with these."""
    import torch  # late: optional

    class Program(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return function(*tensors)

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(Program(), examples), str(path))
    return path


NEGATIVE = """
name: "negative"
platform: "onnxruntime_onnx"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "minus" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
