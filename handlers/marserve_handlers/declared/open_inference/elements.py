"""Requests of the protocol to a model of one text, of bytes or of a picture: each element of a BYTES tensor is an item.

The tensor has the shape [n], or [n, 1] as MLServer's clients write it, and any name. The answer is one tensor of the
same shape, `output`, with the answers as texts, JSON or bytes. MLServer's content types are read and written: `base64`
of elements that came, or are wanted, so; other words (`str`, `datetime`) are of texts, which are taken as they are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.items import TEXT, Encoded
from marserve_handlers.declared.open_inference.answer import check_asked, write_answer
from marserve_handlers.declared.open_inference.datatypes import BYTES, as_objects
from marserve_handlers.declared.open_inference.inferring import as_body, read_infer, version_of
from marserve_handlers.declared.open_inference.request import AskedOutput, InferRequest
from marserve_handlers.errors import BadInput

OUTPUT: Final = "output"
BASE64: Final = "base64"


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of one request, and what its answer needs of it."""

    infer: InferRequest
    name: str
    values: Sequence[bytes]
    shape: tuple[int, ...]


def read_elements(row: Mapping[str, Any], context: Context, place: int, max_elements: int) -> Elements:
    """The elements of the request at a place of the batch. Raises BadInput."""
    infer = read_infer(row, context, place)
    check_asked(infer.asked([OUTPUT]), {OUTPUT: BYTES}, {OUTPUT: 1})
    if len(infer.tensors) != 1:
        raise BadInput(f"{len(infer.tensors)} tensors came, and the model takes one: BYTES [batch]", "inputs")
    [(name, array)] = infer.tensors.items()
    if infer.datatypes[name] != BYTES:
        raise BadInput(f"expected BYTES [batch], got {infer.datatypes[name]}", name)
    if array.ndim != 1 and not (array.ndim == 2 and array.shape[1] == 1):
        raise BadInput(f"expected BYTES [batch] or [batch, 1], got {list(array.shape)}", name)
    if not array.size:
        raise BadInput("has no element", name)
    if array.size > max_elements:
        raise BadInput(f"has {array.size} elements, more than maxRows, {max_elements}", name)
    values: list[bytes] = array.reshape(-1).tolist()
    if _type_of_input(infer, name) == BASE64:
        values = [_from_base64(value, f"{name}[{number}]") for number, value in enumerate(values)]
    return Elements(infer, name, values, array.shape)


def write_elements(elements: Elements, answers: Sequence[Encoded], context: Context, place: int) -> Any:
    """The body of the answer; its headers are set, too."""
    infer = elements.infer
    asked = infer.asked([OUTPUT])
    values = [body.body if isinstance(body, JsonAnswer) else body for body, _ in answers]
    content_type = _content_type(elements, asked[0], answers)
    if content_type == BASE64:
        values = [base64.b64encode(value) for value in values]
    array = as_objects(values).reshape(elements.shape)
    shown = {OUTPUT: content_type} if infer.has_content_types or content_type == BASE64 else {}
    outputs = {OUTPUT: (BYTES, array)}
    written = write_answer(infer, asked, outputs, context.model_name, version_of(context), content_types=shown)
    return as_body(written, context, place)


def _type_of_input(infer: InferRequest, name: str) -> str:
    """What the elements that came are; a word for the whole request is one for its only tensor."""
    return infer.content_types.get(name) or infer.content_type


def _content_type(elements: Elements, asked: AskedOutput, answers: Sequence[Encoded]) -> str:
    """What the elements of the answer are. Bytes are base64 in JSON, and for clients that sent base64."""
    if any(not isinstance(body, JsonAnswer) and kind != TEXT for body, kind in answers):
        is_wanted = asked.content_type or _type_of_input(elements.infer, elements.name)
        is_raw = asked.is_binary and is_wanted != BASE64
        return (asked.content_type or "bytes") if is_raw else BASE64
    if asked.content_type:
        return asked.content_type
    if all(isinstance(body, JsonAnswer) for body, _ in answers):
        return "pd_json" if elements.infer.content_type == "pd" else "json"
    return "str"


def _from_base64(value: bytes, place: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise BadInput("is no base64, which its content_type says", place) from None
