"""One connection of a gRPC client: HTTP/2 by the library h2, its limits, and the streams that are its calls.

h2 keeps the rules of the protocol and knows no sockets. This file feeds it, hands its events to the streams, writes
what it makes, and sends clients away that are silent too long, too old, or flood it. The frames of one turn of the
loop (`MOST_FRAMES`) are handed on before anything is awaited, so that calls which come together reach the queue
together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from marserve.api.byte_ledger import ByteLedger
from marserve.api.grpc.transport.floods import Floods
from marserve.api.grpc.transport.framing import ENCODINGS, IDENTITY
from marserve.api.grpc.transport.head import NotGrpc, header_bytes, read_head, trailers
from marserve.api.grpc.transport.header_blocks import PlainEncoder
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.slices import Slices
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Stream
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

# What a client may send ahead of what was taken: of one call, and of all calls of a connection.
STREAM_WINDOW_BYTES: Final = 1024 * 1024
CONNECTION_WINDOW_BYTES: Final = 8 * 1024 * 1024
# The largest frame that a client may send. Large messages cost less in large frames.
FRAME_BYTES: Final = 256 * 1024
# The most frames that one turn of the loop hands on: each costs some 30 µs, whatever it holds.
MOST_FRAMES: Final = 64
# What h2 has made is written at once beyond this; reading pauses while a client does not take so much.
WRITE_BYTES: Final = 256 * 1024
# A header beyond this multiple of what is allowed is not even read to its end: its connection is closed.
HEADER_SLACK: Final = 4
# A client that has opened a connection says what it wants within this.
PREFACE_S: Final = 10.0
# The ages of connections differ by this much of them, so that clients that came together do not come back together.
AGE_SPREAD: Final = 0.1
NO_STREAM_IS_LAST: Final = 2**31 - 1
# The begin of a request of HTTP/1.x. HTTP/2's preface begins like one of the method PRI.
_HTTP_1: Final = re.compile(rb"(?!PRI )[A-Z]{3,20} ")
# Between asking a client to open no further calls, and saying which one was the last.
LAST_CALLS_S: Final = 0.1

_CONFIG: Final = H2Configuration(
    client_side=False, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
)
_HEAD: Final = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
]


class _Http2(H2Connection):
    """h2's connection, but a client that says that it will leave (GOAWAY) still gets the answers to its calls."""

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Event]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]


class Clients:
    """The connections of a port."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._connections))

    def add(self, connection: Connection) -> None:
        """One has come."""
        self._connections.add(connection)
        self._is_empty.clear()

    def discard(self, connection: Connection) -> None:
        """One has gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()

    async def wait_until_gone(self) -> None:
        """Return when none is left."""
        await self._is_empty.wait()


