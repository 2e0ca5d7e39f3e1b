"""Counts what an ONNX graph takes: its convolutions and matrix products, by the shapes that inference finds.

Two for each multiplication with its addition, as torch's counter. Everything else takes little, or is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marserve_handlers.flops.cost import NotCounted
from marserve_handlers.optimising.call_arrays import Call

Shape = tuple[int, ...]

# Operators that take much and are not counted.
_HEAVY = frozenset(("LSTM", "GRU", "RNN", "Attention", "Einsum", "If", "Loop", "Scan", "DeformConv"))


class CountedGraph:
    """The graph of a file. Raises NotCounted without the package onnx, or for a file that it cannot read."""

    dtype = "float32"

    def __init__(self, path: str) -> None:
        try:
            import onnx  # here: it may not be installed
        except ImportError:
            raise NotCounted(
                "the package onnx is not installed: pip install onnx, or give the server's extra optimise"
            ) from None
        try:
            self._model: Any = onnx.load(path, load_external_data=False)
        except Exception as error:  # protobuf's, the system's
            raise NotCounted(f"the ONNX file cannot be read ({type(error).__name__}: {error})") from None
        self._infer: Callable[..., Any] = onnx.shape_inference.infer_shapes
        self.uncounted: set[str] = set()

    def count(self, call: Call, rows: int) -> int:
        """FLOPs of the same call with so many rows. Raises NotCounted where no shape of a product is known."""
        now = call.rows
        given: dict[str, Shape] = {}
        for name, leaf in call.leaves.items():
            shape = tuple(leaf.shape)
            given[name] = (rows, *shape[1:]) if now and shape and shape[0] == now else shape
        model: Any = type(self._model)()
        model.CopyFrom(self._model)
        del model.graph.value_info[:]  # an exporter's, which may have another batch size
        for node in [*model.graph.input, *model.graph.output]:
            dimensions = node.type.tensor_type.shape.dim
            if node.name in given and len(dimensions) == len(given[node.name]):
                for dimension, length in zip(dimensions, given[node.name], strict=True):
                    dimension.dim_value = length
            elif node.name not in given:
                node.type.tensor_type.ClearField("shape")
        try:
            graph = self._infer(model, data_prop=True).graph
        except Exception as error:
            raise NotCounted(f"the graph's shapes are not known ({type(error).__name__})") from None
        return self._sum(graph, given)

    def _sum(self, graph: Any, given: Mapping[str, Shape]) -> int:
        shapes: dict[str, Shape] = {each.name: tuple(each.dims) for each in graph.initializer} | dict(given)
        for value in [*graph.value_info, *graph.output, *graph.input]:
            dimensions = value.type.tensor_type.shape.dim
            if value.type.tensor_type.HasField("shape") and all(each.HasField("dim_value") for each in dimensions):
                shapes.setdefault(value.name, tuple(each.dim_value for each in dimensions))
        total = 0
        for node in graph.node:
            rule = _RULES.get(node.op_type)
            if rule is None:
                if node.op_type in _HEAVY or node.domain not in ("", "ai.onnx"):
                    self.uncounted.add(node.op_type)
                continue
            inputs, output = [shapes.get(name) for name in node.input], shapes.get(node.output[0])
            flops = rule(node, inputs, output)
            if flops is None:
                self.uncounted.add(f"{node.op_type} of unknown shape")
            else:
                total += flops
        return total


def _conv(node: Any, inputs: Sequence[Shape | None], output: Shape | None) -> int | None:
    weight = inputs[3 if node.op_type == "QLinearConv" else 1]
    return None if output is None or weight is None else 2 * math.prod(output) * math.prod(weight[1:])


def _conv_back(node: Any, inputs: Sequence[Shape | None], output: Shape | None) -> int | None:
    data, weight = inputs[0], inputs[1]
    return None if data is None or weight is None else 2 * math.prod(data) * math.prod(weight[1:])


def _product(node: Any, inputs: Sequence[Shape | None], output: Shape | None) -> int | None:
    first = inputs[0]
    return None if output is None or not first else 2 * math.prod(output) * first[-1]


def _gemm(node: Any, inputs: Sequence[Shape | None], output: Shape | None) -> int | None:
    first = inputs[0]
    if output is None or first is None or len(first) != 2:
        return None
    is_turned = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return 2 * math.prod(output) * first[0 if is_turned else 1]


_RULES: Mapping[str, Callable[[Any, Sequence[Shape | None], Shape | None], int | None]] = {
    "Conv": _conv,
    "QLinearConv": _conv,
    "ConvInteger": _conv,
    "ConvTranspose": _conv_back,
    "MatMul": _product,
    "MatMulInteger": _product,
    "QLinearMatMul": _product,
    "Gemm": _gemm,
}
