"""The data plane's receiver for a gRPC call. A coroutine takes the answer's pieces from it one by one.

It knows no messages and no connection. A client that takes its pieces slowly slows its worker (`Accepted.hold`). If the
worker cannot be held, and too much waits, the client loses its stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from marserve.api.grpc.errors import SlowReader
from marserve.errors import MarserveError
from marserve.messages import Accepted, Answer
from marserve.registry.catalogue.traffic import VERSION_HEADER

# A stream's worker is held when more than this waits for the client, and goes on when it is less.
HOLD_ABOVE_BYTES: Final = 64 * 1024
MOST_WAITING_BYTES: Final = 8 * 1024 * 1024


# The error of a request that failed, the bytes of its answer, and when the first piece of a stream came, 0 without one.
Ended = Callable[[MarserveError | None, int, float], None]


class Pieces:
    """The pieces of one answer, in order. `next` is called by one task at a time.

    `version_header` names the version that answers, from the first piece on, if the answer names it. `headers` are
    those that the handler set, from then on.
    """

    __slots__ = (
        *("_came", "_error", "_is_held", "_is_over", "_job", "_waiting", "_waiting_bytes"),
        *("_bytes", "_ended", "_first_at", "headers", "version_header"),
    )

    def __init__(self, ended: Ended | None = None) -> None:
        self._ended = ended
        self._bytes = 0
        self._first_at = 0.0
        self._waiting: deque[bytes | bytearray] = deque()
        self._waiting_bytes = 0
        self._came: asyncio.Future[None] | None = None
        self._error: MarserveError | None = None
        self._job: Accepted | None = None
        self._is_over = False
        self._is_held = False
        self.version_header: tuple[str, str] | None = None
        self.headers: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, submit: Callable[[Pieces], Accepted], ended: Ended | None = None) -> Pieces:
        """The pieces of the request that `submit` hands to the data plane. Raises what it raises.

        `ended` is called once, when the request was refused or nobody takes pieces any more.
        """
        pieces = cls(ended)
        try:
            job = submit(pieces)
        except MarserveError as error:
            pieces._tell_end(error)
            raise
        if not pieces._is_over:
            pieces._job = job
        return pieces

    @property
    def has_ended(self) -> bool:
        """Whether the answer has come in full, without an error, and all pieces of it were taken."""
        return self._is_over and not self._waiting and self._error is None

    async def next(self) -> bytes | None:
        """The next piece; None after the last one. Raises the error of a request that failed."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            self._came = asyncio.get_running_loop().create_future()
            try:
                await self._came
            finally:
                self._came = None
        piece = self._waiting.popleft()
        self._waiting_bytes -= len(piece)
        if self._is_held and self._waiting_bytes <= HOLD_ABOVE_BYTES and self._job is not None:
            self._is_held = False
            self._job.resume()
        return bytes(piece)

    def cancel(self) -> None:
        """Nobody takes pieces any more: cancel the job, if the answer has not come in full."""
        self._tell_end(self._error)
        self._is_over = True
        job, self._job = self._job, None
        if job is not None:
            job.cancel()

    def _tell_end(self, error: MarserveError | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(error, self._bytes, self._first_at)

    def on_answer(self, answer: Answer) -> None:
        """Take the whole answer."""
        self._take(answer)
        self._end()

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Take one piece."""
        if not last and not self._first_at:
            self._first_at = monotonic()
        self._take(piece)
        if last:
            self._end()
        elif self._waiting_bytes > MOST_WAITING_BYTES:
            self._error = SlowReader(MOST_WAITING_BYTES)
            self.cancel()
            self._waiting.clear()
            self._waiting_bytes = 0
        elif self._waiting_bytes > HOLD_ABOVE_BYTES and not self._is_held and self._job is not None:
            self._is_held = True
            self._job.hold()

    def on_error(self, error: MarserveError) -> None:
        """The request failed, before or in the middle of its answer."""
        self._error = error
        self._end()

    def _take(self, piece: Answer) -> None:
        body = piece.body
        if piece.headers:
            self.headers = piece.headers
            if piece.headers[-1][0] == VERSION_HEADER:
                self.version_header = piece.headers[-1]
        self._waiting.append(body)
        self._bytes += len(body)
        self._waiting_bytes += len(body)
        self._wake()

    def _end(self) -> None:
        self._is_over = True
        self._job = None
        self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)
