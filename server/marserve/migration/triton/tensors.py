"""A model's inputs and outputs: Triton's to the `signature` of a model's configuration and an archive's declaration.

Pure. Triton's `dims` leave the batch axis out where `max_batch_size` is above 0; where it is 0 they are whole shapes,
and the signature says `batch: false`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from marserve.archive.contents.declaration import VERSION
from marserve.migration.triton.config_text import Block, ConfigFault
from marserve.migration.triton.notes import Notes, Refused
from marserve.migration.triton.onnx_graph import GraphTensor, OnnxGraph

DATA_TYPES: Final = (
    "TYPE_INVALID", "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8", "TYPE_INT16",
    "TYPE_INT32", "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_STRING", "TYPE_BF16",
)  # fmt: skip
_DTYPES: Final = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "uint8", "TYPE_UINT16": "uint16", "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64", "TYPE_INT8": "int8", "TYPE_INT16": "int16", "TYPE_INT32": "int32", "TYPE_INT64": "int64",
    "TYPE_FP16": "float16", "TYPE_FP32": "float32", "TYPE_FP64": "float64", "TYPE_STRING": "string",
    "TYPE_BF16": "bfloat16",
}  # fmt: skip
_NUMBERED = re.compile(r".+__([0-9]{1,4})", re.DOTALL)
_FORMATS: Final = ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW")
# Triton's own choice for a model that can be batched and does not say how far.
AUTOMATIC_BATCH_SIZE: Final = 4
_ANY: Final = -1


@dataclass(frozen=True, slots=True)
class TritonTensor:
    """One input or output. `dims` and `reshape` leave the batch axis out if there is one; -1 is a size that varies."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    line: int
    reshape: tuple[int, ...] | None = None
    labels: str = ""


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a model takes and gives, in the order of its program. `max_batch_size` 0: there is no batch axis."""

    inputs: tuple[TritonTensor, ...]
    outputs: tuple[TritonTensor, ...]
    max_batch_size: int

    def signature(self) -> dict[str, Any]:
        """The value of `signature` in the model's configuration."""
        document: dict[str, Any] = {} if self.max_batch_size else {"batch": False}
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            document[kind] = {each.name: self._described(each) for each in tensors}
        return document

    def declaration(self) -> bytes:
        """The archive's declaration, as a worker declares the same signature."""
        document: dict[str, Any] = {"version": VERSION, "kind": "tensors"}
        if not self.max_batch_size:
            document["batch"] = False
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            document[kind] = [
                {"name": each.name, "dtype": each.dtype, "shape": self._shape(each.dims, _names(each))}
                for each in tensors
            ]
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()

    def _described(self, tensor: TritonTensor) -> dict[str, Any]:
        names = _names(tensor)
        described: dict[str, Any] = {"dtype": tensor.dtype, "shape": self._shape(tensor.dims, names)}
        if tensor.reshape is not None:
            described["reshape"] = self._shape(tensor.reshape, names)
        if tensor.labels:
            described["labels"] = tensor.labels
        return described

    def _shape(self, dims: Sequence[int], names: Sequence[str]) -> list[int | str]:
        """The dims with the batch axis; of sizes that vary the first has the first name."""
        left = iter(names)
        sizes: list[int | str] = [next(left) if size == _ANY else size for size in dims]
        return ["batch", *sizes] if self.max_batch_size else sizes


def _names(tensor: TritonTensor) -> list[str]:
    """A name for each size that varies, which no other tensor has."""
    plain = re.sub(r"\W", "_", tensor.name)
    plain = plain if plain.isidentifier() else f"_{plain}"
    return [f"{plain}_size_{axis}" for axis, size in enumerate(tensor.dims, 1) if size == _ANY]


def read_tensors(config: Block, notes: Notes) -> Tensors:
    """What the configuration says, in its order. Raises ConfigFault and Refused."""
    max_batch_size = config.whole("max_batch_size", least=0)
    found: list[tuple[TritonTensor, ...]] = []
    for kind in ("input", "output"):
        tensors: dict[str, TritonTensor] = {}
        for block in config.blocks(kind):
            tensor = _read(block, kind, notes)
            if tensor.name in tensors:
                raise ConfigFault(block.line, block.column, f"the {kind} {tensor.name!r} stands twice")
            tensors[tensor.name] = tensor
        found.append(tuple(tensors.values()))
    for kind in ("batch_input", "batch_output"):
        if config.blocks(kind):
            raise Refused(config.line_of(kind), f"{kind} is made by Triton's batcher", "take it out of the model")
    return Tensors(found[0], found[1], max_batch_size)


