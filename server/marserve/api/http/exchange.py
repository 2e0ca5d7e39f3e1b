"""One inference request and its answer on one connection: the data plane's receiver, and the bytes of the answer.

The connection reads requests; an exchange only writes to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, NamedTuple

from marserve.api.byte_ledger import SMALL_BYTES, HeldBytes, Hold
from marserve.api.errors import NoRoomForBody, error_answer
from marserve.api.http.inference import Route
from marserve.api.http.instances import QUICK_BYTES as QUICK_BYTES_OF_INSTANCES
from marserve.api.http.instances import read_instances
from marserve.api.http.large_answers import LARGE_ABOVE_BYTES, Feed
from marserve.api.http.request_body import is_quick, read_parts
from marserve.api.http.request_head import Head
from marserve.api.http.response_headers import phrase_of
from marserve.api.http.slowness import WrittenConnection
from marserve.api.http.stream_errors import error_frame, with_exception
from marserve.api.open_inference.request_parameters import (
    NOTHING,
    QUICK_BYTES,
    SEARCHED_BYTES,
    Asked,
    json_bytes,
    may_ask,
    read_body,
)
from marserve.errors import Draining, HandlerFailed, MarserveError
from marserve.messages import TRACE_MARK, Accepted, Answer, Part
from marserve.registry.intake.call_modes import SequenceHeaderNames
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.timeline import CLIENT_GONE, Timeline, timed, times_of
from marserve.telemetry.trace_context import Trace
from marserve.telemetry.traces.tracing import Takes

log = logging.getLogger("marserve.api")

SLOW_READER: Final = "slow_reader"
# Statuses whose answers have no body and no length.
BODILESS: Final = (204, 304)
# Up to this length head and body are copied into one write; above it two writes are cheaper.
ONE_WRITE_BYTES: Final = 64 * 1024
# A form up to this length is always quick to decode.
TINY_BYTES: Final = 512


class Read(NamedTuple):
    """What was read of a body: its parts, or the instances that are requests of their own; and what it asks for."""

    parts: list[Part]
    instances: list[Part] | None = None
    asked: Asked = NOTHING


class Exchange:
    """One inference request and its answer. `id` is the request's; `refusal` is answered in place of running it."""

    __slots__ = (
        "began",
        "body",
        "connection",
        "decoding",
        "feed",
        "head",
        "hold",
        "id",
        "is_bodiless",
        "is_streaming",
        "job",
        "keep",
        "refusal",
        "small_bytes",
        "stream_status",
        "stream_type",
        "timeline",
        "trace_ids",
    )

    def __init__(self, connection: WrittenConnection, head: Head, body: bytes | bytearray) -> None:
        # None once the exchange is over; what comes later is dropped.
        self.connection: WrittenConnection | None = connection
        self.head = head
        self.body = body
        listener = connection.listener
        self.id = listener.request_ids.of(head.client_id) if head.client_id else listener.next_id()
        self.began = began = monotonic()
        self.timeline: Timeline | None = None
        self.trace_ids = b""  # of a request without a timeline
        recorder, tracing = listener.recorder, listener.tracing
        if recorder is not None and (recorder.left > 0 or (began >= recorder.refill_at and recorder.refill(began))):
            recorder.left -= 1  # as `Recorder.begins`, but without a call
            self.timeline = self._new_timeline(len(body))
            if tracing is not None:
                self.timeline.trace = tracing.begin(head.lines if head.is_traced else (), head.line)
        elif tracing is not None:
            # Most requests have ids alone; a call for each would cost as much again. A request that others are made of,
            # as nodes of a workflow, has a timeline, by which they are found.
            ids = tracing.ids.pop() if tracing.ids else tracing.draw()
            route = head.route
            if (
                ids[8:16] < tracing.below
                or head.is_traced
                or route is None
                or route.is_workflow
                or route.protocol == "v1"
            ):
                self.timeline = self._new_timeline(len(body))
                lines = head.lines if head.is_traced else ()
                self.timeline.trace = tracing.begin(lines, head.line, ids)
            else:
                self.trace_ids = ids
        self.job: Accepted | None = None
        self.decoding: asyncio.Future[Read] | None = None
        self.feed: Feed | None = None
        self.stream_type = ""  # of the stream that has begun
        self.stream_status = 0  # of a stream that is logged at its end, until then
        self.refusal: BaseException | None = None
        self.is_streaming = False
        self.is_bodiless = False
        self.keep = False
        self.small_bytes = 0  # of its body in the reserve for small ones
        self.hold: Hold | None = None  # the room of a form whose parts have taken the place of its body
        if body and type(body) is not HeldBytes:
            # As `ledger.take_small`, but without a call: nearly every request comes here.
            ledger, size = listener.ledger, len(body)
            if size <= SMALL_BYTES and ledger.small + size <= ledger.half:
                ledger.small += size
                self.small_bytes = size
            else:
                self._count(connection, body)

    def came_in_pieces(self, head_since: float, body_since: float) -> None:
        """Header or body came with more than one read, as `Timeline.came_in_pieces`."""
        if self.trace_ids:
            self._give_timeline()
        if self.timeline is not None:
            self.timeline.came_in_pieces(head_since, body_since)

    @property
    def line_id(self) -> str:
        """The id as log lines have it."""
        given = self.head.client_id
        own = f"{self.id}/{given}" if given and given != self.id else self.id
        trace = self._trace
        return own if trace is None else f"{own}{TRACE_MARK}{trace.trace_id}{TRACE_MARK}{trace.span_id}"

    @property
    def _trace(self) -> Trace | None:
        """Its place in a trace, until its timeline is given away."""
        return None if self.timeline is None else self.timeline.trace

    def _id_with_trace(self) -> bytes:
        """The value of `x-request-id`, and a line more for a client that is to know its trace."""
        trace = None if self.timeline is None else self.timeline.trace  # without a timeline it is not shown
        if trace is None or not trace.is_shown:
            return self.id.encode()
        return f"{self.id}\r\ntraceresponse: {trace.for_client}".encode()

    def _count(self, connection: WrittenConnection, body: bytes | bytearray) -> None:
        """Take room for a body that has come as a whole; without room the request is refused."""
        ledger, size = connection.listener.ledger, len(body)
        if size <= SMALL_BYTES:
            if ledger.take_small(size):
                self.small_bytes = size
                return
        elif (hold := ledger.take(size)) is not None:
            self.body = HeldBytes(body)
            self.body.hold = hold
            return
        self.body = b""
        self.refusal = error = NoRoomForBody(ledger.limit)
        connection.listener.metrics.count_refused(error.cause or "")

    def release(self, connection: WrittenConnection) -> None:
        """Give the room of the body back. A `HeldBytes` that the job still refers to keeps its own."""
        self.hold = None
        if self.small_bytes:
            connection.listener.ledger.release_small(self.small_bytes)
            self.small_bytes = 0

    def start(self) -> None:
        """Submit the request, or answer with its refusal: the connection has made it the active one."""
        connection, head = self.connection, self.head
        assert connection is not None
        body, self.body = self.body, b""
        if self.refusal is not None:
            self.on_error(self.refusal)
            return
        if head.fault is not None:
            self.on_error(head.fault)
            return
        if head.is_form and isinstance(body, HeldBytes):
            self.hold = body.hold
        if head.route is not None and head.route.protocol and self._look_into(connection, head.route, body):
            return
        if head.is_form and len(body) > TINY_BYTES and not is_quick(body, head.content_type or ""):
            self._decode(connection, _read_parts, body, head.content_type or "")
        else:
            self._submit(connection, body)

    def _look_into(self, connection: WrittenConnection, route: Route, body: bytes | bytearray) -> bool:
        """Submit a request whose body says more than its handler's input; False if there is nothing to read in it."""
        surface = connection.listener.surface
        assert surface is not None
        head = self.head
        try:
            if route.protocol == "v1":
                if not surface.takes_instances(route):
                    return False
                if isinstance(body, HeldBytes):
                    self.hold = body.hold
                if len(body) > QUICK_BYTES_OF_INSTANCES:
                    self._decode(connection, _read_instances, body)
                else:
                    self._submit(connection, body, _read_instances(body))
                return True
            end = json_bytes(head.headers, len(body))
            if head.is_form or (end <= SEARCHED_BYTES and not may_ask(body, end)):
                return False
            parts = [Part("body", body, head.content_type)]
            if end > QUICK_BYTES:
                self._decode(connection, _read_asked, parts, end, surface.sequence)
            else:
                self._submit(connection, body, _read_asked(parts, end, surface.sequence))
        except MarserveError as error:
            self.on_error(error)
        return True

    def _decode(self, connection: WrittenConnection, read: Callable[..., Read], *given: Any) -> None:
        """Have a thread read the body."""
        self.decoding = connection.listener.decoding.begin(read, *given)
        self.decoding.add_done_callback(self._decoded)

    def _decoded(self, decoding: asyncio.Future[Read]) -> None:
        """Submit the request after a thread has read the parts of its body, or what it asks for."""
        self.decoding = None
        connection = self.connection
        error = None if decoding.cancelled() else decoding.exception()
        if connection is None or decoding.cancelled():
            return
        if error is None:
            self._submit(connection, b"", decoding.result())
            return
        if not isinstance(error, MarserveError):
            log.error(
                "The body of request %s could not be read",
                self.id,
                exc_info=error,
                extra=caused_by(connection.peer, self.line_id),
            )
        self.on_error(error)

    def _submit(self, connection: WrittenConnection, body: bytes | bytearray, read: Read | None = None) -> None:
        """Submit the request to the data plane; `read` is its body, if it was read already."""
        head = self.head
        timeout_s, priority, asked_version = head.wishes
        deadline = None if timeout_s is None else self.began + timeout_s
        headers = head.headers
        parts, instances = None, None
        if read is not None:
            parts, instances, asked = read
            deadline = asked.deadline(self.began, deadline)
            priority = asked.priority if priority is None else priority
            headers = asked.headers(headers)
        surface = connection.listener.surface
        assert surface is not None
        assert head.route is not None
        try:
            job = surface.predict(
                head.route,
                self.id,
                headers,
                head.content_type,
                body,
                self,
                deadline,
                priority,
                asked_version,
                parts,
                *self._names(connection),
                instances,
                self.timeline,
                self.trace_ids,
            )
        except MarserveError as error:
            self.on_error(error)
        except Exception as error:
            log.exception("Request %s could not be submitted", self.id, extra=caused_by(connection.peer, self.line_id))
            self.on_error(error)
        else:
            if self.connection is not None:
                self.job = job

    def _names(self, connection: WrittenConnection) -> tuple[int, str]:
        """The `key` and `client_id` of the request."""
        given = self.head.client_id
        if not given:
            return 0, ""
        return (connection.listener.request_ids.next_key(), "") if given == self.id else (0, given)

    def abandon(self, why: str = "client") -> None:
        """The client has gone: cancel the request."""
        if self.connection is not None:
            self._log_stream(self.connection, why)
            self.release(self.connection)
            if self.trace_ids:
                self._give_timeline()
            self._keep_time(self.connection, monotonic(), CLIENT_GONE, 0, "client_gone")
        self.connection = None
        job, self.job = self.job, None
        if job is not None:
            job.cancel()
        if self.decoding is not None:
            self.decoding.cancel()
        if self.feed is not None:
            self.feed.close()

    def on_answer(self, answer: Answer) -> None:
        """Write the whole answer."""
        connection = self.connection
        if connection is None:
            return
        head = self.head
        status = answer.status
        if head.is_plain and connection.keep_open and status == 200 and not answer.headers and not answer.reason:
            body = answer.body
            listener = connection.listener
            headers = listener.response_headers
            plain = (headers.of(head.lines) if headers.has_origins else headers).plain
            shown_id = self.id.encode() if self.timeline is None else self._id_with_trace()
            if len(body) <= ONE_WRITE_BYTES:
                connection.transport.write(plain % (shown_id, len(body), body))
                self._sent(connection, 200, True, len(body))
            else:
                self._send(connection, plain % (shown_id, len(body), b""), body, 200, True)
            return
        try:
            self._answer(connection, status, answer.reason, answer.headers, answer.body)
        except HandlerFailed as error:
            self._log_refused(connection, error)
            self.on_error(error)

    def _log_refused(self, connection: WrittenConnection, error: HandlerFailed) -> None:
        log.error(
            "The answer to request %s is not sent: %s", self.id, error, extra=caused_by(connection.peer, self.line_id)
        )

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Write one piece of a stream, the first one with the head (contract §1.8)."""
        connection = self.connection
        if connection is None:
            return
        if not self.is_streaming:
            if last:
                self.on_answer(piece)
                return
            try:
                self._begin_stream(connection, piece)
            except HandlerFailed as error:
                if self.job is not None:
                    self.job.cancel()
                self._log_refused(connection, error)
                self.on_error(error)
                return
        body = piece.body
        timeline = self.timeline
        if timeline is not None:
            timeline.bytes_out += len(body)
        if piece.thrown is not None:
            body = with_exception(body, piece.thrown, connection.listener.error_rules)
        if body and not self.is_bodiless:
            was_full = connection.flow.write_paused
            if self.head.is_http10:
                connection.stream(body)
            elif len(body) <= ONE_WRITE_BYTES:
                connection.stream(b"%x\r\n%b\r\n" % (len(body), bytes(body)))
            else:
                connection.stream(b"%x\r\n" % len(body))
                connection.stream(body)
                connection.stream(b"\r\n")
            if connection.flow.write_paused and self.job is not None:
                self.job.hold()
                if timeline is not None:
                    timeline.hold(monotonic())
            if was_full and connection.unsent > connection.listener.limits.stream_buffer_bytes:
                connection.listener.metrics.count_refused(SLOW_READER)
                self._log_stream(connection, SLOW_READER)
                self._keep_stream(connection, monotonic(), SLOW_READER)
                self.abandon(SLOW_READER)
                connection.transport.abort()
                return
        if last:
            if not self.is_bodiless and not self.head.is_http10:
                connection.stream(b"0\r\n\r\n")
            now, failure = monotonic(), "" if piece.thrown is None else HandlerFailed.cause or ""
            self._log_stream(connection, failure)
            self._keep_stream(connection, now, failure)
            self._end(connection, now, self.keep and connection.keep_open)

    def go_on(self) -> None:
        """Go on: the client has taken what was written."""
        if self.feed is not None:
            self.feed.go_on()
        elif self.is_streaming and self.job is not None:
            self.job.resume()
            if self.timeline is not None:
                self.timeline.resume(monotonic())

    def look(self, now: float, unsent_bytes: int) -> None:
        """Check about once a second whether a large answer must leave memory, because its client is slow."""
        if self.feed is not None:
            self.feed.look(now, unsent_bytes)

    def on_error(self, error: BaseException) -> None:
        """Write an error object; where a stream has begun, break it off so that it cannot pass for a whole one."""
        connection = self.connection
        if connection is None:
            return
        if self.is_streaming:
            self.release(connection)
            self.connection = self.job = None
            self._log_stream(connection, (error.cause if isinstance(error, MarserveError) else None) or "server")
            self._keep_stream(connection, monotonic(), _class_of(error))
            if isinstance(error, Draining) and not self.is_bodiless and not self.head.is_http10:
                self._tell_in_stream(connection, error)
            connection.break_off(at_once=self.head.is_http10)
            return
        if isinstance(error, Draining):  # the client should send its next request elsewhere too
            connection.keep_open = False
        route = self.head.route
        status, body, headers = error_answer(
            error,
            connection.listener.error_rules,
            is_open_inference=route is not None and route.protocol != "",
        )
        self._answer(connection, status, phrase_of(status), headers, body, _class_of(error))

    def _tell_in_stream(self, connection: WrittenConnection, error: MarserveError) -> None:
        """Write why the stream breaks off, if its content type has a form for that."""
        _, body, _ = error_answer(error, connection.listener.error_rules)
        frame = error_frame(self.stream_type, body)
        if frame:
            connection.stream(b"%x\r\n%b\r\n" % (len(frame), frame))

    def _answer(
        self,
        connection: WrittenConnection,
        status: int,
        reason: str,
        headers: list[tuple[str, str]],
        body: bytes | bytearray,
        error: str = "",
    ) -> None:
        """Write a whole answer; `error` is a failure's class.

        Raises HandlerFailed, with nothing written, if its head is not legal HTTP.
        """
        keep = self.head.keep_alive and connection.keep_open and self.refusal is None
        ours = connection.listener.response_headers.of(self.head.lines)
        start = ours.head(status, reason, headers, keep_alive=keep)
        shown_id = self._id_with_trace()
        if status in BODILESS:
            start += b"x-request-id: %b\r\n\r\n" % shown_id
            body = b""
        else:
            start += b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (shown_id, len(body))
            if self.head.is_head:
                body = b""
        self._send(connection, start, body, status, keep, error)

    def _begin_stream(self, connection: WrittenConnection, piece: Answer) -> None:
        head = self.head
        self.is_bodiless = head.is_head or piece.status in BODILESS
        self.keep = head.keep_alive and connection.keep_open and (self.is_bodiless or not head.is_http10)
        ours = connection.listener.response_headers.of(head.lines)
        start = ours.head(piece.status, piece.reason, piece.headers, keep_alive=self.keep)
        framing = b"" if head.is_http10 or piece.status in BODILESS else b"transfer-encoding: chunked\r\n"
        shown_id = self._id_with_trace()
        connection.stream(start + b"x-request-id: %b\r\n%b\r\n" % (shown_id, framing))
        self.is_streaming = True
        self.stream_type = next((value for name, value in piece.headers if name.lower() == "content-type"), "")
        self.stream_status = piece.status
        if self.trace_ids:
            self._give_timeline()
        if self.timeline is not None:
            self.timeline.first_piece_at, self.timeline.status = monotonic(), piece.status
        if not connection.listener.logs_streams_at_end:
            self._log_stream(connection)

    def _log_stream(self, connection: WrittenConnection, broken_off: str = "") -> None:
        """Count and log a stream, once; `broken_off` says why it ends before its time. Without a stream, do nothing."""
        status, self.stream_status = self.stream_status, 0
        if status:
            head, now = self.head, monotonic()
            connection.listener.record_stream(
                connection.peer, head.line, status, self.began, now, self.id, head.client_id, broken_off, self._trace
            )

    def _send(
        self,
        connection: WrittenConnection,
        start: bytes,
        body: bytes | bytearray,
        status: int,
        keep: bool,
        error: str = "",
    ) -> None:
        transport = connection.transport
        if len(body) <= ONE_WRITE_BYTES:
            transport.write(start + body)
        elif len(body) <= LARGE_ABOVE_BYTES:
            transport.write(start)
            transport.write(body)
        else:
            self._send_large(connection, start, body, status, keep)
            return
        self._sent(connection, status, keep, len(body), error)

    def _sent(self, connection: WrittenConnection, status: int, keep: bool, size: int, error: str = "") -> None:
        """The whole answer was written, with a body of `size` bytes."""
        now = monotonic()
        recorder = connection.listener.recorder
        trace = None
        if self.timeline is not None:
            trace = self.timeline.trace
            self._keep_time(connection, now, status, size, error)
        elif recorder is not None and (error or now - self.began > recorder.slow_above_s) and recorder.late_left > 0:
            self._keep_late(recorder, now, status, size, error)
        head = self.head
        connection.listener.record(connection.peer, head.line, status, self.began, now, self.id, head.client_id, trace)
        self._end(connection, now, keep)

    def _send_large(
        self, connection: WrittenConnection, start: bytes, body: bytes | bytearray, status: int, keep: bool
    ) -> None:
        """Write the head now and the body as the client takes it. The job is over at once, and its worker free."""
        if self.trace_ids:
            self._give_timeline()
        self.job = None
        self.keep = keep
        head = self.head
        if self.timeline is not None:
            self.timeline.status, self.timeline.bytes_out = status, len(body)
        connection.listener.record(
            connection.peer, head.line, status, self.began, monotonic(), self.id, head.client_id, self._trace
        )
        connection.stream(start)
        feed = connection.listener.large_answers.feed(body, _Way(self, connection))
        if feed.is_open:
            self.feed = feed

    def fed(self) -> None:
        """A large answer was written whole."""
        self.feed = None
        connection = self.connection
        if connection is not None:
            now = monotonic()
            self._keep_stream(connection, now, "")
            self._end(connection, now, self.keep and connection.keep_open)

    def cut(self) -> None:
        """A large answer cannot be kept: break it off so that it cannot pass for a whole one."""
        self.feed = None
        connection, self.connection = self.connection, None
        if connection is not None:
            self.release(connection)
            self._keep_stream(connection, monotonic(), SLOW_READER)
            connection.listener.metrics.count_refused(SLOW_READER)
            connection.transport.abort()

    def _new_timeline(self, body_bytes: int) -> Timeline:
        """A timeline from the moment when the request was read."""
        given = self.head.client_id
        return Timeline(self.id, self.began, body_bytes, given if given != self.id else "")

    def _keep_time(self, connection: WrittenConnection, now: float, status: int, size: int, error: str) -> None:
        """The request has ended: give its timeline to the recorder, once."""
        timeline, self.timeline = self.timeline, None
        recorder = connection.listener.recorder
        if timeline is not None and recorder is not None:
            timeline.end(now, status, size, error)
            recorder.take(timeline)

    def _keep_late(self, recorder: Takes, now: float, status: int, size: int, error: str) -> None:
        """Make a timeline of a request that had none: it was slow, or has failed."""
        times, took_s = times_of(self.job), now - self.began
        if times is not None and not error and took_s <= min(times.of.slow_above_s, recorder.always_above_s):
            return  # others of its version take as long
        timeline = self._late_timeline()
        timeline.end(now, status, size, error)
        recorder.take_late(timeline)

    def _late_timeline(self) -> Timeline:
        """A timeline of what is known now."""
        job, tracing = timed(self.job), None if self.connection is None else self.connection.listener.tracing
        timeline = self._new_timeline(max(0, self.head.body_bytes))
        if tracing is not None and self.trace_ids:
            timeline.trace = tracing.of(self.trace_ids, self.head.line)
        if job is not None:
            if job.request.timeline is not None:  # a model that its handler called wanted one
                timeline.parts = job.request.timeline.parts
            if job.times is not None:
                timeline.admitted_at, timeline.of = job.arrived, job.times.of
                timeline.left_in(job.times)
        return timeline

    def _give_timeline(self) -> None:
        """Have a timeline from now on."""
        self.timeline, self.trace_ids = self._late_timeline(), b""
        job = timed(self.job)
        if job is not None:
            job.request.give_timeline(self.timeline)

    def _keep_stream(self, connection: WrittenConnection, now: float, error: str) -> None:
        """As `_keep_time`, of an answer whose status and size are known already."""
        timeline = self.timeline
        if timeline is not None:
            timeline.resume(now)
            self._keep_time(connection, now, timeline.status, timeline.bytes_out, error)

    def _end(self, connection: WrittenConnection, now: float, keep: bool) -> None:
        if self.small_bytes:
            connection.listener.ledger.release_small(self.small_bytes)
            self.small_bytes = 0
        self.connection = self.job = self.hold = None
        connection.finish(now, keep, is_refusal=self.refusal is not None)


def _read_parts(body: bytes | bytearray, content_type: str) -> Read:
    """Called in a thread."""
    return Read(read_parts(bytes(body), content_type))


def _read_asked(parts: list[Part], end: int, names: SequenceHeaderNames) -> Read:
    """Called in a thread if the body is long."""
    return Read(parts, asked=read_body(parts[0].body, end, names))


def _read_instances(body: bytes | bytearray) -> Read:
    """Called in a thread if the body is long."""
    return Read([], read_instances(body))


def _class_of(error: BaseException) -> str:
    """The class of an error's cause, as `x-marserve-cause` has it."""
    return getattr(error, "cause", None) or "error"


class _Way:
    """Writes the pieces of a large answer to an exchange's connection."""

    __slots__ = ("_connection", "_exchange")

    def __init__(self, exchange: Exchange, connection: WrittenConnection) -> None:
        self._exchange, self._connection = exchange, connection

    @property
    def is_full(self) -> bool:
        """Whether enough waits for the client, or the connection closes."""
        return self._connection.flow.write_paused or self._connection.transport.is_closing()

    def take(self, piece: bytes) -> None:
        """Write a piece."""
        self._connection.stream(piece)

    def fed(self) -> None:
        """The last piece was written."""
        self._exchange.fed()

    def cut(self) -> None:
        """The rest cannot be written."""
        self._exchange.cut()