class Connection(asyncio.Protocol):
    """One connection. `unknown` answers calls of methods that are not among `methods`."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        unknown: Method,
        limits: GrpcLimits,
        ledger: ByteLedger,
        clients: Clients,
    ) -> None:
        self._methods = methods
        self._unknown = unknown
        self.limits = limits
        self.ledger = ledger
        self._clients = clients
        self.loop = asyncio.get_running_loop()
        self.streams: dict[int, Stream] = {}
        self.peer = ""
        self._blocked: dict[Stream, None] = {}
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._is_flushing = False
        self._has_heard = False
        self._is_greeted = False
        self._is_over = False
        # What came and is not handed on: frames beyond a turn's, or a frame's header that is not whole.
        self._waiting = b""
        self._is_behind = False
        self._slices = Slices(MOST_FRAMES)
        self._unwritten = 0
        self._began = self._heard_at = self._now = monotonic()
        # Since when it has no call.
        self._idle_since = self._began
        self._pinged_at: float | None = None
        self._is_leaving = False
        self._cut_at: float | None = None
        self._last_stream: int | None = None
        self._floods = Floods(limits.least_ping_interval_s, self._began)
        self._age_s = None if limits.age_s is None else limits.age_s * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._http2 = _Http2(_CONFIG)
        self._http2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.calls_per_connection,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.header_bytes,
            },
        )
        self._http2.max_inbound_frame_size = FRAME_BYTES
        self._http2.encoder = PlainEncoder()
        self._http2.decoder.max_header_list_size = HEADER_SLACK * limits.header_bytes
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RequestReceived: self._begin_call,
            DataReceived: self._receive,
            StreamEnded: self._close_half,
            StreamReset: self._reset_by_client,
            WindowUpdated: self._open_window,
            RemoteSettingsChanged: self._open_windows,
            PingReceived: self._answer_ping,
        }

    # ------------------------------------------------------------------------------------------- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        transport = self._transport = cast("asyncio.Transport", transport)  # uvloop's has another class
        if len(self._clients) >= self.limits.connections:
            transport.abort()
            return
        self._clients.add(self)
        self.peer = _peer(transport.get_extra_info("peername"))
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        self._http2.initiate_connection()
        # h2 would end the connection with all of its calls for one too many; that one is refused here.
        self._http2.local_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = NO_STREAM_IS_LAST
        self._http2.local_settings.acknowledge()
        self._http2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65_535)
        # Not written yet: a client of HTTP/1.1 gets an answer that it can read. Clients of HTTP/2 do not wait for it.

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if not self._has_heard:
            self._has_heard = True
            if _HTTP_1.match(data):
                self._refuse_http_1()
                return
            self._flush()
        self._heard_at = monotonic()
        self._pinged_at = None
        waited, self._waiting = self._waiting, b""
        self._take(waited + data if waited else data)

    def _refuse_http_1(self) -> None:
        """Answer a client that speaks HTTP/1.x, as `curl` does, in its protocol, and close."""
        assert self._transport is not None
        rest = f" The same over HTTP/1.1 is at {self.limits.rest}." if self.limits.rest else ""
        body = f"This port takes gRPC alone, which is HTTP/2.{rest}\n".encode()
        head = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(body)}\r\nconnection: close"
        self._is_over = True
        self._transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode() + body)
        self._transport.close()

    def _take(self, data: bytes) -> None:
        """Hand on what `MOST_FRAMES` frames hold; the rest waits for the next turn of the loop."""
        end, frames = self._slices.cut(data)
        if self._is_over or not end:
            self._waiting = b"" if self._is_over else data
            return
        if end < len(data):
            self._waiting = data[end:]
            if frames == MOST_FRAMES:
                self._is_behind = True
                self._hold_reading()
                self.loop.call_soon(self._take_waiting)
            data = data[:end]
        self._feed(data)

    def _take_waiting(self) -> None:
        data, self._waiting = self._waiting, b""
        self._is_behind = False
        self._take(data)
        self._hold_reading()

    def _feed(self, data: bytes) -> None:
        self._now = monotonic()
        try:
            events = self._http2.receive_data(data)
            self._is_greeted = self._is_greeted or bool(events)
            for event in events:
                if self._is_over:
                    return
                self._handlers.get(type(event), self._note_frame)(event)
        except (H2Error, ValueError, KeyError, IndexError) as error:
            # A client that breaks the protocol; h2 has made a frame that says why.
            log.debug("%s broke HTTP/2: %s", self.peer, error)
            self.cut()
            return
        self._flush()

    def _hold_reading(self) -> None:
        """Read only while the client takes what is written, and what came is handed on."""
        if self._transport is not None and not self._transport.is_closing():
            if self._is_paused or self._is_behind:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def eof_received(self) -> bool:
        """The client writes no more: nor does it read, as clients of gRPC are."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It is over."""
        self._is_over = True
        self._clients.discard(self)
        self._transport = None
        for stream in list(self.streams.values()):
            stream.gone()

    def pause_writing(self) -> None:
        """The client does not take what was written."""
        self._is_paused = True
        self._hold_reading()

    def resume_writing(self) -> None:
        """It does again."""
        self._is_paused = False
        self._hold_reading()
        if not self._is_over:
            self._pump_blocked()
            self._flush()

    # ------------------------------------------------------------------------------------------- for streams

    def send_head(self, number: int, encoding: str) -> None:
        """Begin an answer whose compressed messages are compressed so."""
        own = [] if encoding == IDENTITY else [(b"grpc-encoding", encoding.encode())]
        self._send_fields(number, [*_HEAD, *own])

    def send(self, number: int, data: memoryview) -> memoryview | None:
        """Send what the client's windows take of `data`; returns what is left, None if nothing is."""
        http2 = self._http2
        with contextlib.suppress(H2Error):  # the client has reset the call, which its stream will hear
            while not self._is_paused:
                room = min(http2.local_flow_control_window(number), http2.max_outbound_frame_size, len(data))
                if room <= 0:
                    break
                http2.send_data(number, data[:room])
                data = data[room:]
                self._floods.earn()
                self._unwritten += room
                if self._unwritten >= WRITE_BYTES:
                    self._flush()
                if not data:
                    self._flush_soon()
                    return None
        self._flush_soon()
        return data

    def send_trailers(self, number: int, fields: list[tuple[bytes, bytes]]) -> None:
        """End an answer."""
        self._send_fields(number, fields, is_last=True)

    def send_only_trailers(self, number: int, fields: list[tuple[bytes, bytes]]) -> None:
        """End a call without an answer."""
        self._send_fields(number, [*_HEAD, *fields], is_last=True)

    def reset(self, number: int, code: int = ErrorCodes.CANCEL) -> None:
        """Have the client send nothing more of a call; the code says why."""
        try:
            self._http2.reset_stream(number, code)
        except H2Error:  # both sides have closed it
            return
        self._flush_soon()

    def acknowledge(self, number: int, flow_bytes: int) -> None:
        """Let the client send as many bytes more."""
        if flow_bytes:
            try:
                self._http2.acknowledge_received_data(flow_bytes, number)
            except H2Error:  # the connection is being closed
                return
            self._flush_soon()

    def block(self, stream: Stream) -> None:
        """Have the stream go on when its client takes more."""
        self._blocked[stream] = None

    def forget(self, stream: Stream) -> None:
        """The stream is over."""
        self.streams.pop(stream.number, None)
        self._blocked.pop(stream, None)
        if not self.streams:
            self._idle_since = monotonic()
            if self._last_stream is not None:
                self._close()

    # ------------------------------------------------------------------------------------------- for the port

    def sweep(self, now: float) -> None:
        """Look at the limits of time."""
        limits = self.limits
        if self._transport is None:
            return
        if self._cut_at is not None and now >= self._cut_at:
            self.cut()
            return
        if self._age_s is not None and not self._is_leaving and now - self._began >= self._age_s:
            self.leave()
            if limits.age_grace_s is not None:
                self._cut_at = now + limits.age_grace_s
        if limits.idle_s is not None and not self.streams and now - self._idle_since >= limits.idle_s:
            self.leave()
        silent_s = now - self._heard_at
        if not self._is_greeted and now - self._began >= PREFACE_S:
            self._close()
            return
        if self._pinged_at is not None:
            if now - self._pinged_at >= limits.keepalive_timeout_s:
                self._transport.abort()
                return
        elif silent_s >= limits.keepalive_s:
            self._pinged_at = now
            self._http2.ping(b"marserve")
            self._flush()
        for stream in list(self.streams.values()):
            stream.check(now, limits.stall_timeout_s)
        self._flush()

    def leave(self) -> None:
        """Ask the client to open no further calls here. Those that it has opened meanwhile are still answered."""
        if not self._is_leaving and self._transport is not None:
            self._is_leaving = True
            self._write_go_away(NO_STREAM_IS_LAST)
            self.loop.call_later(LAST_CALLS_S, self._name_last_stream)

    def cut(self) -> None:
        """End the connection with all of its calls."""
        for stream in list(self.streams.values()):
            stream.gone()
        self._close()

    def abort(self) -> None:
        """End it without waiting for what was written."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------------------------------- events

    def _begin_call(self, event: RequestReceived) -> None:
        number, fields = event.stream_id, event.headers
        self._floods.earn()
        is_behind_last = self._last_stream is not None and number > self._last_stream
        if is_behind_last or len(self.streams) >= self.limits.calls_per_connection:
            self.reset(number, ErrorCodes.REFUSED_STREAM)
            return
        try:
            head = read_head(fields)
        except NotGrpc as error:
            status = [(b":status", b"%d" % error.http_status), (b"content-type", b"text/plain")]
            self._refuse_at_once(event, [*status, *trailers(StatusCode.INTERNAL, str(error), ())])
            return
        size = header_bytes(fields)
        if size > self.limits.header_bytes:
            limit = self.limits.header_bytes
            text = f"The metadata of the call have {size} bytes; they may have max_header_bytes, {limit}."
            self._refuse_at_once(event, [*_HEAD, *trailers(StatusCode.RESOURCE_EXHAUSTED, text, ())])
            return
        method = self._methods.get(head.path, self._unknown)
        self.streams[number] = Stream(self, number, head, method, self._now)

    def _refuse_at_once(self, event: RequestReceived, fields: list[tuple[bytes, bytes]]) -> None:
        """Answer a request that does not become a call."""
        self._send_fields(event.stream_id, fields, is_last=True)
        if event.stream_ended is None:
            self.reset(event.stream_id, ErrorCodes.NO_ERROR)

    def _receive(self, event: DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if event.data:
            self._floods.earn()
        elif event.stream_ended is None and not self._spend(b"too many frames without data"):
            return
        if stream is None or not event.data:
            self.acknowledge(event.stream_id, event.flow_controlled_length)
        else:
            stream.receive(event.data, event.flow_controlled_length, self._now)

    def _close_half(self, event: StreamEnded) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.close_half()

    def _reset_by_client(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            stream.gone()
        else:
            self._spend(b"too many resets")

    def _open_window(self, event: WindowUpdated) -> None:
        if not self._spend(b"too many updates of windows"):
            return
        if not event.stream_id:
            self._pump_blocked()
        elif (stream := self.streams.get(event.stream_id)) is not None and stream in self._blocked:
            self._pump(stream)

    def _open_windows(self, event: RemoteSettingsChanged) -> None:
        if self._spend(b"too many settings"):
            self._pump_blocked()

    def _answer_ping(self, event: PingReceived) -> None:
        # h2 answers it.
        if not self._floods.ping(self._now):
            self._send_away(b"too_many_pings")

    def _note_frame(self, event: Event) -> None:
        self._spend(b"too many frames that carry no call")

    # ------------------------------------------------------------------------------------------- inside

    def _send_fields(self, number: int, fields: list[tuple[bytes, bytes]], *, is_last: bool = False) -> None:
        with contextlib.suppress(H2Error):  # the client has reset the call, which its stream will hear
            self._http2.send_headers(number, fields, end_stream=is_last)
            self._flush_soon()

    def _pump(self, stream: Stream) -> None:
        self._blocked.pop(stream, None)
        stream.pump()

    def _pump_blocked(self) -> None:
        """Let blocked streams go on, each in turn: one that stays blocked goes to the end of the line."""
        for stream in list(self._blocked):
            if self._is_paused or self._http2.outbound_flow_control_window <= 0:
                return
            self._pump(stream)

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flushing = False
        self._flush()

    def _flush(self) -> None:
        data = self._http2.data_to_send()
        self._unwritten = 0
        if data and self._transport is not None:
            self._transport.write(data)

    def _write_go_away(self, last_stream: int, code: ErrorCodes = ErrorCodes.NO_ERROR, reason: bytes = b"") -> None:
        # h2 takes a connection that has sent GOAWAY for closed, so it does not hear of it.
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=reason)
        self._flush()
        if self._transport is not None:
            self._transport.write(frame.serialize())

    def _name_last_stream(self) -> None:
        if self._last_stream is None and self._transport is not None:
            self._last_stream = self._http2.highest_inbound_stream_id
            self._write_go_away(self._last_stream)
            if not self.streams:
                self._close()

    def _spend(self, reason: bytes) -> bool:
        """Count a frame that carries no call; False: it was one too many, and the client is sent away for it."""
        is_well = self._floods.spend(self._now)
        if not is_well:
            self._send_away(reason)
        return is_well

    def _send_away(self, reason: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            log.info("%s was sent away: %s", self.peer, reason.decode(), extra=caused_by(self.peer))
            self._write_go_away(self._http2.highest_inbound_stream_id, ErrorCodes.ENHANCE_YOUR_CALM, reason)
            self.cut()

    def _close(self) -> None:
        self._is_over = True
        if self._transport is not None:
            self._flush()
            self._transport.close()


def _peer(name: Any) -> str:
    """An address and port as lines of the access log have them."""
    if not isinstance(name, tuple):
        return ""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
