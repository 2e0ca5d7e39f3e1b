"""Requests to stacked batches and back: which rows share a call, how they are padded, whose each row of the result is.

A request holds one row, or several where its arrays have the batch axis. Requests of several rows are kept together
where they fit into a call, and cut where they do not; their rows come back in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from marserve_handlers.declared.arrays import Array, Slot
from marserve_handlers.declared.bodies import JSON, kind_of, read_json, what_came
from marserve_handlers.declared.declaration import Tensor
from marserve_handlers.errors import BadInput

if TYPE_CHECKING:
    from marserve_handlers.declared.open_inference.request import InferRequest

# Filled up, the tensors of a call have at most so many numbers, or so many times those that came.
FILLED_FREELY: Final = 1 << 24
MOST_TIMES_FILLED: Final = 4


class Rows:
    """The arrays of one request, each with a batch axis, and the named sizes of its items.

    `is_batch`: it came with the batch axis, so its answer has one, too. `infer` is the request of the Open Inference
    Protocol that they came in, None for others. `is_bare`: it is JSON without the input's name.
    """

    __slots__ = ("arrays", "came_as_npy", "count", "infer", "is_bare", "is_batch", "sizes")

    def __init__(self, arrays: dict[str, Array], count: int, is_batch: bool, sizes: dict[str, int]) -> None:
        self.arrays = arrays
        self.count = count
        self.is_batch = is_batch
        self.sizes = sizes
        self.came_as_npy = False
        self.is_bare = False
        self.infer: InferRequest | None = None


class Span:
    """Rows `begin` to `end` of a request, which run in one call. `place` is the request's place in the batch."""

    __slots__ = ("begin", "end", "place", "rows")

    def __init__(self, place: int, rows: Rows, begin: int, end: int) -> None:
        self.place = place
        self.rows = rows
        self.begin = begin
        self.end = end


