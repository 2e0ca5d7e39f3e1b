"""The body of an inference request: JSON, and raw tensors behind it, to checked arrays.

Shape, data type and length are held against each other before anything is allocated. Raises BadInput, with the
tensor's name, for what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from marserve_handlers.declared.arrays import TAKES, Array
from marserve_handlers.declared.bodies import Body, read_json
from marserve_handlers.declared.open_inference.datatypes import (
    BYTES,
    DATATYPES,
    RAW_ONLY,
    as_objects,
    dtype_of,
    from_raw,
    item_bytes,
)
from marserve_handlers.declared.open_inference.shared_memory import NONE, SharedTensors, Span, read_span
from marserve_handlers.errors import BadInput
from marserve_handlers.support.shown import short, shown

MAX_TENSORS: Final = 1024
MAX_DIMENSIONS: Final = 32
# numpy bounds the other sizes of a shape that holds nothing, in bytes; so is it here, for the widest type.
MAX_EMPTY_BYTES: Final = (1 << 63) - 1
WIDEST_BYTES: Final = 8

REGION: Final = "shared_memory_region"

NULL_IS_NAN: Final = frozenset({"np", "pd"})
"""Content types of MLServer's codecs of numpy and pandas, which write NaN as null and read it so."""


@dataclass(frozen=True, slots=True)
class AskedOutput:
    """One output that the client wants. `classes`: the names of so many of its largest values instead of the tensor.

    With a `span` its values are written there: bytes of the region that `region` names. `content_type` is MLServer's
    word for what it is, empty without one.
    """

    name: str
    is_binary: bool
    classes: int = 0
    span: Span | None = None
    region: str = ""
    content_type: str = ""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What a client asks for. `outputs` is None where it named none: all of them then, binary if `is_binary`.

    `content_type` is MLServer's word for what the tensors are together, `content_types` has those of single tensors.
    """

    id: str
    tensors: dict[str, Array]
    datatypes: dict[str, str]
    parameters: Mapping[str, Any]
    outputs: Sequence[AskedOutput] | None
    is_binary: bool
    content_type: str = ""
    content_types: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_content_types(self) -> bool:
        """Whether the client speaks of content types, so that the answer does."""
        return bool(self.content_type or self.content_types or any(each.content_type for each in self.outputs or ()))

    def asked(self, names: Sequence[str]) -> Sequence[AskedOutput]:
        """The outputs to answer with, of a model that gives these. Raises BadInput for one that it does not give."""
        if self.outputs is None:
            return [AskedOutput(name, self.is_binary) for name in names]
        for output in self.outputs:
            if output.name not in names:
                raise BadInput(f"the output {shown(output.name)} is asked for; the model gives {', '.join(names)}")
        return self.outputs


def read_request(body: Any, header_length: str | None = None, shared: SharedTensors = NONE) -> InferRequest:
    """Read a request's bytes, or its JSON as it was decoded before. Raises BadInput.

    `header_length` is its header `Inference-Header-Content-Length`; `shared` says where its tensors in shared memory
    are.
    """
    raw = None
    if not isinstance(body, (bytes, bytearray)):
        document: Any = body
    else:
        text, raw = _split(body, header_length)
        document = read_json(text)
    if not isinstance(document, dict):
        raise BadInput('expected a JSON object with a list "inputs"')
    given = document.get("inputs")
    if not isinstance(given, list) or not given:
        raise BadInput("expected a list of one tensor at least, each with name, shape and datatype", "inputs")
    if len(given) > MAX_TENSORS:
        raise BadInput(f"{len(given)} tensors came, and there may be {MAX_TENSORS}", "inputs")
    parameters = _parameters(document, "parameters")
    content_type = _content_type(parameters, "parameters")
    tensors: dict[str, Array] = {}
    datatypes: dict[str, str] = {}
    content_types: dict[str, str] = {}
    at = 0
    for number, tensor in enumerate(given):
        name = _name(tensor, f"inputs[{number}]")
        if name in tensors:
            raise BadInput("came twice", name)
        place = f"{short(name)}.parameters"
        of_tensor = _parameters(tensor, place)
        datatype, shape, size = _described(tensor, name, of_tensor)
        datatypes[name] = datatype
        if own_type := _content_type(of_tensor, place):
            content_types[name] = own_type
        if REGION in of_tensor:
            tensors[name] = _from_memory(tensor, name, datatype, shape, size, shared)
        elif size is None:
            takes_null = (own_type or content_type) in NULL_IS_NAN
            tensors[name] = _from_json(tensor, name, datatype, shape, takes_null=takes_null)
        elif raw is None:
            raise BadInput("has binary_data_size, and the request no header Inference-Header-Content-Length", name)
        elif at + size > len(raw):
            raise BadInput(f"has a binary_data_size of {size}, and {len(raw) - at} bytes are left", name)
        else:
            tensors[name] = _from_raw(raw[at : at + size], name, datatype, shape)
            at += size
    if raw is not None and at != len(raw):
        raise BadInput(f"{len(raw)} bytes came behind the JSON, and the inputs' binary_data_size name {at}")
    is_binary = _flag(parameters, "binary_data_output", "parameters", default=False)
    identity = document.get("id")
    if identity is not None and not isinstance(identity, str):
        raise BadInput(f"expected a text, got {shown(identity)}", "id")
    return InferRequest(
        identity or "",
        tensors,
        datatypes,
        parameters,
        _outputs(document, is_binary, shared),
        is_binary,
        content_type,
        content_types,
    )


def _split(body: Body, header_length: str | None) -> tuple[Body, memoryview | None]:
    """The JSON of a body, and what is behind it; None without a length of the JSON."""
    if header_length is None:
        return body, None
    text = header_length.strip()
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= length <= len(body):
        raise BadInput(
            f"expected a number of bytes from 0 to the body's {len(body)}, got {shown(header_length)}",
            "Inference-Header-Content-Length",
        )
    return bytes(body[:length]), memoryview(body)[length:]


def _name(tensor: Any, place: str) -> str:
    if not isinstance(tensor, dict):
        raise BadInput(f"expected an object, got {shown(tensor)}", place)
    name = tensor.get("name")
    if not isinstance(name, str) or not name:
        raise BadInput(f"expected a name, got {shown(name)}", f"{place}.name")
    return name


def _described(
    tensor: Mapping[str, Any], name: str, parameters: Mapping[str, Any]
) -> tuple[str, tuple[int, ...], int | None]:
    """Data type, shape, and the bytes of a raw tensor; None for one in JSON."""
    datatype = tensor.get("datatype")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise BadInput(f"has the datatype {shown(datatype)}; it must be one of {', '.join(DATATYPES)}", name)
    shape = tensor.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
    ):
        raise BadInput(
            f"has the shape {shown(shape)}; it must be a list of at most {MAX_DIMENSIONS} whole numbers", name
        )
    if 0 in shape and math.prod(size or 1 for size in shape) * WIDEST_BYTES > MAX_EMPTY_BYTES:
        raise BadInput(f"has the shape {shown(shape)}, whose sizes are too large for an array", name)
    size = parameters.get("binary_data_size")
    if size is not None:
        if type(size) is not int or size < 0:
            raise BadInput(f"has a binary_data_size of {shown(size)}; it must be a whole number", name)
        if "data" in tensor:
            raise BadInput("has both data and binary_data_size", name)
    return datatype, tuple(shape), size


def _from_raw(raw: memoryview, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
    try:
        return from_raw(datatype, raw, shape)
    except ValueError as error:
        raise BadInput(f"{datatype} {list(shape)}: {error}", name) from None


def _from_memory(
    tensor: Mapping[str, Any],
    name: str,
    datatype: str,
    shape: tuple[int, ...],
    size: int | None,
    shared: SharedTensors,
) -> Array:
    """The values that lie in shared memory: a copy of them."""
    if size is not None or "data" in tensor:
        raise BadInput(f"has {REGION} and {'data' if 'data' in tensor else 'binary_data_size'}", name)
    span = _span(shared.inputs, name)
    if datatype != BYTES:
        wanted = math.prod(shape) * item_bytes(datatype)
        if span.size != wanted:
            raise BadInput(
                f"{datatype} {list(shape)}: has a shared_memory_byte_size of {span.size}, and its shape takes {wanted}",
                name,
            )
    return _from_raw(read_span(span, name).data, name, datatype, shape)


def _span(spans: Mapping[str, Span], name: str) -> Span:
    """Where a tensor lies that names shared memory. Raises BadInput if the server did not say so."""
    span = spans.get(name)
    if span is None:
        raise BadInput(
            f"has {REGION}, and this server takes no shared memory for it: it has none (system_shared_memory_folder), "
            "the request's JSON is longer than 32 KiB, or it came compressed",
            name,
        )
    return span


def _from_json(
    tensor: Mapping[str, Any], name: str, datatype: str, shape: tuple[int, ...], *, takes_null: bool
) -> Array:
    """The values in `data`, one flat list or nested as the shape is. `takes_null`: in floats null is NaN."""
    if "data" not in tensor:
        raise BadInput("has no data", name)
    if datatype in RAW_ONLY:
        raise BadInput(
            f"is {datatype}, which JSON has no numbers for: send it as a binary tensor (binary_data_size)", name
        )
    data = tensor["data"]
    count = math.prod(shape)
    if datatype == BYTES:
        array = as_objects(_texts(data, name))
    else:
        array = _numbers(data, name, datatype, takes_null=takes_null)
    if array.size != count:
        raise BadInput(f"has {array.size} values, and its shape {list(shape)} has {count}", name)
    return array.reshape(shape)


def _numbers(data: Any, name: str, datatype: str, *, takes_null: bool) -> Array:
    dtype = dtype_of(datatype)
    if not isinstance(data, list):
        data = [data]
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError, TypeError):
        raise BadInput("has lists of unequal lengths, or numbers beyond 64 bits", name) from None
    if not array.size:
        return np.empty(0, dtype)
    if datatype == "UINT64" and array.dtype.kind == "f":  # numpy's choice for small and very large whole numbers
        array = _large(data, array)
    if takes_null and dtype.kind == "f" and array.dtype == object:
        array = _with_nan(array)
    if array.dtype.kind not in TAKES[dtype.kind]:
        raise BadInput(f"has values that are no {datatype}: {shown(data)}", name)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if array.min() < info.min or array.max() > info.max:
            raise BadInput(f"has a number outside of {info.min} to {info.max}, those of {datatype}", name)
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False).reshape(-1)


def _large(data: list[Any], array: Array) -> Array:
    """The numbers as uint64, if all are whole and fit; else as they were read."""
    numbers = np.asarray(data, object)
    if all(type(each) is int and 0 <= each < 1 << 64 for each in numbers.reshape(-1)):
        return numbers.astype(np.uint64)
    return array


def _with_nan(array: Array) -> Array:
    """Numbers and None as float64, if there is nothing else; else as they were read."""
    if any(each is not None and type(each) not in (int, float) for each in array.reshape(-1)):
        return array
    try:
        return array.astype(np.float64)
    except OverflowError:  # a whole number beyond all floats
        return array


def _texts(data: Any, name: str) -> list[bytes]:
    found: list[bytes] = []
    lists = [iter(data if isinstance(data, list) else [data])]
    while lists:
        for each in lists[-1]:
            if isinstance(each, str):
                found.append(each.encode("utf-8", "surrogatepass"))
            elif isinstance(each, list):
                lists.append(iter(each))
                break
            else:
                raise BadInput(f"has a value that is no text: {shown(each)}", name)
        else:
            lists.pop()
    return found


def _parameters(document: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise BadInput(f"expected an object, got {shown(parameters)}", place)
    return parameters


def _content_type(parameters: Mapping[str, Any], place: str) -> str:
    """MLServer's content type, empty without one."""
    value = parameters.get("content_type")
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadInput(f"expected a text, got {shown(value)}", f"{place}.content_type")
    return value


