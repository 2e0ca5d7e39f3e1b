"""`handle(rows, context)` of a model whose `predict` yields: each request's pieces go out as they are made.

The requests of a batch begin together, once each has its first piece or has failed, so that a failure before the first
piece is an answer with its own status. A generator is closed when its client has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from marserve_handlers.context import Context, send_intermediate_predict_response
from marserve_handlers.declared.answer import FailedEvent, JsonAnswer
from marserve_handlers.declared.events import END, EVENT_STREAM, Event, error_frame
from marserve_handlers.declared.item_context import accepts
from marserve_handlers.declared.items import encode_item
from marserve_handlers.declared.single import ItemModel
from marserve_handlers.errors import BAD_INPUT, PREDICTION, describe_failure
from marserve_handlers.support.line_owner import about

JSON_LINES = "application/x-ndjson"

log = logging.getLogger("marserve.worker")


class StreamModel(ItemModel):
    """Serves one model whose `predict` is a generator, or an asynchronous one."""

    def handle(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """The last piece of each request; the others are sent before. An exception ends its request's stream."""
        if self.is_async:
            return self.runner.run(self.handle_async(rows, context))
        streams = [self._begin(row, context, place) for place, row in enumerate(rows)]
        try:
            while True:
                pieces = [stream.step() for stream in streams]
                if all(stream.has_ended for stream in streams):
                    return _last(pieces, context)
                _send(pieces, context)
        finally:
            for stream in streams:
                stream.close()

    async def handle_async(self, rows: list[dict[str, Any]], context: Context) -> list[Any]:
        """The same for asynchronous generators, which run side by side after their first pieces."""
        streams = [self._begin(row, context, place) for place, row in enumerate(rows)]
        tasks: list[asyncio.Task[None]] = []
        try:
            pieces = list(await asyncio.gather(*(stream.step_async() for stream in streams)))
            if all(stream.has_ended for stream in streams):
                return _last(pieces, context)
            _send(pieces, context)
            tasks = [asyncio.ensure_future(self._follow(stream, len(rows), context)) for stream in streams]
            await asyncio.gather(*tasks)
            return [stream.last for stream in streams]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in streams:
                await stream.close_async()

    async def _follow(self, stream: _Stream, count: int, context: Context) -> None:
        """Send one request's pieces; the end of a stream is sent with the batch's, if it is the last to end."""
        while not stream.has_ended:
            piece = await stream.step_async()
            if isinstance(piece, BaseException) or piece:
                pieces: list[Any] = [b""] * count
                pieces[stream.place] = piece
                _send(pieces, context)
            await asyncio.sleep(0)  # a generator that waits for nothing must not hold up others, or a cancel

    def _begin(self, row: dict[str, Any], context: Context, place: int) -> _Stream:
        try:
            return _Stream(self.predict(**self.arguments(row, context, place)), self.words, context, place)
        except Exception as error:
            return _Stream(None, self.words, context, place, error)


class _Stream:
    """The pieces of one request. `last` is what is left for the batch's end."""

    def __init__(
        self, pieces: Any, words: str, context: Context, place: int, failure: BaseException | None = None
    ) -> None:
        self.place = place
        self.has_ended = False
        self.last: Any = b""
        self._items = context.batch_items[place : place + 1]
        self._pieces = pieces
        self._words = words
        self._context = context
        self._failure = failure
        self._count = 0
        self._has_events = False

    def step(self) -> Any:
        """The next piece as bytes, an exception that ends the stream, or what is sent at its end, mostly empty."""
        if self._is_over():
            return b""
        try:
            if self._failure is not None:
                raise self._failure
            pieces: Iterator[Any] = self._pieces
            with about(self._items):
                return self._encode(next(pieces))
        except StopIteration:
            return self._end()
        except Exception as error:
            return self._fail(error)

    async def step_async(self) -> Any:
        """The same of an asynchronous generator."""
        if self._is_over():
            return b""
        try:
            if self._failure is not None:
                raise self._failure
            pieces: AsyncIterator[Any] = self._pieces
            with about(self._items):
                return self._encode(await anext(pieces))
        except StopAsyncIteration:
            return self._end()
        except Exception as error:
            return self._fail(error)

    def close(self) -> None:
        """End the generator, wherever it stands."""
        if self._pieces is not None:
            self._pieces.close()

    async def close_async(self) -> None:
        """The same of an asynchronous generator."""
        if self._pieces is not None:
            await self._pieces.aclose()

    def _is_over(self) -> bool:
        if not self.has_ended and self._context.is_cancelled(self.place):
            self.has_ended = True
        return self.has_ended

    def _encode(self, value: Any) -> bytes:
        if isinstance(value, BaseException):
            raise value
        is_event = isinstance(value, Event)
        if not self._count:
            self._has_events = is_event and accepts(self._context, self.place, EVENT_STREAM, "text/plain")
        if self._has_events:
            body, content_type = (value if is_event else Event(value)).frame(), EVENT_STREAM
        elif is_event:
            body, content_type = f"{value.text()}\n".encode(), "text/plain; charset=utf-8"
        else:
            encoded, content_type = encode_item(value)
            if isinstance(encoded, JsonAnswer):
                body, content_type = encoded.body + b"\n", JSON_LINES
            else:
                body = encoded
        if not self._count and self._context.get_response_content_type(self.place) is None:
            self._context.set_response_content_type(self.place, content_type)
        self._count += 1
        return body

    def _end(self) -> Any:
        if not self._count:
            return self._fail(RuntimeError(f"{self._words} ended without a yield"))
        self.has_ended = True
        return END if self._has_events else b""

    def _fail(self, error: Exception) -> Any:
        self.has_ended = True
        if not self._has_events:
            return error
        # The status has gone out, so the stream's last event says what happened.
        failure = describe_failure(error)
        is_for_client = failure.kind in (PREDICTION, BAD_INPUT)
        if not is_for_client:
            request = self._context.get_request_id(self.place)
            events = f"{self._count} event{'s' if self._count != 1 else ''}"
            log.error("Request %s: its stream failed after %s", request, events, exc_info=error)
        return FailedEvent.of(error_frame(failure.code if is_for_client else 500, failure.message), error)


def _send(pieces: list[Any], context: Context) -> None:
    """Send one piece of each request. Raises NobodyWaits when all clients have gone."""
    send_intermediate_predict_response(pieces, context.request_ids, "ok", 200, context)


def _last(pieces: list[Any], context: Context) -> list[Any]:
    """The last pieces; the only request's failure is raised while nothing of it was sent."""
    if len(pieces) == 1 and isinstance(pieces[0], BaseException) and not context.is_streaming:
        raise pieces[0]
    return pieces