def _read(block: Block, kind: str, notes: Notes) -> TritonTensor:
    name, line = block.text("name"), block.line_of("name")
    if not name:
        raise ConfigFault(block.line, block.column, f"this {kind} has no name")
    data_type = block.choice("data_type", DATA_TYPES)
    dtype = _DTYPES.get(data_type)
    if dtype is None:
        raise ConfigFault(block.line, block.column, f"the {kind} {name!r} has no data_type")
    dims = _dims(block, "dims", kind, name)
    if not dims:
        raise ConfigFault(block.line, block.column, f"the {kind} {name!r} has no dims")
    reshape_block = block.block("reshape")
    reshape = None if reshape_block is None else _dims(reshape_block, "shape", kind, name)
    if reshape is not None:
        _check_reshape(block.line_of("reshape"), name, dims, reshape)
    if kind == "input":
        block.choice("format", _FORMATS)
        if block.flag("optional"):
            notes.differs(
                block.line_of("optional"), f"the input {name} is optional in Triton; here each request has it"
            )
        if block.flag("allow_ragged_batch"):
            said = f"the input {name} may be ragged in Triton; here requests of unequal shapes run one after the other"
            notes.differs(block.line_of("allow_ragged_batch"), said)
    for flag in ("is_shape_tensor", "is_non_linear_format_io"):
        if block.flag(flag):
            raise Refused(block.line_of(flag), f"{flag} is TensorRT's alone", "import the model as ONNX")
    labels = block.text("label_filename") if kind == "output" else ""
    return TritonTensor(name, dtype, dims, line, reshape, labels)


def _dims(block: Block, field: str, kind: str, name: str) -> tuple[int, ...]:
    dims = tuple(block.wholes(field))
    for size in dims:
        if size < 1 and size != _ANY:
            said = f"{field} of the {kind} {name!r} has {size}; a size is 1 or more, or -1 where it varies"
            raise ConfigFault(block.line_of(field), 1, said)
    return dims


def _check_reshape(line: int, name: str, dims: Sequence[int], reshape: Sequence[int]) -> None:
    counts = []
    for shape in (dims, reshape):
        count = 1
        for size in shape:
            count *= size if size != _ANY else 1
        counts.append((count, list(shape).count(_ANY)))
    if counts[0] != counts[1]:
        raise Refused(
            line,
            f"{name} has dims {list(dims)} and the reshape {list(reshape)}, which do not hold equally many values",
            "write one with as many, and as many sizes of -1",
        )


def for_torchscript(tensors: Tensors, config: Block, notes: Notes) -> Tensors:
    """The tensors in the order of the program's arguments and results. Raises Refused.

    Names such as `INPUT__0` say their place; without such names the order of the configuration counts.
    """
    ordered: list[tuple[TritonTensor, ...]] = []
    for kind, given in (("input", tensors.inputs), ("output", tensors.outputs)):
        if not given:
            raise Refused(
                0, f"there is no {kind} in the configuration, and TorchScript does not name its own", f"add its {kind}s"
            )
        places = [_NUMBERED.fullmatch(each.name) for each in given]
        numbers = [int(place[1]) for place in places if place is not None]
        if len(numbers) < len(given):
            if len(given) > 1:
                said = f"the {kind}s do not end in __0, __1, …: they are taken in the order of the configuration"
                notes.differs(config.line_of(kind), said)
            ordered.append(given)
            continue
        by_place = dict(zip(numbers, given, strict=True))
        for place in range(len(given)):
            if place not in by_place:
                raise Refused(
                    given[0].line,
                    f"there is no {kind} whose name ends in __{place}, beside {given[0].name!r}",
                    f"name all {kind}s of the program up to the last one",
                )
        ordered.append(tuple(by_place[place] for place in range(len(given))))
    result = replace(tensors, inputs=ordered[0], outputs=ordered[1])
    _refuse_types(result, ("string",), "a model here takes numbers")
    return result


