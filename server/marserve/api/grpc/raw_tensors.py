"""Tensors of gRPC messages as the binary body of the Open Inference Protocol over REST, and back.

Workers of models that declare their tensors read and write that one form (`marserve_handlers/declared/open_inference`).
Numbers are moved as bytes: none of them becomes an object of Python's but where a client sent typed contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from marserve.errors import BadInput, HandlerFailed

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
RAW_TYPE: Final = "application/octet-stream"


class Typed(NamedTuple):
    """How a data type stands in typed contents: the field, and `array`'s letter of one value; "" for texts."""

    field: str
    code: str


# FP16 and BF16 travel raw alone.
TYPED: Final = {
    "BOOL": Typed("bool_contents", "B"),
    "INT8": Typed("int_contents", "b"),
    "INT16": Typed("int_contents", "h"),
    "INT32": Typed("int_contents", "i"),
    "INT64": Typed("int64_contents", "q"),
    "UINT8": Typed("uint_contents", "B"),
    "UINT16": Typed("uint_contents", "H"),
    "UINT32": Typed("uint_contents", "I"),
    "UINT64": Typed("uint64_contents", "Q"),
    "FP32": Typed("fp32_contents", "f"),
    "FP64": Typed("fp64_contents", "d"),
    "BYTES": Typed("bytes_contents", ""),
}


def write_body(message: Any) -> tuple[bytes, int]:
    """A `ModelInferRequest` as a binary body, and how many bytes of it are JSON. Raises BadInput.

    The answer is asked for in binary, whatever the client sent.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise BadInput(f"There are {len(message.inputs)} inputs and {len(raw)} raw_input_contents; give one for each.")
    inputs: list[dict[str, Any]] = []
    values: list[bytes] = []
    for number, tensor in enumerate(message.inputs):
        has_typed = tensor.HasField("contents") and tensor.contents.ByteSize() > 0
        if raw and has_typed:
            raise BadInput(f"Input {tensor.name!r} has typed contents beside raw_input_contents; give one of them.")
        value = raw[number] if raw else _typed(tensor)
        values.append(value)
        parameters = {**read_parameters(tensor.parameters), "binary_data_size": len(value)}
        described = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        inputs.append({**described, "parameters": parameters})
    document: dict[str, Any] = {
        "id": message.id,
        "parameters": {**read_parameters(message.parameters), "binary_data_output": True},
        "inputs": inputs,
    }
    if message.outputs:
        document["outputs"] = [
            {"name": one.name, "parameters": {**read_parameters(one.parameters), "binary_data": True}}
            for one in message.outputs
        ]
    text = msgspec.json.encode(document)
    return b"".join((text, *values)), len(text)


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, with the value that is set."""
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, field) for name, (value, field) in chosen.items() if field}


def _typed(tensor: Any) -> bytes:
    """The bytes of a tensor's typed contents. Raises BadInput."""
    typed = TYPED.get(tensor.datatype)
    if typed is None:
        raise BadInput(
            f"Input {tensor.name!r} is {tensor.datatype!r}; in typed contents it must be one of {', '.join(TYPED)}."
        )
    values = getattr(tensor.contents, typed.field)
    if not typed.code:
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    try:
        return array(typed.code, values).tobytes()
    except OverflowError:
        raise BadInput(f"Input {tensor.name!r} has a value that is no {tensor.datatype}.") from None


def fill_response(response: Any, message: Any, body: bytes, header_length: str) -> None:
    """Write a worker's binary answer into a `ModelInferResponse`: typed if the request was, and all types have such.

    Raises HandlerFailed for an answer that the worker did not write.
    """
    try:
        length = int(header_length)
        document = msgspec.json.decode(body[:length])
        response.id = str(document.get("id") or message.id)
        response.model_name = str(document.get("model_name") or message.model_name)
        response.model_version = str(document.get("model_version") or message.model_version)
        outputs = document["outputs"]
        is_raw = bool(message.raw_input_contents) or any(each["datatype"] not in TYPED for each in outputs)
        at = length
        for each in outputs:
            tensor = response.outputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
            end = at + each["parameters"]["binary_data_size"]
            if end > len(body):
                raise ValueError("it is cut")
            if is_raw:
                response.raw_output_contents.append(bytes(body[at:end]))
            else:
                _fill_typed(tensor, body[at:end])
            at = end
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HandlerFailed(
            f"The model's answer is no answer of the Open Inference Protocol: {str(error).rstrip('.')}.", code=500
        ) from None


def _fill_typed(tensor: Any, raw: bytes) -> None:
    typed = TYPED[tensor.datatype]
    field = getattr(tensor.contents, typed.field)
    if typed.code:
        values = array(typed.code)
        values.frombytes(raw)
        field.extend(map(bool, values) if tensor.datatype == "BOOL" else values)
        return
    at = 0
    while at < len(raw):
        start = at + 4
        at = start + int.from_bytes(raw[at:start], "little")
        field.append(bytes(raw[start:at]))
