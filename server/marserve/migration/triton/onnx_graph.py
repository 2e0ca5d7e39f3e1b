"""The inputs and outputs of an ONNX file: their names, types and sizes, read past its weights by seeking.

The fields are those of ONNX's `onnx.proto`: `ModelProto.graph` (7), of which `input` (11), `output` (12) and the names
of `initializer` (5). A file of many gigabytes takes no more memory than a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

MOST_NAME_BYTES: Final = 4096
MOST_TENSORS: Final = 1024

_DTYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip

_GRAPH: Final = 7
_INITIALIZER, _INPUT, _OUTPUT = 5, 11, 12
_INITIALIZER_NAME: Final = 8
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT: Final = 10


class NoOnnx(ValueError):
    """The file is no ONNX model; the text says why."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """One input or output. `dtype` is None for what is no tensor of a known type; a size that varies is None."""

    name: str
    dtype: str | None
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """What a model takes and gives, in its order; inputs that have a value in the file are left out."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


def read_graph(path: Path) -> OnnxGraph:
    """Read the file's graph. Raises NoOnnx, and OSError."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        for field, span in _fields(file, 0, end):
            if field == _GRAPH and span is not None:
                return _read_graph(file, *span)
    raise NoOnnx("it has no graph")


def _read_graph(file: BinaryIO, begin: int, end: int) -> OnnxGraph:
    inputs: list[GraphTensor] = []
    outputs: list[GraphTensor] = []
    constants: set[str] = set()
    for field, span in _fields(file, begin, end):
        if span is None:
            continue
        if field in (_INPUT, _OUTPUT):
            found = inputs if field == _INPUT else outputs
            found.append(_tensor(file, *span))
            if len(found) > MOST_TENSORS + len(constants):
                raise NoOnnx(f"it has more than {MOST_TENSORS} inputs or outputs")
        elif field == _INITIALIZER:
            constants.add(_text_of(file, _INITIALIZER_NAME, *span))
    return OnnxGraph(tuple(each for each in inputs if each.name not in constants), tuple(outputs))


def _tensor(file: BinaryIO, begin: int, end: int) -> GraphTensor:
    """A `ValueInfoProto`: `name` (1), `type` (2); of it `tensor_type` (1) with `elem_type` (1) and `shape` (2)."""
    name, dtype, sizes = "", None, []
    for field, span in _fields(file, begin, end):
        if field == 1 and span is not None:
            name = _text(file, *span)
        elif field == 2 and span is not None:
            for kind, tensor in _fields(file, *span):
                if kind != 1 or tensor is None:
                    continue
                dtype = _DTYPES.get(_number_of(file, 1, *tensor) or 0)
                for part, shape in _fields(file, *tensor):
                    if part == 2 and shape is not None:
                        # A dimension's `dim_value` (1) is its size, `dim_param` (2) the name of one that varies.
                        sizes = [
                            _number_of(file, 1, *size) for axis, size in _fields(file, *shape) if axis == 1 and size
                        ]
    return GraphTensor(name, dtype, tuple(sizes))


def _number_of(file: BinaryIO, wanted: int, begin: int, end: int) -> int | None:
    """The field of that number in a message, a varint; None without one."""
    file.seek(begin)
    while file.tell() < end:
        field, sort = _key(file, end)
        if field == wanted and sort == _VARINT:
            return _varint(file, end)
        _skip(file, sort, end)
    return None


def _text_of(file: BinaryIO, wanted: int, begin: int, end: int) -> str:
    return next((_text(file, *span) for field, span in _fields(file, begin, end) if field == wanted and span), "")


def _text(file: BinaryIO, begin: int, end: int) -> str:
    if end - begin > MOST_NAME_BYTES:
        raise NoOnnx(f"a name in it has more than {MOST_NAME_BYTES} bytes")
    file.seek(begin)
    try:
        return file.read(end - begin).decode()
    except UnicodeDecodeError:
        raise NoOnnx("a name in it is no UTF-8") from None


def _fields(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """The fields of a message: number, and where its bytes begin and end; None for one that is a plain number."""
    at = begin
    while at < end:
        file.seek(at)
        field, sort = _key(file, end)
        span = _skip(file, sort, end)
        at = file.tell() if span is None else span[1]
        yield field, span


def _key(file: BinaryIO, end: int) -> tuple[int, int]:
    key = _varint(file, end)
    if not key >> 3:
        raise NoOnnx("its bytes are no protobuf")
    return key >> 3, key & 7


def _skip(file: BinaryIO, sort: int, end: int) -> tuple[int, int] | None:
    """Go past a value; where its bytes begin and end, None for a plain number. Raises NoOnnx."""
    span = None
    if sort == _VARINT:
        _varint(file, end)
    elif sort in (_EIGHT, _FOUR):
        file.seek(8 if sort == _EIGHT else 4, 1)
    elif sort == _BYTES:
        length = _varint(file, end)
        begin = file.tell()
        span = begin, begin + length
        if span[1] > end:
            raise NoOnnx("it is cut off, or no protobuf")
        file.seek(span[1])
    else:
        raise NoOnnx("its bytes are no protobuf")
    if file.tell() > end:
        raise NoOnnx("it is cut off, or no protobuf")
    return span


def _varint(file: BinaryIO, end: int) -> int:
    number = 0
    for place in range(_LONGEST_VARINT):
        byte = file.read(1)
        if not byte or file.tell() > end:
            raise NoOnnx("it is cut off, or no protobuf")
        number |= (byte[0] & 0x7F) << 7 * place
        if byte[0] < 0x80:
            return number
    raise NoOnnx("its bytes are no protobuf")
