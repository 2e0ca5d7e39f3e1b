"""The protocol's data types: numpy's type of each name, raw bytes of tensors to arrays and back.

numpy has no bfloat16: BF16 comes and goes as raw bytes alone, and is float32 in arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from marserve_handlers.declared.arrays import Array

BYTES: Final = "BYTES"
BF16: Final = "BF16"
RAW_ONLY: Final = frozenset({"FP16", BF16})
"""Data types without a form in JSON."""

# numpy's name of each type of numbers.
NUMPY: Final = {
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
    BF16: "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES: Final = (*NUMPY, BYTES)
_PROTOCOL: Final = {dtype: datatype for datatype, dtype in NUMPY.items()}

LENGTH_BYTES: Final = 4


def datatype_of(dtype: str) -> str:
    """The protocol's name of a declared dtype (`float32`: `FP32`). Raises KeyError for another word."""
    return _PROTOCOL[dtype]


def dtype_of(datatype: str) -> np.dtype[Any]:
    """numpy's type of numbers of this data type. Raises TypeError for BF16, and KeyError for BYTES and other words."""
    return np.dtype(NUMPY[datatype])


def item_bytes(datatype: str) -> int:
    """Bytes of one raw value. Raises KeyError for BYTES, whose elements differ in length."""
    return 2 if datatype == BF16 else dtype_of(datatype).itemsize


def from_raw(datatype: str, raw: memoryview, shape: tuple[int, ...]) -> Array:
    """A tensor of this shape over these bytes, without a copy; BF16 and BYTES are copied.

    Raises ValueError, with what is wrong, for bytes that do not fit the shape.
    """
    count = math.prod(shape)
    if datatype == BYTES:
        return as_objects(_elements(raw, count)).reshape(shape)
    wanted = count * item_bytes(datatype)
    if len(raw) != wanted:
        raise ValueError(f"{len(raw)} bytes came, and its shape takes {wanted}")
    if datatype == BF16:
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    array = np.frombuffer(raw, dtype_of(datatype))
    if datatype == "BOOL" and array.size and int(array.view(np.uint8).max()) > 1:
        raise ValueError("a BOOL is the byte 0 or 1")
    return array.reshape(shape)


def to_raw(datatype: str, array: Array) -> bytes | memoryview:
    """The bytes of a tensor's values in row-major order; those of the array itself where they are in one piece."""
    if datatype == BYTES:
        return b"".join(len(each).to_bytes(LENGTH_BYTES, "little") + each for each in array.reshape(-1))
    if datatype == BF16:
        return to_bfloat16(array).tobytes()
    whole = np.ascontiguousarray(array)
    return whole.reshape(-1).view(np.uint8).data if whole.size else b""


def to_bfloat16(array: Array) -> Array:
    """The upper halves of float32, rounded to the nearest even number: uint16. NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).astype(np.uint16)


def as_objects(elements: Iterable[bytes]) -> Array:
    """Elements of BYTES as an array of objects, one dimension; empty ones keep their length."""
    found = list(elements)
    array = np.empty(len(found), object)
    array[:] = found
    return array


def _elements(raw: memoryview, count: int) -> list[bytes]:
    """`count` elements, each behind four bytes of its length. Raises ValueError."""
    found: list[bytes] = []
    at, end = 0, len(raw)
    while at < end:
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(raw[at:start], "little")
        if start > end or at > end:
            raise ValueError(f"its bytes end in the middle of element {len(found)}")
        if len(found) == count:
            raise ValueError(f"more elements came than the {count} of its shape")
        found.append(bytes(raw[start:at]))
    if len(found) != count:
        raise ValueError(f"{len(found)} elements came, and its shape has {count}")
    return found
