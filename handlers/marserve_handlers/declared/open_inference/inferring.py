"""What a model of named tensors makes of a request of the protocol, and of its results an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.arrays import Array, Slot
from marserve_handlers.declared.open_inference.answer import check_asked, write_answer
from marserve_handlers.declared.open_inference.datatypes import datatype_of
from marserve_handlers.declared.open_inference.marking import ANSWER_HEADER_LENGTH, RAW_TYPE, header_length
from marserve_handlers.declared.open_inference.request import InferRequest, read_request
from marserve_handlers.declared.open_inference.shared_memory import shared_tensors
from marserve_handlers.declared.open_inference.unpacking import check_unread, packing_of, unpack
from marserve_handlers.declared.stacking import Inputs, Rows
from marserve_handlers.errors import BadInput
from marserve_handlers.support.shown import shown


class Inferring:
    """Reads requests for one model, and writes their answers."""

    def __init__(self, inputs: Inputs, outputs: Mapping[str, Slot], labels: Mapping[str, Sequence[str]]) -> None:
        """`labels` are the names of classes, by output."""
        self._labels = labels
        self._inputs = inputs
        self._names = list(outputs)
        self._datatypes = {name: datatype_of(slot.tensor.dtype) for name, slot in outputs.items()}
        self._ranks = {name: slot.rank for name, slot in outputs.items()}

    def read(self, place: int, row: Mapping[str, Any], context: Context) -> Rows:
        """The arrays of the request at a place of the batch. Raises BadInput, also for outputs that are not there."""
        infer = read_infer(row, context, place)
        check_asked(infer.asked(self._names), self._datatypes, self._ranks)
        return self._inputs.read_infer(infer)

    def answer(self, arrays: Mapping[str, Array], rows: Rows, context: Context, place: int) -> Any:
        """The answer's body; of one with raw tensors the headers are set, too."""
        infer = rows.infer
        assert infer is not None
        outputs = {name: (self._datatypes[name], array) for name, array in arrays.items()}
        written = write_answer(
            infer,
            infer.asked(self._names),
            outputs,
            context.model_name,
            version_of(context),
            has_batch_axis=self._inputs.has_batch_axis,
            labels=self._labels,
        )
        return as_body(written, context, place)


def read_infer(row: Mapping[str, Any], context: Context, place: int) -> InferRequest:
    """The request at a place of the batch, which is one of the protocol. Raises BadInput."""
    item = context.batch_items[place]
    headers = item.headers
    body = row.get("body") or b""
    packing = packing_of(item.server_headers)
    if packing is not None:
        infer = read_request(unpack(body, packing), header_length(headers))
        check_unread(infer.parameters)
        return infer
    for name, value in headers:
        if name.lower() == b"content-encoding" and value.strip().lower() != b"identity":
            raise BadInput(f"the body came with Content-Encoding: {shown(value.decode('latin-1'))}; send it as it is")
    return read_request(body, header_length(headers), shared_tensors(item.server_headers))


def version_of(context: Context) -> str | None:
    """The model's version, for its answers."""
    manifest = context.manifest or {}
    version: str | None = (manifest.get("model") or {}).get("modelVersion")
    return version


def as_body(written: tuple[bytes, int | None], context: Context, place: int) -> JsonAnswer | bytes:
    """What `write_answer` gave as a handler's answer; of one with raw tensors the headers are set, too."""
    body, length = written
    if length is None:
        return JsonAnswer(body)
    context.set_response_content_type(place, RAW_TYPE)
    context.set_response_header(place, ANSWER_HEADER_LENGTH, str(length))
    return body
