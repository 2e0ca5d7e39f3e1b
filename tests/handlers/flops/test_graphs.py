"""Counts of ONNX graphs: convolutions and matrix products by inferred shapes (`flops/graphs.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from marserve_handlers.flops.cost import Cost, NotCounted, fit  # noqa: E402
from marserve_handlers.flops.graphs import CountedGraph  # noqa: E402
from marserve_handlers.optimising.call_arrays import Call  # noqa: E402

FLOAT = onnx.TensorProto.FLOAT


def graph(folder: Path, nodes: list[Any], inputs: dict[str, list[Any]], weights: dict[str, list[int]]) -> str:
    """The file of a graph whose last node's output is `y`."""
    made = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [onnx.helper.make_tensor_value_info("y", FLOAT, None)],
        [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in weights.items()],
    )
    path = folder / "model.onnx"
    onnx.save(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def cost_of(path: str, **arrays: Any) -> tuple[Cost, set[str]]:
    """Of a call of the graph, and what is not counted."""
    counted = CountedGraph(path)
    call = Call((), arrays)
    return fit(lambda rows: counted.count(call, rows), call.rows), counted.uncounted


@pytest.mark.parametrize("axis", ["n", 2])
def test_convolutions_and_products_count_two_for_each_multiplication(tmp_path: Path, axis: Any) -> None:
    """For any size of the batch, also where the file names one."""
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], group=2),
        make("Flatten", ["c"], ["f"]),
        make("Gemm", ["f", "a"], ["g"], transB=1),
        make("MatMul", ["g", "b"], ["y"]),
    ]
    weights = {"w": [8, 2, 3, 3], "a": [10, 8 * 6 * 6], "b": [10, 5]}
    path = graph(tmp_path, nodes, {"x": [axis, 4, 8, 8]}, weights)

    cost, uncounted = cost_of(path, x=np.zeros((2, 4, 8, 8), np.float32))

    assert cost == Cost(0.0, float(2 * (8 * 6 * 6 * 2 * 9 + 8 * 6 * 6 * 10 + 10 * 5)))
    assert uncounted == set()


def test_what_is_not_counted_is_named(tmp_path: Path) -> None:
    """A recurrent layer beside a product, and a product whose shape depends on numbers."""
    make = onnx.helper.make_node
    nodes = [
        make("MatMul", ["x", "b"], ["p"]),
        make("LSTM", ["p", "w", "r"], ["l"], hidden_size=3),
        make("NonZero", ["p"], ["z"]),
        make("Cast", ["z"], ["f"], to=FLOAT),
        make("MatMul", ["f", "f2"], ["y"]),
    ]
    weights = {"b": [4, 4], "w": [1, 12, 4], "r": [1, 12, 3], "f2": [6, 2]}
    path = graph(tmp_path, nodes, {"x": ["n", 5, 4]}, weights)

    cost, uncounted = cost_of(path, x=np.zeros((2, 5, 4), np.float32))

    assert cost == Cost(0.0, 2.0 * 5 * 4 * 4)
    assert uncounted == {"LSTM", "MatMul of unknown shape"}


def test_a_file_that_is_no_graph_is_not_counted(tmp_path: Path) -> None:
    """With the reason."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not a graph")

    with pytest.raises(NotCounted, match="the ONNX file cannot be read"):
        CountedGraph(str(path))