def for_onnx(tensors: Tensors, graph: OnnxGraph, config: Block, notes: Notes) -> Tensors:
    """The tensors of the configuration, held against the file's; the file's where it has none. Raises Refused."""
    line = config.line_of("max_batch_size")
    if not tensors.inputs or not tensors.outputs:
        tensors = _completed(tensors, graph, notes, line)
    for kind, given, known in (("input", tensors.inputs, graph.inputs), ("output", tensors.outputs, graph.outputs)):
        by_name = {each.name: each for each in known}
        for tensor in given:
            there = by_name.pop(tensor.name, None)
            if there is None:
                names = ", ".join(each.name for each in known)
                raise Refused(
                    tensor.line, f"the model has no {kind} {tensor.name!r}, but {names}", "name it as the model does"
                )
            _check_same(kind, tensor, there, has_batch_axis=bool(tensors.max_batch_size))
        if by_name and kind == "input":
            raise Refused(
                config.line_of("input"),
                f"the model needs the input {next(iter(by_name))!r}, which the configuration does not have",
                "add it",
            )
    _refuse_types(tensors, ("string", "bfloat16"), "an ONNX model here takes numbers that numpy has")
    return tensors


def _completed(tensors: Tensors, graph: OnnxGraph, notes: Notes, line: int) -> Tensors:
    """The file's inputs or outputs, as Triton completes a configuration without them."""
    every = (*graph.inputs, *graph.outputs)
    can_batch = bool(graph.inputs and graph.outputs) and all(each.sizes and each.sizes[0] is None for each in every)
    max_batch_size = tensors.max_batch_size
    if not max_batch_size and can_batch and not tensors.inputs and not tensors.outputs:
        max_batch_size = AUTOMATIC_BATCH_SIZE
        notes.works(line, f"max_batch_size is {max_batch_size}, as Triton completes it for a model that can be batched")
    first = 1 if max_batch_size else 0

    def complete(given: Sequence[TritonTensor], known: Sequence[GraphTensor], kind: str) -> tuple[TritonTensor, ...]:
        if given:
            return tuple(given)
        if not known:
            raise Refused(0, f"the model has no {kind}s", "export it again")
        for each in known:
            if each.dtype is None:
                raise Refused(0, f"the {kind} {each.name!r} is no tensor", "export the model with tensors alone")
        # What has no sizes is a scalar, and Triton refuses it without a reshape.
        return tuple(
            TritonTensor(each.name, str(each.dtype), tuple(_ANY if n is None else n for n in each.sizes[first:]), line)
            for each in known
        )

    inputs, outputs = (
        complete(tensors.inputs, graph.inputs, "input"),
        complete(tensors.outputs, graph.outputs, "output"),
    )
    notes.works(line, f"inputs and outputs are the model's own: {', '.join(each.name for each in (*inputs, *outputs))}")
    return Tensors(inputs, outputs, max_batch_size)


def _check_same(kind: str, tensor: TritonTensor, there: GraphTensor, *, has_batch_axis: bool) -> None:
    if there.dtype != tensor.dtype:
        raise Refused(
            tensor.line,
            f"the {kind} {tensor.name!r} is {tensor.dtype} here and {there.dtype or 'no tensor'} in the model",
            "write the model's data_type",
        )
    if not there.sizes:  # a file need not say the shape of an output
        return
    sizes = list(there.sizes)
    if has_batch_axis and sizes.pop(0) is not None:
        said = f"max_batch_size is above 0, and the first size of {tensor.name!r} is {there.sizes[0]} in the model"
        raise Refused(tensor.line, said, "set max_batch_size to 0, with whole shapes as dims")
    dims = tensor.dims if tensor.reshape is None else tensor.reshape
    fits = len(dims) == len(sizes) and all(
        size is None or size == dim or (kind == "output" and dim == _ANY)
        for dim, size in zip(dims, sizes, strict=False)
    )
    if not fits:
        shown = [_ANY if size is None else size for size in sizes]
        raise Refused(
            tensor.line,
            f"the {kind} {tensor.name!r} has dims {list(dims)} here and {shown} in the model",
            "write the model's sizes, without the batch axis where max_batch_size is above 0",
        )


def _refuse_types(tensors: Tensors, dtypes: Sequence[str], why: str) -> None:
    for kind, given in (("input", tensors.inputs), ("output", tensors.outputs)):
        for tensor in given:
            if tensor.dtype in dtypes:
                said = f"the {kind} {tensor.name!r} is {tensor.dtype}: {why}"
                raise Refused(tensor.line, said, "serve it with a handler of your own (docs/handlers.md)")
