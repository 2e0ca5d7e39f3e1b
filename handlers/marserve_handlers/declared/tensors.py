"""`handle(rows, context)` of a model with named tensors: reads, stacks and calls `predict`, and cuts the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.arrays import NPY_TYPE, Array, Slot, as_array, as_npy
from marserve_handlers.declared.bodies import JSON
from marserve_handlers.declared.declaration import Declaration
from marserve_handlers.declared.item_context import accepts, is_in_vain
from marserve_handlers.declared.items import encode_json
from marserve_handlers.declared.open_inference.marking import is_marked
from marserve_handlers.declared.predicting import CONTEXT, Predicting
from marserve_handlers.declared.running import Runner
from marserve_handlers.declared.stacking import Inputs, Rows, Span, fill, next_size
from marserve_handlers.errors import BadInput, add_note
from marserve_handlers.support.devices.device_errors import is_out_of_memory

if TYPE_CHECKING:
    from marserve_handlers.declared.open_inference.inferring import Inferring


class TensorModel:
    """Serves one model of named tensors. `predict` is bound; `most_rows` is how many rows one call may have.

    `labels` are the names of an output's classes, for clients that ask for a classification. With `answers_bare` a
    request that does not name its input gets the only output without its name, too. `sizes`, in order, are the only
    numbers of rows that `predict` is called with, empty for any: it gets copies of the last row, whose results are cut.
    """

    def __init__(
        self,
        predict: Any,
        predicting: Predicting,
        declaration: Declaration,
        *,
        most_rows: int,
        max_rows: int,
        labels: Mapping[str, Sequence[str]] | None = None,
        answers_bare: bool = False,
        sizes: Sequence[int] = (),
    ) -> None:
        self._labels = labels or {}
        self._answers_bare = answers_bare and len(declaration.outputs) == 1
        self._predict = predict
        self._words = predicting.words
        self._is_async = predicting.is_async
        self._takes_context = predicting.takes_context
        self._inputs = Inputs(declaration.inputs, max_rows, has_batch_axis=declaration.has_batch_axis)
        self._outputs = {name: Slot(name, tensor) for name, tensor in declaration.outputs.items()}
        self._most_rows = most_rows
        self._sizes = sizes
        self._runner = Runner()
        self._asked_lengths = [
            size for size in self._inputs.padded if predicting.takes_any or f"{size}_lengths" in predicting.parameters
        ]
        self._as_torch = [
            (name, tensor.dtype)
            for name, tensor in declaration.inputs.items()
            if _is_of_torch(predicting.hints.get(name))
        ]
        # Named sizes of outputs that were filled up in the inputs: each request gets its own part of them.
        self._trims = any(size in self._inputs.padded for slot in self._outputs.values() for _, size in slot.names)

    # ------------------------------------------------------------------------------------------- a batch

    def handle(self, rows: Sequence[dict[str, Any] | None], context: Context) -> list[Any]:
        """One answer for each request, None for None. An exception in an answer's place is that request's alone."""
        if self._is_async:
            return self._runner.run(self.handle_async(rows, context))
        batch = _Batch(rows, self._reader(context))
        for spans in self._calls(batch, context):
            try:
                returned = self._predict(**self._arguments(spans, context))
            except Exception as error:
                self._add_hint(error)
                batch.fail(spans, error)
            else:
                self._take(batch, spans, returned)
        return self._finish(batch, context)

    async def handle_async(self, rows: Sequence[dict[str, Any] | None], context: Context) -> list[Any]:
        """The same where `predict` is a coroutine."""
        batch = _Batch(rows, self._reader(context))
        for spans in self._calls(batch, context):
            try:
                returned = await self._predict(**self._arguments(spans, context))
            except Exception as error:
                self._add_hint(error)
                batch.fail(spans, error)
            else:
                self._take(batch, spans, returned)
        return self._finish(batch, context)

    @cached_property
    def _infer(self) -> Inferring:
        # here: most workers never see a request of the protocol
        from marserve_handlers.declared.open_inference.inferring import Inferring

        return Inferring(self._inputs, self._outputs, self._labels)

    def _reader(self, context: Context) -> Callable[[int, dict[str, Any]], Rows]:
        """What reads the request at a place of the batch."""
        read = self._inputs.read
        return lambda place, row: self._infer.read(place, row, context) if is_marked(context, place) else read(row)

    def _calls(self, batch: _Batch, context: Context) -> Iterator[list[Span]]:
        # Without a batch axis nothing can share a call.
        most = max(self._most_rows, len(batch.rows)) if self._inputs.has_batch_axis else 1
        if self._sizes:
            most = self._sizes[-1]
        for number, spans in enumerate(self._inputs.calls(batch.requests, most)):
            if number:  # nothing more is run of a request that failed in an earlier call, or whose client has gone
                batch.gone.update(span.place for span in spans if is_in_vain(context, span.place))
                spans = [span for span in spans if span.place not in batch.failed and span.place not in batch.gone]
            if spans:
                if number and context.begin_call is not None:
                    context.begin_call()
                yield spans

    def _arguments(self, spans: Sequence[Span], context: Context) -> dict[str, Any]:
        arguments: dict[str, Any] = self._inputs.stack(spans)
        if self._sizes:
            self._fill(arguments, _rows_of(spans))
        for name, dtype in self._as_torch:
            array = arguments[name]
            if array is not None:
                arguments[name] = _tensor(array, dtype)
        for size in self._asked_lengths:
            arguments[f"{size}_lengths"] = self._inputs.lengths(spans, size)
            if self._sizes:
                self._fill(arguments, _rows_of(spans), f"{size}_lengths")
        if self._takes_context:
            arguments[CONTEXT] = context
        return arguments

    def _fill(self, arguments: dict[str, Any], rows: int, *names: str) -> None:
        """Fill arrays, all or those of these names, up to the next of the sizes."""
        size = next_size(rows, self._sizes)
        for name in names or list(arguments):
            if size > rows and arguments[name] is not None:
                arguments[name] = fill(arguments[name], size)

    def _add_hint(self, error: Exception) -> None:
        """Note how to get tensors, on a TypeError of torch about an array that `predict` was given."""
        of_torch = {name for name, _ in self._as_torch}
        name = next((name for name in self._inputs.slots if name not in of_torch), None)
        if name is None or "torch" not in sys.modules or not isinstance(error, TypeError):
            return
        if "numpy.ndarray" in str(error):
            add_note(error, f"predict gets numpy arrays; annotate {name}: torch.Tensor to get tensors")

    # ------------------------------------------------------------------------------------------- its result

    def _take(self, batch: _Batch, spans: Sequence[Span], returned: Any) -> None:
        """Give each request its part of what `predict` returned. Raises TypeError or ValueError for a wrong result."""
        outputs = self._outputs
        if not isinstance(returned, Mapping):
            if len(outputs) != 1:
                raise TypeError(
                    f"{self._words} returned {type(returned).__name__}; it must return a dict with {', '.join(outputs)}"
                )
            returned = dict.fromkeys(outputs, returned)
        if returned.keys() != outputs.keys():
            raise TypeError(
                f"{self._words} returned the keys {', '.join(map(str, returned)) or 'none'}; declared are "
                f"{', '.join(outputs)}"
            )
        total = next_size(_rows_of(spans), self._sizes) if self._sizes else _rows_of(spans)
        errors: dict[int, BaseException] = {}
        arrays: dict[str, Array | None] = {}
        for name, slot in outputs.items():
            value = returned[name]
            if isinstance(value, (list, tuple)) and any(isinstance(each, BaseException) for each in value):
                value = _without_errors(value, errors)
                if value is None:
                    arrays[name] = None
                    continue
            arrays[name] = slot.check_output(value, total)
        at = 0
        for span in spans:
            end = at + span.end - span.begin
            if errors:
                failure = next((errors[row] for row in range(at, end) if row in errors), None)
                if failure is not None:
                    batch.failed[span.place] = failure
                    at = end
                    continue
            parts = batch.parts[span.place]
            for name, array in arrays.items():
                if array is not None:
                    part = array[at:end]
                    parts.setdefault(name, []).append(
                        self._trimmed(part, outputs[name], span.rows) if self._trims else part
                    )
            at = end

    def _trimmed(self, part: Array, slot: Slot, rows: Rows) -> Array:
        """The part of an output that belongs to a request's own sizes, where its inputs were filled up."""
        cuts = [slice(None)] * part.ndim
        for axis, size in slot.names:
            if size in self._inputs.padded and size in rows.sizes:
                cuts[axis] = slice(0, rows.sizes[size])
        return part[tuple(cuts)]

    def _finish(self, batch: _Batch, context: Context) -> list[Any]:
        answers: list[Any] = [None] * len(batch.rows)
        for place, rows in batch.requests:
            if place in batch.gone:
                answers[place] = b""
            elif place not in batch.failed:
                try:
                    answers[place] = self._answer(batch.parts[place], rows, context, place)
                except (ValueError, BadInput) as error:
                    # Its rows ran in several calls, with results of unequal shapes; or its memory is too small.
                    batch.failed[place] = error
        # No frame of its traceback may keep a failure: the cycle would hold the batch's bodies until it is collected.
        if batch.failed and len(answers) == 1:
            raise batch.failed.popitem()[1]
        for place in list(batch.failed):
            answers[place] = batch.failed.pop(place)
        return answers

    def _answer(self, parts: Mapping[str, list[Array]], rows: Rows, context: Context, place: int) -> Any:
        if rows.infer is not None:
            return self._infer.answer({name: _joined(arrays) for name, arrays in parts.items()}, rows, context, place)
        if rows.came_as_npy and len(self._outputs) == 1 and accepts(context, place, NPY_TYPE, JSON):
            context.set_response_content_type(place, NPY_TYPE)
            array = _joined(next(iter(parts.values())))
            return as_npy(array if rows.is_batch else array[0])
        if rows.is_bare and self._answers_bare:
            array = _joined(next(iter(parts.values())))
            return (array if rows.is_batch else array[0]).tolist()
        if rows.is_batch:
            return JsonAnswer(encode_json({name: _joined(arrays).tolist() for name, arrays in parts.items()}))
        return JsonAnswer(encode_json({name: arrays[0][0].tolist() for name, arrays in parts.items()}))


