"""Arrays to the body of an inference answer: JSON, with raw tensors behind it where the client asked for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from marserve_handlers.declared.arrays import Array
from marserve_handlers.declared.open_inference.datatypes import BYTES, RAW_ONLY, as_objects, to_raw
from marserve_handlers.declared.open_inference.request import NULL_IS_NAN, REGION, AskedOutput, InferRequest
from marserve_handlers.declared.open_inference.shared_memory import Span, write_span
from marserve_handlers.errors import BadInput


def check_asked(asked: Sequence[AskedOutput], datatypes: Mapping[str, str], ranks: Mapping[str, int]) -> None:
    """Raise BadInput for outputs that cannot be written as asked for; before the model is run.

    `datatypes` and `ranks` (of whole tensors, the batch axis counted) are the model's outputs'.
    """
    for output in asked:
        if output.classes:
            if ranks[output.name] != 2:
                raise BadInput("is no tensor of scores [batch, classes], so it has no classification", output.name)
        elif datatypes[output.name] in RAW_ONLY and not output.is_binary:
            raise BadInput(
                f"is {datatypes[output.name]}, which JSON has no numbers for: ask for it with binary_data: true",
                output.name,
            )


def write_answer(
    request: InferRequest,
    asked: Sequence[AskedOutput],
    outputs: Mapping[str, tuple[str, Array]],
    model: str,
    version: str | None,
    *,
    has_batch_axis: bool = True,
    labels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    content_types: Mapping[str, str] = MappingProxyType({}),
) -> tuple[bytes, int | None]:
    """The answer's body, and how many bytes of it are JSON; None if all are. `outputs` has data type and array.

    Without `has_batch_axis` the arrays, of one item each, are written without that axis. `labels` are the names of an
    output's classes. `content_types` are those of outputs that have one of their own; others have one if the request
    speaks of content types.
    Outputs that were asked for in shared memory are written there when all of them have been found to fit. Raises
    BadInput for one that does not.
    """
    described: list[dict[str, Any]] = []
    raw: list[bytes | memoryview] = []
    shared: list[tuple[Span, str, bytes | memoryview]] = []
    is_finite = True
    has_content_types = request.has_content_types
    for output in asked:
        datatype, array = outputs[output.name]
        if output.classes:
            datatype, array = BYTES, classify(array, output.classes, labels.get(output.name, ()))
        if not has_batch_axis:
            array = array[0]
        tensor: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": list(array.shape)}
        parameters: dict[str, Any] = {}
        content_type = content_types.get(output.name, "")
        if has_content_types and not content_type:
            content_type = "str" if datatype == BYTES else output.content_type or "np"
        if content_type:
            parameters["content_type"] = content_type
        if output.span is not None:
            values = to_raw(datatype, array)
            if len(values) > output.span.size:
                raise BadInput(
                    f"{datatype} {list(array.shape)}: has {len(values)} bytes, and a shared_memory_byte_size of "
                    f"{output.span.size}",
                    output.name,
                )
            shared.append((output.span, output.name, values))
            # Triton's clients look for a size behind the JSON wherever an output has parameters.
            parameters |= {REGION: output.region, "shared_memory_byte_size": len(values), "binary_data_size": 0}
        elif output.is_binary:
            values = to_raw(datatype, array)
            raw.append(values)
            parameters["binary_data_size"] = len(values)
        elif datatype == BYTES:
            tensor["data"] = [each.decode("utf-8", "replace") for each in array.reshape(-1)]
        else:
            numbers = array.reshape(-1).tolist()
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                if content_type in NULL_IS_NAN:
                    numbers = [None if each != each else each for each in numbers]
                is_finite = False
            tensor["data"] = numbers
        if parameters:
            tensor["parameters"] = parameters
        described.append(tensor)
    for span, name, values in shared:
        write_span(span, name, values)
    document: dict[str, Any] = {"model_name": model}
    if version is not None:
        document["model_version"] = version
    if request.id:
        document["id"] = request.id
    if request.content_type == "pd":  # a frame of pandas, of one column for each output
        document["parameters"] = {"content_type": "pd"}
    elif request.content_type and len(described) == 1:
        document["parameters"] = {"content_type": described[0]["parameters"]["content_type"]}
    document["outputs"] = described
    # NaN and Infinity have no JSON: Python's writer has words for them, which clients read.
    text = msgspec.json.encode(document) if is_finite else json.dumps(document, separators=(",", ":")).encode()
    return (b"".join((text, *raw)), len(text)) if raw else (text, None)


def classify(scores: Array, most: int, labels: Sequence[str] = ()) -> Array:
    """`value:index` of the largest scores of each row, largest first: [batch, most], no more than there are classes.

    It is `value:index:label` for a class that has a label.
    """
    count = min(most, scores.shape[1])
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :count]
    ends = [f":{label}" for label in labels]
    ends += [""] * (scores.shape[1] - len(ends))
    words = [
        f"{row[index]:f}:{index}{ends[index]}".encode()
        for row, places in zip(scores, order, strict=True)
        for index in places
    ]
    return as_objects(words).reshape(len(scores), count)
