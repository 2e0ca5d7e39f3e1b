"""The main thread of a worker that preprocesses ahead: computes batch after batch, and answers them as ever.

A batch begins on the shared page in its turn, so limits count from there: that of the response, and what a worker's end
costs. It has ended before it begins if all its clients have gone meanwhile.
"""

from __future__ import annotations

from typing import Any, NoReturn

from marserve.messages import AskHealth, AskLengths, Batch, Check, Item, Result, SetLevel, Stop
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel
from marserve.worker.overlap.ahead import CALLS, Ahead, BatchAhead
from marserve.worker.process.own_process import leave
from marserve.worker.process.printed_lines import set_level
from marserve.worker.serving import HAS_EXPIRED, WAS_CANCELLED, ServedModel
from marserve_handlers.support.overlapping.seam import Overlap


class _AsTheyAre:
    """Ids were told apart when the batch was read."""

    def of(self, items: list[Item]) -> list[Item]:
        """The same items."""
        return items


class OverlappedModel(ServedModel):
    """A model whose batches were read, and are preprocessed, by the thread of `Ahead`."""

    distinct_ids: Any

    def __init__(self, connection: Connection, page: Page, model: LoadedModel, overlap: Overlap) -> None:
        super().__init__(connection, page, model)
        self._overlap = overlap
        self._turn: BatchAhead | None = None
        self.distinct_ids = _AsTheyAre()
        self.calls.leave_reading()
        self.ahead = Ahead(connection, page, overlap, super().take_in, self.calls.returned_elsewhere, model.load.gpu_id)

    def serve(self) -> NoReturn:
        """Serve until the server says stop or is gone. Raises EOFError at the end of the connection."""
        self.ahead.start()
        while True:
            self._serve_next()

    def _serve_next(self) -> None:
        found = self.ahead.inbox.get()
        if isinstance(found, BatchAhead):
            self._turn = found
            try:
                self.serve_batch(found.batch, [])
            finally:
                self._turn = None
                self._overlap.expect(None)
                self.ahead.ended(found.batch)
            return
        if isinstance(found, BaseException):
            raise found
        message, bodies = found
        if type(message) is AskLengths:
            self.serve_lengths(message, bodies)
        elif type(message) is AskHealth:
            self.serve_health(message)
        elif type(message) is Check:
            self.serve_check(message, bodies)
        elif type(message) is SetLevel:
            set_level(message.level)
        elif type(message) is Stop:
            leave(0)
        if type(message) in CALLS:
            self.ahead.ended(None)

    def take_in(
        self, batch: Batch, bodies: list[bytearray], now: float
    ) -> tuple[list[Item], list[dict[str, Any]], list[Result | None]]:
        """What the thread has read of the batch; no rows if nobody waits for it any more."""
        turn = self._turn
        assert turn is not None
        turn.is_read.wait()
        if turn.defect is not None:
            raise turn.defect
        assert turn.state is not None
        gone = self._all_gone(turn, now)
        if gone is not None:
            return turn.live, [], gone
        self._overlap.context.take_over(turn.state)
        self._overlap.expect(turn)
        return turn.live, turn.rows, turn.outcome

    def _all_gone(self, turn: BatchAhead, now: float) -> list[Result | None] | None:
        """How each item has ended, if all have since they were read; else None."""
        outcome: list[Result | None] = []
        live = iter(turn.live)
        for index, result in enumerate(turn.outcome):
            if result is None:
                deadline = next(live).deadline
                if self._page.is_cancelled(turn.batch.number, index):
                    result = WAS_CANCELLED
                elif deadline is not None and deadline <= now:
                    result = HAS_EXPIRED
                else:
                    return None
            outcome.append(result)
        return outcome
