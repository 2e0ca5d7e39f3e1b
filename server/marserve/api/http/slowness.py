"""The writing side of a connection: answers go out through it, and it measures how fast the client takes them.

It knows neither requests nor answers. An exchange writes to it; `connection.py` is the reading side.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from marserve.api.http.listener import Listener


class Flow(FlowControl):
    """uvicorn's flow control with several reasons to pause: it reads only while no reason holds."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._holds: set[str] = set()

    def hold(self, why: str) -> None:
        """Pause reading until `let_go` is called with the same reason."""
        self._holds.add(why)
        super().pause_reading()

    def let_go(self, why: str) -> None:
        """Drop a reason to pause; read again if it was the last."""
        self._holds.discard(why)
        if not self._holds:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Pause reading until `resume_reading`: enough requests wait for their turn."""
        self.hold("backlog")

    def resume_reading(self) -> None:
        """Read again, unless there is another reason to pause: no request waits any more."""
        self.let_go("backlog")


class WrittenConnection(HttpToolsProtocol):
    """A connection as an exchange sees it. `keep_open`: it may stay open after the answer."""

    listener: ClassVar[Listener]
    flow: Flow
    keep_open: bool
    peer: str
    unsent_since = 0.0  # in monotonic seconds; 0: all was taken when it was last looked at
    streamed_bytes = 0  # all that was written of streams, to compute what the client has taken
    taken_bytes = 0
    counted_unsent = 0  # bytes that the ledger counts as waiting for the client

    def finish(self, now: float, keep: bool, *, is_refusal: bool) -> None:
        """The active exchange was answered at `now`; `keep` says whether the connection stays open."""
        raise NotImplementedError

    def break_off(self, *, at_once: bool) -> None:
        """The active exchange ended in the middle of its answer: close the connection.

        `at_once`: drop what still waits for the client.
        """
        raise NotImplementedError

    def pause_writing(self) -> None:
        """The client does not keep up: count what waits for it from now on."""
        super().pause_writing()
        self.count_unsent(self.unsent)

    def resume_writing(self) -> None:
        """The client has taken nearly all that waited: stop counting it."""
        super().resume_writing()
        self.count_unsent(0)

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to take them."""
        return self.transport.get_write_buffer_size()

    def stream(self, data: bytes | bytearray) -> None:
        """Write a piece of an answer that has more."""
        self.streamed_bytes += len(data)
        self.transport.write(data)
        if self.flow.write_paused:
            self.count_unsent(self.unsent)

    def count_unsent(self, unsent: int) -> None:
        """Count so many bytes as waiting for the client."""
        if unsent != self.counted_unsent:
            self.listener.ledger.count_answers(unsent - self.counted_unsent)
            self.counted_unsent = unsent

    def is_stalled(self, now: float) -> bool:
        """Whether bytes wait, and the client has taken none for `stall_timeout_s`."""
        unsent = self.unsent
        taken = self.streamed_bytes - unsent
        if not unsent or not self.unsent_since or taken > self.taken_bytes:
            self.unsent_since = now
        self.taken_bytes = taken
        return self.is_stalled_for(now, self.listener.limits.stall_timeout_s)

    def is_stalled_for(self, now: float, seconds: float) -> bool:
        """As `is_stalled`, for another time; uses what the last call of `is_stalled` saw."""
        return self.unsent > 0 and now - self.unsent_since >= seconds
