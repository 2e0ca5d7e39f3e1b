"""A worker that runs many batches at once (`asyncCommunication`): one event loop, a task for each batch.

The handler's `handle` is a coroutine; a plain function runs in its turn. Each batch has a context of its own, a shallow
copy of the model's: objects that the author put there while loading are shared. A task whose clients have all gone is
cancelled. Loaded only for models that need it.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import msgspec

from marserve.messages import (
    AskHealth,
    Batch,
    Batches,
    Cancel,
    Check,
    Item,
    Piece,
    Raised,
    Result,
    Results,
    Returned,
    SetLevel,
    Stop,
)
from marserve.shared_page import Page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import loss_told_by, misfit, raised
from marserve.worker.process.hindrances import hindrances
from marserve.worker.process.printed_lines import set_level
from marserve.worker.serving import WAS_CANCELLED, ServedModel, recover
from marserve_handlers.context import Context
from marserve_handlers.errors import NobodyWaits
from marserve_handlers.metrics import MetricsCache
from marserve_handlers.support.line_owner import of_this_task

_ids: ContextVar[Mapping[int, str]] = ContextVar("request_ids", default={})  # noqa: B039 - never changed


class IdsOfThisTask(Mapping[int, str]):
    """The request ids of the current task's batch, so that measurements are attributed to its own requests."""

    def __getitem__(self, index: int) -> str:
        return _ids.get()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(_ids.get())

    def __len__(self) -> int:
        return len(_ids.get())


