"""What every call of a gRPC listener passes: the check of its key, its wishes, its status, its line in the log.

Services (`inference.py`, …) are coroutines that take a message and a `Call`, and return a message or write several.
They raise typed errors. This file makes the transport's methods of them, with bytes in and bytes out, so that a message
that cannot be read is refused like any other bad input. It knows no service and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final

from google.protobuf.message import DecodeError

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger, Hold
from marserve.api.decoding import SHORT_BYTES, Decoding
from marserve.api.errors import AS_RECORDED, ErrorRules, NoRoomForBody, error_status
from marserve.api.grpc.errors import MethodNotFound, StalledReader, grpc_status
from marserve.api.grpc.schema import Schema
from marserve.api.grpc.transport.framing import IDENTITY, Message, compressed, decompressed
from marserve.api.grpc.transport.head import refusal_of_encoding
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Refused, Stream, StreamGone
from marserve.api.request_ids import CLIENT_ID, RequestIds, read_client_id
from marserve.api.wishes import NO_WISHES, READERS
from marserve.errors import BadInput, MarserveError
from marserve.messages import PART_MARK, Part, Request
from marserve.telemetry.logs.access_log import AccessLog, access_line
from marserve.telemetry.logs.line_ids import about_request
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.timeline import CLIENT_GONE, Timeline
from marserve.telemetry.trace_context import NAMES, Trace
from marserve.telemetry.traces.spans import GRPC
from marserve.telemetry.traces.tracing import Takes, Tracing

log = logging.getLogger("marserve.api")

# Raises if the value of `authorization` does not let a call pass.
Authorize = Callable[[str | bytes | None], None]

AUTHORIZATION: Final = "authorization"
REQUEST_ID: Final = "x-request-id"
# A call's own deadline may end it a little before the clock says so.
DEADLINE_SLACK_S: Final = 0.05
# The most fields of a message, not counting fields inside fields; a tensor or an input is one.
MAX_FIELDS: Final = 4096
# A message up to this length, within `MAX_FIELDS`, is read on the loop: mostly it is one long text or picture.
QUICK_MESSAGE_BYTES: Final = 128 * 1024
# A compressed message up to this length is read on the loop: it may become a thousand times as long.
QUICK_COMPRESSED_BYTES: Final = 256
# A message of an answer below this is not compressed; up to the second that is done on the loop.
LEAST_PACKED_BYTES: Final = 1024
QUICK_PACKED_BYTES: Final = 16 * 1024
# A request to health or reflection is a name.
LONGEST_QUESTION_BYTES: Final = 64 * 1024
# A stream is broken off when its client has taken nothing of it for so long, as over HTTP.
STALL_TIMEOUT_S: Final = 60.0


# The wire's kinds of fields: a number of any length, bytes with their length before them, and two of fixed length.
_OF_VARINT: Final = 0
_OF_LENGTH: Final = 2
_FIXED_BYTES: Final = {1: 8, 5: 4}
# The metadata that say something of the call itself: one look for each.
_NOTABLE: Final = frozenset((*READERS, *(each.decode() for each in NAMES)))


class Call:
    """One call. `began` and `deadline` are seconds on the monotonic clock; the deadline is the channel's or the wished
    one, if any.

    `metadata` came with the call; the key is left out. `message_bytes` is the length of the last message that was read.
    A service sets `version_header` to the header that names the version which answered. `carried` are those of the
    metadata that carry a trace, and `trace` is that of its last request.
    """

    __slots__ = (
        "_decoding",
        "_ledger",
        "_stall_timeout_s",
        "_stream",
        "began",
        "carried",
        "client_id",
        "deadline",
        "error_rules",
        "id",
        "key",
        "message_bytes",
        "metadata",
        "recorder",
        "trace",
        "tracing",
        "version_header",
        "wishes",
    )

    def __init__(
        self,
        stream: Stream,
        request_ids: RequestIds,
        error_rules: ErrorRules,
        stall_timeout_s: float,
        ledger: ByteLedger,
        decoding: Decoding,
        recorder: Takes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.recorder = recorder
        self.tracing = tracing
        self.trace: Trace | None = None
        self._decoding = decoding
        self._stream = stream
        self._ledger = ledger
        self._stall_timeout_s = stall_timeout_s
        given = [_bytes(value) for name, value in stream.metadata if name == CLIENT_ID]
        client_id = read_client_id(given[0]) if len(given) == 1 else ""
        self.id = request_ids.of(client_id)
        # As those of a `Request`.
        self.client_id = client_id if client_id != self.id else ""
        self.key = request_ids.next_key() if client_id == self.id else 0
        self.error_rules = error_rules
        self.began = monotonic()
        self.deadline = stream.deadline
        self.wishes = NO_WISHES
        self.metadata: list[tuple[bytes, bytes]] = []
        self.carried: Sequence[tuple[bytes, bytes]] = ()
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
        timeline = None
        began = self.began if request_id in (None, self.id) else monotonic()
        if self.recorder is not None and self.recorder.begins(monotonic()):
            timeline = Timeline(self.id, began, self.message_bytes, self.client_id)
            if self.tracing is not None:
                timeline.trace = self.trace = self.tracing.begin(self.carried, f"{GRPC}{self._stream.path}")
        return Request(
            request_id or self.id,
            parts,
            [*headers, *self.carried],
            list(server_headers),
            deadline=self.deadline,
            names_version=version is not None,
            priority=self.wishes.priority,
            asked_version=self.wishes.asked_version,
            metadata=self.metadata,
            key=self.key,
            client_id=self.client_id,
            timeline=timeline,
        )

    def keep_time(self, request: Request, error: MarserveError | None, size: int, first_piece_at: float) -> None:
        """A request of the call has ended: give its timeline to the recorder. It is an `Ended`."""
        timeline = request.timeline
        if timeline is None or self.recorder is None:
            return
        timeline.first_piece_at = first_piece_at
        if error is not None:
            timeline.end(monotonic(), error_status(error, self.error_rules), size, error.cause or "error")
        elif size or timeline.last is None or timeline.last.landed_at:
            timeline.end(monotonic(), 200, size)
        else:
            timeline.end(monotonic(), CLIENT_GONE, 0, "client_gone")
        self.recorder.take(timeline)

    def part(self, number: int) -> Call:
        """The call as one of the requests in it sees it: with an id, wishes and a deadline of its own."""
        part = copy.copy(self)
        part.id = f"{self.id}{PART_MARK}{number}"
        part.began = monotonic()
        return part

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count an answer that waits for its turn to be written."""
        self._ledger.count_answers(size)
        try:
            yield
        finally:
            self._ledger.count_answers(-size)

    async def write(self, message: Any) -> None:
        """Send one message of a stream; returns when the client's window has room for more.

        Raises StalledReader if it has no room for too long, StreamGone if the call has ended.
        """
        data = message.SerializeToString()
        with self.holding(len(data)):
            packed = await pack(data, self._stream.answer_encoding, self._decoding)
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._stream.write(packed)
            except TimeoutError:
                raise StalledReader(self._stall_timeout_s) from None

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """What the end of the call says of it: its id, and with traces the span that it was."""
        if self.trace is None or not self.trace.is_shown:
            return ((REQUEST_ID, self.id),)
        return ((REQUEST_ID, self.id), ("traceresponse", self.trace.for_client))

    def read_metadata(self) -> str | bytes | None:
        """Read the metadata that came with the call; returns the value of `authorization`."""
        key = None
        for name, value in self._stream.metadata:
            if name == AUTHORIZATION:
                key = value if key is None else key
                continue
            self.metadata.append((_bytes(name), _bytes(value)))
        return key

    def read_wishes(self) -> None:
        """Read deadline, priority and version from the metadata, and what carries a trace. Raises BadInput."""
        for name, value in self.metadata:
            if (word := name.decode("latin-1")) in _NOTABLE:
                if word in READERS:
                    self.wishes = self.wishes.adding(word, value, "call")
                else:
                    self.carried = (*self.carried, (name, value))
        self._end_by(self.wishes.timeout_s)

    def ask(self, timeout_s: float | None, priority: int | None) -> None:
        """Take what the message itself asks for: the earlier deadline holds, and the priority of the metadata."""
        self._end_by(timeout_s)
        if self.wishes.priority is None:
            self.wishes = self.wishes._replace(priority=priority)

    def _end_by(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            wished = self.began + timeout_s
            self.deadline = wished if self.deadline is None else min(wished, self.deadline)


class Messages:
    """The messages of a dialogue, in order.

    One that cannot be read raises, and the next may be read, unless `is_broken`: then none will come. A message counts
    among the bytes in flight until the next one is read, or until the holds are closed that `keep` gave.
    """

    def __init__(self, stream: Stream, read: Callable[[Message, list[Hold]], Awaitable[Any]]) -> None:
        """`read` reads a message that has come, and adds to the holds what room it takes beside that."""
        self.is_broken = False
        self._stream = stream
        self._read = read
        self._holds: list[Hold] = []

    def __aiter__(self) -> Messages:
        return self

    async def __anext__(self) -> Any:
        """The next message. Raises BadInput and BodyTooLarge for one that cannot be read, and what ends the call."""
        self.close()
        try:
            came = await self._stream.read()
        except MarserveError:
            self.is_broken = True
            raise
        if came is None:
            raise StopAsyncIteration
        self._holds.append(self._stream.take_hold())
        return await self._read(came, self._holds)

    def keep(self) -> list[Hold]:
        """Count the last message from now on until these holds are closed."""
        holds, self._holds = self._holds, []
        return holds

    def close(self) -> None:
        """Count the last message no longer."""
        for hold in self.keep():
            hold.close()


UnaryAnswer = Callable[[Any, Call], Awaitable[Any]]
StreamAnswer = Callable[[Any, Call], Awaitable[None]]
DialogueAnswer = Callable[[Messages, Call], Awaitable[None]]
Answers = Mapping[str, UnaryAnswer | StreamAnswer | DialogueAnswer]


class Calls:
    """The calls of one listener: makes methods of services' coroutines, and knows how many calls are under way."""

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
        recorder: Takes | None = None,
        tracing: Tracing | None = None,
        message_bytes: int = UNBOUNDED,
    ) -> None:
        """`message_bytes`: the most that a compressed message may hold."""
        self._recorder = recorder
        self._tracing = tracing
        self._ledger = ledger or ByteLedger(UNBOUNDED)
        self._message_bytes = message_bytes
        self._stall_timeout_s = stall_timeout_s
        self._decoding = decoding or Decoding()
        self._schema = schema
        self._access_log = access_log if access_log.is_on else None
        self._has_ids = access_log.has_ids
        self._sampling = access_log.sampling
        self._metrics = metrics
        self._authorize = authorize
        self._authorize_of: dict[str, Authorize | None] = {}  # by path
        self._error_rules = error_rules
        self._request_ids = request_ids or RequestIds()
        # Calls in the middle of an answer; a dialogue that waits for its client does not count.
        self._busy = 0
        self.has_been_called = False
        self._is_silent = asyncio.Event()
        self._is_silent.set()

    def service(
        self, name: str, answers: Answers, authorize: Mapping[str, Authorize | None] | None = None
    ) -> dict[str, Method]:
        """The methods of a service of the schema by path; `answers` has a coroutine for each that is answered.

        `authorize` has the check of the key for methods that need another one than the port's.
        """
        methods = {}
        for method, check in (authorize or {}).items():
            self._authorize_of[f"{name}/{method}"] = check
        for method, described in self._schema.methods(name).items():
            path = f"{name}/{method}"
            message = self._schema.message(described.input_type.full_name)
            answer: Any = answers.get(method)
            if answer is None:
                continue
            if described.client_streaming:
                methods[path] = Method(self._dialogue(message, answer), is_dialogue=True)
            elif described.server_streaming:
                methods[path] = Method(self._stream(message, answer))
            else:
                methods[path] = Method(self._unary(message, answer))
        return methods

    def unknown_method(self) -> Method:
        """Answers every call that there is no such method, in TorchServe's words."""

        async def behave(stream: Stream) -> None:
            async def work(call: Call) -> bytes:
                raise MethodNotFound(stream.path)

            await self._carry(stream, work)

        # It reads nothing, so it suits every kind of call.
        return Method(behave, is_dialogue=True)

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

    def _unary(self, message: Any, answer: UnaryAnswer) -> Callable[[Stream], Awaitable[bytes | Message | None]]:
        async def behave(stream: Stream) -> bytes | Message | None:
            async def work(call: Call) -> bytes | Message:
                asked = await self._only_message(message, stream, call)
                made: bytes = (await answer(asked, call)).SerializeToString()
                self._count_until_sent(len(made), stream)
                return await pack(made, stream.answer_encoding, self._decoding)

            return await self._carry(stream, work)

        return behave

    def _stream(self, message: Any, answer: StreamAnswer) -> Callable[[Stream], Awaitable[None]]:
        async def behave(stream: Stream) -> None:
            async def work(call: Call) -> None:
                await answer(await self._only_message(message, stream, call), call)

            await self._carry(stream, work)

        return behave

    def _dialogue(self, message: Any, answer: DialogueAnswer) -> Callable[[Stream], Awaitable[None]]:
        async def behave(stream: Stream) -> None:
            async def work(call: Call) -> None:
                async def read(came: Message, holds: list[Hold]) -> Any:
                    data = await self._data_of(came, stream, holds)
                    call.message_bytes = len(data)
                    return await self._parse(message, data)

                messages = Messages(stream, read)
                try:
                    await answer(messages, call)
                finally:
                    messages.close()

            await self._carry(stream, work, is_busy=False)

        return behave

    def _count_until_sent(self, size: int, stream: Stream) -> None:
        """Count an answer until its client has taken it or has gone."""
        self._ledger.count_answers(size)
        stream.when_over(lambda: self._ledger.count_answers(-size))

    async def _only_message(self, message: Any, stream: Stream, call: Call) -> Any:
        """The message of a call that has one. Raises what is wrong with it."""
        holds: list[Hold] = []
        data = await self._data_of(stream.only_message(), stream, holds)
        for hold in holds:
            stream.when_over(hold.close)
        call.message_bytes = len(data)
        return await self._parse(message, data)

    async def _data_of(self, message: Message, stream: Stream, holds: list[Hold]) -> bytes:
        """The bytes of a message, no longer compressed; the room that they take then is added to `holds`.

        Raises BadInput, BodyTooLarge, NoRoomForBody.
        """
        if not message.is_compressed:
            return message.data
        refusal = refusal_of_encoding(stream.encoding)
        if refusal is not None:
            raise refusal
        given = stream.encoding, message.data, self._message_bytes
        if len(message.data) <= QUICK_COMPRESSED_BYTES:
            data = decompressed(*given)
        else:
            data = await self._decoding.begin(decompressed, *given)
        hold = self._ledger.take(len(data))
        if hold is None:
            raise NoRoomForBody(self._ledger.limit)
        holds.append(hold)
        return data

    async def _parse(self, message: Any, data: bytes) -> Any:
        """The message in these bytes; many bytes are read in a thread. Raises BadInput."""
        if len(data) <= SHORT_BYTES:
            return parse(message, data)
        check_fields(message, data)
        if len(data) <= QUICK_MESSAGE_BYTES:
            return parse(message, data)
        return await self._decoding.begin(parse, message, data)

    async def _carry(
        self, stream: Stream, work: Callable[[Call], Awaitable[bytes | Message | None]], *, is_busy: bool = True
    ) -> bytes | Message | None:
        """Run one call to its end, and count and log it. Returns its answer; None if there is none to be sent."""
        call = Call(
            stream,
            self._request_ids,
            self._error_rules,
            self._stall_timeout_s,
            self._ledger,
            self._decoding,
            self._recorder,
            self._tracing,
        )
        with about_request(call.line_id):
            return await self._carry_call(stream, call, work, is_busy=is_busy)

    async def _carry_call(
        self, stream: Stream, call: Call, work: Callable[[Call], Awaitable[bytes | Message | None]], *, is_busy: bool
    ) -> bytes | Message | None:
        began = call.began
        if is_busy:
            self.begin_work()
            # Over when the answer was sent, not when it was made: a stopping port would cut it in between.
            stream.when_over(self.end_work)
        try:
            key = call.read_metadata()
            authorize = self._authorize_of.get(stream.path, self._authorize) if self._authorize_of else self._authorize
            if authorize is not None:
                authorize(key)
            call.read_wishes()
            answer = await work(call)
            ends = ((REQUEST_ID, call.id),) if call.trace is None else call.trailers
            stream.trailers = (*ends, *(() if call.version_header is None else (call.version_header,)))
            self._record(call, stream, StatusCode.OK, began)
            return answer
        except (asyncio.CancelledError, StreamGone):
            # Ended by the client, by the deadline that it named, or by a server that stops.
            passed = call.deadline is not None and monotonic() >= call.deadline - DEADLINE_SLACK_S
            code = StatusCode.DEADLINE_EXCEEDED if passed else StatusCode.CANCELLED
            self._record(call, stream, code, began)
            raise
        except Exception as error:
            if not isinstance(error, MarserveError):
                # The outermost border: a defect of marserve in one call is answered and logged.
                log.exception("Request %s failed: gRPC %s", call.id, stream.path, extra=caused_by(stream.peer))
            code, description, trailers = grpc_status(error, self._error_rules)
            self._record(call, stream, code, began)
            if isinstance(error, StalledReader):
                # A status cannot overtake a message that the client does not take, so the call is dropped instead.
                stream.drop()
            else:
                # A handler may raise with a code that means success: then the answer is an empty message.
                answer = b"" if code is StatusCode.OK else None
                stream.end(code, description, (*call.trailers, *trailers), answer)
            return None

    def _record(self, call: Call, stream: Stream, code: StatusCode, began: float) -> None:
        """Count and log a call whose status is about to be sent."""
        self._metrics.count_call(code.name)
        if self._access_log is not None:
            milliseconds = int((monotonic() - began) * 1000)
            has_failed = code is not StatusCode.OK
            if self._sampling is not None and not self._sampling.keeps(call.id, milliseconds, has_failed=has_failed):
                return
            line = access_line(
                stream.peer,
                "gRPC",
                stream.path,
                "HTTP/2.0",
                code.value[0],
                milliseconds,
                _ids_of(call) if self._has_ids else "",
            )
            self._access_log.write(line)


