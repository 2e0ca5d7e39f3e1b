"""Tests for the Open Inference Protocol over gRPC: tensors to JSON and back, and its service."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from marserve.api.grpc.data_types import DATA_TYPES, read_parameters
from marserve.api.grpc.open_inference import fill_response, write_request
from marserve.errors import BadInput, HandlerFailed
from marserve.messages import Answer
from marserve.registry.intake.registration import RegisterParameters
from support.fake_pool import Behaviour
from support.grpc_house import SCHEMA, Client, client_of, inference_port, refusal
from support.grpc_tensors import TENSORS, tensor
from support.management_house import House

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_grpc_loop")]

STANDARD, TORCHSERVES = "inference", "org.pytorch.serve.grpc.openinference"
REQUEST, RESPONSE = (SCHEMA.message(f"inference.ModelInfer{side}") for side in ("Request", "Response"))


@pytest.mark.parametrize(("datatype", "field", "data"), TENSORS)
def test_typed_contents_become_json(datatype: str, field: str, data: list[Any]) -> None:
    """By their data type's field."""
    request = REQUEST(model_name="m", id="q", inputs=[tensor(datatype, contents={field: data})])

    assert json.loads(write_request(request)) == {
        "id": "q",
        "model_name": "m",
        "inputs": [{"name": "a", "shape": [2], "datatype": datatype, "data": data}],
    }


@pytest.mark.parametrize(("datatype", "field", "data"), [*TENSORS, ("FP16", "", [0.5, -2.0])])
def test_raw_contents_become_the_same_json(datatype: str, field: str, data: list[Any]) -> None:
    """Little-endian, one after the other."""
    raw = struct.pack(f"<2{DATA_TYPES[datatype].code}", *data)
    request = REQUEST(model_name="m", inputs=[tensor(datatype)], raw_input_contents=[raw])

    assert json.loads(write_request(request))["inputs"][0]["data"] == data


def test_bytes_travel_as_base64() -> None:
    """Typed, or raw with their lengths before them."""
    typed = REQUEST(inputs=[tensor("BYTES", contents={"bytes_contents": [b"a", b"\xff\x00"]})])
    raw = REQUEST(inputs=[tensor("BYTES")], raw_input_contents=[b"\x01\0\0\0a\x02\0\0\0\xff\x00"])

    assert [json.loads(write_request(one))["inputs"][0]["data"] for one in (typed, raw)] == [["YQ==", "/wA="]] * 2


def test_numbers_that_json_has_no_word_for_pass() -> None:
    """In the words that Python reads."""
    request = REQUEST(inputs=[tensor("FP32", contents={"fp32_contents": [math.nan, math.inf]})])

    first, second = json.loads(write_request(request))["inputs"][0]["data"]
    assert (math.isnan(first), second) == (True, math.inf)


def test_parameters_and_wanted_outputs_come_along() -> None:
    """Where they are given."""
    parameter = SCHEMA.message("inference.InferParameter")
    request = REQUEST(
        model_name="m",
        parameters={"top": parameter(int64_param=3)},
        inputs=[tensor("BOOL", parameters={"flag": parameter(bool_param=True)})],
        outputs=[{"name": "scores"}],
    )

    document = json.loads(write_request(request))
    assert (document["parameters"], document["outputs"]) == ({"top": 3}, [{"name": "scores"}])
    assert document["inputs"][0]["parameters"] == {"flag": True}


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"inputs": [tensor("FP8")]}, "datatype 'FP8'"),
        ({"inputs": [tensor("FP16")]}, "raw_input_contents only"),
        ({"inputs": [tensor("FP32")], "raw_input_contents": [b"abc"]}, "no whole number of FP32 values"),
        ({"inputs": [tensor("FP32")], "raw_input_contents": [b"", b""]}, "1 inputs and 2 raw_input_contents"),
        ({"inputs": [tensor("BYTES")], "raw_input_contents": [b"\x05\0\0\0a"]}, "in the middle of an element"),
        ({"inputs": [tensor("BYTES")], "raw_input_contents": [b"\0\0"]}, "in the middle of an element"),
    ],
)
def test_tensors_that_cannot_be_read_are_refused(request_fields: dict[str, Any], words: str) -> None:
    """With the input's name and what is wrong."""
    with pytest.raises(BadInput, match=words):
        write_request(REQUEST(**request_fields))


def answer(request: Any, *outputs: dict[str, Any], **members: Any) -> Any:
    """The response that a handler's answer makes."""
    response = RESPONSE()
    fill_response(response, request, json.dumps({"outputs": outputs, **members}).encode())
    return response


