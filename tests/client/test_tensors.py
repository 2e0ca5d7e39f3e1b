"""Arrays to bodies of the Open Inference Protocol and back, held against what the server's workers read and write."""

from __future__ import annotations

import builtins
import importlib
import json
import struct
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from marserve_client import tensors
from marserve_client.errors import BadAnswer, BadInput
from marserve_client.tensors import HEADER_LENGTH, Tensors, read_answer, write_request
from marserve_handlers.declared.open_inference.answer import write_answer
from marserve_handlers.declared.open_inference.datatypes import NUMPY
from marserve_handlers.declared.open_inference.request import AskedOutput, InferRequest, read_request

NUMBERS = {datatype: dtype for datatype, dtype in NUMPY.items() if datatype != "BF16"}


def as_worker_reads(inputs: dict[str, Any], **more: Any) -> InferRequest:
    """What the server's worker makes of a request."""
    body, headers = write_request(inputs, **more)
    return read_request(body, headers.get(HEADER_LENGTH))


def as_worker_writes(outputs: dict[str, tuple[str, Any]], *, is_binary: bool) -> Tensors:
    """What the client makes of an answer of the server's worker."""
    request = InferRequest("", {}, {}, {}, None, is_binary)
    asked = [AskedOutput(name, is_binary) for name in outputs]
    body, length = write_answer(request, asked, outputs, "m", "1.0")
    return read_answer(body, None if length is None else str(length), "r-1")


