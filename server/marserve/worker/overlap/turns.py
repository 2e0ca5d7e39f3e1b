"""The main thread of a worker that preprocesses ahead: computes batch after batch, and answers them as ever.

A batch begins on the shared page in its turn, so limits count from there: that of the response, and what a worker's end
costs. It has ended before it begins if all its clients have gone meanwhile.
"""

from __future__ import annotations

from typing import Any

from marserve.messages import Batch, Item, Result
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel
from marserve.worker.overlap.ahead import Ahead, BatchAhead
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
        self._last: Any = None  # the message that was returned last
        self._is_reading = False
        self.distinct_ids = _AsTheyAre()
        self.calls.leave_reading()
        self.ahead = Ahead(connection, page, overlap, super().take_in, self.calls.returned_elsewhere, model.load.gpu_id)

    def receive(self) -> list[tuple[Any, list[Any]]]:
        """As a connection's: the next message, once the one before is done. Raises EOFError when the server is gone.

        The first call begins to read ahead; a batch that this returns is served next.
        """
        if self._is_reading:
            self._overlap.expect(None)
            self.ahead.ended(self._last, None if self._turn is None else self._turn.batch)
        else:
            self._is_reading = True
            self.ahead.start()
        self._turn = None
        found = self.ahead.inbox.get()
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, BatchAhead):
            self._turn = found
            self._last = found.batch
            return [(found.batch, [])]
        self._last = found[0]
        return [found]

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
