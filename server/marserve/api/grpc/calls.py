"""What every call of a gRPC listener passes: the check of its key, its wishes, its status, its line in the log.

Services (`inference.py`, …) are coroutines that take a message and a `Call`, and return a message or write several.
They raise typed errors. This file makes grpcio's handlers of them, with bytes in and bytes out, so that a message that
cannot be read is refused like any other bad input. It knows no service and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.api.decoding import SHORT_BYTES, Decoding
from marserve.api.errors import AS_RECORDED, ErrorRules, NoRoomForBody
from marserve.api.grpc.errors import MethodNotFound, StalledReader, grpc_status
from marserve.api.grpc.schema import Schema
from marserve.api.request_ids import CLIENT_ID, RequestIds, read_client_id
from marserve.api.wishes import NO_WISHES, READERS
from marserve.errors import BadInput, MarserveError
from marserve.messages import Part, Request
from marserve.telemetry.logs.access_log import AccessLog, access_line
from marserve.telemetry.logs.line_ids import about_request
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.metrics.counts import Metrics

log = logging.getLogger("marserve.api")

# Raises if the value of `authorization` does not let a call pass.
Authorize = Callable[[str | bytes | None], None]

AUTHORIZATION: Final = "authorization"
REQUEST_ID: Final = "x-request-id"
# grpcio keeps deadlines by a clock of its own, and may end a call a little before ours says so.
DEADLINE_SLACK_S: Final = 0.05
# grpcio's own logger. It writes a traceback when a client or its deadline ends a call before its status is sent.
GRPCIO_LOG: Final = "grpc._cython.cygrpc"
# The most fields of a message, not counting fields inside fields; a tensor or an input is one.
MAX_FIELDS: Final = 4096
# A message up to this length, within `MAX_FIELDS`, is read on the loop: mostly it is one long text or picture.
QUICK_MESSAGE_BYTES: Final = 128 * 1024
# A request to health or reflection is a name.
LONGEST_QUESTION_BYTES: Final = 64 * 1024
# A stream is broken off when its client has taken nothing of it for so long, as over HTTP.
STALL_TIMEOUT_S: Final = 60.0


# The wire's kinds of fields: a number of any length, bytes with their length before them, and two of fixed length.
_OF_VARINT: Final = 0
_OF_LENGTH: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}


class ClientGone(Exception):
    """The client or its deadline has ended the call, so that nothing more can be written to it."""


def quiet_grpcio() -> None:
    """Keep grpcio from writing a traceback for a client that has gone: the access log has a line for its call."""
    logging.getLogger(GRPCIO_LOG).addFilter(_is_no_failed_batch)


def _is_no_failed_batch(record: logging.LogRecord) -> bool:
    """Whether a record is about anything but a message or status that could not be sent any more."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)