@pytest.fixture(name="bare")
def _without_numpy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as it is where numpy is not installed."""
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "numpy":
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    spec = importlib.util.find_spec("marserve_client.tensors")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------- requests


@given(st.sampled_from(sorted(NUMBERS)).flatmap(lambda name: arrays.arrays(NUMBERS[name], arrays.array_shapes())))
def test_an_array_arrives_as_it_is(array: Any) -> None:
    """Every type of numbers, every shape; bit by bit."""
    arrived = as_worker_reads({"x": array}).tensors["x"]

    assert (arrived.dtype, arrived.shape, arrived.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12)[::2],
        np.zeros((0, 3), "float32"),
        np.float64(2.5),
        [np.ones(2), np.zeros(2)],
    ],
    ids=["big endian", "turned", "with gaps", "empty", "one number", "in a list"],
)
def test_arrays_that_lie_otherwise_arrive_with_their_values(array: Any) -> None:
    """Byte order, strides, no values at all."""
    arrived = as_worker_reads({"x": array}).tensors["x"]

    assert arrived.shape == np.asarray(array).shape
    assert arrived.tolist() == np.asarray(array).tolist()


@pytest.mark.parametrize(
    "value",
    [
        np.array([b"one", "zw\u00f6lf".encode(), b""], object),
        np.array(["one", "zw\u00f6lf", ""]),
        np.array([b"one", "zw\u00f6lf", b""], object),
        ["one", "zw\u00f6lf", ""],
        [b"one", "zw\u00f6lf", b""],
    ],
    ids=["bytes", "texts", "both", "list of texts", "list of both"],
)
def test_texts_and_bytes_arrive_as_bytes(value: Any) -> None:
    """Arrays in binary, lists in JSON."""
    arrived = as_worker_reads({"x": value}, datatypes={"x": "BYTES"})

    assert arrived.datatypes == {"x": "BYTES"}
    assert arrived.tensors["x"].tolist() == [b"one", "zw\u00f6lf".encode(), b""]


@pytest.mark.parametrize(
    ("value", "said", "datatype", "shape"),
    [
        ([[1.0, 2], [3, 4.5]], None, "FP32", [2, 2]),
        ([1, 2, 3], None, "INT64", [3]),
        ([1, 2, 3], "FP64", "FP64", [3]),
        ([[True], [False]], None, "BOOL", [2, 1]),
        ((), None, "FP32", [0]),
        ([[], []], "INT8", "INT8", [2, 0]),
        (2.5, None, "FP32", []),
    ],
)
def test_lists_say_shape_and_type_by_their_values(
    value: Any, said: str | None, datatype: str, shape: list[int]
) -> None:
    """`datatypes` says another one."""
    arrived = as_worker_reads({"x": value}, datatypes={"x": said} if said else None)

    assert arrived.datatypes == {"x": datatype}
    assert list(arrived.tensors["x"].shape) == shape


def test_bfloat16_is_sent_as_sixteen_bits() -> None:
    """An array of uint16 that says so; the worker has float32 of it."""
    arrived = as_worker_reads({"x": np.array([0x3FC0, 0xC000], "uint16")}, datatypes={"x": "BF16"})

    assert arrived.tensors["x"].tolist() == [1.5, -2.0]


@pytest.mark.torch
def test_tensors_of_torch_arrive() -> None:
    """On the CPU, of any layout in memory, with gradients; bfloat16, too."""
    import torch

    inputs = {
        "turned": torch.arange(6).reshape(2, 3).T,
        "learning": torch.tensor([1.5], requires_grad=True),
        "brain": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "half": torch.tensor([0.5], dtype=torch.float16),
    }

    arrived = as_worker_reads(inputs)

    assert arrived.datatypes == {"turned": "INT64", "learning": "FP32", "brain": "BF16", "half": "FP16"}
    assert [arrived.tensors[name].tolist() for name in inputs] == [[[0, 3], [1, 4], [2, 5]], [1.5], [1.5, -2], [0.5]]


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["sparse", "complex", "meta"])
def test_tensors_that_cannot_be_sent_are_named(kind: str) -> None:
    """With their name, before anything is sent."""
    import torch

    made = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "complex": lambda: torch.zeros(2, dtype=torch.complex64),
        "meta": lambda: torch.zeros(2, device="meta"),
    }[kind]()

    with pytest.raises(BadInput, match="cannot be sent") as refused:
        write_request({"x": made})

    assert (refused.value.field, refused.value.status) == ("x", None)


@pytest.mark.parametrize(
    ("inputs", "more", "words"),
    [
        ({}, {}, "inputs must be a dict of at least one tensor"),
        ([1.0], {}, "inputs must be a dict of at least one tensor"),
        ({"": [1]}, {}, "inputs: '' is no name"),
        ({3: [1]}, {}, "inputs: 3 is no name"),
        ({"x": [[1], [1, 2]]}, {}, "x: its lists have unequal lengths"),
        ({"x": [[1], 2]}, {}, "x: its lists have unequal lengths"),
        ({"x": [1, "a"]}, {}, "x: its lists have values of int, str"),
        ({"x": [None]}, {}, "x: its lists have values of NoneType"),
        ({"x": [np.ones(1), np.ones(2)]}, {}, "x: its lists have arrays of unequal shapes"),
        ({"x": [b"\xff"]}, {}, "x: has bytes that are no UTF-8"),
        ({"x": b"abc"}, {}, "x: got one bytes; a tensor of BYTES is a list"),
        ({"x": object()}, {}, "x: got object; an input is an array of numpy"),
        ({"x": {"a": 1}}, {}, "x: got dict; an input is an array of numpy"),
        ({"x": np.zeros(2, "complex64")}, {}, "x: an array of complex64 cannot be sent"),
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, {}, "x: an array of datetime64"),
        ({"x": np.zeros(1, [("a", "i4")])}, {}, "x: an array of "),
        ({"x": np.array([1, None], object)}, {}, "x: has an element of type int"),
        *([({"x": np.zeros((1,) * 33)}, {}, "x: has 33 dimensions")] if np.__version__ >= "2" else ()),  # 32 before
        ({"x": np.zeros(2)}, {"datatypes": {"x": "FP32"}}, r"x: datatypes says FP32, .* \.astype\('float32'\)"),
        ({"x": np.zeros(2)}, {"datatypes": {"x": "FP8"}}, "x: 'FP8' is no data type"),
        ({"x": np.zeros(2)}, {"datatypes": {"y": "FP32"}}, "datatypes: names 'y', which is no input; there are x"),
        ({"x": np.array(["a"])}, {"datatypes": {"x": "FP32"}}, "x: an array of <U1 is BYTES"),
        ({"x": [1.0]}, {"datatypes": {"x": "FP16"}}, "x: FP16 is sent as an array"),
        ({"x": ["a"]}, {"datatypes": {"x": "INT8"}}, "x: datatypes says INT8, and its values are BYTES"),
        ({"x": [1]}, {"outputs": "sum"}, "outputs: expected a list of names"),
        ({"x": [1]}, {"parameters": {"a": object()}}, "parameters: cannot be written as JSON"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_name(inputs: Any, more: dict[str, Any], words: str) -> None:
    """Before anything is sent: what came, and what to do."""
    with pytest.raises(BadInput, match=f"^{words}") as refused:
        write_request(inputs, **more)

    assert refused.value.status is None


def test_a_request_names_the_outputs_and_parameters() -> None:
    """Outputs are asked for in binary, where numpy is there to read them."""
    request = as_worker_reads({"x": [1]}, outputs=["sum"], parameters={"priority": 3})

    assert request.outputs == [AskedOutput("sum", is_binary=True)]
    assert request.parameters == {"priority": 3, "binary_data_output": True}


# ------------------------------------------------------------------------------------------------------------ answers


@given(st.sampled_from(sorted(NUMBERS)).flatmap(lambda name: arrays.arrays(NUMBERS[name], arrays.array_shapes())))
def test_an_array_comes_back_as_it_is(array: Any) -> None:
    """Bit by bit; writable, and in memory of its own."""
    datatype = {dtype: name for name, dtype in NUMBERS.items()}[array.dtype.name]
    came = as_worker_writes({"y": (datatype, array)}, is_binary=True)

    assert (came["y"].dtype, came["y"].shape, came["y"].tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert came["y"].flags.writeable
    assert came["y"].flags.aligned


@pytest.mark.parametrize("is_binary", [True, False])
def test_texts_and_numbers_come_back_in_both_forms(is_binary: bool) -> None:
    """With the protocol's types, the version that answered and the request's id."""
    texts = np.array([[b"one", "zw\u00f6lf".encode()]], object)
    came = as_worker_writes({"y": ("FP32", np.ones((2, 1), "float32")), "t": ("BYTES", texts)}, is_binary=is_binary)

    assert came["y"].tolist() == [[1], [1]]
    assert came["y"].dtype == np.float32
    assert came["t"].tolist() == texts.tolist()
    assert (came.datatypes, came.model_version, came.request_id) == ({"y": "FP32", "t": "BYTES"}, "1.0", "r-1")


@pytest.mark.torch
def test_an_output_becomes_a_tensor_of_torch() -> None:
    """bfloat16 as torch's own, over the same memory; BYTES have none."""
    import torch

    came = as_worker_writes(
        {
            "y": ("FP32", np.ones(2, "float32")),
            "b": ("BF16", np.array([1.5, -2], "float32")),
            "t": ("BYTES", np.array([b"a"], object)),
        },
        is_binary=True,
    )

    assert came["b"].dtype == np.uint16
    assert came.torch("b").dtype is torch.bfloat16
    assert came.torch("b").tolist() == [1.5, -2.0]
    came.torch("y")[0] = 7
    assert came["y"].tolist() == [7, 1]
    with pytest.raises(TypeError, match="BYTES"):
        came.torch("t")


