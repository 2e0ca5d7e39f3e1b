"""Tensors of the Open Inference Protocol (v2): arrays to the body of an inference, and its answer back to arrays.

Arrays of numpy and tensors of torch go and come as binary tensors: raw little-endian values behind the JSON. Lists go
as JSON. Without numpy answers are asked for in JSON, and come as nested lists.

numpy is optional, and torch is never imported: a tensor can only come from a caller who has imported it. numpy has no
BF16: it goes as `torch.bfloat16`, as an array of ml_dtypes, or as uint16 with `datatypes={"x": "BF16"}`; it comes as
uint16, and `Tensors.torch` makes a `torch.bfloat16` of it. Pure: nothing is sent.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from marserve_client.errors import BadAnswer, BadInput

if TYPE_CHECKING:
    import numpy as np
else:
    try:
        import numpy as np
    except ImportError:
        np = None

# numpy's name of each data type; BF16 as raw 16 bits.
_NUMPY: Final = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "uint16",
}
BYTES: Final = "BYTES"
BF16: Final = "BF16"
_PROTOCOL: Final = {name: datatype for datatype, name in _NUMPY.items() if datatype != BF16} | {"bfloat16": BF16}
# JSON has no numbers for these.
_BINARY_ONLY: Final = ("FP16", BF16)
_LENGTH_BYTES: Final = 4
_MOST_DIMENSIONS: Final = 32
# Of a shape that holds nothing: its lists would take memory all the same.
_MOST_EMPTY: Final = 1 << 20
_JSON_TYPE: Final = "application/json"
_BINARY_TYPE: Final = "application/octet-stream"
HEADER_LENGTH: Final = "inference-header-content-length"


class Tensors(dict[str, Any]):
    """The outputs of an inference by name: arrays of numpy, or nested lists where numpy is not installed.

    BYTES are arrays of objects of `bytes`, BF16 is uint16. `datatypes` has the protocol's type of each output,
    `model_version` the version that answered, `request_id` the server's id of the request, `parameters` those of the
    answer.
    """

    def __init__(
        self,
        outputs: Mapping[str, Any],
        datatypes: Mapping[str, str],
        *,
        model_version: str | None = None,
        request_id: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(outputs)
        self.datatypes = dict(datatypes)
        self.model_version = model_version
        self.request_id = request_id
        self.parameters = dict(parameters or {})

    def torch(self, name: str) -> Any:
        """An output as a `torch.Tensor` over the same memory, BF16 as `torch.bfloat16`.

        Raises KeyError for another name, RuntimeError unless the program has imported torch, TypeError for BYTES.
        """
        output, torch = self[name], sys.modules.get("torch")
        if torch is None:
            raise RuntimeError("torch is not imported; this package never imports it: import torch, then ask again.")
        if self.datatypes[name] == BYTES:
            raise TypeError(f"{name} is BYTES, which torch has no type for; it is an array of bytes.")
        if isinstance(output, list):
            return torch.tensor(output)
        if self.datatypes[name] == BF16:
            return torch.from_numpy(output.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(output)


# ---------------------------------------------------------------------------------------------------------- requests


def write_request(
    inputs: Mapping[str, Any],
    *,
    datatypes: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, dict[str, str]]:
    """The body of an inference and its headers. Raises BadInput, with the tensor's name, for what cannot be sent.

    `datatypes` says the protocol's type of inputs whose values do not: lists of floats are FP32 otherwise, whole
    numbers INT64. `outputs` names those that are wanted, all without it.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise BadInput("inputs must be a dict of at least one tensor by its name.")
    said = dict(datatypes or {})
    if unknown := [name for name in said if name not in inputs]:
        raise BadInput(f"datatypes: names {unknown[0]!r}, which is no input; there are {_listed(inputs)}.")
    described: list[dict[str, Any]] = []
    raw: list[Any] = []
    for name, value in inputs.items():
        if not isinstance(name, str) or not name:
            raise BadInput(f"inputs: {name!r} is no name of a tensor; names are texts.")
        tensor, values = _write(name, value, said.get(name))
        described.append(tensor)
        if values is not None:
            raw.append(values)
    document: dict[str, Any] = {"inputs": described}
    is_binary = np is not None
    if outputs is not None:
        if isinstance(outputs, str):
            raise BadInput(f"outputs: expected a list of names, got the text {outputs!r}.")
        document["outputs"] = [{"name": name, "parameters": {"binary_data": is_binary}} for name in outputs]
    merged = {**(parameters or {}), **({"binary_data_output": True} if is_binary else {})}
    if merged:
        document["parameters"] = merged
    try:
        text = json.dumps(document, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"parameters: cannot be written as JSON ({error}).") from None
    if not raw:
        return text, {"content-type": _JSON_TYPE}
    return b"".join((text, *raw)), {"content-type": _BINARY_TYPE, HEADER_LENGTH: str(len(text))}