def _flag(parameters: Mapping[str, Any], key: str, place: str, *, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise BadInput(f"expected true or false, got {shown(value)}", f"{place}.{key}")
    return value


def _outputs(document: Mapping[str, Any], is_binary: bool, shared: SharedTensors) -> list[AskedOutput] | None:
    given = document.get("outputs")
    if given is None or given == []:
        return None
    if not isinstance(given, list) or len(given) > MAX_TENSORS:
        raise BadInput(f"expected a list of at most {MAX_TENSORS} objects", "outputs")
    outputs: list[AskedOutput] = []
    for number, each in enumerate(given):
        place = f"outputs[{number}]"
        name = _name(each, place)
        if any(output.name == name for output in outputs):
            raise BadInput("is asked for twice", name)
        parameters = _parameters(each, f"{place}.parameters")
        classes = parameters.get("classification", 0)
        if type(classes) is not int or classes < 0:
            raise BadInput(f"expected a whole number, got {shown(classes)}", f"{place}.parameters.classification")
        wants_raw = _flag(parameters, "binary_data", f"{place}.parameters", default=is_binary)
        content_type = _content_type(parameters, f"{place}.parameters")
        if REGION in parameters:
            span, region = _span(shared.outputs, name), str(parameters[REGION])
            outputs.append(AskedOutput(name, is_binary=True, span=span, region=region, content_type=content_type))
        else:
            outputs.append(AskedOutput(name, wants_raw, classes, content_type=content_type))
    return outputs
