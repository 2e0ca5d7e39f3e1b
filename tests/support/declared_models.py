"""Declared models opened as a worker opens them, and batches of requests for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.decorator import definition_of
from marserve_handlers.declared.opening import Opened, open_declared
from support.model_context import FakeItem, make_context


class Opening:
    """An opened model with its context: `answer` runs one batch."""

    def __init__(self, target: Any, *, most_rows: int = 4, max_rows: int = 16, context: Context | None = None) -> None:
        definition = definition_of(target)
        assert definition is not None
        self.context = make_context() if context is None else context
        self.opened: Opened = open_declared(definition, self.context, most_rows=most_rows, max_rows=max_rows)
        self.declaration: dict[str, Any] = json.loads(self.opened.declaration)

    def answer(self, *requests: Any, items: Sequence[FakeItem] | None = None) -> list[Any]:
        """The answers to a batch: JSON decoded, bytes and exceptions as they are.

        A request is a row (`{"body": bytearray(…)}`), bytes, or anything else as JSON.
        """
        rows = [_row(request) for request in requests]
        self.context.begin_batch(items or [FakeItem(f"id-{place}") for place in range(len(rows))])
        return [
            json.loads(answer.body) if isinstance(answer, JsonAnswer) else answer
            for answer in self.opened.handle(rows, self.context)
        ]

    def only(self, request: Any) -> Any:
        """The answer to a request that comes alone; raises what fails it."""
        return self.answer(request)[0]


def _row(request: Any) -> dict[str, Any]:
    if isinstance(request, dict) and request and all(isinstance(each, bytearray) for each in request.values()):
        return request
    return {"body": bytearray(request if isinstance(request, bytes) else json.dumps(request).encode())}