def test_torch_is_not_imported_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants one has imported it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    with pytest.raises(RuntimeError, match="import torch"):
        Tensors({"y": np.ones(1)}, {"y": "FP64"}).torch("y")

    assert "torch" not in sys.modules


def answer(*outputs: dict[str, Any], raw: bytes = b"") -> tuple[bytes, str]:
    """The body of an answer, and its header."""
    text = json.dumps({"outputs": list(outputs)}).encode()
    return text + raw, str(len(text))


def output(**other: Any) -> dict[str, Any]:
    """An output with raw bytes, and what is other about it."""
    return {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}, **other}


RAW = struct.pack("<f", 1)


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (b"", None, "no inference"),
        (b"<html>", None, "no inference"),
        (b"[1]", None, "no inference"),
        (b"{}", None, "'outputs' is missing"),
        (b'{"outputs": [3]}', None, "no inference"),
        (b"[" * 100_000, None, "no inference"),
        (b"{}", "3", "is '3', and the body has 2 bytes"),
        (b"{}", "-1", "is '-1', and"),
        (b"{}", "9" * 5000, "and the body has 2 bytes"),
        (*answer(output(), raw=RAW + b"x"), "5 bytes stand behind the JSON, and the outputs have 4"),
        (*answer(output(), raw=RAW[:3]), "binary_data_size of 4, and 3 bytes are left"),
        (*answer(output(shape=[2]), raw=RAW), "y has 4 bytes, and its shape"),
        (*answer(output(shape=[1 << 60, 1 << 60]), raw=RAW), "y has 4 bytes, and its shape"),
        (*answer(output(shape=[-1]), raw=RAW), "y has the shape"),
        (*answer(output(shape=[1] * 33), raw=RAW), "y has the shape"),
        (*answer(output(datatype="FP8"), raw=RAW), "y has the datatype FP8"),
        (*answer(output(parameters={"binary_data_size": "4"}), raw=RAW), "binary_data_size of 4"),
        (*answer(output(datatype="BYTES"), raw=RAW), "y ends in the middle of element 0"),
        (*answer(output(datatype="BYTES", shape=[2]), raw=bytes(4)), "y has 1 elements, and its shape 2"),
        (*answer(output(parameters={}, data=[1, 2])), "no inference"),
        (*answer(output(parameters={}, data="abc")), "no inference"),
        (*answer(output(parameters={}, datatype="BYTES", data=[3])), "no inference"),
    ],
)
def test_an_answer_that_does_not_fit_is_no_answer(body: bytes, length: str | None, words: str) -> None:
    """One error with the request's id, whatever came; no memory is taken by what it only says."""
    with pytest.raises(BadAnswer, match=words) as failed:
        read_answer(body, length, "r-1")

    assert failed.value.request_id == "r-1"


