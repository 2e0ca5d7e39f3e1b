"""What a model declares, as plain data: its inputs and outputs. Pure: standard library only.

`marserve archive` writes the JSON of a `Declaration` into the archive, and a worker reports its own when it has loaded
the model, so both sides compare and show the same document.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

DECLARATION_VERSION: Final = 1
DECLARATION_PATH: Final = "MAR-INF/declaration.json"
MAX_DECLARATION_BYTES: Final = 64 << 10
BATCH: Final = "batch"

DTYPES: Final = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)

ELEMENTS: Final = ("text", "bytes", "image")
"""Items that an element of a BYTES tensor can be."""

ItemKind = Literal["json", "bytes", "text", "image", "events", "any"]


class DeclarationError(ValueError):
    """The declaration cannot be used: a model that has it is not loaded."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named input or output. `shape` is `["batch", …]`: behind it numbers, and names for sizes that vary.

    With `pad` requests whose named sizes differ share a batch, filled up with that value; without it only requests of
    one shape do. An `optional` input may be missing, and is None then.
    """

    dtype: str
    shape: Sequence[int | str]
    pad: float | None = None
    optional: bool = False

    @property
    def item_shape(self) -> tuple[int | str, ...]:
        """The shape of one item: without the batch axis."""
        return tuple(self.shape[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """The named sizes of an item."""
        return tuple(size for size in self.shape[1:] if isinstance(size, str))

    def describe(self) -> dict[str, Any]:
        """The tensor's members of the declaration's JSON; those without a value are left out."""
        described: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.pad is not None:
            described["pad"] = self.pad
        if self.optional:
            described["optional"] = True
        return described


@dataclass(frozen=True, slots=True)
class ItemType:
    """What one item, or one answer, is. `stream`: it comes in pieces.

    `schema` is the JSON schema of `json`, and of what else than plain text an input of `text` may be.
    """

    kind: ItemKind
    content_type: str = ""
    schema: Mapping[str, Any] | None = None
    stream: bool = False

    def describe(self) -> dict[str, Any]:
        """The members of the declaration's JSON; those without a value are left out."""
        described: dict[str, Any] = {"type": self.kind}
        if self.content_type:
            described["contentType"] = self.content_type
        if self.stream:
            described["stream"] = True
        if self.schema is not None:
            described["schema"] = self.schema
        return described


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that a model declares: named tensors in and out, or one item in and its answer out.

    Without `has_batch_axis` the model takes and gives tensors without that axis, one request a call. Their shapes here
    begin with `"batch"` all the same; those of the JSON do not. `is_async`: `predict` of one item is a coroutine, or an
    asynchronous generator, so that several of its requests can run at once. A program with `takes_one_row` is run on
    one row after the other; clients see nothing of it.
    """

    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    input: ItemType | None = None
    output: ItemType | None = None
    name: str | None = None
    has_batch_axis: bool = True
    is_async: bool = False
    takes_one_row: bool = False

    @property
    def takes_elements(self) -> bool:
        """Whether the elements of one BYTES tensor are its items, in the Open Inference Protocol.

        They are where an item is bytes, in some form, and its answer comes whole.
        """
        is_stream = self.output is not None and self.output.stream
        return self.input is not None and self.input.kind in ELEMENTS and not is_stream

    def document(self) -> dict[str, Any]:
        """The declaration as JSON's types.

        `{"version": 1, "kind": "tensors", "inputs": [{"name", "dtype", "shape", …}], "outputs": […]}`, or
        `{"version": 1, "kind": "item", "input": {"type", "schema", …}, "output": {…}}`; `name` if the author gave one,
        `"batch": false` for tensors without a batch axis, and `"async": true` for a coroutine that takes one item.
        """
        document: dict[str, Any] = {"version": DECLARATION_VERSION, "kind": "tensors" if self.input is None else "item"}
        if self.name is not None:
            document["name"] = self.name
        if self.input is None:
            if not self.has_batch_axis:
                document["batch"] = False
            document["inputs"] = [self._described(name, tensor) for name, tensor in self.inputs.items()]
            document["outputs"] = [self._described(name, tensor) for name, tensor in self.outputs.items()]
        else:
            document["input"] = self.input.describe()
            document["output"] = (self.output or ItemType("any")).describe()
            if self.is_async:
                document["async"] = True
        return document

    def _described(self, name: str, tensor: Tensor) -> dict[str, Any]:
        shape = {} if self.has_batch_axis else {"shape": list(tensor.item_shape)}
        return {"name": name, **tensor.describe(), **shape}

    def encode(self) -> bytes:
        """The declaration's JSON. Raises DeclarationError if it has more than `MAX_DECLARATION_BYTES`."""
        try:
            text = json.dumps(self.document(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise DeclarationError(f"The declaration cannot be written as JSON: {str(error).rstrip('.')}.") from None
        if len(text) > MAX_DECLARATION_BYTES:
            raise DeclarationError(
                f"The declaration has {len(text)} bytes, and may have {MAX_DECLARATION_BYTES}: make its JSON schema "
                "smaller, by shorter descriptions or fewer nested classes."
            )
        return text


def check_tensors(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, are_parameters: bool = True) -> None:
    """Raise DeclarationError for tensors that cannot be served, with the tensor's name and what would be right.

    With `are_parameters` their names must be names of Python; those of other programs' tensors may be any text.
    """
    if not inputs:
        raise DeclarationError("inputs is empty: name at least one tensor.")
    if not outputs:
        raise DeclarationError("outputs is missing: name at least one tensor that predict returns.")
    for what, tensors in (("input", inputs), ("output", outputs)):
        for name, tensor in tensors.items():
            _check_tensor(what, name, tensor, is_parameter=are_parameters)
    if all(tensor.optional for tensor in inputs.values()):
        raise DeclarationError("Every input is optional: at least one tensor must come with each request.")
    padded = {name for tensor in inputs.values() if tensor.pad is not None for name in tensor.names}
    for name in padded:
        if f"{name}_lengths" in inputs:
            raise DeclarationError(
                f"The input {name}_lengths has the name of the lengths of {name}, which is padded: name it otherwise."
            )


def _check_tensor(what: str, name: object, tensor: object, *, is_parameter: bool) -> None:
    if not isinstance(name, str) or not name or (is_parameter and not name.isidentifier()):
        raise DeclarationError(f"The {what} {name!r} is no name of a parameter: use letters, digits and _.")
    if not isinstance(tensor, Tensor):
        raise DeclarationError(f"The {what} {name} is {type(tensor).__name__}; it must be a Tensor.")
    if tensor.dtype not in DTYPES:
        raise DeclarationError(f"The {what} {name} has the dtype {tensor.dtype!r}; there are {', '.join(DTYPES)}.")
    shape = tensor.shape
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not shape or shape[0] != BATCH:
        shown = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else shape
        raise DeclarationError(f'The {what} {name} has the shape {shown!r}; its first dimension must be "batch".')
    for size in shape[1:]:
        is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        if not is_number and not (isinstance(size, str) and size.isidentifier()):
            raise DeclarationError(
                f"The {what} {name} has the dimension {size!r}; it must be a whole number, or a name for a size that "
                "varies."
            )
    names = [BATCH, *tensor.names]
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise DeclarationError(f"The {what} {name} has the dimension {twice[0]!r} twice; name each one differently.")
    if tensor.pad is not None and not _can_pad(tensor.dtype, tensor.pad):
        raise DeclarationError(f"The {what} {name} has the pad {tensor.pad!r}; it must be a number of {tensor.dtype}.")
    if what == "output" and (tensor.pad is not None or tensor.optional):
        raise DeclarationError(f"The output {name} has pad or optional, which only inputs have.")


def _can_pad(dtype: str, pad: object) -> bool:
    """Whether an array of this dtype can be filled up with it; infinite values and NaN cannot be declared."""
    if not isinstance(pad, (int, float)) or not math.isfinite(pad):
        return False
    if dtype == "bool":
        return pad in (0, 1)
    if "int" not in dtype:
        return True
    bits = int(dtype.partition("int")[2])
    least, most = (0, 1 << bits) if dtype.startswith("u") else (-(1 << bits - 1), 1 << bits - 1)
    return pad == int(pad) and least <= pad < most


def check_same(archive: bytes, handler: bytes, word: str) -> None:
    """Raise DeclarationError if two declarations differ: where, and what each says. `word` names the handler.

    `archive` is what the archive holds, `handler` what the handler declares, empty for nothing.
    """
    if not handler:
        raise DeclarationError(
            f"{DECLARATION_PATH} of the archive declares {_cut(archive.decode('utf-8', 'replace'))}, and the handler "
            f"{word} declares nothing: make the archive anew with marserve archive."
        )
    in_archive = json.loads(archive)
    found = first_difference(in_archive, _as_older(in_archive, json.loads(handler)))
    if found is not None:
        path, said, in_handler = found
        raise DeclarationError(
            f"{DECLARATION_PATH} of the archive and the handler {word} declare different things at {path}: the archive "
            f"{_cut(json.dumps(said))}, the handler {_cut(json.dumps(in_handler))}. Make the archive anew with "
            "marserve archive."
        )


def _as_older(archive: Any, handler: Any) -> Any:
    """The handler's, without what archives of older builds do not have: the schema of a text, and `async`."""
    old, new = archive.get("input") or {}, handler.get("input") or {}
    if old.get("type") == new.get("type") == "text" and "schema" not in old:
        handler = {**handler, "input": {key: value for key, value in new.items() if key != "schema"}}
    return {key: value for key, value in handler.items() if key != "async" or key in archive}


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


def first_difference(one: object, other: object, path: str = "") -> tuple[str, object, object] | None:
    """Where two documents differ first: the path and both values, `None` for a missing one; None if they are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            found = first_difference(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list) and any(isinstance(each, Mapping) for each in (*one, *other)):
        for index, (left, right) in enumerate(_pairs(one, other)):
            found = first_difference(left, right, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    return None if one == other else (path, one, other)


def _pairs(one: list[Any], other: list[Any]) -> Iterator[tuple[Any, Any]]:
    for index in range(max(len(one), len(other))):
        yield one[index] if index < len(one) else None, other[index] if index < len(other) else None
