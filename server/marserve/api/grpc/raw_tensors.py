"""Tensors of gRPC messages as the binary body of the Open Inference Protocol over REST, and back.

Workers of models that declare their tensors read and write that one form (`marserve_handlers/declared/open_inference`).
Numbers are moved as bytes: none of them becomes an object of Python's but where a client sent typed contents.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec

from marserve.api.grpc.data_types import (
    DATA_TYPES,
    SHARED_MEMORY_REGION,
    DataType,
    bad_answer,
    is_shared,
    join_elements,
    raw_contents,
    read_parameters,
    split_elements,
    write_parameters,
)
from marserve.errors import BadInput

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
RAW_TYPE: Final = "application/octet-stream"
TYPED: Final = tuple(name for name, kind in DATA_TYPES.items() if kind.field)
"""Data types that typed contents have; FP16 and BF16 travel raw alone."""


def write_body(message: Any) -> tuple[bytes, int]:
    """A `ModelInferRequest` as a binary body, and how many bytes of it are JSON. Raises BadInput.

    The answer is asked for in binary, whatever the client sent.
    """
    raw = raw_contents(message)
    inputs: list[dict[str, Any]] = []
    values: list[bytes] = []
    of_raw = iter(raw)
    for tensor in message.inputs:
        has_typed = tensor.HasField("contents") and tensor.contents.ByteSize() > 0
        described = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
        parameters = read_parameters(tensor.parameters)
        if is_shared(tensor):
            if has_typed:
                raise BadInput(f"Input {tensor.name!r} has contents and {SHARED_MEMORY_REGION}; give one of them.")
            inputs.append({**described, "parameters": parameters})
            continue
        if raw and has_typed:
            raise BadInput(f"Input {tensor.name!r} has typed contents beside raw_input_contents; give one of them.")
        value = next(of_raw) if raw else _typed(tensor)
        values.append(value)
        parameters = {**parameters, "binary_data_size": len(value)}
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


def _typed(tensor: Any) -> bytes:
    """The bytes of a tensor's typed contents. Raises BadInput."""
    if tensor.datatype not in TYPED:
        raise BadInput(
            f"Input {tensor.name!r} is {tensor.datatype!r}; in typed contents it must be one of {', '.join(TYPED)}."
        )
    kind = DATA_TYPES[tensor.datatype]
    values = getattr(tensor.contents, kind.field)
    if not kind.code:
        return join_elements(values)
    try:
        return array(_code_of(kind), values).tobytes()
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
        write_parameters(response.parameters, document.get("parameters"))
        outputs = document["outputs"]
        is_raw = (
            bool(message.raw_input_contents)
            or (len(message.inputs) > 0 and all(map(is_shared, message.inputs)))  # nothing of it was typed
            or any(each["datatype"] not in TYPED for each in outputs)
        )
        at = length
        for each in outputs:
            tensor = response.outputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
            parameters = each["parameters"]
            write_parameters(tensor.parameters, parameters, without=("binary_data_size",))
            if SHARED_MEMORY_REGION in parameters:  # the worker has written it there
                if is_raw:  # clients count one for each output
                    response.raw_output_contents.append(b"")
                continue
            end = at + parameters["binary_data_size"]
            if end > len(body):
                raise ValueError("it is cut")
            if is_raw:
                response.raw_output_contents.append(bytes(body[at:end]))
            else:
                _fill_typed(tensor, body[at:end])
            at = end
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise bad_answer(str(error)) from None


def _fill_typed(tensor: Any, raw: bytes) -> None:
    kind = DATA_TYPES[tensor.datatype]
    field = getattr(tensor.contents, kind.field)
    if not kind.code:
        field.extend(split_elements(raw))
        return
    values = array(_code_of(kind))
    values.frombytes(raw)
    field.extend(map(bool, values) if tensor.datatype == "BOOL" else values)


def _code_of(kind: DataType) -> str:
    """`array`'s letter of a data type: it has none for truth values, which are bytes."""
    return "B" if kind.code == "?" else kind.code