# -------------------------------------------------------------------------------------------------------------- numpy


def test_without_numpy_lists_go_and_come(bare: ModuleType) -> None:
    """As nested lists, by JSON both ways."""
    body, headers = bare.write_request({"x": [[1.0, 2.0]]}, outputs=["y"])
    request = read_request(body, headers.get(HEADER_LENGTH))
    text, _ = answer(
        output(parameters={}, shape=[2, 2], data=[1, 2, 3, 4]),
        output(name="e", shape=[2, 0, 3], data=[], parameters={}),
    )

    came = bare.read_answer(text, None)

    assert request.tensors["x"].tolist() == [[1, 2]]
    assert request.outputs == [AskedOutput("y", is_binary=False)]
    assert came == {"y": [[1, 2], [3, 4]], "e": [[], []]}


@pytest.mark.parametrize("value", [np.ones(1), object()])
def test_without_numpy_an_array_is_refused_with_the_next_step(bare: ModuleType, value: Any) -> None:
    """Which package is missing."""
    with pytest.raises(BadInput, match=r"x: .* pip install numpy"):
        bare.write_request({"x": value})


@pytest.mark.parametrize(
    "given_output",
    [output(parameters={}, data=[1, 2]), output(parameters={}, shape=[1 << 40, 0], data=[]), output(shape=[1])],
)
def test_without_numpy_a_wrong_answer_is_no_answer(bare: ModuleType, given_output: dict[str, Any]) -> None:
    """Values that do not fit, lists of nothing without end, and binary that was not asked for."""
    body, length = answer(given_output, raw=RAW if given_output["parameters"] else b"")

    with pytest.raises(BadAnswer):
        bare.read_answer(body, length)


def test_the_module_reads_numpy_here() -> None:
    """The other tests are of the whole."""
    assert tensors.np is np