class _Batch:
    """The requests of a batch on their way: what they hold, the parts of their answers, and which of them failed."""

    def __init__(self, rows: Sequence[dict[str, Any] | None], read: Callable[[int, dict[str, Any]], Rows]) -> None:
        self.rows = rows
        self.requests: list[tuple[int, Rows]] = []
        self.failed: dict[int, BaseException] = {}
        self.gone: set[int] = set()
        self.parts: list[dict[str, list[Array]]] = [{} for _ in rows]
        for place, row in enumerate(rows):
            if row is None:  # another part of the handler answers it
                continue
            try:
                self.requests.append((place, read(place, row)))
            except BadInput as error:
                self.failed[place] = error

    def fail(self, spans: Sequence[Span], error: Exception) -> None:
        """`predict` raised: the failure of the only request of the call; raised again where there are several.

        The server runs halves of a batch that raised until the guilty request stands alone.
        """
        place = spans[0].place
        if any(span.place != place for span in spans) or is_out_of_memory(error):
            try:
                raise error
            finally:
                del error  # the traceback has this frame
        self.failed[place] = error


def _rows_of(spans: Sequence[Span]) -> int:
    return sum(span.end - span.begin for span in spans)


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _without_errors(values: Sequence[Any], errors: dict[int, BaseException]) -> Array | None:
    """The rows as one array, zeros in the place of exceptions, which go to `errors`; None if there is nothing else."""
    arrays = [None if isinstance(each, BaseException) else as_array(each) for each in values]
    good = next((array for array in arrays if array is not None), None)
    for row, each in enumerate(values):
        if isinstance(each, BaseException):
            errors.setdefault(row, each)
    if good is None:
        return None
    return np.stack([np.zeros_like(good) if array is None else array for array in arrays])


def _is_of_torch(annotation: Any) -> bool:
    """Whether an annotation is a class of torch; text where it could not be resolved."""
    words = annotation if isinstance(annotation, str) else getattr(annotation, "__module__", None)
    return str(words).partition(".")[0] == "torch"


def _tensor(array: Array, dtype: str) -> Any:
    import torch  # here: the author's annotation says that it is there

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(torch.bfloat16) if dtype == "bfloat16" else tensor
