"""`signature` of a model's configuration: the tensors of a program that does not declare them, or not so.

    signature:
      inputs:
        x: {dtype: float32, shape: [batch, 3]}
        n: {dtype: int64, shape: [batch, 1], reshape: [batch]}
      outputs:
        y: {dtype: float32, shape: [batch, 2]}

A tensor is what `Tensor` takes. `reshape` is the shape that the program itself takes or gives, where clients know
another one; `labels` of an output is a file of the archive with the names of its classes. With `batch: false` no tensor
has a batch axis, and each request is run by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from marserve_handlers.declared.arrays import Array, as_array
from marserve_handlers.declared.declaration import BATCH, Declaration, DeclarationError, Tensor, check_tensors

_ANY: Final = -1  # numpy's word for the size that is left

Shape = Sequence[int | str]


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors as clients know them, and the shapes of those that the program knows by another one.

    `reshapes` has, by the tensor's name, its shape on both sides, as arrays have it when the program is run. `labels`
    are files of the archive with the names of an output's classes, a line each.
    """

    declaration: Declaration
    reshapes: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def read_labels(self, folder: str) -> dict[str, list[str]]:
        """The labels of each output that has some, from the archive at `folder`. Raises DeclarationError."""
        found: dict[str, list[str]] = {}
        for name, file in self.labels.items():
            path = os.path.realpath(os.path.join(folder, file))
            try:
                if os.path.commonpath((path, os.path.realpath(folder))) != os.path.realpath(folder):
                    raise FileNotFoundError
                with open(path, encoding="utf-8", errors="replace") as text:
                    found[name] = text.read().splitlines()
            except OSError:
                raise DeclarationError(f"The labels of {name} are {file!r}, which is no file of the archive.") from None
        return found

    def reshaping(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run` of arrays in the inputs' order, with its inputs and outputs reshaped."""
        if not self.reshapes:
            return run
        inputs, outputs = list(self.declaration.inputs), list(self.declaration.outputs)

        def run_reshaped(arrays: list[Any]) -> Any:
            given = run([self._before(name, array) for name, array in zip(inputs, arrays, strict=True)])
            if isinstance(given, Mapping):
                given = list(given.values())
            elif not isinstance(given, (list, tuple)):
                given = [given]
            return [self._after(name, each) for name, each in zip(outputs, given, strict=False)]

        return run_reshaped

    def _before(self, name: str, array: Array) -> Array:
        if name not in self.reshapes:
            return array
        clients, programs = self.reshapes[name]
        return _reshaped(array, clients, programs)

    def _after(self, name: str, value: Any) -> Any:
        if name not in self.reshapes:
            return value
        clients, programs = self.reshapes[name]
        return _reshaped(as_array(value), programs, clients)


def read_signature(config: Mapping[str, Any]) -> Signature | None:
    """The signature in a model's configuration; None without one. Raises DeclarationError."""
    signature = config.get("signature")
    if signature is None:
        return None
    has_batch_axis = signature.get("batch", True) if isinstance(signature, Mapping) else True
    if not isinstance(has_batch_axis, bool):
        raise DeclarationError(
            f"signature.batch of the model's configuration is {has_batch_axis!r}; it must be true or false."
        )
    tensors: list[dict[str, Tensor]] = []
    reshapes: dict[str, tuple[Shape, Shape]] = {}
    labels: dict[str, str] = {}
    for kind in ("inputs", "outputs"):
        given = signature.get(kind) if isinstance(signature, Mapping) else None
        found: dict[str, Tensor] = {}
        try:
            for name, members in dict(given or {}).items():
                members = {**members}
                reshape, file = members.pop("reshape", None), members.pop("labels", None)
                found[name] = _with_axis(Tensor(**members), has_batch_axis=has_batch_axis)
                if reshape is not None:
                    reshapes[name] = tuple(members["shape"]), tuple(reshape)
                if file is not None and kind == "outputs":
                    labels[name] = str(file)
        except (AttributeError, TypeError, ValueError, KeyError):
            raise DeclarationError(
                f"signature.{kind} of the model's configuration is {given!r}; it must be a map of names to dtype and "
                "shape, with reshape where the program has another shape, for inputs also pad and optional."
            ) from None
        tensors.append(found)
    check_tensors(*tensors, are_parameters=False)
    for name, (_, programs) in reshapes.items():
        _check_reshape(name, programs, has_batch_axis=has_batch_axis)
    return Signature(Declaration(tensors[0], tensors[1], has_batch_axis=has_batch_axis), reshapes, labels)


def _with_axis(tensor: Tensor, *, has_batch_axis: bool) -> Tensor:
    if has_batch_axis:
        return tensor
    return Tensor(tensor.dtype, [BATCH, *tensor.shape], tensor.pad, tensor.optional)


def _check_reshape(name: str, shape: Shape, *, has_batch_axis: bool) -> None:
    sizes = shape
    if has_batch_axis:
        if not shape or shape[0] != BATCH:
            raise DeclarationError(f'{name} has the reshape {list(shape)!r}; its first dimension must be "batch".')
        sizes = shape[1:]
    for size in sizes:
        is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        if not is_number and not (isinstance(size, str) and size.isidentifier()):
            raise DeclarationError(
                f"{name} has {size!r} in its reshape; it must be a whole number, or a name for a size that varies."
            )


def _reshaped(array: Array, now: Shape, then: Shape) -> Array:
    """The array, which has the shape `now`, in the shape `then`. A size is the one of its name in `now`."""
    if array.ndim != len(now):
        raise ValueError(f"the program gave the shape {list(array.shape)}, and its reshape says {list(now)}")
    sizes = dict(zip(now, array.shape, strict=True))
    return array.reshape([size if isinstance(size, int) else sizes.get(size, _ANY) for size in then])