def _ids_of(call: Call) -> str:
    """What its access line ends with."""
    return call.line_id.replace("/", " ") + (call.trace.for_lines if call.trace is not None else "")


async def pack(data: bytes, encoding: str, decoding: Decoding) -> bytes | Message:
    """A message of an answer, compressed if that is wanted and may pay; many bytes are compressed in a thread."""
    if encoding == IDENTITY or len(data) < LEAST_PACKED_BYTES:
        return data
    if len(data) <= QUICK_PACKED_BYTES:
        return compressed(encoding, data)
    return await decoding.begin(compressed, encoding, data)


def parse(message: Any, data: bytes) -> Any:
    """The message in these bytes. Raises BadInput."""
    try:
        return message.FromString(data)
    except DecodeError:
        raise BadInput(f"The message cannot be read as {message.DESCRIPTOR.full_name}.") from None


def parse_question(message: Any, came: Message) -> Any:
    """The message that has come, for services outside of `Calls`. Raises Refused."""
    size = len(came.data)
    try:
        if size > LONGEST_QUESTION_BYTES:
            raise BadInput(f"The message has {size} bytes; here it may have {LONGEST_QUESTION_BYTES}.")
        if came.is_compressed:
            raise BadInput("The message is compressed; here it may not be.")
        return parse(message, came.data)
    except BadInput as error:
        raise Refused(StatusCode.INVALID_ARGUMENT, error.message) from None


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


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