def _write(name: str, value: Any, datatype: str | None) -> tuple[dict[str, Any], Any]:
    """One input as JSON describes it, and its raw bytes; None for those where the JSON has the values."""
    if datatype is not None and datatype != BYTES and datatype not in _NUMPY:
        raise BadInput(f"{name}: {datatype!r} is no data type; it must be one of {_listed([*_NUMPY, BYTES])}.")
    if isinstance(value, (str, bytes, bytearray)):
        raise BadInput(f"{name}: got one {type(value).__name__}; a tensor of BYTES is a list or an array of them.")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value, datatype = _from_torch(name, value, torch, datatype)
    elif isinstance(value, (list, tuple)) or type(value) in (bool, int, float):
        return _write_json(name, value, datatype)
    return _write_array(name, value, datatype)


def _from_torch(name: str, tensor: Any, torch: Any, datatype: str | None) -> tuple[Any, str | None]:
    """The tensor as an array of the same memory where it lies on the CPU in one piece."""
    _need_numpy(name, "a tensor of torch")
    try:
        plain = tensor.detach().cpu().contiguous()
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view("uint16"), datatype or BF16
        return plain.numpy(), datatype
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise BadInput(
            f"{name}: a tensor of {tensor.dtype} and layout {tensor.layout} cannot be sent ({error}); "
            "send a dense one of another type."
        ) from None


def _write_array(name: str, value: Any, datatype: str | None) -> tuple[dict[str, Any], Any]:
    _need_numpy(name, f"a value of type {type(value).__name__}")
    if not hasattr(value, "__array__"):
        raise BadInput(
            f"{name}: got {type(value).__name__}; an input is an array of numpy, a tensor of torch, or nested lists."
        )
    array = np.asarray(value)
    if array.ndim > _MOST_DIMENSIONS:
        raise BadInput(f"{name}: has {array.ndim} dimensions; a tensor has at most {_MOST_DIMENSIONS}.")
    shape = list(array.shape)
    if array.dtype.kind in "OSU":
        if datatype not in (None, BYTES):
            raise BadInput(f"{name}: an array of {array.dtype} is BYTES, and datatypes says {datatype}.")
        values: Any = b"".join(map(_element, [name] * array.size, array.reshape(-1).tolist()))
        datatype = BYTES
    else:
        found = _PROTOCOL.get(array.dtype.name)
        if found is None:
            raise BadInput(
                f"{name}: an array of {array.dtype} cannot be sent; convert it to one of {_listed(_PROTOCOL)}."
            )
        if datatype is not None and datatype != found and (datatype, found) != (BF16, "UINT16"):
            wanted = "uint16" if datatype == BF16 else _NUMPY.get(datatype, "object")
            raise BadInput(
                f"{name}: datatypes says {datatype}, and the array is of {array.dtype}; convert it by "
                f".astype({wanted!r})."
            )
        datatype = datatype or found
        if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
            array = array.astype(array.dtype.newbyteorder("<"))
        whole = np.ascontiguousarray(array).reshape(-1)
        values = whole.view(np.uint8).data if whole.size else b""
    size = len(values)
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}, values


def _element(name: str, value: object) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise BadInput(f"{name}: has an element of type {type(value).__name__}; BYTES are bytes or texts.")
    return len(value).to_bytes(_LENGTH_BYTES, "little") + value


def _write_json(name: str, value: Any, datatype: str | None) -> tuple[dict[str, Any], Any]:
    """Nested lists: shape from their nesting, type from their values. Lists of arrays are one array."""
    shape: list[int] = []
    flat = [value]
    while flat and isinstance(flat[0], (list, tuple)):
        length = len(flat[0])
        if any(not isinstance(each, (list, tuple)) or len(each) != length for each in flat):
            raise BadInput(f"{name}: its lists have unequal lengths; a tensor is as long everywhere in one dimension.")
        shape.append(length)
        if len(shape) > _MOST_DIMENSIONS:
            raise BadInput(f"{name}: has more than {_MOST_DIMENSIONS} dimensions.")
        flat = [element for each in flat for element in each]
    if np is not None and any(isinstance(each, (np.ndarray, np.generic)) for each in flat):
        return _write_array(name, _stacked(name, value), datatype)
    found = _datatype_of(name, flat)
    if datatype is None:
        datatype = found
    elif (found == BYTES) != (datatype == BYTES) and flat:
        raise BadInput(f"{name}: datatypes says {datatype}, and its values are {found}.")
    if datatype in _BINARY_ONLY:
        raise BadInput(f"{name}: {datatype} is sent as an array of numpy or a tensor of torch; JSON has none.")
    if datatype == BYTES:
        flat = [_text(name, each) for each in flat]
    return {"name": name, "datatype": datatype, "shape": shape, "data": flat}, None


def _stacked(name: str, value: Any) -> Any:
    try:
        return np.asarray(value)
    except ValueError:
        raise BadInput(f"{name}: its lists have arrays of unequal shapes; a tensor has one shape.") from None


