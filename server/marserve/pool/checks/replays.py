"""Runs kept requests again as one batch, in a worker that the dispatcher lends for it.

The worker gets an ordinary batch. Its answers come here in place of the dispatcher: the queue, the batcher and the
model's counts do not know of it. What the handler does itself (other models that it calls, metrics that it measures)
happens as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from marserve.errors import BadFrame, DeadlinePassed, HandlerFailed, MarserveError, Thrown, WorkerDied
from marserve.messages import Answer, Batch, Item, Raised, Request, Results, pack_head
from marserve.pool.dispatch.dispatcher import error_of
from marserve.pool.dispatch.jobs import Flight
from marserve.telemetry.kept_requests import Replayed
from marserve.telemetry.timeline import BatchTimes
from marserve.wire import Body

STREAMS = "this version answers with a stream, which is not compared"


@dataclass(eq=False)
class Replay:
    """One batch to be run again; `outcome` gets what came of it. `times` are there once it is sent."""

    requests: Sequence[Request]
    outcome: asyncio.Future[Replayed]
    times: BatchTimes | None = None
    streams: set[int] = field(default_factory=set)

    def begin(self, key: str, flight: Flight) -> tuple[Batch, list[Body]]:
        """It goes to this worker now: the message for it, and its bodies."""
        self.times = BatchTimes(key, len(self.requests), flight.sent_at, flight.number == 1)
        items, bodies = [], []
        for request in self.requests:
            named = [(part.name, part.content_type) for part in request.parts]
            head = pack_head(request.headers, request.server_headers)
            items.append(Item(request.id, named, head, None, request.key, request.client_id))
            bodies += [part.body for part in request.parts]
        return Batch(flight.number, items), bodies

    def streamed(self, items: int) -> None:
        """A piece of a stream has come for each of so many items. Raises BadFrame for other numbers of them."""
        if items != len(self.requests):
            raise BadFrame(f"a batch that is run again has {len(self.requests)} items, a piece of it {items}")
        self.streams.update(range(items))

    def land(self, results: Results, bodies: Sequence[Body], now: float) -> None:
        """It has ended. Raises BadFrame for other numbers of answers."""
        if not len(results.results) == len(bodies) == len(self.requests):
            raise BadFrame(f"a batch that is run again has {len(self.requests)} items, its answer {len(bodies)}")
        ended: list[Answer | MarserveError] = []
        for index, (result, body) in enumerate(zip(results.results, bodies, strict=True)):
            if result.error == "expired":
                ended.append(DeadlinePassed("worker"))
            elif result.error is not None:
                ended.append(error_of(result.error, result.reason, result.status, result.thrown))
            elif index in self.streams:
                ended.append(HandlerFailed(STREAMS))
            else:
                ended.append(Answer(body, result.status, result.reason, result.headers, result.thrown))
        self._end(results, ended, now)

    def fail(self, raised: Raised, now: float) -> None:
        """The handler raised for all of it."""
        thrown = Thrown(raised.error_type, raised.error_text, raised.traceback)
        error = error_of(raised.kind, raised.message, raised.code, thrown)
        self._end(raised, [error] * len(self.requests), now)

    def _end(self, message: Results | Raised, ended: list[Answer | MarserveError], now: float) -> None:
        times = self.times
        assert times is not None
        times.land(now, message.handler_s, message.work)
        if not self.outcome.done():
            self.outcome.set_result(Replayed(times, ended))

    def lose(self, cause: str, now: float) -> None:
        """Its worker has ended: that is an outcome, too."""
        times = self.times
        if times is not None and not self.outcome.done():
            times.land(now, 0.0, None)
            self.outcome.set_result(Replayed(times, [WorkerDied(cause) for _ in self.requests]))