@pytest.mark.parametrize(("datatype", "field", "data"), TENSORS)
def test_an_answer_fills_typed_contents(datatype: str, field: str, data: list[Any]) -> None:
    """Nested lists count in their order; id and name are the request's where the answer has none."""
    made = answer(REQUEST(model_name="m", id="q"), {"name": "o", "datatype": datatype, "shape": [2], "data": [data]})

    assert (made.id, made.model_name, made.outputs[0].name, list(made.outputs[0].shape)) == ("q", "m", "o", [2])
    assert list(getattr(made.outputs[0].contents, field)) == data


@pytest.mark.parametrize(("datatype", "field", "data"), TENSORS)
def test_raw_in_is_raw_out(datatype: str, field: str, data: list[Any]) -> None:
    """As clients of the standard expect who sent raw."""
    made = answer(REQUEST(raw_input_contents=[b""]), {"name": "o", "datatype": datatype, "shape": [2], "data": data})

    assert made.raw_output_contents == [struct.pack(f"<2{DATA_TYPES[datatype].code}", *data)]
    assert not made.outputs[0].HasField("contents")


def test_an_output_without_a_typed_form_makes_the_answer_raw() -> None:
    """FP16, and all its mates with it."""
    made = answer(
        REQUEST(),
        {"name": "o", "datatype": "FP16", "shape": [1], "data": [0.5]},
        {"name": "p", "datatype": "BYTES", "shape": [2], "data": ["ab", {"x": 1}]},
    )

    assert made.raw_output_contents == [struct.pack("<e", 0.5), b'\x02\0\0\0ab\x07\0\0\0{"x":1}']


def test_parameters_of_an_answer_are_those_of_its_message() -> None:
    """Where they have a type there."""
    given = {"a": True, "b": 7, "c": "x", "d": 0.5, "e": [1], "f": 1 << 63, "g": None}
    back = answer(REQUEST(), {"name": "y", "datatype": "INT8", "shape": [1], "data": [1], "parameters": given})

    assert read_parameters(back.outputs[0].parameters) == {"a": True, "b": 7, "c": "x", "d": 0.5}


def test_a_string_of_an_answer_keeps_no_quotes() -> None:
    """TorchServe's did."""
    made = answer(REQUEST(), {"name": "o", "datatype": "BYTES", "shape": [1], "data": ["word"]})

    assert made.outputs[0].contents.bytes_contents == [b"word"]


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b'{"outputs": 1}',
        b'{"outputs": [1]}',
        b'{"outputs": [{"name": "o", "datatype": "FP8", "shape": [1], "data": [1]}]}',
        b'{"outputs": [{"name": "o", "datatype": "UINT8", "shape": [1], "data": [-1]}]}',
        b'{"outputs": [{"name": "o", "datatype": "INT32", "shape": "x", "data": [1]}]}',
        b'{"outputs": [{"datatype": "INT32", "shape": [1], "data": [1]}]}',
        b'{"outputs": [{"name": "o", "datatype": "INT32", "shape": [1], "data": ["x"]}]}',
        b'{"outputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"outputs": [{"name": "\xff"}]}',
    ],
)
def test_an_answer_that_is_none_is_the_handlers_failure(body: bytes) -> None:
    """The call ends with a sentence, and the worker lives."""
    with pytest.raises(HandlerFailed, match="no answer of the Open Inference Protocol"):
        fill_response(RESPONSE(), REQUEST(), body)


# ------------------------------------------------------------------------------------------- the service


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """Two versions of a model; requests wait for the test."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    house.pools.behaviours["m"] = Behaviour(holds=True)
    for version in ("1.0", "2.0"):
        await house.registry.register(RegisterParameters(house.put(version=version), initial_workers=1))
    yield house
    await house.registry.stop()


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    """Who speaks to the inference port."""
    async with inference_port(house.registry, has_open_inference=True) as port, client_of(port) as client:
        yield client


def call(client: Client, method: str, package: str = STANDARD, **fields: Any) -> Any:
    """Begin a call."""
    return client.method(f"{package}.GRPCInferenceService", method)(**fields)


@pytest.mark.parametrize("package", [STANDARD, TORCHSERVES])
async def test_the_service_says_what_there_is(client: Client, package: str) -> None:
    """Under both names."""
    metadata = await call(client, "ModelMetadata", package, name="m")

    assert (await call(client, "ServerLive", package)).live
    assert (await call(client, "ServerReady", package)).ready
    assert (await call(client, "ServerMetadata", package)).name == "marserve"
    assert (await call(client, "ModelReady", package, name="m", version="2.0")).ready
    assert (metadata.name, list(metadata.versions)) == ("m", ["1.0", "2.0"])


async def test_an_inference_is_a_json_request(house: House, client: Client) -> None:
    """Under `body`, with the content type; the answer's tensors come back."""
    begun = call(
        client, "ModelInfer", model_name="m", model_version="2.0", id="q",
        inputs=[tensor("FP32", contents={"fp32_contents": [1.5, 2.5]})],
    )  # fmt: skip
    pool = house.pools.made[1]
    while not pool.held:
        assert (await call(client, "ServerLive")).live
    [part] = pool.held[0].request.parts
    pool.held[0].answer(
        Answer(b'{"id": "q", "outputs": [{"name": "s", "datatype": "FP64", "shape": [1], "data": [4.0]}]}')
    )
    response = await begun

    assert (part.name, part.content_type, json.loads(part.body)["inputs"][0]["data"]) == (
        "body",
        "application/json",
        [1.5, 2.5],
    )
    assert (response.id, response.model_name, response.model_version) == ("q", "m", "2.0")
    assert list(response.outputs[0].contents.fp64_contents) == [4.0]


