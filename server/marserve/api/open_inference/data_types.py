"""The protocol's data types: the dtype that models declare for each, and how a raw value is packed.

Workers have a table of their own in `marserve_handlers/declared/open_inference`, which the server does not know; a test
holds both together.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from marserve.registry.catalogue.protocol_tensors import ELEMENTS


class DataType(NamedTuple):
    """The dtype of a declaration, and `struct`'s format of a raw value, empty for BYTES and for BF16."""

    dtype: str
    code: str


DATA_TYPES: Final = {
    "BOOL": DataType("bool", "?"),
    "INT8": DataType("int8", "b"),
    "INT16": DataType("int16", "h"),
    "INT32": DataType("int32", "i"),
    "INT64": DataType("int64", "q"),
    "UINT8": DataType("uint8", "B"),
    "UINT16": DataType("uint16", "H"),
    "UINT32": DataType("uint32", "I"),
    "UINT64": DataType("uint64", "Q"),
    "FP16": DataType("float16", "e"),
    "BF16": DataType("bfloat16", ""),
    "FP32": DataType("float32", "f"),
    "FP64": DataType("float64", "d"),
    "BYTES": DataType(ELEMENTS, ""),
}
