"""What both forms of a tensor in gRPC's messages of the Open Inference Protocol share: how each data type travels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from marserve.api.open_inference.data_types import DATA_TYPES as PROTOCOLS
from marserve.errors import BadInput, HandlerFailed, without_stop

LENGTH_BYTES: Final = 4
SHARED_MEMORY_REGION: Final = "shared_memory_region"


class DataType(NamedTuple):
    """How a data type travels: its field of typed contents (empty: it has none), and `struct`'s format of raw ones."""

    field: str
    code: str


# By `struct`'s format; FP16 and BF16 have no field.
_CONTENTS: Final = {
    "?": "bool_contents",
    **dict.fromkeys("bhi", "int_contents"),
    "q": "int64_contents",
    **dict.fromkeys("BHI", "uint_contents"),
    "Q": "uint64_contents",
    "f": "fp32_contents",
    "d": "fp64_contents",
}
DATA_TYPES: Final = {
    name: DataType("bytes_contents" if name == "BYTES" else _CONTENTS.get(each.code, ""), each.code)
    for name, each in PROTOCOLS.items()
    if name != "BF16"
}
"""BF16 is not among them: its values have no form in Python, and pass as bytes."""
_FIELDS: Final = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


def raw_contents(message: Any) -> Any:
    """The raw contents of a `ModelInferRequest`, one for each input in the message, or none.

    Raises BadInput for another number.
    """
    raw = message.raw_input_contents
    count = sum(not is_shared(tensor) for tensor in message.inputs) if raw else 0
    if raw and len(raw) != count:
        raise BadInput(f"There are {count} inputs and {len(raw)} raw_input_contents; give one for each.")
    return raw


def is_shared(tensor: Any) -> bool:
    """Whether an input, or an output that is asked for, lies in shared memory, and so is not in the message."""
    return SHARED_MEMORY_REGION in tensor.parameters


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name, with the value that is set."""
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, field) for name, (value, field) in chosen.items() if field}


def write_parameters(into: Any, given: Any, *, without: Collection[str] = ()) -> None:
    """Set the parameters of an answer's JSON that have a type there: truth values, whole numbers, texts, floats."""
    for name, value in given.items() if isinstance(given, Mapping) else ():
        field = _FIELDS.get(type(value))
        if field is None or name in without or (field == "int64_param" and not -(1 << 63) <= value < 1 << 63):
            continue
        setattr(into[name], field, value)


def split_elements(raw: bytes) -> Iterator[bytes]:
    """The elements of raw BYTES: four bytes of length stand before each. Raises ValueError in the middle of one."""
    position = 0
    while position < len(raw):
        begin = position + LENGTH_BYTES
        end = begin + int.from_bytes(raw[position:begin], "little")
        if end > len(raw) or begin > len(raw):
            raise ValueError("its bytes end in the middle of an element")
        yield raw[begin:end]
        position = end


def join_elements(elements: Iterable[bytes]) -> bytes:
    """Elements as raw BYTES."""
    return b"".join(len(element).to_bytes(LENGTH_BYTES, "little") + element for element in elements)


def bad_answer(why: str) -> HandlerFailed:
    """The error of an answer that cannot be read."""
    return HandlerFailed(
        f"The model's answer is no answer of the Open Inference Protocol: {without_stop(why)}.", code=500
    )
