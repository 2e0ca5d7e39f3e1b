"""`handle(rows, context)` of a model that takes one annotated item: each request is one call of `predict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.item_context import ItemContext
from marserve_handlers.declared.items import Decode, encode_item
from marserve_handlers.declared.predicting import CONTEXT, Predicting
from marserve_handlers.declared.running import Runner
from marserve_handlers.support.line_owner import about


class ItemModel:
    """Serves one model of single items. `predict` is bound; `convert` checks its answers, None for any answer."""

    def __init__(
        self,
        predict: Any,
        predicting: Predicting,
        parameter: str,
        decode: Decode,
        convert: Callable[[Any], Any] | None,
    ) -> None:
        self.predict = predict
        self.words = predicting.words
        self._parameter = parameter
        self._decode = decode
        self._convert = convert
        self.is_async = predicting.is_async
        self._takes_context = predicting.takes_context
        self.runner = Runner()
        if self.is_async:
            # here: imported once, by the template, and not by each worker at its first request
            import asyncio  # noqa: F401

    def handle(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """One answer for each request. An exception in an answer's place is that request's alone."""
        if self.is_async:
            answers: list[Any] = self.runner.run(self.handle_async(rows, context))
            return answers
        if len(rows) == 1:
            return [self._encode(self.predict(**self.arguments(rows[0], context, 0)), context, 0)]
        return [self._one(row, context, place) for place, row in enumerate(rows)]

    async def handle_async(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """The same where `predict` is a coroutine: the requests of a batch run side by side."""
        import asyncio  # here for a quicker start: few workers need it, and those have it since their model was opened

        if len(rows) == 1:
            return [self._encode(await self.predict(**self.arguments(rows[0], context, 0)), context, 0)]
        return list(await asyncio.gather(*(self._one_async(row, context, place) for place, row in enumerate(rows))))

    def _one(self, row: dict[str, Any], context: Context, place: int) -> Any:
        try:
            with about(context.batch_items[place : place + 1]):
                return self._encode(self.predict(**self.arguments(row, context, place)), context, place)
        except Exception as error:
            return error

    async def _one_async(self, row: dict[str, Any], context: Context, place: int) -> Any:
        try:
            with about(context.batch_items[place : place + 1]):
                return self._encode(await self.predict(**self.arguments(row, context, place)), context, place)
        except Exception as error:
            return error

    def arguments(self, row: dict[str, Any], context: Context, place: int) -> dict[str, Any]:
        """The arguments of `predict` for a request. Raises BadInput."""
        items = context.batch_items
        arguments = {self._parameter: self._decode(row, items[place].parts if items else ())}
        if self._takes_context:
            arguments[CONTEXT] = ItemContext(context, place)
        return arguments

    def _encode(self, value: Any, context: Context, place: int) -> Any:
        if isinstance(value, BaseException):
            raise value
        body, content_type = encode_item(value if self._convert is None else self._convert(value))
        if type(body) is not JsonAnswer and context.get_response_content_type(place) is None:
            context.set_response_content_type(place, content_type)
        return body
