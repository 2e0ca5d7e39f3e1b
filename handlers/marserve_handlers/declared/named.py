"""Models that declare themselves: `base_handler` takes their inputs by name, or the only one by itself.

An ONNX model and an exported program say names, dtypes and shapes of their inputs and outputs. Of TorchScript and eager
models the key `signature` of the model's configuration says it (`signature.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.declared.arrays import as_array
from marserve_handlers.declared.declaration import BATCH, Declaration, Tensor
from marserve_handlers.declared.open_inference.marking import is_marked
from marserve_handlers.declared.opening import DEFAULT_MAX_ROWS
from marserve_handlers.declared.predicting import Predicting
from marserve_handlers.declared.tensors import TensorModel

logger = logging.getLogger(__name__)

# Of one input or output: its name, its dtype, its sizes. A size is a number, or a name or None for one that varies.
Spec = tuple[str, str | None, Sequence[int | str | None]]


def declare_specs(inputs: Iterable[Spec], outputs: Iterable[Spec], *, may_batch: bool = True) -> Declaration | None:
    """The declaration of a program with these inputs and outputs; None for other types than numbers, and for scalars.

    The first sizes are the batch axis if all of them vary, and if all of them are 1: the program is then run on one row
    after the other. Else, and without `may_batch`, no tensor has one: shapes are whole, and each request is run by
    itself. A size that varies and has no plain name is named by its place.
    """
    kinds = list(inputs), list(outputs)
    every = [spec for specs in kinds for spec in specs]
    if not all(kinds) or any(dtype is None or not sizes for _, dtype, sizes in every):
        return None
    firsts = [sizes[0] for _, _, sizes in every]
    takes_one_row = may_batch and all(size == 1 for size in firsts)
    has_batch_axis = takes_one_row or (may_batch and not any(isinstance(size, int) for size in firsts))
    ours, theirs = ({spec[0]: _tensor(*spec, first=int(has_batch_axis)) for spec in specs} for specs in kinds)
    return Declaration(ours, theirs, has_batch_axis=has_batch_axis, takes_one_row=takes_one_row)


def _tensor(name: str, dtype: str | None, sizes: Sequence[int | str | None], *, first: int) -> Tensor:
    """The tensor of a spec with the batch axis before its sizes from `first` on."""
    shape: list[int | str] = [BATCH]
    for axis, size in enumerate(sizes[first:], first):
        if not isinstance(size, int):
            is_plain = isinstance(size, str) and size.isidentifier() and size not in (*shape, *sizes[:first])
            size = str(size) if is_plain else f"{_plain(name)}_size_{axis}"
        shape.append(size)
    return Tensor(str(dtype), shape)


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)


def _is_infer(value: Any, context: Context, place: int) -> bool:
    """Whether a row is a request of the Open Inference Protocol that no envelope has unwrapped.

    One without a value came as a form: it is refused as such a request.
    """
    return (value is None or isinstance(value, (dict, bytes, bytearray))) and is_marked(context, place)


class NamedInputs:
    """Answers the rows of a batch by the model's declaration. `run` takes arrays in the inputs' order.

    A model without a batch axis is run on one item at a time, whose arrays have none.
    """

    def __init__(
        self,
        declaration: Declaration,
        run: Callable[[list[Any]], Any],
        most_rows: int,
        labels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.text = declaration.encode()
        self._has_optional = any(tensor.optional for tensor in declaration.inputs.values())
        outputs, has_batch_axis = list(declaration.outputs), declaration.has_batch_axis

        def predict(**arrays: Any) -> dict[str, Any]:
            taken = [arrays[name] for name in declaration.inputs]
            given = _listed(run(taken if has_batch_axis else [array[0] for array in taken]))
            if len(given) < len(outputs):
                raise ValueError(f"the model gave {len(given)} outputs, and {len(outputs)} are declared")
            if not has_batch_axis:
                given = [as_array(each)[None] for each in given]
            return dict(zip(outputs, given, strict=False))  # a signature may name the first ones alone

        how = Predicting("the model", {}, {}, Any, takes_context=False, takes_any=True, is_async=False, is_stream=False)
        self._model = TensorModel(
            predict,
            how,
            declaration,
            most_rows=most_rows,
            max_rows=DEFAULT_MAX_ROWS,
            labels=labels,
            answers_bare=True,
        )

    def is_for(self, value: Any) -> bool:
        """Whether a row's value is read by the declaration.

        Bare values of a program with optional inputs are not: it may take the first one alone. Nor are bytes that are
        no `.npy` file.
        """
        if isinstance(value, (bytes, bytearray)):
            return value[:6] == b"\x93NUMPY"
        return isinstance(value, dict) or (value is not None and not self._has_optional)

    def answer(
        self,
        data: Sequence[Any],
        context: Context,
        value_of: Callable[[Any], Any],
        others: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """One answer for each row: `others` answers those that the declaration does not read, together."""
        values = [value_of(row) for row in data]
        rows: list[Any] = [
            {"body": value} if self.is_for(value) or _is_infer(value, context, place) else None
            for place, value in enumerate(values)
        ]
        left = [place for place, row in enumerate(rows) if row is None]
        answers = self._model.handle(rows, context) if len(left) < len(rows) else list(rows)
        if left:
            for place, answer in zip(left, others([data[place] for place in left]), strict=True):
                answers[place] = answer
        return answers


def _listed(given: Any) -> Sequence[Any]:
    """What a program gave as its outputs in order."""
    if isinstance(given, Mapping):
        return list(given.values())
    return given if isinstance(given, (list, tuple)) else [given]


def row_by_row(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], list[Any]]:
    """`run` of arrays with any number of rows, for a program that takes one."""

    def run_rows(arrays: list[Any]) -> list[Any]:
        count = next(len(array) for array in arrays if array is not None)
        parts = [
            [as_array(each) for each in _listed(run([None if one is None else one[at : at + 1] for one in arrays]))]
            for at in range(count)
        ]
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    return run_rows
