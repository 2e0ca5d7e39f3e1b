"""A dispatcher of any mode, without workers: what it asked for, and what a test lets its workers say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from marserve.errors import WorkerDied
from marserve.messages import Part, Raised, Request, Result
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight, Job, Question
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics
from support.receivers import Told

LAST = Result(200, "", [])
MORE = Result(200, "", [("ts_stream_next", "true")])


class Client(Told):
    """A receiver with its job."""

    job: Job


class ModeStage:
    """A dispatcher, and everything that it asked for. `options` are those of `PoolOptions`."""

    def __init__(self, **options: Any) -> None:
        self.metrics = VersionMetrics("m", "1")
        self.dispatcher = Dispatcher(PoolOptions("m", "1", 1, 4, **options), self.metrics, self)
        self.dispatcher.living_slots = 1
        self.flights: dict[str, list[Flight]] = {}
        self.cancelled: list[tuple[str, int, int]] = []
        self.emptied: list[str] = []
        self.held: list[str] = []
        self._ids = itertools.count()

    # What the dispatcher asks for.

    def send(self, key: str, flight: Flight) -> None:
        """A flight leaves."""
        self.flights.setdefault(key, []).append(flight)

    def ask_lengths(self, key: str, question: Question) -> None:
        """A worker is asked for lengths."""
        raise AssertionError("nobody asks for lengths here")

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """A running item is no longer wanted."""
        self.cancelled.append((key, number, index))

    def hold(self, key: str) -> None:
        """A worker is to be read no more."""
        self.held.append(key)

    def resume(self, key: str) -> None:
        """A worker is to be read again."""

    def lane_emptied(self, key: str) -> None:
        """A closed worker is done."""
        self.emptied.append(key)

    def all_ended(self) -> None:
        """The last job left."""

    # What the test lets happen.

    def open(self, *keys: str, now: float = 0.0) -> None:
        """Workers are ready."""
        for key in keys:
            self.dispatcher.open_lane(key, now)

    def submit(
        self,
        body: str,
        now: float = 0.0,
        *,
        sequence: str | None = None,
        start: bool = False,
        end: bool = False,
        headers: Mapping[str, str] | None = None,
        client: Client | None = None,
        **fields: Any,
    ) -> Client:
        """A request arrives; `client` is its receiver, if the test has one of its own."""
        client = client or Client()
        said = dict(headers or {})
        if sequence is not None:
            said["ts_request_sequence_id"] = sequence
        if start:
            said["ts_request_sequence_start"] = "true"
        if end:
            said["ts_request_sequence_end"] = "true"
        raw = [(name.encode(), value.encode()) for name, value in said.items()]
        request = Request(f"r{next(self._ids)}", [Part("body", body.encode())], raw, **fields)
        client.job = self.dispatcher.submit(request, client, now)
        return client

    def at(self, key: str) -> list[str]:
        """What a worker runs: the bodies of its oldest flight."""
        flights = self.flights.get(key)
        return [job.request.parts[0].body.decode() for job in flights[0].jobs] if flights else []

    def answer(
        self, key: str, now: float = 0.0, *, results: list[Result] | None = None, which: int = 0, run_s: float = 0.001
    ) -> None:
        """A worker answers one of its flights; unless told otherwise each with its own body, and that was all."""
        flight = self.flights[key].pop(which)
        bodies = [job.request.parts[0].body for job in flight.jobs]
        results = results or [LAST] * len(flight.jobs)
        self.dispatcher.finished(key, flight.number, run_s, results, bodies, now)

    def piece(self, key: str, now: float = 0.0, *, which: int = 0) -> None:
        """A worker sends a piece of each answer of a flight."""
        flight = self.flights[key][which]
        bodies = [b"piece" for _ in flight.jobs]
        self.dispatcher.piece(key, flight.number, [LAST] * len(bodies), bodies, now)

    def fail(self, key: str, now: float = 0.0) -> None:
        """A worker's handler raises for its oldest flight."""
        flight = self.flights[key].pop(0)
        self.dispatcher.raised(key, Raised(flight.number, 0.001, "handler", "Prediction failed", 503, ""), now)

    def die(
        self,
        key: str,
        now: float = 0.0,
        *,
        begun: int | None = None,
        may_retry: bool = True,
        accused: int = 0,
        is_suspect: bool = True,
    ) -> None:
        """A worker is gone; it had begun all that it was sent, unless said otherwise."""
        flights = self.flights.pop(key, [])
        if begun is None:
            begun = flights[-1].number if flights else 0
        error = WorkerDied("killed")
        self.dispatcher.died(key, begun, error, may_retry=may_retry, is_suspect=is_suspect, accused=accused, now=now)