def _datatype_of(name: str, flat: Sequence[Any]) -> str:
    kinds = {type(each) for each in flat}
    for taken, datatype in (({bool}, "BOOL"), ({int}, "INT64"), ({int, float}, "FP32"), ({str, bytes}, BYTES)):
        if kinds <= taken:
            return datatype if kinds else "FP32"
    shown = _listed(sorted(kind.__name__ for kind in kinds))
    raise BadInput(f"{name}: its lists have values of {shown}; a tensor has numbers, truth values or texts alone.")


def _text(name: str, value: str | bytes) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput(
            f"{name}: has bytes that are no UTF-8, which JSON cannot carry; send an array of numpy (dtype object)."
        ) from None


def _need_numpy(name: str, what: str) -> None:
    if np is None:
        raise BadInput(
            f"{name}: {what} is sent by numpy, which is not installed: pip install numpy, or send nested lists."
        )


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


# ----------------------------------------------------------------------------------------------------------- answers


def read_answer(body: bytes, header_length: str | None, request_id: str | None = None) -> Tensors:
    """The outputs of an answer. Raises BadAnswer for another body.

    `header_length` is its header `Inference-Header-Content-Length`: how many bytes of JSON stand before raw tensors.
    Arrays are writable, and have memory of their own.
    """
    try:
        return _read(body, header_length, request_id)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadAnswer(
            f"The answer is no inference of the Open Inference Protocol ({_reason(error)}).",
            status=200,
            request_id=request_id,
        ) from error


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).rstrip(".")


def _read(body: bytes, header_length: str | None, request_id: str | None) -> Tensors:
    length = len(body)
    if header_length is not None:
        text = header_length.strip()
        length = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not 0 <= length <= len(body):
            raise ValueError(f"{HEADER_LENGTH} is {header_length!r}, and the body has {len(body)} bytes")
    document = json.loads(body[:length])
    raw = memoryview(body)[length:]
    outputs: dict[str, Any] = {}
    datatypes: dict[str, str] = {}
    at = 0
    for output in document["outputs"]:
        name, datatype = str(output["name"]), str(output["datatype"])
        shape = tuple(output["shape"])
        if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has the shape {list(shape)}")
        if datatype != BYTES and datatype not in _NUMPY:
            raise ValueError(f"{name} has the datatype {datatype}")
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            outputs[name] = _from_json(name, datatype, shape, output["data"])
        else:
            if type(size) is not int or not 0 <= size <= len(raw) - at:
                raise ValueError(f"{name} has a binary_data_size of {size}, and {len(raw) - at} bytes are left")
            outputs[name] = _from_raw(name, datatype, shape, raw[at : at + size])
            at += size
        datatypes[name] = datatype
    if at != len(raw):
        raise ValueError(f"{len(raw)} bytes stand behind the JSON, and the outputs have {at}")
    version, parameters = document.get("model_version"), document.get("parameters")
    return Tensors(
        outputs,
        datatypes,
        model_version=version if isinstance(version, str) else None,
        request_id=request_id,
        parameters=parameters if isinstance(parameters, dict) else None,
    )


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Any:
    if np is None:
        return _nested(name, shape, _flat(data))
    if datatype == BYTES:
        return _objects([each.encode() for each in _flat(data)]).reshape(shape)
    return np.array(data, _NUMPY[datatype]).reshape(shape)


def _flat(data: Any) -> list[Any]:
    flat = data if isinstance(data, list) else [data]
    while flat and isinstance(flat[0], list):
        flat = [element for each in flat for element in each]
    return flat


def _nested(name: str, shape: tuple[int, ...], flat: list[Any]) -> Any:
    if len(flat) != math.prod(shape):
        raise ValueError(f"{name} has {len(flat)} values, and its shape {list(shape)}")
    if not shape:
        return flat[0]
    if math.prod(size or 1 for size in shape) > _MOST_EMPTY and not flat:
        raise ValueError(f"{name} holds nothing, and its shape is {list(shape)}")
    for size in reversed(shape[1:]):
        count = len(flat) // size if size else math.prod(shape[: shape.index(0)])
        flat = [flat[at * size : (at + 1) * size] for at in range(count)]
    return flat


def _from_raw(name: str, datatype: str, shape: tuple[int, ...], raw: memoryview) -> Any:
    """A copy of its own: writable, aligned, and the rest of the body can be forgotten."""
    count = math.prod(shape)
    if np is None:
        raise ValueError(f"{name} is binary, which was not asked for, and numpy is not installed")
    if datatype == BYTES:
        return _objects(_elements(name, raw, count)).reshape(shape)
    dtype = np.dtype(_NUMPY[datatype]).newbyteorder("<")
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"{name} has {len(raw)} bytes, and its shape {list(shape)} of {datatype} {count} values")
    return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="), copy=True).reshape(shape)


def _elements(name: str, raw: memoryview, count: int) -> list[bytes]:
    found: list[bytes] = []
    at, end = 0, len(raw)
    while at < end:
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if start > end or at > end:
            raise ValueError(f"{name} ends in the middle of element {len(found)}")
        found.append(bytes(raw[start:at]))
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} elements, and its shape {count}")
    return found


def _objects(elements: list[bytes]) -> Any:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array
