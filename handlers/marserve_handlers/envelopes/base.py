"""What all envelopes share: unpack the batch, call the handler, pack its answers. Knows no protocol."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.errors import PredictionException


class BaseEnvelope(ABC):
    """Wraps a handler's `handle`: `parse_input` before it, `format_output` after it.

    Authors write their own by overriding these two. `context` is the running batch's. With `answers_nothing_itself` a
    handler is not called for requests that hold nothing at all: `format_output` is given an empty list.
    """

    context: Any = None
    answers_nothing_itself: ClassVar[bool] = False

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn

    def handle(self, data: Any, context: Any) -> Any:
        """Answer a batch. A describe request goes to the handler as it is: it has nothing to unpack."""
        if _is_describe(context):
            return self._handle_fn(data, context)
        self.context = context
        rows = self.parse_input(data) if data else data
        if self._holds_nothing(data, rows):
            return self.format_output([])
        answers = self._handle_fn(rows, context)
        return self.format_output(plain(answers)) if answers else answers

    async def handle_async(self, data: Any, context: Any) -> Any:
        """As `handle`, around a handler that is a coroutine function; batches may run side by side."""
        if _is_describe(context):
            return await self._handle_fn(data, context)
        mine = copy.copy(self)  # what is remembered between unpacking and packing is this batch's alone
        mine.context = context
        rows = mine.parse_input(data) if data else data
        if mine._holds_nothing(data, rows):
            return mine.format_output([])
        answers = await self._handle_fn(rows, context)
        return mine.format_output(plain(answers)) if answers else answers

    def _holds_nothing(self, data: Any, rows: Any) -> bool:
        return self.answers_nothing_itself and bool(data) and rows == []

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """What the handler is given for the batch's rows."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """A list with one answer for each row of the batch, from what the handler gave."""


def plain(answers: Any) -> Any:
    """The handler's answers, with values for JSON text: programs that declare their tensors write it themselves."""
    if not isinstance(answers, list) or not any(isinstance(each, JsonAnswer) for each in answers):
        return answers
    return [json.loads(each.body) if isinstance(each, JsonAnswer) else each for each in answers]


def document_of(row: Any) -> Any:
    """The JSON document of a row: its `data`, else its `body`, else the row itself; bytes and text are parsed.

    Raises PredictionException (400) for what is no JSON.
    """
    value = row
    if isinstance(row, dict):
        value = row.get("data") or row.get("body") or row
    if isinstance(value, (bytes, bytearray, str)):
        try:
            return json.loads(value)
        except ValueError:
            raise PredictionException("The request's body is not JSON.", 400) from None
    return value


def list_of(row: Any, key: str) -> list[Any]:
    """The list under `key` of the row's document. Raises PredictionException (400) without one."""
    document = document_of(row)
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list):
        raise PredictionException(f'The request must be a JSON object with a list "{key}".', 400)
    return found


def raise_failure(answers: Any) -> None:
    """Raise the first exception that stands in an answer's place: a request is answered for all of its inputs."""
    for answer in answers if isinstance(answers, (list, tuple)) else ():
        if isinstance(answer, Exception):
            raise answer


def split(answers: Any, lengths: list[int]) -> list[Any]:
    """The handler's answers to a joined batch, cut back to one list for each row.

    Of one row they are all its own, however many there are. Raises ValueError when they cannot be assigned, and an
    exception that stands in an answer's place: the server then runs the rows alone.
    """
    raise_failure(answers)
    if len(lengths) == 1:
        return [answers]
    if not isinstance(answers, (list, tuple)) or len(answers) != sum(lengths):
        count = len(answers) if isinstance(answers, (list, tuple)) else f"a {type(answers).__name__}"
        raise ValueError(f"The handler gave {count} for {sum(lengths)} inputs of {len(lengths)} requests.")
    parts, at = [], 0
    for length in lengths:
        parts.append(list(answers[at : at + length]))
        at += length
    return parts


def _is_describe(context: Any) -> bool:
    return context is not None and context.get_request_header(0, "describe") == "True"
