"""Inputs of the Open Inference Protocol over gRPC: of each type of numbers, its field and the values at its ends."""

from __future__ import annotations

from typing import Any

TENSORS: list[tuple[str, str, list[Any]]] = [
    ("BOOL", "bool_contents", [True, False]),
    ("INT8", "int_contents", [-128, 127]),
    ("INT16", "int_contents", [-32768, 5]),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
    ("UINT8", "uint_contents", [0, 255]),
    ("UINT16", "uint_contents", [0, 65535]),
    ("UINT32", "uint_contents", [0, 2**32 - 1]),
    ("UINT64", "uint64_contents", [0, 2**64 - 1]),
    ("FP32", "fp32_contents", [1.5, -2.5]),
    ("FP64", "fp64_contents", [0.1, 1e300]),
]


def tensor(datatype: str, **fields: Any) -> dict[str, Any]:
    """One input."""
    return {"name": "a", "datatype": datatype, "shape": [2], **fields}
