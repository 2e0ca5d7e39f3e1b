"""Tests for tensors of gRPC messages as a binary body, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve.api.grpc.raw_tensors import fill_response, write_body
from marserve.errors import BadInput, HandlerFailed
from marserve_handlers.declared.open_inference.answer import write_answer
from marserve_handlers.declared.open_inference.request import InferRequest, read_request
from support.grpc_house import SCHEMA
from support.grpc_tensors import TENSORS, tensor

REQUEST, RESPONSE = (SCHEMA.message(f"inference.ModelInfer{side}") for side in ("Request", "Response"))
PARAMETER = SCHEMA.message("inference.InferParameter")
IN_MEMORY = {
    "shared_memory_region": PARAMETER(string_param="r"),
    "shared_memory_byte_size": PARAMETER(int64_param=8),
    "shared_memory_offset": PARAMETER(int64_param=4),
}


def read(message: Any) -> InferRequest:
    """What a worker makes of the message."""
    body, length = write_body(message)
    return read_request(body, str(length))


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": [tensor("FP32")], "raw_input_contents": [b"", b""]}, "There are 1 inputs and 2 raw_input_contents"),
        (
            {"inputs": [tensor("FP32", contents={"fp32_contents": [1]})], "raw_input_contents": [b"12345678"]},
            "Input 'a' has typed contents beside raw_input_contents",
        ),
        ({"inputs": [tensor("FP16")]}, "Input 'a' is 'FP16'; in typed contents it must be one of BOOL"),
        ({"inputs": [tensor("FP8")]}, "Input 'a' is 'FP8'; in typed contents it must be one of BOOL"),
        ({"inputs": [tensor("INT8", contents={"int_contents": [128, 0]})]}, "Input 'a' has a value that is no INT8"),
        (
            {"inputs": [tensor("FP32", parameters=IN_MEMORY), tensor("FP32")], "raw_input_contents": [b"", b""]},
            "There are 1 inputs and 2 raw_input_contents",
        ),
        (
            {"inputs": [tensor("FP32", parameters=IN_MEMORY, contents={"fp32_contents": [1]})]},
            "Input 'a' has contents and shared_memory_region",
        ),
    ],
)
def test_a_message_that_does_not_fit_is_refused_before_a_worker_sees_it(fields: dict[str, Any], words: str) -> None:
    """With the input's name."""
    with pytest.raises(BadInput) as caught:
        write_body(REQUEST(**fields))

    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("length", ["", "x", "-1", "1000"])
def test_an_answer_that_no_worker_wrote_is_the_models_failure(length: str) -> None:
    """The server lives."""
    with pytest.raises(HandlerFailed, match="no answer of the Open Inference Protocol"):
        fill_response(RESPONSE(), REQUEST(), b'{"outputs": [{"name": "a"}]}', length)