@pytest.mark.parametrize(
    ("package", "method", "fields", "code"),
    [
        (STANDARD, "ModelInfer", {"model_name": "x"}, "NOT_FOUND"),
        (TORCHSERVES, "ModelInfer", {"model_name": "x"}, "INTERNAL"),
        (TORCHSERVES, "ModelInfer", {}, "INVALID_ARGUMENT"),
        (TORCHSERVES, "ModelReady", {"name": "x"}, "NOT_FOUND"),
        (TORCHSERVES, "ModelReady", {}, "INVALID_ARGUMENT"),
        (STANDARD, "ModelMetadata", {"name": "m", "version": "9"}, "NOT_FOUND"),
        (STANDARD, "ModelMetadata", {}, "INVALID_ARGUMENT"),
    ],
)
async def test_what_is_not_there_is_not_found(
    client: Client, package: str, method: str, fields: dict[str, Any], code: str
) -> None:
    """TorchServe's own service says INTERNAL of an inference, as its clients know it."""
    assert (await refusal(call(client, method, package, **fields)))[0] == code


async def test_the_service_is_there_only_where_it_is_asked_for(house: House) -> None:
    """As `ts_open_inference_protocol` says."""
    async with inference_port(house.registry) as port, client_of(port) as client:
        assert (await refusal(call(client, "ServerLive")))[0] == "UNIMPLEMENTED"


# ------------------------------------------------------------------------------------------- parameters


PARAMETER = SCHEMA.message("inference.InferParameter")


@pytest.fixture
async def whole(house: House) -> AsyncIterator[Client]:
    """Who speaks to a port of `marserve`."""
    async with (
        inference_port(house.registry, has_open_inference=True, is_open_inference_whole=True) as port,
        client_of(port) as client,
    ):
        yield client


async def test_parameters_become_deadline_priority_and_sequence(house: House, whole: Client) -> None:
    """As over REST; the metadata's priority has precedence, and the earlier deadline holds."""
    parameters = {
        "timeout": PARAMETER(int64_param=1_500_000),
        "priority": PARAMETER(uint64_param=3),
        "sequence_id": PARAMETER(string_param="talk"),
        "sequence_start": PARAMETER(bool_param=True),
    }
    before = monotonic()
    own, both = [
        call(whole, "ModelInfer", model_name="m", parameters=parameters, metadata=metadata)
        for metadata in (None, (("x-marserve-priority", "9"), ("x-marserve-timeout-ms", "500")))
    ]
    pool = house.pools.made[0]
    while len(pool.held) < 2:
        assert (await call(whole, "ServerLive")).live
    first, second = sorted((job.request for job in pool.held), key=lambda request: request.priority or 0)

    assert first.deadline is not None
    assert second.deadline is not None
    assert before + 1.5 <= first.deadline <= monotonic() + 1.5
    assert second.deadline < first.deadline
    assert (first.priority, second.priority) == (2, 9)
    assert first.headers == [(b"ts_request_sequence_id", b"talk"), (b"ts_request_sequence_start", b"true")]
    own.cancel()
    both.cancel()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", PARAMETER(int64_param=-1)),
        ("timeout", PARAMETER(string_param="1")),
        ("sequence_id", PARAMETER(double_param=1.0)),
        ("sequence_start", PARAMETER(bool_param=True)),
        ("sequence_end", PARAMETER(int64_param=1)),
    ],
)
async def test_a_wrong_parameter_is_refused_by_name_and_reaches_no_model(
    house: House, whole: Client, name: str, value: Any
) -> None:
    """The status of bad input."""
    code, words = await refusal(call(whole, "ModelInfer", model_name="m", parameters={name: value}))

    assert (code, words.partition(" is ")[0]) == ("INVALID_ARGUMENT", f"Parameter {name}")
    assert not house.pools.made[0].held
