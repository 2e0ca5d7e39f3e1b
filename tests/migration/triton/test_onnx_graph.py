"""Tests for reading what an ONNX file takes and gives."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marserve.migration.triton.onnx_graph import GraphTensor, NoOnnx, read_graph

onnx: Any = pytest.importorskip("onnx")


def model_bytes() -> bytes:
    """A model with a constant among its inputs, as old files have them, and weights."""
    helper, kinds = onnx.helper, onnx.TensorProto
    weights = helper.make_tensor("w", kinds.FLOAT, [64], [0.5] * 64)
    inputs = [
        helper.make_tensor_value_info("x.1", kinds.FLOAT, ["N", None, 3]),
        helper.make_tensor_value_info("w", kinds.FLOAT, [64]),
        helper.make_tensor_value_info("words", kinds.STRING, []),
    ]
    outputs = [helper.make_tensor_value_info("y", kinds.BFLOAT16, [1, 1 << 33])]
    node = helper.make_node("Identity", ["x.1"], ["y"])
    graph = helper.make_graph([node], "g", inputs, outputs, initializer=[weights])
    return bytes(helper.make_model(graph).SerializeToString())


def test_inputs_and_outputs_are_read_without_what_the_file_has_values_for(tmp_path: Path) -> None:
    """Sizes that vary, with a name or without one, are None; a scalar has none."""
    path = tmp_path / "model.onnx"
    path.write_bytes(model_bytes())

    graph = read_graph(path)

    assert graph.inputs == (GraphTensor("x.1", "float32", (None, None, 3)), GraphTensor("words", "string", ()))
    assert graph.outputs == (GraphTensor("y", "bfloat16", (1, 1 << 33)),)


def test_a_file_far_larger_than_memory_is_read_past_its_weights(tmp_path: Path) -> None:
    """A sparse file of 64 GiB in which a node of the graph fills nearly all."""
    path = tmp_path / "model.onnx"
    helper, kinds = onnx.helper, onnx.TensorProto
    value = helper.make_tensor_value_info("x", kinds.INT64, [2])
    tail = onnx.GraphProto(input=[value], output=[value]).SerializeToString()
    filling = 64 << 30

    def key(field: int, length: int) -> bytes:
        written = bytearray([field << 3 | 2])
        while length > 0x7F:
            written.append(length & 0x7F | 0x80)
            length >>= 7
        return bytes(written + bytes([length]))

    node = key(1, filling)
    with path.open("wb") as file:
        file.write(key(7, len(node) + filling + len(tail)) + node)
        file.seek(filling, 1)
        file.write(tail)

    assert read_graph(path).inputs == (GraphTensor("x", "int64", (2,)),)


@pytest.mark.parametrize("data", [b"", b"\0", b"PK\x03\x04", b"\x3a\xff\xff\x01", b"\x80" * 11, b"\x3a\x02\x5a\x7f"])
def test_what_is_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    """With a sentence."""
    path = tmp_path / "model.onnx"
    path.write_bytes(data)

    with pytest.raises(NoOnnx):
        read_graph(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
def test_a_damaged_model_is_read_or_refused(tmp_path: Path, place: int, bytes_there: bytes) -> None:
    """By no other error."""
    data = bytearray(model_bytes())
    place %= len(data)
    data[place : place + len(bytes_there)] = bytes_there
    path = tmp_path / "model.onnx"
    path.write_bytes(data)

    with contextlib.suppress(NoOnnx):
        read_graph(path)
