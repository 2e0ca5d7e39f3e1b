"""`ModelStreamInfer`: inferences that run beside each other in one stream, each with one answer or many.

As Triton has it (its `decoupled_models.md` and `stream_infer_handler.cc`): an answer carries the id of its request, an
error is an answer with `error_message` and the stream goes on, `triton_final_response` marks the last answer of a
request. Where the end of a stream of answers brings no tensors, it is an answer of its own only if the request asked
for that. Whole answers come in the order of their requests; pieces come as they are made, and nothing waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from marserve.api.byte_ledger import Hold
from marserve.api.errors import error_message
from marserve.api.grpc.answers import Pieces
from marserve.api.grpc.calls import Call, Calls, Messages
from marserve.api.grpc.errors import StalledReader, shortened
from marserve.errors import BadInput, MarserveError

# The most requests of one stream that are under way; the next one is read when one of them has ended.
MOST_AT_ONCE: Final = 64
FINAL: Final = "triton_final_response"
WANTS_EMPTY_FINAL: Final = "triton_enable_empty_final_response"
# Triton's metadata by which a client asks for the first error as the status of the call, which it ends.
ENDS_WITH_ERRORS: Final = (b"triton_grpc_error", b"true")

Submit = Callable[[Any, Call], Awaitable[Pieces]]
Respond = Callable[[Any, Pieces, bytes, Any], Awaitable[None]]


class InferStream:
    """The method.

    `submit` hands a message to the data plane. `respond` writes one piece of the answer into a `ModelInferResponse`;
    its arguments are the message, the answer, the piece, the response. Both raise MarserveError.
    """

    def __init__(self, calls: Calls, submit: Submit, respond: Respond, response: Any) -> None:
        """`response` is the class of the stream's messages."""
        self._calls = calls
        self._submit = submit
        self._respond = respond
        self._response = response

    async def answer(self, messages: Messages, call: Call) -> None:
        """Answer the requests of one stream, until the client has said all and heard all, or has gone."""
        stream = _Stream(call, self._response)
        try:
            async with asyncio.TaskGroup() as group:
                number = 0
                while (asked := await self._next(messages, number := number + 1, stream)) is not None:
                    stream.add(asked)
                    self._calls.begin_work()
                    group.create_task(self._follow(asked, stream)).add_done_callback(lambda _: self._calls.end_work())
        except BaseExceptionGroup as errors:
            # One is enough: it has ended the stream, and with it the others.
            raise errors.exceptions[0] from None
        finally:
            stream.close()

    async def _next(self, messages: Messages, number: int, stream: _Stream) -> _Asked | None:
        """Read and submit the next request, when there is room for it; None after the last one."""
        await stream.room.acquire()
        try:
            message = await anext(messages, None)
        except MarserveError as error:
            if messages.is_broken:
                raise
            return _Asked(number, None, error=error)
        if message is None:
            return None
        asked = _Asked(number, message, messages.keep())
        try:
            asked.wants_empty_final = _wants_empty_final(message)
            asked.pieces = await self._submit(message, stream.call.part(number))
        except MarserveError as error:
            asked.error = error
        except BaseException:
            asked.close()
            raise
        return asked

    async def _follow(self, asked: _Asked, stream: _Stream) -> None:
        """Write the answers of one request as they come."""
        try:
            if asked.error is not None:
                raise asked.error
            assert asked.pieces is not None
            while (piece := await asked.pieces.next()) is not None:
                is_last = asked.pieces.has_ended
                asked.is_stream = asked.is_stream or not is_last
                with stream.call.holding(len(piece)):
                    await self._write(asked, asked.pieces, piece, stream, is_last=is_last)
        except StalledReader:
            raise
        except MarserveError as error:
            await stream.refuse(asked, error)
        finally:
            stream.remove(asked)

    async def _write(self, asked: _Asked, pieces: Pieces, piece: bytes, stream: _Stream, *, is_last: bool) -> None:
        if not asked.is_stream:
            await stream.wait_for_earlier(asked)
        elif not piece and not (is_last and asked.wants_empty_final):
            return
        if piece or not asked.is_stream:
            answer = self._response()
            await self._respond(asked.message, pieces, piece, answer.infer_response)
        else:
            answer = stream.without_tensors(asked)
        answer.infer_response.parameters[FINAL].bool_param = is_last
        await stream.write(answer)
        asked.has_begun.set()


