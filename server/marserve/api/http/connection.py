"""One HTTP/1.1 connection: its limits, and the short path from its parser to the data plane and back.

`HttpConnection` is a subclass of uvicorn's protocol class and keeps uvicorn's life cycle and TLS. It takes requests for
inference routes itself: bytes in, one `Request` out; an `Answer` in, one write out; no ASGI scope and no task. All
other requests go on as ASGI.

Requests of one connection are answered one at a time, in the order they came. `active` is the one being answered (an
`Exchange`, or uvicorn's cycle); the rest are `waiting`. While many wait, reading pauses.

    phase IDLE   between two requests
          HEAD   a request has begun, its header is not complete
          BODY   the header is complete, the body is not
          DEAF   further bytes are dropped; the connection closes after the answers that it still owes

Clients repeat their headers. A header whose very bytes were accepted before is not parsed again. That holds for whole
requests in one read, with a length, on inference routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import Any, Final

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from marserve.api.browsers import BrowserRules
from marserve.api.byte_ledger import SMALL_BYTES, HeldBytes, Hold, Refusal
from marserve.api.decoding import Decoding
from marserve.api.errors import (
    AS_RECORDED,
    BodyTooSlow,
    ErrorRules,
    HeadersTooLarge,
    MalformedRequest,
    NoRoomForBody,
    RequestTooSlow,
    TargetTooLong,
)
from marserve.api.http.asgi_run import AsgiRun
from marserve.api.http.connections import ConnectionTable
from marserve.api.http.exchange import Exchange
from marserve.api.http.inference import InferenceSurface
from marserve.api.http.large_answers import LargeAnswers
from marserve.api.http.listener import Listener
from marserve.api.http.request_head import (
    UNKNOWN_LENGTH,
    Head,
    Headers,
    HttpLimits,
    header_bytes,
    read_head,
    strip_upgrade,
)
from marserve.api.http.response_headers import ResponseHeaders
from marserve.api.http.slowness import Flow, WrittenConnection
from marserve.api.http.unread import has_unread
from marserve.api.request_ids import RequestIds
from marserve.api.tokens import Tokens, authorization_of
from marserve.errors import BodyTooLarge, MarserveError
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.logs.log_limit import caused_by
from marserve.telemetry.metrics.server_metrics import Metrics
from marserve.telemetry.traces.tracing import Takes, Tracing

log = logging.getLogger("marserve.api")

IDLE: Final = 0
HEAD: Final = 1
BODY: Final = 2
DEAF: Final = 3

END_OF_HEAD: Final = b"\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# A read that may hold chunks is parsed in slices: each chunk costs some microseconds, and may be of one byte.
SLICE_BYTES: Final = 4 * 1024
# Slices are parsed for so long in one step of the loop; a slice of the worst kind takes about as long.
SLICES_S: Final = 0.001

# Reading pauses when so many requests wait on a connection, or when a waiting one has a longer body than this.
READ_AHEAD: Final = 8
READ_AHEAD_BYTES: Final = 64 * 1024
# If a client has taken nothing of an answer for so long, its requests behind it lose their room to others.
PRESSED_STALL_S: Final = 2.0
# The most bytes of one chunk's frame on the wire: sixteen digits, two line ends, and a little more.
CHUNK_FRAME_BYTES: Final = 24


def bind_connection(
    surface: InferenceSurface | None,
    limits: HttpLimits,
    access_log: AccessLog,
    metrics: Metrics,
    connections: ConnectionTable,
    *,
    response_headers: ResponseHeaders | None = None,
    error_rules: ErrorRules = AS_RECORDED,
    large_answers: LargeAnswers | None = None,
    tokens: Tokens | None = None,
    browser_rules: BrowserRules | None = None,
    decoding: Decoding | None = None,
    request_ids: RequestIds | None = None,
    recorder: Takes | None = None,
    tracing: Tracing | None = None,
    logs_streams_at_end: bool = False,
) -> type[HttpConnection]:
    """Make the protocol class of one listener, for uvicorn's `Config(http=…)`.

    `surface` is None on a listener without inference routes. The owner of `connections` starts and stops it, and closes
    `large_answers` and `decoding`. With `tokens` inference routes need the inference key; `api/rest/guard.py` checks
    the keys of other routes. `browser_rules` judge requests for inference routes without a key. Uvicorn's own access
    log, `Date` and `Server` headers should be off.
    """
    shared = Listener(
        surface,
        limits,
        access_log,
        metrics,
        connections,
        response_headers or ResponseHeaders(),
        error_rules,
        large_answers or LargeAnswers(ledger=connections.ledger),
        tokens,
        browser_rules,
        decoding,
        request_ids,
        recorder,
        tracing,
        logs_streams_at_end=logs_streams_at_end,
    )

    class BoundConnection(HttpConnection):
        listener = shared

    return BoundConnection


class HttpConnection(WrittenConnection):
    """One connection of the listener that `bind_connection` gave it."""

    # About the present read and its request; each is set before its first use.
    begun: int  # requests whose first byte came with this read
    read_bytes: int
    partial_bytes: int
    lines: deque[tuple[bytes, bytes]]
    body: bytes | bytearray
    body_bytes: int
    chunks: int
    framed_bytes: int
    run: AsgiRun | None  # gets the body
    head_began: float  # as `head_since` was
    body_since: float
    body_mark_at: float
    body_mark_bytes: int

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # uvicorn lets data follow a request that asked to close; nothing here would read it.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self.phase = IDLE
        self.active: Exchange | RequestResponseCycle | None = None
        self.waiting: deque[Exchange | tuple[RequestResponseCycle, AsgiRun]] = deque()
        self.peer = "/"
        self.owes_continue = False
        self._is_advancing = False
        # The request being read.
        self.head: Head | None = None
        self.hold: Hold | None = None  # the room of its body
        self.replay: tuple[bytes, bytes, Headers] | None = None
        # In monotonic seconds; 0: neither idle nor in a header.
        self.idle_since = monotonic()
        self.head_since = 0.0
        self.has_spoken = False

    # ------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in, or refuse it if there are too many."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.keep_open = not self.listener.is_leaving
        if self.client is not None:
            self.peer = f"/{self.client[0]}:{self.client[1]}"
        try:
            self.listener.connections.admit(self, self.client[0] if self.client is not None else None)
        except MarserveError as error:
            self._refuse(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has closed, by the client or the server: drop what is under way."""
        self.listener.connections.leave(self, self.client[0] if self.client is not None else None)
        self.phase = DEAF
        active, self.active = self.active, None
        if isinstance(active, Exchange):
            active.abandon()
        elif active is not None:
            active.disconnected = True
            active.message_event.set()
        self._drop_waiting()
        self._drop_body()
        self.count_unsent(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what the client sent. A whole request with a known header skips the parser."""
        phase = self.phase
        if phase == IDLE:
            if self.active is None:
                end = data.find(END_OF_HEAD) + 4
                head = self.listener.heads.get(data[:end])
                if head is not None and len(data) - end == head.body_bytes:
                    self.has_spoken = True
                    exchange = self.active = Exchange(self, head, data[end:])
                    exchange.start()
                    return
        elif phase == DEAF:
            return
        if len(data) > SLICE_BYTES and self._may_be_chunked(data):
            self._receive_slices(data)
        else:
            self._receive(data)

    def _may_be_chunked(self, data: bytes) -> bool:
        """Whether a read may hold chunks: each costs time, however short it is."""
        if self.phase == BODY:
            assert self.head is not None
            if self.head.body_bytes == UNKNOWN_LENGTH:
                return True
            if self.head.body_bytes - self.body_bytes >= len(data):
                return False
        return self.phase == HEAD or b"chunked" in data.lower()

    def _receive_slices(self, data: bytes) -> None:
        """Parse slices for a while and the rest in later steps of the loop; until then nothing more is read."""
        end = monotonic() + SLICES_S
        for at in range(0, len(data), SLICE_BYTES):
            if self.phase == DEAF:  # refused or closed
                break
            if at and monotonic() >= end:
                self.flow.hold("slices")
                self.loop.call_soon(self._receive_slices, data[at:])
                return
            self._receive(data[at : at + SLICE_BYTES])
        if not self.transport.is_closing():
            self.flow.let_go("slices")

    def _receive(self, data: bytes) -> None:
        phase = self.phase
        self.begun = 0
        self.read_bytes = len(data)
        offer_at = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            (offer_at,) = upgrade.args
        except httptools.HttpParserError as error:
            if self.phase != DEAF:
                self._on_parser_error(error)
            return
        if offer_at is not None:  # here, so that the upgrade is not the context of the next error
            self._on_upgrade(data, offer_at)
            return
        after = self.phase
        if after == IDLE:
            if phase == IDLE and self.begun == 1:
                self._learn_head(data)
        elif after == HEAD:
            self._on_partial_head(phase)
        elif after == BODY:
            self._on_partial_body(phase)

    def eof_received(self) -> None:
        """Close the transport and drop what runs: as for TorchServe, a client that closes its half has gone."""

    def part_after_next_answer(self) -> None:
        """The server will stop soon: answer the next request with `connection: close`."""
        self.keep_open = False
        if isinstance(self.active, RequestResponseCycle):
            self.active.keep_alive = False

    def shutdown(self) -> None:
        """The server stops: answer what is under way with `connection: close`, and close.

        An idle connection stays open a little longer, for a request that the client may be sending.
        """
        self.part_after_next_answer()
        if not self.is_busy:
            self.loop.call_later(self.listener.limits.drain_idle_s, self.close_if_idle)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read, waits, or is being answered."""
        return self.active is not None or self.phase in (HEAD, BODY)

    @property
    def is_answering(self) -> bool:
        """Whether an answer is being made or not yet taken whole."""
        return self.active is not None or self.unsent > 0

    def close_if_idle(self) -> None:
        """Close unless a request is under way, or has come but was not read yet."""
        if self.is_busy:
            return
        if has_unread(self.transport):  # the loop stalled; the request is read next
            self.loop.call_later(self.listener.limits.drain_idle_s, self.close_if_idle)
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        """The client has taken nearly all that waited for it: let the active exchange go on."""
        super().resume_writing()
        if isinstance(self.active, Exchange):
            self.active.go_on()

    # ------------------------------------------------------------------------------------------- limits of time

    def check(self, now: float) -> None:
        """Check every time limit. Called about once a second."""
        transport = self.transport
        if self.counted_unsent:
            self.count_unsent(self.unsent)
        if self.is_stalled(now):
            self.listener.metrics.count_refused("slow_reader")
            transport.abort()
        elif isinstance(self.active, Exchange):
            self.active.look(now, self.unsent)
        if transport.is_closing():
            return
        if self.waiting and self.is_stalled_for(now, PRESSED_STALL_S) and self.listener.ledger.is_pressed(now):
            self._refuse_waiting()
        phase = self.phase
        limits = self.listener.limits
        if phase == IDLE:
            if self.active is None:
                limit = limits.keep_alive_s if self.has_spoken else limits.header_timeout_s
                if now - self.idle_since >= limit and not has_unread(transport):
                    transport.close()
        elif phase == HEAD:
            if now - self.head_since >= limits.header_timeout_s:
                self._refuse(RequestTooSlow("header", limits.header_timeout_s))
        elif phase == BODY:
            self._check_body(now, limits)

    def _check_body(self, now: float, limits: HttpLimits) -> None:
        if self.flow.read_paused or self.owes_continue:  # the client waits for the server
            self.body_since = self.body_mark_at = now
            self.body_mark_bytes = self.body_bytes
        elif not self.body_bytes:
            if now - self.body_since >= limits.body_timeout_s:
                self._refuse(RequestTooSlow("body", limits.body_timeout_s))
        elif now - self.body_mark_at >= limits.body_window_s:
            if self.body_bytes - self.body_mark_bytes < limits.body_bytes_per_s * (now - self.body_mark_at):
                self._refuse(BodyTooSlow(limits.body_bytes_per_s, limits.body_window_s))
                return
            self.body_mark_at = now
            self.body_mark_bytes = self.body_bytes

    # ------------------------------------------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self.phase = HEAD
        self.has_spoken = True
        self.begun += 1
        self.url = b""
        # One line over the limit is enough to refuse the header.
        self.lines = deque(maxlen=self.listener.limits.header_lines + 1)

    def on_url(self, url: bytes) -> None:
        """The target, or a piece of it."""
        self.url = self.url + url if self.url else url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, as the client wrote it; or a trailer line of a chunked body, which is not used."""
        self.lines.append((name, value))

    def on_headers_complete(self) -> None:
        """Check the header and find the route. Raises what refuses the request; `data_received` answers with it."""
        lines = list(self.lines)
        listener = self.listener
        limits = listener.limits
        self.head_began = self.head_since
        if self.read_bytes > limits.header_bytes or self.head_since:
            self.head_since = 0.0
            if header_bytes(lines) > limits.header_bytes:
                raise HeadersTooLarge(limits.header_bytes, "bytes")
        parser = self.parser
        head = self.head = read_head(
            parser.get_method(),
            self.url,
            parser.get_http_version(),
            parser.should_keep_alive(),
            lines,
            limits,
            listener.match,
        )
        if listener.tokens is not None and head.route is not None:
            # Before the body, so that a client without a key need not send it. A header that passes may be remembered.
            listener.tokens.check("inference", authorization_of(lines))
        if listener.browser_rules is not None and head.route is not None:
            listener.browser_rules.check(head.method, head.lines)
        self.phase = BODY
        self.run = None
        self.body = b""
        self.body_bytes = 0
        self.body_since = 0.0
        self.chunks = 0
        if parser.should_upgrade():
            self.replay = (head.method, self.url, lines)
            return
        if head.body_bytes > SMALL_BYTES and not head.is_upload:
            self._open_body(head.body_bytes)
        if head.route is None:
            self._begin_asgi(head)
        elif head.expects_continue:
            if self.active is None and (self.hold is None or not self.hold.is_waiting):
                self.transport.write(CONTINUE)
            else:
                self.owes_continue = True

    def on_chunk_header(self) -> None:
        """One more chunk, or the empty last one."""
        self.chunks += 1

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        received = self.body_bytes + len(body)
        self.body_bytes = received
        head = self.head
        assert head is not None
        limits = self.listener.limits
        if head.is_upload:
            if received > limits.upload_bytes:
                raise BodyTooLarge(limits.upload_bytes, "max_upload_size")
            super().on_body(body)
            return
        if received > limits.body_bytes:
            raise BodyTooLarge(limits.body_bytes)
        if self.chunks > limits.body_chunks:
            raise MalformedRequest(f"the body comes in more than {limits.body_chunks} chunks")
        if self.hold is not None:
            self._take(self.hold, len(body))
        if head.route is None:
            super().on_body(body)
        elif received == len(body):
            self.body = body
        elif isinstance(self.body, bytearray):
            self.body += body  # in place, so that a large body is held once
        else:
            self.body = HeldBytes(self.body)
            self.body += body

    def on_message_complete(self) -> None:
        """The request is whole: submit one of an inference route now or in its turn."""
        if self.replay is not None:
            return
        head = self.head
        assert head is not None
        hold = self._complete_body() if self.body_bytes else None
        body, self.body = self.body, b""
        self.phase = IDLE if head.keep_alive else DEAF
        if head.route is None:
            super().on_message_complete()
            return
        if hold is not None:
            body = body if isinstance(body, HeldBytes) else HeldBytes(body)
            body.hold = hold
        elif isinstance(body, HeldBytes):
            body = bytes(body)  # it has no hold; the exchange counts it
        exchange = Exchange(self, head, body)
        if self.head_began or self.body_since:
            exchange.came_in_pieces(self.head_began, self.body_since)
        if self.active is None:
            self.active = exchange
            exchange.start()
        else:
            self._enqueue(exchange)

    # ------------------------------------------------------------------------------------------- room for bodies

    @property
    def is_reading(self) -> bool:
        """Whether the client holds the body up: it does not send, or does not take the answer that must go first.

        Without the second, a client that takes no answers could keep room for bodies of which it sends nothing.
        """
        active = self.active
        if not self.flow.read_paused or active is None:
            return not self.flow.read_paused
        assert self.head is not None
        is_its_own = self.head.route is None and active is self.cycle
        return not is_its_own or active.response_started  # type: ignore[union-attr]

    def go_on(self) -> None:
        """Read on: the body has room now."""
        self.flow.let_go("room")
        if self.owes_continue and self.active is None and self.phase == BODY:
            self.owes_continue = False
            self.transport.write(CONTINUE)

    def give_up(self, why: Refusal) -> None:
        """Refuse the body: it has no room any more."""
        self._refuse(NoRoomForBody(self.listener.ledger.limit, why))

    def _open_body(self, length: int | None) -> Hold:
        """Ask for room for the body that begins; nothing is read until it has room. Raises BodyTooLarge."""
        ledger = self.listener.ledger
        if length is not None and length > ledger.limit:
            raise BodyTooLarge(ledger.limit, "max_bytes_in_flight")
        hold = self.hold = ledger.open(length, self, monotonic())
        if hold.is_waiting:
            self.flow.hold("room")
        return hold

    def _take(self, hold: Hold, size: int) -> None:
        """Count a piece of the body. Raises BodyTooLarge, NoRoomForBody."""
        ledger = self.listener.ledger
        if hold.received + size > ledger.limit:
            raise BodyTooLarge(ledger.limit, "max_bytes_in_flight")
        if not hold.take(size, monotonic()):
            raise NoRoomForBody(ledger.limit)
        if hold.is_waiting:
            self.flow.hold("room")

    def _complete_body(self) -> Hold | None:
        """The body has come whole: the hold that it keeps, if any. Raises NoRoomForBody.

        The exchange counts the small body of an inference request, the run that of a request that goes on as ASGI.
        """
        ledger = self.listener.ledger
        hold, self.hold = self.hold, None
        run, self.run = self.run, None
        self.flow.let_go("room")
        if hold is not None and not hold.complete():
            raise NoRoomForBody(ledger.limit)
        if run is not None and run.head.is_upload:
            return None  # nothing of it is held
        if run is not None:
            run.hold = hold or ledger.take(self.body_bytes)
            if run.hold is None:
                raise NoRoomForBody(ledger.limit)
        elif hold is not None and hold.is_small:
            hold.close()
            return None
        return hold

    def _drop_body(self) -> None:
        """Drop the body that is being read, and give its room back."""
        self.body = b""
        self.run = None
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.close()
            self.flow.let_go("room")

    def _drop_waiting(self) -> None:
        """Drop the requests that wait for their turn; they get no answer."""
        for waiting in self.waiting:
            if isinstance(waiting, Exchange):
                waiting.release(self)
            else:
                waiting[0].body = bytearray()  # the cycle may live on, but its bytes do not count any more
        self.waiting.clear()

    def _refuse_waiting(self) -> None:
        """Refuse what waits behind an answer that the client does not take: others need the room of its bodies.

        In its turn the first waiting request gets the refusal, which closes the connection. The rest is dropped.
        """
        first = self.waiting[0]
        head = first.head if isinstance(first, Exchange) else first[1].head
        self._drop_cycle()
        self._drop_body()
        self._drop_waiting()
        self.phase = DEAF
        self.replay = None
        error = NoRoomForBody(self.listener.ledger.limit, "untaken")
        self.listener.metrics.count_refused(error.cause or "")
        self._answer_with(error, head)

    # ------------------------------------------------------------------------------------------- reading, step by step

    def _learn_head(self, data: bytes) -> None:
        """Remember the header of the one request in `data`, if the same bytes will always mean the same."""
        head = self.head
        assert head is not None
        end = len(data) - head.body_bytes
        if head.is_repeatable and data.find(END_OF_HEAD) == end - 4 and data.startswith(head.method):
            self.listener.remember(data[:end], head)

    def _on_partial_head(self, phase_before: int) -> None:
        """A read ended inside a header: count its bytes, as the parser does not show an incomplete line."""
        limits = self.listener.limits
        if not self.head_since:
            self.head_since = monotonic()
            # If the read held the end of another request, it is not known how many bytes were header.
            self.partial_bytes = self.read_bytes if phase_before == IDLE and self.begun == 1 else 0
        else:
            self.partial_bytes += self.read_bytes
        if len(self.url) > limits.request_line_bytes:
            self._refuse(TargetTooLong(limits.request_line_bytes))
        elif len(self.lines) > limits.header_lines:
            self._refuse(HeadersTooLarge(limits.header_lines, "lines"))
        elif self.partial_bytes > limits.header_bytes + limits.request_line_bytes:
            self._refuse(HeadersTooLarge(limits.header_bytes, "bytes"))

    def _on_partial_body(self, phase_before: int) -> None:
        """A read ended inside a body: start its clock, and bound the frames of a chunked one."""
        if not self.body_since:
            self.body_since = self.body_mark_at = monotonic()
            self.body_mark_bytes = self.body_bytes
            self.framed_bytes = self.body_bytes
        elif phase_before == BODY:
            self.framed_bytes += self.read_bytes
        head = self.head
        assert head is not None
        if self.hold is None and self.body_bytes and self.replay is None and not head.is_upload:
            try:
                hold = self._open_body(None if head.body_bytes == UNKNOWN_LENGTH else head.body_bytes)
                self._take(hold, self.body_bytes)
            except MarserveError as error:
                self._refuse(error)
                return
        if head.body_bytes == UNKNOWN_LENGTH:
            # Chunk extensions and trailers are read and dropped; without a bound they could go on for ever.
            spare = self.listener.limits.header_bytes + CHUNK_FRAME_BYTES * self.chunks
            if self.framed_bytes - self.body_bytes > spare:
                self._refuse(HeadersTooLarge(self.listener.limits.header_bytes, "bytes"))

    def _on_parser_error(self, error: httptools.HttpParserError) -> None:
        """Refuse the request: the parser, or a callback that it called, raised."""
        cause = error.__context__  # what the callback raised
        if cause is None or isinstance(cause, httptools.HttpParserError):
            cause = MalformedRequest()
        elif not isinstance(cause, MarserveError):
            log.error("A request could not be read", exc_info=cause, extra=caused_by(self.peer))
        self._refuse(cause)

    def _on_upgrade(self, data: bytes, offset: int) -> None:
        """Ignore an offer to change the protocol, at which the parser stopped, and go on in HTTP/1.

        Java's client makes one with every first request. The header is read again without the offer, then the body and
        what follows it. That may be many more requests with an offer, so this is a loop and no recursion.
        """
        rest = memoryview(data)
        at: int | None = offset
        while at is not None:
            rest = rest[at:]
            at = self._read_without_offer(rest)

    def _read_without_offer(self, rest: memoryview) -> int | None:
        """Read the kept header without its offer, then `rest`; returns where in `rest` the next offer ended."""
        assert self.replay is not None
        assert self.head is not None
        version = b"1.0" if self.head.is_http10 else b"1.1"
        (method, target, lines), self.replay = self.replay, None
        self.parser = httptools.HttpRequestParser(self)
        kept = b"".join([b"%b: %b\r\n" % line for line in strip_upgrade(lines)])
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version, kept)
        try:
            self.parser.feed_data(head)
            if rest:
                self.parser.feed_data(rest)
        except httptools.HttpParserUpgrade as upgrade:
            at: int
            (at,) = upgrade.args
            return at
        except httptools.HttpParserError as error:
            if self.phase != DEAF:
                self._on_parser_error(error)
            return None
        if self.phase == HEAD:
            self._on_partial_head(BODY)
        elif self.phase == BODY:
            self._on_partial_body(HEAD)
        return None

    def _refuse(self, error: BaseException) -> None:
        """Answer the request being read with an error, in its turn, and close. Nothing more is read."""
        cycle = self._drop_cycle()
        self._drop_body()
        phase, self.phase = self.phase, DEAF
        self.replay = None
        cause = "too_large" if isinstance(error, BodyTooLarge) else getattr(error, "cause", None)
        self.listener.metrics.count_refused(cause or "unreadable")
        if cycle is not None and cycle.response_started:
            # The application has begun to answer without reading everything; no second answer may follow.
            if cycle.response_complete:
                self._close_gently()
            else:
                self.transport.abort()
            return
        if phase == BODY:
            assert self.head is not None
            head = self.head
        elif phase == HEAD and self.url:
            head = Head(self.parser.get_method(), self.url, "1.1", False, [])
        else:
            head = Head(b"-", b"-", "1.1", False, [])
        self._answer_with(error, head)

    def _answer_with(self, error: BaseException, head: Head) -> None:
        """Answer a request with an error, in its turn."""
        exchange = Exchange(self, head, b"")
        exchange.refusal = error
        if self.active is None:
            self.active = exchange
            exchange.start()
        else:
            self.waiting.append(exchange)

    def _drop_cycle(self) -> RequestResponseCycle | None:
        """Take the ASGI cycle of the request being read out, marked as disconnected; None if it has none."""
        if self.phase != BODY or self.head is None or self.head.route is not None or self.cycle is None:
            return None
        cycle = self.cycle
        cycle.disconnected = not cycle.response_complete
        cycle.message_event.set()
        if cycle is self.active:
            self.active = None
        elif self.waiting and isinstance(self.waiting[-1], tuple) and self.waiting[-1][0] is cycle:
            self.waiting.pop()
        return cycle

    # ------------------------------------------------------------------------------------------- one after the other

    def finish(self, now: float, keep: bool, *, is_refusal: bool) -> None:
        """Go on with the next waiting request, or close."""
        self.active = None
        self.idle_since = now
        if not keep:
            if is_refusal or not self.keep_open:
                self._close_gently()
            else:
                self._drop_waiting()
                self.phase = DEAF
                self.transport.close()
        elif self.waiting or self.owes_continue:
            self._advance()

    def break_off(self, *, at_once: bool) -> None:
        """Close in the middle of an answer, so that it cannot pass for a whole one."""
        self.active = None
        if at_once:
            self.transport.abort()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The answer of uvicorn's cycle is complete: go on."""
        self.server_state.total_requests += 1
        self.active = None
        self.idle_since = monotonic()
        if self.transport.is_closing():
            return
        if self._has_left_an_upload:
            self._close_gently()
        else:
            self._advance()

    @property
    def _has_left_an_upload(self) -> bool:
        """Whether the answer that is complete now was to an upload that was not read to its end, and says so."""
        head, cycle = self.head, self.cycle
        is_left = head is not None and head.is_upload and not head.keep_alive
        return is_left and cycle is not None and cycle.response_complete

    def _advance(self) -> None:
        """Start waiting requests until one stays active. One answered at once calls this again, without recursion."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self.waiting and self.active is None:
                waiting = self.waiting.popleft()
                if isinstance(waiting, Exchange):
                    self.active = waiting
                    waiting.start()
                else:
                    self._run_asgi(*waiting)
        finally:
            self._is_advancing = False
        if not self.waiting:
            self.flow.resume_reading()
            if self.active is None and self.owes_continue and (self.hold is None or not self.hold.is_waiting):
                self.owes_continue = False
                if self.phase == BODY:
                    self.transport.write(CONTINUE)

    def _enqueue(self, waiting: Exchange | tuple[RequestResponseCycle, AsgiRun]) -> None:
        """Let a request wait for those before it. Raises MalformedRequest if too many wait already."""
        if len(self.waiting) >= self.listener.limits.pipelined_requests:
            raise MalformedRequest(f"more than {self.listener.limits.pipelined_requests} requests were sent ahead")
        self.waiting.append(waiting)
        # Not at the first one: while nothing is read, a client that goes away is not noticed.
        if len(self.waiting) >= READ_AHEAD or (isinstance(waiting, Exchange) and len(waiting.body) > READ_AHEAD_BYTES):
            self.flow.pause_reading()

    def _begin_asgi(self, head: Head) -> None:
        """Pass the request on as ASGI; its body follows through `on_body`."""
        url = self.url
        super().on_message_begin()  # makes the scope
        self.url = url
        self.headers.extend([(name.lower(), value) for name, value in head.lines])
        self.expect_100_continue = head.expects_continue
        # Else uvicorn would queue the request behind an incomplete cycle; `_start_asgi_task` keeps the order.
        self.cycle = None  # type: ignore[assignment]
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Called by uvicorn for a request whose header is complete."""
        assert self.head is not None
        run = self.run = AsgiRun(self.listener, cycle, app, self.peer, self.head)
        run.hold = self.hold
        if self.active is None:
            self._run_asgi(cycle, run)
        else:
            self._enqueue((cycle, run))

    def _run_asgi(self, cycle: RequestResponseCycle, run: AsgiRun) -> None:
        self.active = cycle
        if not self.keep_open:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, run)

    def _close_gently(self) -> None:
        """Close once the client has had time to read the answer.

        If the client still sends, closing at once resets the connection, and the answer is lost (RFC 9112 §9.6).
        """
        self.phase = DEAF
        self._drop_waiting()
        self._drop_body()
        transport = self.transport
        if transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(self.listener.limits.linger_s, transport.close)