def test_an_answer_that_is_cut_is_the_models_failure() -> None:
    """Its tensors have fewer bytes than it says."""
    each = {"name": "a", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    text = json.dumps({"outputs": [each]}).encode()

    with pytest.raises(HandlerFailed, match="it is cut"):
        fill_response(RESPONSE(), REQUEST(), text + b"1234", str(len(text)))


# ------------------------------------------------------------------------------------------- what does


@pytest.mark.parametrize(("datatype", "field", "data"), [*TENSORS, ("BYTES", "bytes_contents", [b"", b"\xff\x00"])])
def test_tensors_go_to_a_worker_and_come_back_typed_or_raw(datatype: str, field: str, data: list[Any]) -> None:
    """As they came: the worker's reader and writer are the real ones."""
    typed = REQUEST(id="q", model_name="m", inputs=[tensor(datatype, contents={field: data})])
    infer = read(typed)
    raw = REQUEST(inputs=[tensor(datatype)], raw_input_contents=[write_body(typed)[0][write_body(typed)[1] :]])

    body, length = write_answer(
        infer, infer.asked(["y"]), {"y": (datatype, infer.tensors["a"])}, model="m", version="1.0"
    )
    back, back_raw = RESPONSE(), RESPONSE()
    fill_response(back, typed, body, str(length))
    fill_response(back_raw, raw, body, str(length))

    assert infer.id == "q"
    assert read(raw).tensors["a"].tolist() == infer.tensors["a"].tolist() == data
    assert list(getattr(back.outputs[0].contents, field)) == data
    assert (back.id, back.model_name, back.model_version) == ("q", "m", "1.0")
    assert (back.outputs[0].name, back.outputs[0].datatype, list(back.outputs[0].shape)) == ("y", datatype, [2])
    assert back_raw.raw_output_contents == raw.raw_input_contents
    assert not back_raw.outputs[0].HasField("contents")


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_come_and_go_raw(datatype: str) -> None:
    """And what a typed request gets of such a type is raw as well."""
    raw = REQUEST(inputs=[tensor(datatype)], raw_input_contents=[b"\x00\x3c\x00\x40"])
    infer = read(raw)

    body, length = write_answer(infer, infer.asked(["y"]), {"y": (datatype, infer.tensors["a"])}, "m", None)
    back = RESPONSE()
    fill_response(back, REQUEST(), body, str(length))

    assert back.raw_output_contents == [b"\x00\x3c\x00\x40"]


def test_parameters_and_outputs_that_are_asked_for_go_along() -> None:
    """Those of a tensor, of an output and of the request."""
    message = REQUEST(
        inputs=[tensor("FP32", contents={"fp32_contents": [1, 2]}, parameters={"p": PARAMETER(int64_param=7)})],
        outputs=[{"name": "y", "parameters": {"classification": PARAMETER(int64_param=3)}}],
        parameters={"q": PARAMETER(string_param="x")},
    )

    body, length = write_body(message)
    document = json.loads(body[:length])

    assert document["inputs"][0]["parameters"] == {"p": 7, "binary_data_size": 8}
    assert document["parameters"] == {"q": "x", "binary_data_output": True}
    assert read(message).asked(["y"])[0].classes == 3


def test_tensors_in_shared_memory_go_along_without_values() -> None:
    """Raw contents are those of the other inputs; an output has an empty one, as clients count them."""
    message = REQUEST(
        inputs=[tensor("FP32", parameters=IN_MEMORY), tensor("FP32")],
        raw_input_contents=[b"12345678"],
        outputs=[{"name": "y", "parameters": IN_MEMORY}, {"name": "z"}],
    )
    body, length = write_body(message)
    answer = {
        "outputs": [
            {
                "name": "y",
                "datatype": "FP32",
                "shape": [2],
                "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8},
            },
            {"name": "z", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}},
        ]
    }
    text = json.dumps(answer).encode()
    back = RESPONSE()
    fill_response(back, message, text + b"abcd", str(len(text)))

    first, second = json.loads(body[:length])["inputs"]
    assert first["parameters"] == {
        "shared_memory_region": "r",
        "shared_memory_byte_size": 8,
        "shared_memory_offset": 4,
    }
    assert (second["parameters"], body[length:]) == ({"binary_data_size": 8}, b"12345678")
    assert list(back.raw_output_contents) == [b"", b"abcd"]
    assert back.outputs[0].parameters["shared_memory_byte_size"].int64_param == 8


def test_a_request_whose_inputs_are_all_in_shared_memory_gets_raw_outputs() -> None:
    """Its client sent nothing typed."""
    answer = {
        "outputs": [{"name": "z", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}],
    }
    text = json.dumps(answer).encode()
    back = RESPONSE()
    fill_response(back, REQUEST(inputs=[tensor("FP32", parameters=IN_MEMORY)]), text + b"abcd", str(len(text)))

    assert list(back.raw_output_contents) == [b"abcd"]


def test_parameters_of_an_answer_go_along() -> None:
    """MLServer's content types, of the answer and of its outputs; the size of raw values is in the message."""
    output = {
        "name": "y",
        "datatype": "INT8",
        "shape": [1],
        "parameters": {"binary_data_size": 1, "content_type": "np"},
    }
    text = json.dumps({"parameters": {"content_type": "pd"}, "outputs": [output]}).encode()
    back = RESPONSE()

    fill_response(back, REQUEST(), text + b"\1", str(len(text)))

    assert {name: each.string_param for name, each in back.parameters.items()} == {"content_type": "pd"}
    assert {name: each.string_param for name, each in back.outputs[0].parameters.items()} == {"content_type": "np"}
