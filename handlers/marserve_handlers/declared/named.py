"""Models that declare themselves: `base_handler` takes their inputs by name, or the only one by itself.

An ONNX model and an exported program say names, dtypes and shapes of their inputs and outputs. Of TorchScript and eager
models the key `signature` of the model's configuration says it (`signature.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


def declare_specs(inputs: Iterable[Spec], outputs: Iterable[Spec]) -> Declaration | None:
    """The declaration of a program with these inputs and outputs; None if they have no batch axis, or odd dtypes.

    The first size of each must vary. One that varies and has no plain name is named by its place.
    """
    tensors: list[dict[str, Tensor]] = []
    for specs in (inputs, outputs):
        found: dict[str, Tensor] = {}
        for name, dtype, sizes in specs:
            if dtype is None or not sizes or isinstance(sizes[0], int):
                return None
            shape: list[int | str] = [BATCH]
            for axis, size in enumerate(sizes[1:], 1):
                if not isinstance(size, int):
                    is_plain = isinstance(size, str) and size.isidentifier() and size not in (*shape, sizes[0])
                    size = str(size) if is_plain else f"{_plain(name)}_size_{axis}"
                shape.append(size)
            found[name] = Tensor(dtype, shape)
        tensors.append(found)
    return Declaration(tensors[0], tensors[1]) if all(tensors) else None


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
            given = run(taken if has_batch_axis else [array[0] for array in taken])
            if isinstance(given, Mapping):
                given = list(given.values())
            elif not isinstance(given, (list, tuple)):
                given = [given]
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