class Inputs:
    """The declared inputs of a model: reads requests, and stacks them."""

    def __init__(self, tensors: Mapping[str, Tensor], max_rows: int, *, has_batch_axis: bool = True) -> None:
        self.has_batch_axis = has_batch_axis
        self.slots = {name: Slot(name, tensor) for name, tensor in tensors.items()}
        self.max_rows = max_rows
        self._only = next(iter(self.slots.values())) if len(self.slots) == 1 else None
        self._has_names = any(slot.names for slot in self.slots.values())
        self.has_optional = any(slot.tensor.optional for slot in self.slots.values())
        self.padded = tuple(
            dict.fromkeys(size for slot in self.slots.values() if slot.tensor.pad is not None for _, size in slot.names)
        )
        """The named sizes that are filled up, and whose true lengths `predict` may ask for."""
        # Sizes that must be equal within a call: those of tensors without a pad.
        self._equal = tuple(
            dict.fromkeys(size for slot in self.slots.values() if slot.tensor.pad is None for _, size in slot.names)
        )

    # ------------------------------------------------------------------------------------------- one request

    def read(self, row: Mapping[str, Any]) -> Rows:
        """The arrays of a request: a raw body, or a form with a field for each tensor. Raises BadInput."""
        body = row.get("body")
        if body is None:
            body = row.get("data") if "data" not in self.slots else None
        if body is not None and not isinstance(body, (bytes, bytearray)):  # decoded before
            return self.read_value(body)
        if body is not None and self._only is not None and body.startswith(b"\x93"):
            rows = self._single(self._only, self._only.read_npy(body))
            rows.came_as_npy = True
            return rows
        if body is not None:
            return self.read_value(read_json(body))
        values = {name: value for name, value in row.items() if name in self.slots}
        if not values:
            raise BadInput(f"expected {self.words}, got {what_came(row, JSON)}")
        return self._rows({name: _read_field(self.slots[name], value) for name, value in values.items()})

    def read_infer(self, infer: InferRequest) -> Rows:
        """The arrays of a request of the Open Inference Protocol. Raises BadInput.

        They have the batch axis, and get one where the model has none. Of MLServer's clients a list of n values has the
        shape [n, 1]; it is taken for [n].
        """
        tensors = dict(infer.tensors)
        for name, array in infer.tensors.items():
            slot = self.slots.get(name)
            if slot is None:
                continue
            if array.dtype == object:
                raise BadInput(f"expected {slot.whole_words}, got BYTES", name)
            came = list(array.shape)
            if not self.has_batch_axis:
                if not slot.takes_item(array.shape):
                    raise BadInput(f"expected {slot.words}, got {came}", name)
                tensors[name] = array[None]
            elif slot.rank == 1 and came[1:] == [1]:
                tensors[name] = array[:, 0]
            elif array.ndim == slot.rank - 1:
                raise BadInput(f"expected {slot.whole_words}, got {came}, which lacks the batch axis", name)
        rows = self._rows(tensors)
        rows.infer = infer
        return rows

    def read_value(self, value: Any) -> Rows:
        """The arrays of decoded JSON: an object of the tensors' names, or the only tensor by itself."""
        only = self._only
        if type(value) is dict:
            if only is not None and len(value) == 1:  # the usual case
                array = value.get(only.name)
                if array is not None:
                    return self._single(only, array)
            return self._rows(value)
        if only is None:
            raise BadInput(f"expected a JSON object with {self.words}, got {kind_of(value)}")
        rows = self._single(only, value)
        rows.is_bare = True
        return rows

    def _single(self, slot: Slot, value: Any) -> Rows:
        array, is_batch = slot.read(value)
        sizes = {} if not slot.names else {size: array.shape[axis] for axis, size in slot.names}
        count = array.shape[0]
        if is_batch:
            self._check_count(count)
        return Rows({slot.name: array}, count, is_batch, sizes)

    def _rows(self, values: Mapping[str, Any]) -> Rows:
        for name in values:
            if name not in self.slots:
                raise BadInput(f"there is no such input; expected {self.words}", name)
        arrays: dict[str, Array] = {}
        sizes: dict[str, int] = {}
        first: tuple[str, int, bool] | None = None
        for name, slot in self.slots.items():
            value = values.get(name)
            if value is None:
                if slot.tensor.optional:
                    continue
                raise BadInput(f"is missing, expected {slot.words}", name)
            array, is_batch = slot.read(value)
            count = array.shape[0]
            if first is None:
                first = name, count, is_batch
            elif is_batch is not first[2]:
                with_axis, without = (name, first[0]) if is_batch else (first[0], name)
                raise BadInput(f"came without the batch axis, and {with_axis} with one", without)
            elif count != first[1]:
                raise BadInput(f"has {count} rows, and {first[0]} has {first[1]}", name)
            for axis, size in slot.names:
                if sizes.setdefault(size, array.shape[axis]) != array.shape[axis]:
                    raise BadInput(f"has {array.shape[axis]} {size}, and another input has {sizes[size]}", name)
            arrays[name] = array
        if first is None:
            raise BadInput(f"expected {self.words}, got no input")
        if first[2]:
            self._check_count(first[1])
        return Rows(arrays, first[1], first[2], sizes)

    def _check_count(self, count: int) -> None:
        if count < 1:
            raise BadInput("the request has no rows")
        if count > self.max_rows:
            raise BadInput(f"the request has {count} rows, more than maxRows, {self.max_rows}")

    @property
    def words(self) -> str:
        """All inputs with their shapes, for messages."""
        return ", ".join(f"{name}: {slot.words}" for name, slot in self.slots.items())

    # ------------------------------------------------------------------------------------------- a batch

    def calls(self, requests: Sequence[tuple[int, Rows]], most: int) -> Iterator[list[Span]]:
        """The rows of each call of `predict`: at most `most`, of requests that may share it, in order of arrival."""
        groups: dict[tuple[Any, ...], list[tuple[int, Rows]]] = {}
        if self._equal or self.has_optional:
            for request in requests:
                rows = request[1]
                key = (
                    (*(rows.sizes.get(size) for size in self._equal), *rows.arrays)
                    if self.has_optional
                    else tuple(rows.sizes.get(size) for size in self._equal)
                )
                groups.setdefault(key, []).append(request)
        else:
            groups = {(): list(requests)}
        for group in groups.values():
            for call in _cut(group, most):
                yield from self._bounded(call) if self.padded and len(call) > 1 else [call]

    def _bounded(self, call: Sequence[Span]) -> Iterator[list[Span]]:
        """The call, or parts of it, so that its tensors, filled up, are not far larger than what came."""
        begin = rows = came = 0
        widest: dict[str, int] = {}
        for index, span in enumerate(call):
            sizes, count = span.rows.sizes, span.end - span.begin
            own = count * self._padded_numbers(sizes)
            wider = {size: max(number, widest.get(size, 0)) for size, number in sizes.items()}
            filled = (rows + count) * self._padded_numbers(wider)
            if rows and filled > max(FILLED_FREELY, MOST_TIMES_FILLED * (came + own)):
                yield list(call[begin:index])
                begin, rows, came, wider = index, 0, 0, sizes
            rows, came, widest = rows + count, came + own, wider
        yield list(call[begin:])

    def _padded_numbers(self, sizes: Mapping[str, int]) -> int:
        """How many numbers one item of these sizes has in the tensors that are filled up.

        A size of 0 counts as 1: filled up, it is as large as its mates'.
        """
        return sum(
            math.prod(size if isinstance(size, int) else max(1, sizes.get(size, 1)) for size in slot.tensor.item_shape)
            for slot in self.slots.values()
            if slot.tensor.pad is not None
        )

    def stack(self, spans: Sequence[Span]) -> dict[str, Array | None]:
        """The stacked arrays of a call, by name; None for optional inputs that did not come."""
        if len(spans) == 1:
            span = spans[0]
            arrays: dict[str, Array | None] = (
                dict(span.rows.arrays)
                if span.end - span.begin == span.rows.count
                else {name: array[span.begin : span.end] for name, array in span.rows.arrays.items()}
            )
            if self.has_optional:
                return {name: arrays.get(name) for name in self.slots}
            return arrays
        stacked: dict[str, Array | None] = {}
        for name, slot in self.slots.items():
            if self.has_optional and name not in spans[0].rows.arrays:
                stacked[name] = None
                continue
            parts = [_part(span, name) for span in spans]
            if slot.tensor.pad is not None and any(part.shape[1:] != parts[0].shape[1:] for part in parts):
                stacked[name] = _pad(parts, slot)
            else:
                stacked[name] = np.concatenate(parts)
        return stacked

    def lengths(self, spans: Sequence[Span], size: str) -> Array:
        """The true lengths of a padded size, one a row: int64 [rows]."""
        return np.repeat(
            np.array([span.rows.sizes.get(size, 0) for span in spans], np.int64),
            [span.end - span.begin for span in spans],
        )