class _Asked:
    """One request of a stream: what answers it, or the error that does, and the room that its message takes.

    `message` is None if it could not be read. `is_stream`: there was a piece of its answer that was not the last one.
    `has_begun` is set when it has had an answer or a first piece, so that whole answers of later requests may pass.
    """

    def __init__(
        self, number: int, message: Any, holds: Sequence[Hold] = (), *, error: MarserveError | None = None
    ) -> None:
        self.number = number
        self.message = message
        self.error = error
        self.pieces: Pieces | None = None
        self.wants_empty_final = False
        self.is_stream = False
        self.has_begun = asyncio.Event()
        self._holds = holds

    def close(self) -> None:
        """Cancel what is left of it, and give its room back. May be called twice."""
        self.has_begun.set()
        if self.pieces is not None:
            self.pieces.cancel()
        for hold in self._holds:
            hold.close()


class _Stream:
    """The requests of one stream that are under way, in their order, and its one way out."""

    def __init__(self, call: Call, response: Any) -> None:
        self.call = call
        self.room = asyncio.Semaphore(MOST_AT_ONCE)
        self._ends_with_errors = ENDS_WITH_ERRORS in call.metadata
        self._response = response
        self._under_way: dict[int, _Asked] = {}
        self._writes = asyncio.Lock()

    def add(self, asked: _Asked) -> None:
        """Count one more request."""
        self._under_way[asked.number] = asked

    def remove(self, asked: _Asked) -> None:
        """One has ended: the next message may be read."""
        del self._under_way[asked.number]
        asked.close()
        self.room.release()

    def close(self) -> None:
        """End those that are left."""
        for asked in self._under_way.values():
            asked.close()

    async def wait_for_earlier(self, asked: _Asked) -> None:
        """Wait until each earlier request has had an answer, or the first piece of one."""
        for earlier in [each for number, each in self._under_way.items() if number < asked.number]:
            await earlier.has_begun.wait()

    async def write(self, answer: Any) -> None:
        """Write one answer; those of several requests take turns."""
        async with self._writes:
            await self.call.write(answer)

    async def refuse(self, asked: _Asked, error: MarserveError) -> None:
        """Say why there is no answer, or no further one. Raises the error if the client wants it as the status."""
        if self._ends_with_errors:
            raise error
        if not asked.is_stream:
            await self.wait_for_earlier(asked)
        answer = self.without_tensors(asked)
        answer.error_message = shortened(error_message(error, self.call.error_rules))
        answer.infer_response.parameters[FINAL].bool_param = True
        await self.write(answer)

    def without_tensors(self, asked: _Asked) -> Any:
        """An answer that names its request, as far as that could be read."""
        answer = self._response()
        if asked.message is not None:
            answer.infer_response.id = asked.message.id
            answer.infer_response.model_name = asked.message.model_name
            answer.infer_response.model_version = asked.message.model_version
        return answer


def _wants_empty_final(message: Any) -> bool:
    """Take the parameter, which is none of the model's, out of the message. Raises BadInput."""
    if WANTS_EMPTY_FINAL not in message.parameters:
        return False
    value = message.parameters[WANTS_EMPTY_FINAL]
    if value.WhichOneof("parameter_choice") != "bool_param":
        raise BadInput(f"Parameter {WANTS_EMPTY_FINAL} has no bool_param; true or false is set there.")
    wants = bool(value.bool_param)
    del message.parameters[WANTS_EMPTY_FINAL]
    return wants
