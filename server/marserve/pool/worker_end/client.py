"""The server's end of the wire to one worker: batches out, results in. Knows no queue and no policy.

`send` turns a flight into one frame; messages that come back go to a `Peer`, the worker's slot. A worker that
breaks the protocol is reported through `on_broken` and must be ended.

A flight for an idle worker is written at once. Flights sent ahead to a busy worker are gathered until this turn of the
event loop is over, and small ones share a frame: one write and one encoding for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import (
    AskHealth,
    AskLengths,
    Batch,
    Batches,
    Called,
    Cancel,
    Check,
    Checked,
    Counted,
    DeviceLost,
    DevicePeak,
    EndProfile,
    Health,
    Hello,
    Item,
    Lengths,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    OutOfStep,
    Piece,
    Profile,
    Profiled,
    Raised,
    Results,
    Returned,
    SetLevel,
    Stop,
    ToWorker,
    Warned,
    pack_head,
)
from marserve.pool.dispatch.jobs import Flight, Job, Question

# The most bytes of bodies in a frame that flights share: the worker cannot begin before it has the whole frame.
SHARED_FRAME_BYTES = 16 * 1024
# How many messages of measurements may come before the next answer: one for a batch, and one after loading.
MAX_METRICS_UNANSWERED = 2
# Heads that are kept packed: their largest size in bytes, and their number.
MAX_KEPT_HEAD_BYTES = 4096
MAX_KEPT_HEADS = 256


# A protocol: slots lie above the worker's end, and `Life` is one of theirs.
class Peer(Protocol):
    """Takes the worker's messages. Called on the event loop; `BadFrame` raised here ends the worker."""

    def on_results(self, ended: Sequence[tuple[Results, list[wire.Body]]]) -> None:
        """One or more batches have ended, in this order."""

    def on_raised(self, message: Raised) -> None:
        """The handler raised for a whole batch."""

    def on_piece(self, message: Piece, bodies: list[wire.Body]) -> None:
        """A piece of a running batch's streams has come."""

    def on_called(self, message: Called, bodies: list[wire.Body]) -> None:
        """The handler calls another model."""

    def on_checked(self, message: Checked) -> None:
        """A check has ended."""

    def on_health(self, message: Health) -> None:
        """The handler has said whether the worker is well."""

    def on_profiled(self, message: Profiled, bodies: list[wire.Body]) -> None:
        """A profile has ended; the bodies are its traces."""

    def on_lengths(self, message: Lengths) -> None:
        """The handler has said how long some items are."""

    def on_metrics(self, message: Metrics) -> None:
        """The handler has measured something."""

    def on_loaded(self, message: Loaded) -> None:
        """The model is loaded."""

    def on_not_loaded(self, message: NotLoaded) -> None:
        """Loading failed; the worker is about to end."""

    def on_out_of_step(self, message: OutOfStep) -> None:
        """The ranks of a group did not end a call alike."""

    def on_device_lost(self, message: DeviceLost) -> None:
        """The device is lost to the worker, which is about to end."""

    def on_device_peak(self, message: DevicePeak) -> None:
        """A batch that was larger than any before has raised the worker's peak on its device."""

    def on_counted(self, message: Counted) -> None:
        """The model's FLOPs are counted."""

    def on_warned(self, message: Warned) -> None:
        """Sentences for describe that the handler noted after its load."""

    def on_broken(self, error: BadFrame) -> None:
        """The worker broke the protocol."""

    def on_closed(self) -> None:
        """The connection has ended."""