def _cut(requests: Sequence[tuple[int, Rows]], most: int) -> Iterator[list[Span]]:
    call: list[Span] = []
    room = most
    for place, rows in requests:
        count = rows.count
        if count <= most:
            if count > room:
                yield call
                call, room = [], most
            call.append(Span(place, rows, 0, count))
            room -= count
            continue
        at = 0
        while at < count:
            if not room:
                yield call
                call, room = [], most
            taken = min(room, count - at)
            call.append(Span(place, rows, at, at + taken))
            at += taken
            room -= taken
    if call:
        yield call


def _part(span: Span, name: str) -> Array:
    array = span.rows.arrays[name]
    return array if span.end - span.begin == span.rows.count else array[span.begin : span.end]


def _pad(parts: Sequence[Array], slot: Slot) -> Array:
    """One array of all rows, as large as the largest item in each size, filled up with the pad."""
    shape = tuple(max(part.shape[axis] for part in parts) for axis in range(1, slot.rank))
    padded = np.full((sum(len(part) for part in parts), *shape), slot.tensor.pad, slot.dtype)
    at = 0
    for part in parts:
        place = (slice(at, at + len(part)), *(slice(0, size) for size in part.shape[1:]))
        padded[place] = part
        at += len(part)
    return padded


def _read_field(slot: Slot, value: Any) -> Any:
    if value[:6] == b"\x93NUMPY":
        return slot.read_npy(value)
    try:
        return read_json(value)
    except BadInput as error:
        raise BadInput(str(error.message), slot.name) from None


def next_size(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes, which are in order, that holds so many rows; as many as they are where none does."""
    return next((size for size in sizes if size >= rows), rows)


def fill(array: Array, size: int) -> Array:
    """The array with copies of its last row up to `size` rows."""
    return np.concatenate([array, np.repeat(array[-1:], size - len(array), axis=0)])
