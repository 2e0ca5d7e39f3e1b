"""Receivers that keep what they were told: for tests without an event loop, and for tests with one."""

from __future__ import annotations

import asyncio

from marserve.errors import MarserveError
from marserve.messages import Answer
from support.patience import PATIENCE_S


class Told:
    """All that a receiver was told, in order."""

    def __init__(self) -> None:
        self.pieces: list[Answer] = []
        self.ends: list[Answer | MarserveError] = []

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self._end(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece of a stream; the last one is its end."""
        self.pieces.append(piece)
        if last:
            self._end(piece)

    def on_error(self, error: MarserveError) -> None:
        """An error."""
        self._end(error)

    def _end(self, end: Answer | MarserveError) -> None:
        self.ends.append(end)

    @property
    def end(self) -> Answer | MarserveError | None:
        """Its one end, None before it. Two ends are a fault."""
        assert len(self.ends) <= 1, self.ends
        return self.ends[0] if self.ends else None

    @property
    def body(self) -> bytes | None:
        """The body of its answer, None before it and for an error."""
        return self.end.body if isinstance(self.end, Answer) else None


class Waiting(Told):
    """A receiver that a coroutine may wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()
        self._pieces_came = asyncio.Event()

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece."""
        super().on_piece(piece, last)
        self._pieces_came.set()

    def _end(self, end: Answer | MarserveError) -> None:
        super()._end(end)
        self._ended.set()

    async def piece(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for a first piece."""
        async with asyncio.timeout(timeout_s):
            await self._pieces_came.wait()

    async def told(self, timeout_s: float = PATIENCE_S) -> Answer | MarserveError:
        """Wait for its one end."""
        async with asyncio.timeout(timeout_s):
            await self._ended.wait()
        end = self.end
        assert end is not None
        return end