class PackedHeads:
    """Packed headers. Requests with the same header share its lists, which are packed once."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, int], tuple[bytes, object, object]] = {}

    @property
    def kept(self) -> int:
        """How many packed headers are kept."""
        return len(self._packed)

    def forget(self) -> None:
        """Drop all packed headers."""
        self._packed.clear()

    def pack(self, headers: list[tuple[bytes, bytes]], server_headers: list[tuple[str, str]]) -> bytes:
        """These headers packed; the lists must not change afterwards."""
        key = (id(headers), id(server_headers))
        found = self._packed.get(key)
        if found is not None:
            return found[0]
        packed = pack_head(headers, server_headers)
        if len(packed) <= MAX_KEPT_HEAD_BYTES:
            if len(self._packed) >= MAX_KEPT_HEADS:
                self._packed.clear()
            self._packed[key] = (packed, headers, server_headers)  # held, so that no other list gets their id
        return packed


class WorkerClient(asyncio.Protocol):
    """One connection to one worker. `max_frame_bytes` bounds the bodies of one message."""

    def __init__(self, peer: Peer, *, max_frame_bytes: int = wire.MAX_FRAME_BYTES) -> None:
        self._peer = peer
        self._decoder = wire.server_decoder(max_frame_bytes=max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._heads = PackedHeads()
        self._gathered: list[Flight] = []
        self._is_receiving = False  # `data_received` runs, and flushes at its end
        self._said: set[type] = set()  # the once-only messages that have come
        self._metrics_unanswered = 0
        self.last_sent = 0
        """The number of the last flight that was written."""
        self.sent_bytes = 0
        """Bytes of inputs that were written. The peer counts them, and sets this to 0."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = cast("asyncio.Transport", transport)

    def load(self, load: Load) -> None:
        """Send the order to load."""
        self._send(load)

    def send(self, flight: Flight) -> None:
        """Send the flight's jobs, at the latest at the end of this turn of the loop; the peer gets the results."""
        gathered = self._gathered
        gathered.append(flight)
        if self._is_receiving:
            return
        if not flight.is_ahead:
            self.flush()
        elif len(gathered) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    @property
    def gathered(self) -> int:
        """How many flights wait to be written together."""
        return len(self._gathered)

    def flush(self) -> None:
        """Write the flights that were gathered."""
        flights = self._gathered
        if not flights:
            return
        self._gathered = []
        self.last_sent = flights[-1].number
        together: list[Batch] = []
        bodies: list[wire.Body] = []
        size = 0
        for flight in flights:
            items, more = self._items_of(flight.jobs)
            more_bytes = sum(map(len, more))
            if together and size + more_bytes > SHARED_FRAME_BYTES:
                self._send_batches(together, bodies)
                together, bodies, size = [], [], 0
            together.append(Batch(flight.number, items))
            bodies += more
            size += more_bytes
            self.sent_bytes += more_bytes
        self._send_batches(together, bodies)

    def _send_batches(self, batches: list[Batch], bodies: list[wire.Body]) -> None:
        self._write(batches[0] if len(batches) == 1 else Batches(batches), bodies)

    def ask_lengths(self, question: Question) -> None:
        """Ask the handler how long some items are; the peer gets the answer."""
        items, bodies = self._items_of(question.jobs)
        self._send(AskLengths(question.number, items, question.limit_s), bodies)

    def check(self, check: Check | Batch, bodies: Sequence[wire.Body]) -> None:
        """Have the worker check something, or run a batch that is no flight; the peer gets the outcome."""
        self._send(check, list(bodies))

    def profile(self, order: Profile | EndProfile) -> None:
        """Have the worker measure its batches, or end that; the peer gets what it measured."""
        if isinstance(order, Profile):
            self.take_frames_of(order.max_bytes)
        self._send(order)

    def ask_health(self, number: int) -> None:
        """Ask the handler whether the worker is well; the peer gets the answer. `number` as in the message."""
        self._send(AskHealth(number))

    def answer_call(self, returned: Returned, body: wire.Body) -> None:
        """Give the worker the answer to a call of another model."""
        self._send(returned, [body])

    def take_frames_of(self, max_frame_bytes: int) -> None:
        """Accept frames of up to so many bytes, if that is more than so far."""
        self._decoder.max_frame_bytes = max(self._decoder.max_frame_bytes, max_frame_bytes)

    def cancel(self, number: int, index: int) -> None:
        """Tell a worker that runs many batches at once that an item is no longer wanted."""
        self._send(Cancel(number, index))

    def set_level(self, level: str) -> None:
        """Have the worker log from this level on; `level` is a word such as `debug`."""
        self._send(SetLevel(level.upper()))

    def stop(self) -> None:
        """Ask the worker to finish what it was sent and end."""
        self._send(Stop())

    def pause_reading(self) -> None:
        """Read nothing more until `resume_reading`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection at once; later messages are dropped."""
        # An aborted transport of uvloop's does not say that it is closing, and raises when it is written to.
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._forget()

    def _forget(self) -> None:
        """Drop all bytes that are held: client and peer refer to each other, so both stay in memory for a while."""
        self._decoder.forget()
        self._heads.forget()
        self._gathered = []

    def _send(self, message: ToWorker, bodies: list[wire.Body] | None = None) -> None:
        self.flush()
        self._write(message, bodies)

    def _write(self, message: ToWorker, bodies: list[wire.Body] | None = None) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # `connection_lost` is about to be called, or was
        buffers = wire.encode(message, bodies or ())
        try:
            if len(buffers) == 1:
                transport.write(buffers[0])
            else:
                transport.writelines(buffers)
        except RuntimeError:
            # After a failed write uvloop's transport is closed, but `is_closing` does not say so yet.
            self._transport = None

    def data_received(self, data: bytes) -> None:
        """Pass every complete message to the peer; consecutive results go together."""
        peer = self._peer
        self._is_receiving = True
        try:
            ended: list[tuple[Results, list[wire.Body]]] = []
            for message, bodies in self._decoder.feed(data):
                kind: Any = type(message)
                if kind is Results:
                    ended.append((cast("Results", message), bodies))
                    self._metrics_unanswered = 0
                    continue
                if ended:
                    peer.on_results(ended)
                    ended = []
                if kind is Metrics:
                    self._metrics_unanswered += 1
                    if self._metrics_unanswered > MAX_METRICS_UNANSWERED:
                        raise BadFrame("it sends measurements without end, and answers nothing")
                    peer.on_metrics(cast("Metrics", message))
                    continue
                self._metrics_unanswered = 0
                if kind is Raised:
                    peer.on_raised(cast("Raised", message))
                elif kind is Piece:
                    peer.on_piece(cast("Piece", message), bodies)
                elif kind is Called:
                    peer.on_called(cast("Called", message), bodies)
                elif kind is Lengths:
                    peer.on_lengths(cast("Lengths", message))
                elif kind is OutOfStep:
                    peer.on_out_of_step(cast("OutOfStep", message))
                elif kind is DevicePeak:
                    peer.on_device_peak(cast("DevicePeak", message))
                elif kind is Warned:
                    peer.on_warned(cast("Warned", message))
                elif kind is DeviceLost:
                    peer.on_device_lost(cast("DeviceLost", message))
                elif kind is Checked:
                    peer.on_checked(cast("Checked", message))
                elif kind is Health:
                    peer.on_health(cast("Health", message))
                elif kind is Profiled:
                    peer.on_profiled(cast("Profiled", message), bodies)
                else:
                    self._hear_once(kind, message)
            if ended:
                peer.on_results(ended)
        except BadFrame as error:
            peer.on_broken(error)
        finally:
            self._is_receiving = False
            self.flush()

    def _hear_once(self, kind: type, message: object) -> None:
        """Pass on a message that may come only once. Raises BadFrame for a second one, and for any other message."""
        if kind in self._said or kind not in (Hello, Loaded, NotLoaded, Counted):
            raise BadFrame(f"it sent {kind.__name__}, which it may not, or may not again")
        self._said.add(kind)
        if kind is Loaded:
            self._peer.on_loaded(cast("Loaded", message))
        elif kind is NotLoaded:
            self._peer.on_not_loaded(cast("NotLoaded", message))
        elif kind is Counted:
            self._peer.on_counted(cast("Counted", message))

    def _items_of(self, jobs: Sequence[Job]) -> tuple[list[Item], list[wire.Body]]:
        """The jobs as items for the wire, and their bodies."""
        items: list[Item] = []
        bodies: list[wire.Body] = []
        for job in jobs:
            request = job.request
            parts = []
            # A job with a piece of its answer goes on to another step in the worker, which has its parts already.
            for part in request.parts if not job.has_sent_pieces else ():
                parts.append((part.name, part.content_type))
                bodies.append(part.body)
            head = self._heads.pack(request.headers, request.server_headers)
            timeline, ids = request.timeline, request.trace_ids
            if ids:
                items.append(Item(request.id, parts, head, job.deadline, request.key, request.client_id, b"", ids))
            elif timeline is None or timeline.trace is None:
                items.append(Item(request.id, parts, head, job.deadline, request.key, request.client_id))
            else:
                traceparent = timeline.trace.for_handler
                items.append(Item(request.id, parts, head, job.deadline, request.key, request.client_id, traceparent))
        return items, bodies

    def connection_lost(self, error: Exception | None) -> None:
        """The worker has ended, or is about to."""
        self._transport = None
        self._forget()
        self._peer.on_closed()
