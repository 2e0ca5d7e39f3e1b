"""The thread that reads what the server sends, and preprocesses a batch while the main thread computes the one before.

It begins with a batch as soon as the batch is there, and reads nothing more until its `preprocess` has ended. It sends
nothing: what the server hears of a batch comes in its turn. An exception of the author's code is kept until then.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from marserve.messages import Batch, Batches, Item, Result, Returned, SetLevel, Stop
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.rows import DistinctIds
from marserve_handlers.support.line_owner import of_this_task
from marserve_handlers.support.overlapping.seam import BatchState, Overlap, Prepared, refuse_pieces

# Messages for which the main thread does not call the author's code.
NO_CALLS = frozenset((SetLevel, Stop))

TakeIn = Callable[[Batch, list[bytearray], float], tuple[list[Item], list[dict[str, Any]], list[Result | None]]]


class BatchAhead(Prepared):
    """A batch on its way to its turn: its live items and rows, and for every item None or how it has ended."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self.live: list[Item] = []
        self.outcome: list[Result | None] = []
        self.defect: BaseException | None = None
        """Of marserve, met before the author's code was called."""


class Ahead:
    """Reads a connection. What it hands over lies in `inbox`: batches, messages with their bodies, at last an error."""

    def __init__(
        self,
        connection: Connection,
        page: Page,
        overlap: Overlap,
        take_in: TakeIn,
        returned: Callable[[Returned, bytes | bytearray], None],
        gpu_id: int | None = None,
    ) -> None:
        self.inbox: queue.SimpleQueue[BatchAhead | tuple[Any, list[bytearray]] | BaseException] = queue.SimpleQueue()
        self._connection = connection
        self._page = page
        self._overlap = overlap
        self._take_in = take_in
        self._returned = returned
        self._gpu_id = gpu_id
        self._ids = DistinctIds()
        self._calls = 0  # of the author's code that the main thread makes, or has before it
        self._lock = threading.Lock()  # of these two, which both threads change

    def start(self) -> None:
        """Begin to read. Nothing else may read the connection from now on.

        The thread has what the author's code has set for the main one so far: context variables, torch's gradient mode.
        """
        torch = sys.modules.get("torch")
        has_gradients = torch is None or torch.is_grad_enabled()
        run = copy_context().run
        threading.Thread(target=run, args=(self._read, has_gradients), name="preprocess", daemon=True).start()

    def ended(self, message: Any, batch: Batch | None) -> None:
        """The main thread is done with a message; if it was a batch, other requests may have its ids."""
        with self._lock:
            self._calls -= type(message) not in NO_CALLS
            if batch is not None:
                self._ids.forget(batch.items)

    def _read(self, has_gradients: bool) -> None:
        try:
            torch = sys.modules.get("torch")
            if torch is not None:
                torch.set_grad_enabled(has_gradients)
                if self._gpu_id is not None and torch.cuda.is_available():
                    torch.cuda.set_device(self._gpu_id)  # a thread begins with the first device
            while True:
                for message, bodies in self._connection.receive():
                    self._take(message, bodies)
        except BaseException as error:
            self.inbox.put(error)

    def _take(self, message: Any, bodies: list[bytearray]) -> None:
        if type(message) is Batch:
            self._prepare(message, bodies)
            bodies.clear()  # not kept while the next ones are awaited
        elif type(message) is Batches:
            at = 0
            for batch in message.batches:
                end = at + sum(len(item.parts) for item in batch.items)
                self._prepare(batch, bodies[at:end])
                at = end
            bodies.clear()
        elif type(message) is Returned:
            self._returned(message, bodies[0] if bodies else b"")
        else:
            with self._lock:
                self._calls += type(message) not in NO_CALLS
            self.inbox.put((message, bodies))

    def _prepare(self, batch: Batch, bodies: list[bytearray]) -> None:
        now = time.monotonic()
        with self._lock:
            items = self._ids.of(batch.items, keep=True)
            if not self._calls:
                # The main thread will say so, too. But if `preprocess` ends the process first, this batch has begun.
                self._page.begin(batch.number, now)
            self._calls += 1
        if items is not batch.items:
            batch = Batch(batch.number, items)
        ahead = BatchAhead(batch)
        self.inbox.put(ahead)
        context = self._overlap.context
        token = of_this_task.set(items)
        try:
            try:
                ahead.live, ahead.rows, ahead.outcome = self._take_in(batch, bodies, now)
            except BaseException as error:
                ahead.defect = error
                ahead.end()
                return
            state = ahead.state = BatchState(ahead.live)
            ahead.is_read.set()
            if ahead.rows:
                places = [place for place, result in enumerate(ahead.outcome) if result is None]
                state.send_pieces = refuse_pieces
                state.ask_cancelled = lambda index: self._page.is_cancelled(batch.number, places[index])
                context.enter(state)
                try:
                    ahead.end(self._overlap.preprocess(ahead.rows))
                except BaseException as error:
                    ahead.end(error=error)
        finally:
            context.enter(None)
            of_this_task.reset(token)
