"""The side of a connection that is written to: where an answer goes, and how fast its client takes it.

It knows neither requests nor answers: an exchange writes to it, and `connection.py` has the rest.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from marserve.api.http.listener import Listener


class Flow(FlowControl):
    """uvicorn's control of a connection's flow, which reads only while there is no reason at all to pause."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._holds: set[str] = set()

    def hold(self, why: str) -> None:
        """Read nothing until `let_go` was called for the same reason."""
        self._holds.add(why)
        super().pause_reading()

    def let_go(self, why: str) -> None:
        """Read again, unless there is another reason not to."""
        self._holds.discard(why)
        if not self._holds:
            super().resume_reading()

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`: what was read waits for its turn."""
        self.hold("backlog")

    def resume_reading(self) -> None:
        """What was read has had its turn."""
        self.let_go("backlog")


class WrittenConnection(HttpToolsProtocol):
    """What an exchange has of its connection. `keep_open`: the connection may stay after the answer."""

    listener: ClassVar[Listener]
    flow: Flow
    keep_open: bool
    peer: str
    unsent_since = 0.0  # in monotonic seconds; 0: all was taken when it was last looked at
    streamed_bytes = 0  # of streams: what was written in all, so that what the client took can be told
    taken_bytes = 0
    counted_unsent = 0  # bytes that wait for the client, as the ledger has them

    def finish(self, now: float, keep: bool, *, is_refusal: bool) -> None:
        """The active exchange has been answered at `now`; `keep` says whether the connection stays."""
        raise NotImplementedError

    def break_off(self, *, at_once: bool) -> None:
        """The active exchange has ended in the middle of its answer, and so does the connection.

        `at_once`: what waits for the client is not written any more.
        """
        raise NotImplementedError

    def pause_writing(self) -> None:
        """The client does not keep up: from now on what waits for it counts."""
        super().pause_writing()
        self.count_unsent(self.unsent)

    def resume_writing(self) -> None:
        """The client has taken nearly all that waited for it."""
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
        """So many bytes wait for the client now."""
        if unsent != self.counted_unsent:
            self.listener.ledger.count_answers(unsent - self.counted_unsent)
            self.counted_unsent = unsent

    def is_stalled(self, now: float) -> bool:
        """Whether the client has taken nothing of what waits for it for too long."""
        unsent = self.unsent
        taken = self.streamed_bytes - unsent
        if not unsent or not self.unsent_since or taken > self.taken_bytes:
            self.unsent_since = now
        self.taken_bytes = taken
        return self.is_stalled_for(now, self.listener.limits.stall_timeout_s)

    def is_stalled_for(self, now: float, seconds: float) -> bool:
        """Whether it has taken nothing for so long, as far as `is_stalled` has seen."""
        return self.unsent > 0 and now - self.unsent_since >= seconds
