"""The server's end of the wire to one worker: batches out, results in. Knows no queue and no policy.

`exchange` turns a flight into one frame; what comes back goes to a `Peer`, the worker's slot. A worker that says what
no honest worker says is reported through `on_broken` and must be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, cast

from marserve import wire
from marserve.errors import BadFrame
from marserve.messages import (
    Batch,
    Check,
    Checked,
    Item,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    Piece,
    Raised,
    Results,
    Stop,
    ToWorker,
)
from marserve.pool.batcher import Flight


class Peer(Protocol):
    """Who hears what the worker says. Called on the event loop; `BadFrame` raised here ends the worker."""

    def on_results(self, message: Results, bodies: list[wire.Body]) -> None:
        """A batch has ended."""

    def on_raised(self, message: Raised) -> None:
        """A batch has raised as a whole."""

    def on_piece(self, message: Piece, bodies: list[wire.Body]) -> None:
        """A piece of a running batch's streams."""

    def on_checked(self, message: Checked) -> None:
        """A check has ended."""

    def on_metrics(self, message: Metrics) -> None:
        """What the handler measured."""

    def on_loaded(self, message: Loaded) -> None:
        """The model is loaded."""

    def on_not_loaded(self, message: NotLoaded) -> None:
        """Loading failed; the worker is on its way out."""

    def on_broken(self, error: BadFrame) -> None:
        """The worker said what no honest worker says."""

    def on_closed(self) -> None:
        """The connection has ended."""


class WorkerClient(asyncio.Protocol):
    """One connection to one worker. `max_frame_bytes` bounds the bodies of one message, whatever its header says."""

    def __init__(self, peer: Peer, *, max_frame_bytes: int = wire.MAX_FRAME_BYTES) -> None:
        self._peer = peer
        self._decoder = wire.server_decoder(max_frame_bytes=max_frame_bytes)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready to send."""
        self._transport = cast("asyncio.Transport", transport)

    def load(self, load: Load) -> None:
        """Tell the worker what to load."""
        self._send(load)

    def exchange(self, flight: Flight) -> None:
        """Send the flight's jobs; the peer hears how they ended."""
        items = []
        bodies: list[wire.Body] = []
        for job in flight.jobs:
            request = job.request
            parts = []
            for part in request.parts:
                parts.append((part.name, part.content_type))
                bodies.append(part.body)
            items.append(Item(request.id, parts, request.headers, request.server_headers, job.deadline))
        self._send(Batch(flight.number, items), bodies)

    def check(self, check: Check, bodies: Sequence[wire.Body]) -> None:
        """Have the worker check something; the peer hears what it found."""
        self._send(check, list(bodies))

    def take_frames_of(self, max_frame_bytes: int) -> None:
        """Take frames of up to so many bytes, if that is more than until now."""
        self._decoder.max_frame_bytes = max(self._decoder.max_frame_bytes, max_frame_bytes)

    def stop(self) -> None:
        """Ask the worker to finish what it was sent and end."""
        self._send(Stop())

    def pause_reading(self) -> None:
        """Read nothing more until told to."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self, message: ToWorker, bodies: list[wire.Body] | None = None) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return  # its end is on its way to the peer
        buffers = wire.encode(message, bodies or ())
        if len(buffers) == 1:
            transport.write(buffers[0])
        else:
            transport.writelines(buffers)

    def data_received(self, data: bytes) -> None:
        """Hand on every message that is now whole."""
        peer = self._peer
        try:
            for message, bodies in self._decoder.feed(data):
                kind: Any = type(message)
                if kind is Results:
                    peer.on_results(cast("Results", message), bodies)
                elif kind is Metrics:
                    peer.on_metrics(cast("Metrics", message))
                elif kind is Raised:
                    peer.on_raised(cast("Raised", message))
                elif kind is Piece:
                    peer.on_piece(cast("Piece", message), bodies)
                elif kind is Checked:
                    peer.on_checked(cast("Checked", message))
                elif kind is Loaded:
                    peer.on_loaded(cast("Loaded", message))
                elif kind is NotLoaded:
                    peer.on_not_loaded(cast("NotLoaded", message))
        except BadFrame as error:
            peer.on_broken(error)

    def connection_lost(self, error: Exception | None) -> None:
        """The worker is gone, or on its way."""
        self._transport = None
        self._peer.on_closed()
