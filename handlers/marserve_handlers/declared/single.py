"""`handle(rows, context)` of a model that takes one annotated item: each request is one call of `predict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from marserve_handlers.context import Context
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.item_context import ItemContext, is_in_vain
from marserve_handlers.declared.items import Decode, Encoded, encode_item
from marserve_handlers.declared.open_inference.marking import is_marked
from marserve_handlers.declared.predicting import CONTEXT, Predicting
from marserve_handlers.declared.running import Runner
from marserve_handlers.errors import BadInput
from marserve_handlers.support.line_owner import about

if TYPE_CHECKING:
    from marserve_handlers.declared.open_inference.elements import Elements


class ItemModel:
    """Serves one model of single items. `predict` is bound; `convert` checks its answers, None for any answer."""

    def __init__(
        self,
        predict: Any,
        predicting: Predicting,
        parameter: str,
        decode: Decode,
        convert: Callable[[Any], Any] | None,
        *,
        max_elements: int = 0,
    ) -> None:
        """`max_elements` is how many elements a request of the Open Inference Protocol may have, each of them an item.

        With 0 such a request is an item as it is.
        """
        self._max_elements = max_elements
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
            return self.runner.run(self.handle_async(rows, context))
        if len(rows) == 1:
            return [self._answer(rows[0], context, 0)]
        return [self._one(row, context, place) for place, row in enumerate(rows)]

    async def handle_async(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """The same where `predict` is a coroutine: the requests of a batch run side by side."""
        import asyncio  # here for a quicker start: few workers need it, and those have it since their model was opened

        if len(rows) == 1:
            return [await self._answer_async(rows[0], context, 0)]
        return list(await asyncio.gather(*(self._one_async(row, context, place) for place, row in enumerate(rows))))

    def _one(self, row: dict[str, Any], context: Context, place: int) -> Any:
        try:
            with about(context.batch_items[place : place + 1]):
                return self._answer(row, context, place)
        except Exception as error:
            return error

    async def _one_async(self, row: dict[str, Any], context: Context, place: int) -> Any:
        try:
            with about(context.batch_items[place : place + 1]):
                return await self._answer_async(row, context, place)
        except Exception as error:
            return error

    def _answer(self, row: dict[str, Any], context: Context, place: int) -> Any:
        if self._max_elements and is_marked(context, place):
            return self._answer_elements(row, context, place)
        return self._encode(self.predict(**self.arguments(row, context, place)), context, place)

    async def _answer_async(self, row: dict[str, Any], context: Context, place: int) -> Any:
        if self._max_elements and is_marked(context, place):
            return await self._answer_elements_async(row, context, place)
        return self._encode(await self.predict(**self.arguments(row, context, place)), context, place)

    def _answer_elements(self, row: dict[str, Any], context: Context, place: int) -> Any:
        """One call of `predict` for each element, one after the other."""
        # here: most workers never see a request of the protocol
        from marserve_handlers.declared.open_inference.elements import read_elements, write_elements

        elements = read_elements(row, context, place, self._max_elements)
        answers: list[Encoded] = []
        for number, arguments in enumerate(self._arguments_of(elements, context, place)):
            if number:
                if is_in_vain(context, place):  # nothing more is run of a request whose client has gone
                    return b""
                if context.begin_call is not None:
                    context.begin_call()
            answers.append(self._encoded(self.predict(**arguments)))
        return write_elements(elements, answers, context, place)

    async def _answer_elements_async(self, row: dict[str, Any], context: Context, place: int) -> Any:
        """The same where `predict` is a coroutine: the elements run side by side."""
        import asyncio  # as in `handle_async`

        # here: most workers never see a request of the protocol
        from marserve_handlers.declared.open_inference.elements import read_elements, write_elements

        elements = read_elements(row, context, place, self._max_elements)
        arguments = self._arguments_of(elements, context, place)
        tasks = [asyncio.ensure_future(self.predict(**each)) for each in arguments]
        try:
            answers = [self._encoded(value) for value in await asyncio.gather(*tasks)]
        finally:  # the others, where one has failed
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return write_elements(elements, answers, context, place)

    def _arguments_of(self, elements: Elements, context: Context, place: int) -> list[dict[str, Any]]:
        """The arguments of `predict` for each element: all are read before the first is run. Raises BadInput."""
        found: list[dict[str, Any]] = []
        for number, element in enumerate(elements.values):
            try:
                arguments = {self._parameter: self._decode({"body": element}, ())}
            except BadInput as error:
                raise BadInput(error.message, f"{elements.name}[{number}]") from None
            found.append({**arguments, CONTEXT: ItemContext(context, place)} if self._takes_context else arguments)
        return found

    def arguments(self, row: dict[str, Any], context: Context, place: int) -> dict[str, Any]:
        """The arguments of `predict` for a request. Raises BadInput."""
        items = context.batch_items
        arguments = {self._parameter: self._decode(row, items[place].parts if items else ())}
        if self._takes_context:
            arguments[CONTEXT] = ItemContext(context, place)
        return arguments

    def _encoded(self, value: Any) -> Encoded:
        """What `predict` returned, as bytes or JSON; raises the exception that it returned."""
        if isinstance(value, BaseException):
            raise value
        return encode_item(value if self._convert is None else self._convert(value))

    def _encode(self, value: Any, context: Context, place: int) -> Any:
        body, content_type = self._encoded(value)
        if type(body) is not JsonAnswer and context.get_response_content_type(place) is None:
            context.set_response_content_type(place, content_type)
        return body