class Call:
    """One call. `deadline` is in seconds on the monotonic clock: the channel's or the wished one, if any.

    `metadata` came with the call; the key is left out. `message_bytes` is the length of a single message. A service
    sets `version_header` to the header that names the version which answered.
    """

    __slots__ = (
        "_context",
        "_ledger",
        "_stall_timeout_s",
        "client_id",
        "deadline",
        "error_rules",
        "id",
        "key",
        "message_bytes",
        "metadata",
        "version_header",
        "wishes",
    )

    def __init__(
        self, context: Any, request_ids: RequestIds, error_rules: ErrorRules, stall_timeout_s: float, ledger: ByteLedger
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._stall_timeout_s = stall_timeout_s
        given = [_bytes(value) for name, value in context.invocation_metadata() or () if name == CLIENT_ID]
        client_id = read_client_id(given[0]) if len(given) == 1 else ""
        self.id = request_ids.of(client_id)
        # As those of a `Request`.
        self.client_id = client_id if client_id != self.id else ""
        self.key = request_ids.next_key() if client_id == self.id else 0
        self.error_rules = error_rules
        self.deadline: float | None = None
        self.wishes = NO_WISHES
        self.metadata: list[tuple[bytes, bytes]] = []
        self.message_bytes = 0
        self.version_header: tuple[str, str] | None = None

    @property
    def line_id(self) -> str:
        """The id as log lines have it."""
        return f"{self.id}/{self.client_id}" if self.client_id else self.id

    def request(
        self,
        parts: list[Part],
        version: str | None,
        headers: Sequence[tuple[bytes, bytes]] = (),
        request_id: str | None = None,
        server_headers: Sequence[tuple[str, str]] = (),
    ) -> Request:
        """The request that this call makes; one of several in the call has an id of its own."""
        return Request(
            request_id or self.id,
            parts,
            list(headers),
            list(server_headers),
            deadline=self.deadline,
            names_version=version is not None,
            priority=self.wishes.priority,
            asked_version=self.wishes.asked_version,
            metadata=self.metadata,
            key=self.key,
            client_id=self.client_id,
        )

    async def write(self, message: Any) -> None:
        """Send one message of a stream; returns when the client's window has room for more.

        Raises StalledReader if it has no room for too long, ClientGone if the call has ended.
        """
        data = message.SerializeToString()
        self._ledger.count_answers(len(data))
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._context.write(data)
        except TimeoutError:
            raise StalledReader(self._stall_timeout_s) from None
        except grpc.aio.InternalError:
            raise ClientGone from None
        finally:
            self._ledger.count_answers(-len(data))

    def read_metadata(self, now: float) -> str | bytes | None:
        """Read the metadata that came with the call; returns the value of `authorization`."""
        left_s = self._context.time_remaining()
        if left_s is not None:
            self.deadline = now + left_s
        key = None
        for name, value in self._context.invocation_metadata() or ():
            if name == AUTHORIZATION:
                key = value if key is None else key
                continue
            self.metadata.append((_bytes(name), _bytes(value)))
        return key

    def read_wishes(self, now: float) -> None:
        """Read deadline, priority and version from the metadata. Raises BadInput."""
        for name, value in self.metadata:
            if (wish := name.decode("latin-1")) in READERS:
                self.wishes = self.wishes.adding(wish, value, "call")
        if self.wishes.timeout_s is not None:
            wished = now + self.wishes.timeout_s
            self.deadline = wished if self.deadline is None else min(wished, self.deadline)


UnaryAnswer = Callable[[Any, Call], Awaitable[Any]]
StreamAnswer = Callable[[Any, Call], Awaitable[None]]
DialogueAnswer = Callable[[AsyncIterator[Any], Call], Awaitable[None]]
Answers = Mapping[str, UnaryAnswer | StreamAnswer | DialogueAnswer]


class Calls:
    """The calls of one listener: makes grpcio's handlers, and knows how many calls are under way."""

    def __init__(
        self,
        schema: Schema,
        access_log: AccessLog,
        metrics: Metrics,
        authorize: Authorize | None = None,
        *,
        error_rules: ErrorRules = AS_RECORDED,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        decoding: Decoding | None = None,
        ledger: ByteLedger | None = None,
        request_ids: RequestIds | None = None,
    ) -> None:
        self._ledger = ledger or ByteLedger(UNBOUNDED)
        self._stall_timeout_s = stall_timeout_s
        self._decoding = decoding or Decoding()
        self._schema = schema
        self._access_log = access_log if access_log.is_on else None
        self._has_ids = access_log.has_ids
        self._metrics = metrics
        self._authorize = authorize
        self._error_rules = error_rules
        self._request_ids = request_ids or RequestIds()
        # Calls in the middle of an answer; a dialogue that waits for its client does not count.
        self._busy = 0
        self.has_been_called = False
        self._is_silent = asyncio.Event()
        self._is_silent.set()

    def service(self, name: str, answers: Answers) -> grpc.GenericRpcHandler:
        """grpcio's handler of a service of the schema; `answers` has a coroutine for each method that is answered."""
        handlers = {}
        for method, described in self._schema.methods(name).items():
            path = f"{name}/{method}"
            message = self._schema.message(described.input_type.full_name)
            answer: Any = answers.get(method)
            if answer is None:
                continue
            if described.client_streaming:
                handlers[method] = grpc.stream_stream_rpc_method_handler(self._dialogue(path, message, answer))
            elif described.server_streaming:
                handlers[method] = grpc.unary_stream_rpc_method_handler(self._stream(path, message, answer))
            else:
                handlers[method] = grpc.unary_unary_rpc_method_handler(self._unary(path, message, answer))
        return grpc.method_handlers_generic_handler(name, handlers)

    def unknown_methods(self) -> grpc.GenericRpcHandler:
        """grpcio's handler of all methods that no other handler takes. It must come last."""
        return _UnknownMethods(self)

    async def wait_until_silent(self) -> None:
        """Return when no answer is being made."""
        await self._is_silent.wait()

    def begin_work(self) -> None:
        """Count an answer that is being made from now on."""
        self._busy += 1
        self.has_been_called = True
        self._is_silent.clear()

    def end_work(self) -> None:
        """Count it no longer: it was given, or its client has gone."""
        self._busy -= 1
        if not self._busy:
            self._is_silent.set()

    def _unary(self, path: str, message: Any, answer: UnaryAnswer) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def behave(data: bytes, context: Any) -> bytes:
            async def work(call: Call) -> bytes:
                with self._room_for(len(data)):
                    return await answer_in_room(call)

            async def answer_in_room(call: Call) -> bytes:
                call.message_bytes = len(data)
                made: bytes = (await answer(await self._parse(message, data), call)).SerializeToString()
                self._count_until_sent(len(made), context)
                return made

            return await self._carry(path, context, work)

        return behave

    def _stream(self, path: str, message: Any, answer: StreamAnswer) -> Callable[[bytes, Any], Awaitable[None]]:
        async def behave(data: bytes, context: Any) -> None:
            async def work(call: Call) -> bytes:
                with self._room_for(len(data)):
                    await answer(await self._parse(message, data), call)
                return b""

            await self._carry(path, context, work)

        return behave

    def _dialogue(self, path: str, message: Any, answer: DialogueAnswer) -> Callable[[Any, Any], Awaitable[None]]:
        async def behave(_: Any, context: Any) -> None:
            async def messages() -> AsyncIterator[Any]:
                while (data := await context.read()) is not grpc.aio.EOF:
                    # Counted until the next message is read: `MOST_AT_ONCE` bounds what runs of a dialogue.
                    with self._room_for(len(data)):
                        yield await self._parse(message, data)

            async def work(call: Call) -> bytes:
                await answer(messages(), call)
                return b""

            await self._carry(path, context, work, is_busy=False)

        return behave

    @contextlib.contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        """Count a message that has come, until its call ends. Raises NoRoomForBody."""
        hold = self._ledger.take(size)
        if hold is None:
            raise NoRoomForBody(self._ledger.limit)
        try:
            yield
        finally:
            hold.close()

    def _count_until_sent(self, size: int, context: Any) -> None:
        """Count an answer until its client has taken it or has gone."""
        self._ledger.count_answers(size)
        context.add_done_callback(lambda _: self._ledger.count_answers(-size))

    async def _parse(self, message: Any, data: bytes) -> Any:
        """The message in these bytes; many bytes are read in a thread. Raises BadInput."""
        if len(data) <= SHORT_BYTES:
            return parse(message, data)
        check_fields(message, data)
        if len(data) <= QUICK_MESSAGE_BYTES:
            return parse(message, data)
        return await self._decoding.begin(parse, message, data)

    async def refuse(self, path: str, context: Any, error: MarserveError) -> None:
        """Refuse a call whatever its message says."""

        async def work(call: Call) -> bytes:
            raise error

        await self._carry(path, context, work)

    async def _carry(
        self, path: str, context: Any, work: Callable[[Call], Awaitable[bytes]], *, is_busy: bool = True
    ) -> bytes:
        """Run one call to its end, and count and log it."""
        call = Call(context, self._request_ids, self._error_rules, self._stall_timeout_s, self._ledger)
        with about_request(call.line_id):
            return await self._carry_call(path, context, call, work, is_busy=is_busy)

    async def _carry_call(
        self, path: str, context: Any, call: Call, work: Callable[[Call], Awaitable[bytes]], *, is_busy: bool
    ) -> bytes:
        began = monotonic()
        if is_busy:
            self.begin_work()
            # Over when the answer was sent, not when it was made: a stopping port would cut it in between.
            context.add_done_callback(self._work_was_sent)
        try:
            key = call.read_metadata(began)
            if self._authorize is not None:
                self._authorize(key)
            call.read_wishes(began)
            answer = await work(call)
            version_headers = () if call.version_header is None else (call.version_header,)
            context.set_trailing_metadata(((REQUEST_ID, call.id), *version_headers))
            self._record(path, call, context, StatusCode.OK, began)
            return answer
        except (asyncio.CancelledError, ClientGone) as error:
            # Ended by the client, by the deadline that it named, or by a server that stops.
            passed = call.deadline is not None and monotonic() >= call.deadline - DEADLINE_SLACK_S
            code = StatusCode.DEADLINE_EXCEEDED if passed else StatusCode.CANCELLED
            self._record(path, call, context, code, began)
            if isinstance(error, ClientGone):
                raise asyncio.CancelledError from None
            raise
        except Exception as error:
            if not isinstance(error, MarserveError):
                # The outermost border: a defect of marserve in one call is answered and logged.
                log.exception("Request %s failed: gRPC %s", call.id, path, extra=caused_by(peer_of(context.peer())))
            code, description, trailers = grpc_status(error, self._error_rules)
            self._record(path, call, context, code, began)
            if isinstance(error, StalledReader):
                # A status cannot overtake a message that the client does not take, so the call is dropped instead.
                raise asyncio.CancelledError from error
            metadata = ((REQUEST_ID, call.id), *trailers)
            if code is StatusCode.OK:  # a handler that raised with a code that means success
                context.set_details(description)
                context.set_trailing_metadata(metadata)
                return b""
            try:
                await context.abort(code, description, metadata)
            except grpc.aio.InternalError:  # the call has ended meanwhile
                raise asyncio.CancelledError from None
            raise AssertionError from error  # abort does not return

    def _work_was_sent(self, context: Any) -> None:
        self.end_work()

    def _record(self, path: str, call: Call, context: Any, code: StatusCode, began: float) -> None:
        """Count and log a call whose status is about to be sent."""
        self._metrics.count_call(code.name)
        if self._access_log is not None:
            line = access_line(
                peer_of(context.peer()),
                "gRPC",
                path,
                "HTTP/2.0",
                code.value[0],
                int((monotonic() - began) * 1000),
                call.line_id.replace("/", " ") if self._has_ids else "",
            )
            self._access_log.write(line)


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call that there is no such method, in TorchServe's words."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        """The handler of a call."""
        path = details.method.removeprefix("/")

        async def behave(_: Any, context: Any) -> None:
            await self._calls.refuse(path, context, MethodNotFound(path))

        # It reads nothing, so it suits every kind of call.
        return grpc.stream_stream_rpc_method_handler(behave)


def parse(message: Any, data: bytes) -> Any:
    """The message in these bytes. Raises BadInput."""
    try:
        return message.FromString(data)
    except DecodeError:
        raise BadInput(f"The message cannot be read as {message.DESCRIPTOR.full_name}.") from None


async def parse_or_abort(message: Any, data: bytes, context: Any) -> Any:
    """The message in these bytes, for services outside of `Calls`; else ends the call with INVALID_ARGUMENT."""
    try:
        if len(data) > LONGEST_QUESTION_BYTES:
            raise BadInput(f"The message has {len(data)} bytes; here it may have {LONGEST_QUESTION_BYTES}.")
        return parse(message, data)
    except BadInput as error:
        await context.abort(StatusCode.INVALID_ARGUMENT, error.message)


def check_fields(message: Any, data: bytes) -> None:
    """Count the fields of a message before it is read: each becomes an object. Raises BadInput for too many.

    A message that is cut off passes; reading it fails.
    """
    at, end = 0, len(data)
    try:
        for _ in range(MAX_FIELDS):
            kind = data[at]
            at += 1
            if kind > 0x7F:
                at = _end_of_number(data, at)
            kind &= 7
            if kind == _OF_LENGTH:
                length = data[at]
                at += 1
                if length > 0x7F:
                    begin, at = at - 1, _end_of_number(data, at)
                    length = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(data[begin:at]))
                at += length
            elif kind == _OF_VARINT:
                at = _end_of_number(data, at)
            else:
                at += _FIXED_BYTES[kind]
            if at >= end:
                return
    except (IndexError, KeyError):
        return
    raise BadInput(f"The message has more than {MAX_FIELDS} fields; it is read as {message.DESCRIPTOR.name}.")


def _end_of_number(data: bytes, at: int) -> int:
    """The place after a number that goes on here. Raises IndexError at the end of the data."""
    while data[at] > 0x7F:
        at += 1
    return at + 1


def peer_of(peer: str) -> str:
    """grpcio's `ipv4:127.0.0.1:50000` or `ipv6:%5B::1%5D:50000` as HTTP's lines have it: `127.0.0.1:50000`."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in ("ipv4", "ipv6") else ""


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