class ConcurrentLoop:
    """Serves one model's batches side by side. `served` does what all modes have in common."""

    def __init__(self, served: ServedModel, connection: Connection, page: Page, model: LoadedModel) -> None:
        self._served = served
        self._connection = connection
        self._page = page
        self._model = model
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._running: dict[int, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._is_stopping = False

    def one_by_one(self) -> LoadedModel:
        """The model with a blocking `handle`, for calls before batches are served."""
        handle, loop = self._model.handle, self._loop

        def run(rows: list[dict[str, Any]], context: Context) -> Any:
            return loop.run_until_complete(_finish(handle(rows, context)))

        return self._model.calling(run)

    def serve(self) -> NoReturn:
        """Serve until the server says stop or is gone. Raises EOFError, or SystemExit with a status, at the end."""
        self._loop.add_reader(self._connection.fileno(), self._read)
        self._loop.run_forever()
        raise self._failure or SystemExit(0)

    # ------------------------------------------------------------------------------------------- messages

    def _read(self) -> None:
        try:
            for message, bodies in self._connection.receive_some():
                self._take(message, bodies)
        except Exception as error:
            self._end(error)

    def _take(self, message: Any, bodies: list[bytearray]) -> None:
        if type(message) is Batch:
            self._begin(message, bodies)
        elif type(message) is Batches:
            at = 0
            for batch in message.batches:
                end = at + sum(len(item.parts) for item in batch.items)
                self._begin(batch, bodies[at:end])
                at = end
        elif type(message) is Cancel:
            run = self._running.get(message.number)
            if run is not None:
                run.cancel(message.index)
        elif type(message) is Returned:
            self._served.calls.returned(message, bodies[0] if bodies else b"")
        elif type(message) is AskHealth:
            self._keep(self._loop.create_task(self._served.serve_health_beside(message), name="health"))
        elif type(message) is Check:
            self._served.serve_check(message, bodies)
        elif type(message) is SetLevel:
            set_level(message.level)
        elif type(message) is Stop:
            self._is_stopping = True
            self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._is_stopping and not self._tasks:
            self._end(SystemExit(0))

    def _end(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._loop.stop()

    # ------------------------------------------------------------------------------------------- batches

    def _begin(self, batch: Batch, bodies: list[bytearray]) -> None:
        began = time.monotonic()
        self._page.begin(batch.number, began)
        live, rows, outcome = self._served.take_in(batch, bodies, began)
        context = copy.copy(self._model.context)
        named = self._served.distinct_ids.of(live, keep=True)
        context.begin_batch(named)
        if isinstance(context.metrics, MetricsCache):  # not if the author has put another object there
            context.metrics.request_ids = IdsOfThisTask()
        run = self._running[batch.number] = _Run(batch.number, context, outcome, self._send_pieces)
        context.send_call = lambda place, *what: self._served.calls.call(batch.number, run.positions[place], *what)
        run.items, run.named = live, named
        run.began = began
        hindrances.begin()
        task = self._loop.create_task(self._serve(run, rows), name=f"batch {batch.number}")
        run.task = task
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def _serve(self, run: _Run, rows: list[dict[str, Any]]) -> None:
        context = run.context
        if not rows or not run.begin():
            results = [result or WAS_CANCELLED for result in run.outcome]
            self._answer(run, Results(run.number, 0.0, results), [b""] * len(results))
            return
        _ids.set(context.request_ids or {})
        of_this_task.set(run.items)
        began = time.monotonic()
        held = hindrances.read()
        answered: Any = None
        failure: Raised | None = None
        try:
            answered = await _finish(self._model.handle(rows, context))
            context.end_stream()
        except SystemExit:
            raise
        except BaseException as error:  # also of a cancelled task, whose clients have all gone
            if not isinstance(error, asyncio.CancelledError):
                self._served.failed.append(loss_told_by(error))
            failure = raised(run.number, time.monotonic() - began, error)
        handler_s = time.monotonic() - began
        failure = failure or misfit(run.number, handler_s, answered, len(rows))
        if failure is not None:
            self._served.end_if_lost(run.number, failure, wait=False)
            recover(failure)
            work = self._served.work_of(context, run.began, began, handler_s, held)
            self._answer(run, msgspec.structs.replace(failure, work=work), [])
            return
        results, bodies = self._served.encode(answered, run.outcome, context)
        if self._served.failed:
            self._served.end_if_lost(run.number, wait=False)
        together = sum(len(other.outcome) for other in self._running.values())
        work = self._served.work_of(context, run.began, began, handler_s, held)
        self._answer(run, Results(run.number, handler_s, results, work), bodies)
        self._served.note_peak(together)

    def _answer(self, run: _Run, message: Results | Raised, bodies: list[bytes]) -> None:
        del self._running[run.number]
        self._served.distinct_ids.forget(run.named)
        if self._running:
            self._page.count_finished()
        else:
            self._page.finish()
        self._served.send_metrics()
        if isinstance(message, Results):
            self._served.send_results(message, bodies)
        else:
            self._connection.send(message)

    def _send_pieces(self, run: _Run, pieces: list[Any]) -> None:
        results, bodies = self._served.encode(pieces, run.outcome, run.context)
        self._connection.send(Piece(run.number, results), bodies)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._end(error)
        self._stop_if_done()


class _Run:
    """A running batch: its context, the state of its items, and which of them are cancelled."""

    def __init__(
        self,
        number: int,
        context: Context,
        outcome: list[Result | None],
        send: Callable[[_Run, list[Any]], None],
    ) -> None:
        self.number = number
        self.context = context
        self.outcome = outcome
        self.task: asyncio.Task[None] | None = None
        self.items: list[Item] = []
        self.named: Sequence[Item] = ()
        self.began = 0.0
        self.positions = [position for position, result in enumerate(outcome) if result is None]
        self._gone: set[int] = set()
        self._has_begun = False
        self._send = send
        context.send_pieces = self.send_pieces
        context.ask_cancelled = self.is_cancelled

    def is_cancelled(self, index: int) -> bool:
        """Whether the client of live item `index` has gone."""
        return self.positions[index] in self._gone

    def begin(self) -> bool:
        """The handler is about to be called; False if all clients have gone."""
        self._has_begun = True
        return not self._is_in_vain

    def cancel(self, position: int) -> None:
        """An item is cancelled; once all of them are, the handler is interrupted."""
        self._gone.add(position)
        if self._is_in_vain and self._has_begun and self.task is not None:
            self.task.cancel()

    @property
    def _is_in_vain(self) -> bool:
        return self._gone.issuperset(self.positions)

    def send_pieces(self, pieces: Sequence[Any]) -> None:
        """Send one piece of a stream for each live item."""
        if not isinstance(pieces, list) or len(pieces) != len(self.positions):
            raise ValueError(f"an intermediate answer needs a list of {len(self.positions)} pieces, one for each row")
        if self._is_in_vain:
            raise NobodyWaits
        self._send(self, pieces)


async def _finish(answered: Any) -> Any:
    """What a handler returned, or the result of its coroutine."""
    return await answered if inspect.isawaitable(answered) else answered
