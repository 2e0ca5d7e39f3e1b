"""Tests for bodies of the Open Inference Protocol: what may come, and what is said of what may not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput
from marserve_handlers.declared.open_inference.request import AskedOutput, InferRequest, read_request


def tensor(**members: Any) -> dict[str, Any]:
    """An input `x` of two numbers, with other members."""
    described = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **members}
    return {name: value for name, value in described.items() if value is not None}


def raw(described: dict[str, Any], *values: bytes) -> tuple[bytes, str]:
    """A body with raw tensors behind its JSON, and the header's value."""
    text = json.dumps(described).encode()
    return text + b"".join(values), str(len(text))


def read(*inputs: Any, **members: Any) -> InferRequest:
    """A request in JSON."""
    return read_request(json.dumps({"inputs": list(inputs), **members}).encode())


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], 'expected a JSON object with a list "inputs"'),
        ({}, "inputs: expected a list of one tensor at least, each with name, shape and datatype"),
        ({"inputs": []}, "inputs: expected a list of one tensor at least, each with name, shape and datatype"),
        ({"inputs": [1]}, "inputs[0]: expected an object, got 1"),
        ({"inputs": [tensor()] * 2000}, "inputs: 2000 tensors came, and there may be 1024"),
        ({"inputs": [tensor(), tensor()]}, "x: came twice"),
        ({"inputs": [tensor(name=None)]}, "inputs[0].name: expected a name, got None"),
        ({"inputs": [tensor(name="")]}, "inputs[0].name: expected a name, got ''"),
        ({"inputs": [tensor(datatype="FLOAT")]}, "x: has the datatype 'FLOAT'; it must be one of BOOL, UINT8"),
        ({"inputs": [tensor(datatype=["FP32"])]}, "x: has the datatype ['FP32']; it must be one of BOOL, UINT8"),
        ({"inputs": [tensor(shape=None)]}, "x: has the shape None; it must be a list"),
        ({"inputs": [tensor(shape=[1, -1])]}, "x: has the shape [1, -1]; it must be a list"),
        ({"inputs": [tensor(shape=[1, 2.0])]}, "x: has the shape [1, 2.0]; it must be a list"),
        ({"inputs": [tensor(shape=[True, 2])]}, "x: has the shape [True, 2]; it must be a list"),
        ({"inputs": [tensor(shape=[1] * 33)]}, "x: has the shape [1, 1"),
        ({"inputs": [tensor(shape=[1 << 61, 1 << 61])]}, "x: has 2 values, and its shape"),
        ({"inputs": [tensor(shape=[0, 1 << 61], data=[])]}, "x: has the shape [0, 2305843009213693952], whose sizes"),
        (
            {"inputs": [tensor(datatype="BYTES", shape=[1 << 30, 0, 1 << 30], data=[])]},
            "x: has the shape [1073741824, 0, 1073741824], whose sizes are too large for an array",
        ),
        ({"inputs": [tensor(parameters={"content_type": 1})]}, "x.parameters.content_type: expected a text, got 1"),
        (
            {"inputs": [tensor()], "parameters": {"content_type": []}},
            "parameters.content_type: expected a text, got []",
        ),
        ({"inputs": [tensor(data=[1, None])]}, "x: has values that are no FP32: [1, None]"),
        (
            {"inputs": [tensor(data=[None, "1"], parameters={"content_type": "np"})]},
            "x: has values that are no FP32: [None, '1']",
        ),
        (
            {"inputs": [tensor(data=[None, 1], datatype="INT32", parameters={"content_type": "np"})]},
            "x: has values that are no INT32: [None, 1]",
        ),
        ({"inputs": [tensor(data=None)]}, "x: has no data"),
        ({"inputs": [tensor(data=[1, 2, 3])]}, "x: has 3 values, and its shape [1, 2] has 2"),
        ({"inputs": [tensor(data=[[1], [1, 2]])]}, "x: has lists of unequal lengths, or numbers beyond 64 bits"),
        ({"inputs": [tensor(data=["1", "2"])]}, "x: has values that are no FP32: ['1', '2']"),
        ({"inputs": [tensor(data={"a": 1})]}, "x: has values that are no FP32: [{'a': 1}]"),
        ({"inputs": [tensor(datatype="INT32", data=[1.5, 2])]}, "x: has values that are no INT32: [1.5, 2]"),
        ({"inputs": [tensor(datatype="UINT8", data=[1, 256])]}, "x: has a number outside of 0 to 255, those of UINT8"),
        ({"inputs": [tensor(datatype="UINT64", data=[-1, 2])]}, "x: has a number outside of 0 to 18446744073709551615"),
        ({"inputs": [tensor(datatype="BOOL", data=[1, 0])]}, "x: has values that are no BOOL: [1, 0]"),
        ({"inputs": [tensor(datatype="FP16")]}, "x: is FP16, which JSON has no numbers for: send it as a binary"),
        ({"inputs": [tensor(datatype="BF16")]}, "x: is BF16, which JSON has no numbers for: send it as a binary"),
        ({"inputs": [tensor(datatype="BYTES", data=["a", 1])]}, "x: has a value that is no text: 1"),
        ({"inputs": [tensor(datatype="BYTES", data=["a"])]}, "x: has 1 values, and its shape [1, 2] has 2"),
        ({"inputs": [tensor(parameters=3)]}, "x.parameters: expected an object, got 3"),
        (
            {"inputs": [tensor(data=None, parameters={"binary_data_size": 8})]},
            "x: has binary_data_size, and the request no header Inference-Header-Content-Length",
        ),
        ({"inputs": [tensor()], "parameters": []}, "parameters: expected an object, got []"),
        ({"inputs": [tensor()], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output: expected tr"),
        ({"inputs": [tensor()], "id": 5}, "id: expected a text, got 5"),
        ({"inputs": [tensor()], "outputs": {}}, "outputs: expected a list of at most 1024 objects"),
        ({"inputs": [tensor()], "outputs": ["y"]}, "outputs[0]: expected an object, got 'y'"),
        ({"inputs": [tensor()], "outputs": [{"name": "y"}, {"name": "y"}]}, "y: is asked for twice"),
        (
            {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"classification": -1}}]},
            "outputs[0].parameters.classification: expected a whole number, got -1",
        ),
        (
            {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]},
            "outputs[0].parameters.binary_data: expected true or false, got 'yes'",
        ),
    ],
)
def test_json_that_does_not_fit_is_refused_with_its_place(document: Any, message: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(BadInput) as caught:
        read_request(json.dumps(document).encode())

    assert str(caught.value.message).startswith(message)


EIGHT = np.array([1, 2], "<f4").tobytes()


@pytest.mark.parametrize(
    ("members", "behind", "message"),
    [
        ({"parameters": {"binary_data_size": 8}}, b"", "x: has a binary_data_size of 8, and 0 bytes are left"),
        ({"parameters": {"binary_data_size": 8}}, EIGHT + b"!", "9 bytes came behind the JSON, and the inputs' binary"),
        ({"parameters": {"binary_data_size": 4}}, EIGHT[:4], "x: FP32 [1, 2]: 4 bytes came, and its shape takes 8"),
        ({"parameters": {"binary_data_size": -8}}, EIGHT, "x: has a binary_data_size of -8; it must be a whole number"),
        ({"parameters": {"binary_data_size": 8.0}}, EIGHT, "x: has a binary_data_size of 8.0; it must be a whole numb"),
        ({"parameters": {"binary_data_size": 8}, "data": [1, 2]}, EIGHT, "x: has both data and binary_data_size"),
        ({"datatype": "BOOL", "parameters": {"binary_data_size": 2}}, b"\0\2", "x: BOOL [1, 2]: a BOOL is the byte 0"),
        (
            {"shape": [1 << 61, 16], "parameters": {"binary_data_size": 8}},
            EIGHT,
            "x: FP32 [2305843009213693952, 16]: 8 bytes came, and its shape takes",
        ),
        (
            {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
            b"\2\0\0\0a",
            "x: BYTES [1]: its bytes end in the middle of element 0",
        ),
        (
            {"datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 7}},
            b"\1\0\0\0a\0\0",
            "x: BYTES [2]: its bytes end in the middle of element 1",
        ),
        (
            {"datatype": "BYTES", "shape": [1 << 60], "parameters": {"binary_data_size": 5}},
            b"\1\0\0\0a",
            "x: BYTES [1152921504606846976]: 1 elements came, and its shape has",
        ),
        (
            {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 8}},
            b"\0\0\0\0\0\0\0\0",
            "x: BYTES [1]: more elements came than the 1 of its shape",
        ),
    ],
)
def test_raw_tensors_that_do_not_fit_are_refused(members: dict[str, Any], behind: bytes, message: str) -> None:
    """Whatever their shape says, no more memory is taken than came."""
    body, length = raw({"inputs": [tensor(**{"data": None, **members})]}, behind)

    with pytest.raises(BadInput) as caught:
        read_request(body, length)

    assert str(caught.value.message).startswith(message)


@pytest.mark.parametrize("length", ["", "-1", "1000", "ten", "1e3", "٣", "9" * 30])
def test_a_length_of_the_json_that_is_none_is_refused(length: str) -> None:
    """With what it may be."""
    with pytest.raises(BadInput, match=r"Inference-Header-Content-Length: expected a number of bytes from 0 to"):
        read_request(json.dumps({"inputs": [tensor()]}).encode(), length)


# ------------------------------------------------------------------------------------------- what does


@pytest.mark.parametrize(
    ("datatype", "dtype", "values"),
    [
        ("BOOL", "bool", [True, False]),
        ("UINT8", "uint8", [0, 255]),
        ("UINT16", "uint16", [0, 65535]),
        ("UINT32", "uint32", [0, 4294967295]),
        ("UINT64", "uint64", [0, 18446744073709551615]),
        ("INT8", "int8", [-128, 127]),
        ("INT16", "int16", [-32768, 32767]),
        ("INT32", "int32", [-2147483648, 2147483647]),
        ("INT64", "int64", [-9223372036854775808, 9223372036854775807]),
        ("FP32", "float32", [0.5, -3]),
        ("FP64", "float64", [0.1, 1e300]),
    ],
)
def test_each_type_of_numbers_comes_flat_nested_and_raw(datatype: str, dtype: str, values: list[Any]) -> None:
    """One array whichever way."""
    wanted = np.array([values], dtype)
    body, length = raw(
        {"inputs": [tensor(datatype=datatype, data=None, parameters={"binary_data_size": wanted.nbytes})]},
        wanted.tobytes(),
    )

    found = [
        read(tensor(datatype=datatype, data=values)),
        read(tensor(datatype=datatype, data=[values])),
        read_request(body, length),
    ]

    for request in found:
        array = request.tensors["x"]
        assert array.dtype == wanted.dtype
        assert array.tolist() == wanted.tolist()
        assert request.datatypes == {"x": datatype}


def test_halves_come_raw_alone() -> None:
    """BF16 is float32 in arrays: numpy has no such type."""
    halves, upper = np.array([1.5, -2], "<f2"), np.array([0x3FC0, 0xC000], "<u2")
    body, length = raw(
        {
            "inputs": [
                tensor(name="a", datatype="FP16", data=None, parameters={"binary_data_size": 4}),
                tensor(name="b", datatype="BF16", data=None, parameters={"binary_data_size": 4}),
            ]
        },
        halves.tobytes(),
        upper.tobytes(),
    )

    tensors = read_request(body, length).tensors

    assert (tensors["a"].dtype, tensors["a"].tolist()) == ("float16", [[1.5, -2]])
    assert (tensors["b"].dtype, tensors["b"].tolist()) == ("float32", [[1.5, -2]])


def test_bytes_come_as_texts_and_raw() -> None:
    """Empty ones and what is no UTF-8 too; the shape holds."""
    body, length = raw(
        {"inputs": [tensor(datatype="BYTES", shape=[2, 1], data=None, parameters={"binary_data_size": 10})]},
        b"\0\0\0\0\2\0\0\0\xff\0",
    )

    assert read_request(body, length).tensors["x"].tolist() == [[b""], [b"\xff\0"]]
    assert read(tensor(datatype="BYTES", data=[["é", ""]])).tensors["x"].tolist() == [["é".encode(), b""]]


@pytest.mark.parametrize("shape", [[0], [0, 1 << 59], [1 << 29, 0, 1 << 30], [0] * 32])
@pytest.mark.parametrize("datatype", ["FP32", "FP64", "BYTES"])
def test_tensors_of_nothing_keep_their_shape(datatype: str, shape: list[int]) -> None:
    """Up to the largest that numpy has, in JSON and raw."""
    body, length = raw(
        {"inputs": [tensor(datatype=datatype, shape=shape, data=None, parameters={"binary_data_size": 0})]}
    )

    assert list(read(tensor(datatype=datatype, shape=shape, data=[])).tensors["x"].shape) == shape
    assert list(read_request(body, length).tensors["x"].shape) == shape


def test_raw_numbers_lie_over_the_body_itself() -> None:
    """No copy of a tensor is made."""
    body, length = raw({"inputs": [tensor(data=None, parameters={"binary_data_size": 8})]}, EIGHT)
    whole = bytearray(body)

    array = read_request(whole, length).tensors["x"]
    whole[-8:] = np.array([7, 8], "<f4").tobytes()

    assert array.tolist() == [[7, 8]]


def test_raw_and_plain_tensors_may_stand_side_by_side() -> None:
    """Per tensor, in the order of the inputs."""
    body, length = raw(
        {"inputs": [tensor(name="a"), tensor(name="b", data=None, parameters={"binary_data_size": 8})]}, EIGHT
    )

    assert [array.tolist() for array in read_request(body, length).tensors.values()] == [[[1, 2]], [[1, 2]]]


def test_outputs_are_asked_for_one_by_one_or_all() -> None:
    """`binary_data_output` is the word for those that say nothing."""
    given = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z", "parameters": {"classification": 3}}]
    request = read(tensor(), outputs=given, parameters={"binary_data_output": True}, id="7")

    assert request.id == "7"
    assert request.asked(["y", "z"]) == [AskedOutput("y", False), AskedOutput("z", True, 3)]
    assert read(tensor(), parameters={"binary_data_output": True}).asked(["y"]) == [AskedOutput("y", True)]
    with pytest.raises(BadInput, match="the output 'z' is asked for; the model gives y"):
        request.asked(["y"])


def test_content_types_are_read_and_null_is_nan_to_those_of_numpy_and_pandas() -> None:
    """Of a tensor, an output and the whole request; MLServer's codecs write NaN as null."""
    gaps = tensor(data=[None, 2.5])

    of_tensor = read({**gaps, "parameters": {"content_type": "np"}}, outputs=[{"name": "y"}])
    of_all = read(gaps, parameters={"content_type": "pd"})
    of_output = read(tensor(), outputs=[{"name": "y", "parameters": {"content_type": "str"}}])

    assert np.array_equal(of_tensor.tensors["x"], np.array([[np.nan, 2.5]], np.float32), equal_nan=True)
    assert of_tensor.content_types == {"x": "np"}
    assert np.isnan(of_all.tensors["x"][0, 0])
    assert (of_all.content_type, of_all.content_types) == ("pd", {})
    assert of_output.asked(["y"])[0].content_type == "str"
    assert [each.has_content_types for each in (of_tensor, of_all, of_output, read(tensor()))] == [True] * 3 + [False]
