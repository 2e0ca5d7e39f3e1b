"""Carries out what a version's certificate asks for: has samples checked in a worker, at load, on demand, in service.

One check runs at a time. The dispatcher lends a worker for it (`want_lane`). To the pool a check is a batch without
requests, so the response limit holds for each call of the handler in it. `certificate.py` decides; this only carries
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from marserve.errors import BadFrame, BadInput, CannotReplay, Draining, NoWorker, WorkerDied
from marserve.messages import (
    Answer,
    Batch,
    Called,
    Check,
    Checked,
    Item,
    Part,
    Piece,
    Raised,
    Request,
    Result,
    Results,
    pack_head,
)
from marserve.option_values import Sample, Tolerance
from marserve.pool.checks.certificate import Certificate, InService, report_of, sentence_of
from marserve.pool.checks.replays import Replay
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.jobs import Flight
from marserve.pool.dispatch.lengths.allowance import Allowance
from marserve.pool.options import PoolOptions
from marserve.telemetry.kept_requests import Replayed
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.wire import Body

log = logging.getLogger("marserve.pool.certifier")

T = TypeVar("T")

MOST_SAMPLE_BYTES = 64 * 1024 * 1024
# After this time a check begins no further call of the handler.
CHECK_LIMIT_S = 60.0
# How many pairs of answers are compared at a time: a worker reports at most so many differences.
MOST_PAIRS = 10
# The batch size of a check on demand for a version without batches: enough to see whether it could have some.
SIZE_ON_DEMAND = 8


@dataclass(eq=False)
class _Order:
    """A check to be made. `size` is the largest batch; `wanted` are answers that were given (in service).

    For the kind `answers` they are pairs, to be compared as `how` says.
    """

    kind: Literal["load", "demand", "service", "answers", "replay"]
    inputs: list[list[Part]]
    size: int
    limit_s: float
    requests: list[Request] | None = None
    wanted: tuple[list[Result], list[Body]] | None = None
    outcome: asyncio.Future[Checked] | asyncio.Future[Replayed] | None = None
    how: Tolerance | Literal["handler", "scores"] = "handler"
    replay: Replay | None = None


class Certifier:
    """The checks of one pool. All methods belong to the event loop's thread."""

    def __init__(
        self,
        options: PoolOptions,
        folder: Path,
        dispatcher: Dispatcher,
        metrics: VersionMetrics,
        send: Callable[[str, Check | Batch, Sequence[Body]], None],
        *,
        has_slots: Callable[[], bool],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`folder` is the model's; `send` sends a check, or a batch that is run again, to a worker by its key."""
        self.certificate = Certificate(options.batch_check, has_samples=bool(options.inputs_to_try))
        self.in_service = InService()
        self.allowance = Allowance()
        self.samples_batches = options.batch_check_sample > 0
        self._options, self._folder, self._dispatcher, self._metrics = options, folder, dispatcher, metrics
        self._send, self._has_slots = send, has_slots
        self._draw = draw
        self._orders: deque[_Order] = deque()
        self._out: tuple[str, int, _Order] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._item_s = 0.0
        self._is_stopped = False
        self.replays_on = ""
        """The worker that runs kept requests again; empty while none does."""

    # ------------------------------------------------------------------------------------------- at load

    def start(self) -> None:
        """Begin to check the model's samples if the certificate needs it; returns at once."""
        options = self._options
        if self._is_stopped or self._reading is not None or not self.certificate.needs_check(options.batch_size):
            return
        if any(order.kind == "load" for order in self._orders) or (self._out and self._out[2].kind == "load"):
            return
        self._reading = asyncio.create_task(self._order_samples(options.batch_size))

    async def _order_samples(self, size: int) -> None:
        try:
            inputs = await self._read_samples()
        except BadInput as error:
            self.certificate.fail(str(error))
            self._tell_failure()
            return
        finally:
            self._reading = None
        limit_s = min(CHECK_LIMIT_S, self._options.startup_timeout_s)
        self._order(_Order("load", inputs, size, limit_s))

    async def _read_samples(self) -> list[list[Part]]:
        return await asyncio.to_thread(read_samples, self._options.inputs_to_try, self._folder)

    # ------------------------------------------------------------------------------------------- on demand

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for a check."""
        return any(order.outcome is not None for order in self._orders)

    async def check(self, given: Sequence[list[Part]] = ()) -> dict[str, Any]:
        """Check these inputs, or the model's own samples, and return the outcome as describe shows it.

        The outcome is the certificate's new state. Raises BadInput without inputs and samples, NoWorker, Draining,
        WorkerDied.
        """
        options = self._options
        if not can_lend(options):
            raise BadInput("Batches of this model cannot be checked: it has sequences, steps, or calls side by side.")
        self._refuse_without_workers()
        inputs = list(given) or await self._read_samples()
        if not inputs:
            raise BadInput(
                "There is nothing to check with: send samples, or name some as `samples` in the model's configuration."
            )
        size = options.batch_size if options.batch_size > 1 else SIZE_ON_DEMAND
        outcome: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        checked = await self._carry_out(_Order("demand", inputs, size, CHECK_LIMIT_S, outcome=outcome), outcome)
        return {"certificate": self.certificate.state, **report_of(checked)}

    async def compare(
        self, pairs: Sequence[tuple[Answer, Answer]], how: Tolerance | Literal["handler", "scores"]
    ) -> Checked:
        """Have a worker compare pairs of answers, the primary's and the shadow's; at most `MOST_PAIRS`.

        Within a tolerance, by the handler's own `compare`, or by the best class of their scores. Each pair that
        differs, or could not be compared, is among the differences, its index as the item. Raises NoWorker, Draining,
        WorkerDied.
        """
        self._refuse_without_workers()
        results = [Result(answer.status, answer.reason, answer.headers) for pair in pairs for answer in pair]
        bodies: list[Body] = [answer.body for pair in pairs for answer in pair]
        outcome: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        order = _Order("answers", [], 1, CHECK_LIMIT_S, wanted=(results, bodies), outcome=outcome, how=how)
        return await self._carry_out(order, outcome)

    async def replay(self, requests: Sequence[Request]) -> Replayed:
        """Have a worker run these requests again as one batch. Raises CannotReplay, NoWorker, Draining."""
        options = self._options
        if not can_lend(options):
            raise CannotReplay(
                f"{self._name} has sequences, steps, or calls side by side; its requests cannot be run again by "
                "themselves. Name another version."
            )
        self._refuse_without_workers()
        outcome: asyncio.Future[Replayed] = asyncio.get_running_loop().create_future()
        order = _Order("replay", [], 1, CHECK_LIMIT_S, replay=Replay(requests, outcome), outcome=outcome)
        return await self._carry_out(order, outcome)

    def _refuse_without_workers(self) -> None:
        if self._dispatcher.is_draining or self._is_stopped:
            raise Draining
        if not self._has_slots() or self._dispatcher.living_slots <= 0:
            raise NoWorker(self._options.model)

    async def _carry_out(self, order: _Order, outcome: asyncio.Future[T]) -> T:
        self._order(order)
        try:
            async with asyncio.timeout(self._options.startup_timeout_s + CHECK_LIMIT_S):
                return await outcome
        except TimeoutError:  # workers have not loaded the model, or earlier checks take long
            raise NoWorker(self._options.model) from None
        finally:
            with contextlib.suppress(ValueError):  # not in the line any more: it was begun
                self._orders.remove(order)

    # ------------------------------------------------------------------------------------------- in service

    def note(self, flight: Flight, message: Results, bodies: Sequence[Body]) -> None:
        """A batch was answered: perhaps have it run again, item by item. Called after its clients got their answers."""
        self.allowance.earn(message.handler_s)
        if len(flight.jobs) < 2 or self._draw() >= self._options.batch_check_sample:
            return
        if self._orders or self._out or self._is_stopped or not self._dispatcher.has_spare_lane:
            return
        kept = [
            index
            for index, (job, result) in enumerate(zip(flight.jobs, message.results, strict=True))
            if result.error not in ("expired", "cancelled")
            and not job.has_sent_pieces
            and not (job.request.is_describe or job.request.shares_memory)
        ]
        # An item alone takes no longer than its whole batch did; once some were run again, their mean time is known.
        expected_s = len(kept) * (self._item_s or message.handler_s)
        if not kept or not self.allowance.affords(expected_s):
            return
        requests = [flight.jobs[index].request for index in kept]
        self._order(
            _Order(
                "service",
                [request.parts for request in requests],
                1,
                self.allowance.left_s,
                requests,
                ([message.results[index] for index in kept], [bodies[index] for index in kept]),
            )
        )

    # ------------------------------------------------------------------------------------------- the pool's news

    def _lent(self, key: str, flight: Flight) -> None:
        """Send the oldest order to a lent worker."""
        order = self._orders.popleft() if self._orders else _Order("service", [], 1, 0.0)
        self._out = (key, flight.number, order)
        if order.replay is not None:
            self.replays_on = key
            self._send(key, *order.replay.begin(key, flight))
            return
        items: list[Item] = []
        bodies: list[Body] = []
        for index, parts in enumerate(order.inputs):
            request = order.requests[index] if order.requests is not None else Request(f"sample-{index}", parts)
            named = [(part.name, part.content_type) for part in parts]
            items.append(Item(request.id, named, pack_head(request.headers, request.server_headers), None))
            bodies.extend(part.body for part in parts)
        wanted = None
        if order.wanted is not None:
            wanted = order.wanted[0]
            bodies.extend(order.wanted[1])
        tolerance = order.how if isinstance(order.how, Tolerance) else self._options.batch_tolerance
        how: Literal["tolerance", "handler", "scores"] | None = None
        if order.kind == "answers":
            how = "tolerance" if isinstance(order.how, Tolerance) else order.how
        self._send(key, Check(flight.number, items, order.size, tolerance, order.limit_s, wanted, how), bodies)

    def on_checked(self, key: str, checked: Checked) -> None:
        """A worker has ended its check. Raises BadFrame if it had none of this number."""
        out, self._out = self._out, None
        if out is not None and out[:2] == (key, checked.number):
            self._take(out[2], checked)
        self._dispatcher.end_loan(key, checked.number, time.monotonic())
        self._next()
        self.start()  # the batch size may have grown meanwhile

    def on_replayed(self, key: str, message: Results | Raised, bodies: Sequence[Body], now: float) -> None:
        """The worker `replays_on` has ended its batch. Raises BadFrame if it is not that one."""
        order = self._replay_of(key, message.number)
        if isinstance(message, Raised):
            order.fail(message, now)
        else:
            order.land(message, bodies, now)
        self._out, self.replays_on = None, ""
        self._dispatcher.end_loan(key, message.number, now)
        self._next()

    def on_piece(self, key: str, message: Piece) -> None:
        """The worker `replays_on` has sent a piece of a stream. Raises BadFrame if it is not one of its batch."""
        self._replay_of(key, message.number).streamed(len(message.results))

    def request_of(self, key: str, message: Called) -> Request:
        """For which request the worker `replays_on` calls another model. Raises BadFrame if it has no such one."""
        requests = self._replay_of(key, message.number).requests
        if message.index >= len(requests):
            raise BadFrame(f"it calls a model for item {message.index} of a batch of {len(requests)}")
        return requests[message.index]

    def _replay_of(self, key: str, number: int) -> Replay:
        out = self._out
        if out is None or out[:2] != (key, number) or out[2].replay is None:
            raise BadFrame(f"worker {key} speaks of batch {number}, which it was not running")
        return out[2].replay

    def lost(self, key: str, cause: str) -> None:
        """A worker has ended, and the check that it may have run with it."""
        if self._out is None or self._out[0] != key:
            return
        order, self._out = self._out[2], None
        self.replays_on = ""
        if order.replay is not None:
            order.replay.lose(cause, time.monotonic())
        elif order.outcome is not None and not order.outcome.done():
            order.outcome.set_exception(WorkerDied(cause))
        elif order.kind == "load" and not self._is_stopped:
            if self.certificate.lose(cause):
                self._orders.appendleft(order)
            else:
                self._tell_failure()
        self._next()

    def reconfigure(self, options: PoolOptions) -> None:
        """Form batches by other options from now on; what they ask for is checked first."""
        self._options = options
        self.apply()
        self.start()

    def apply(self) -> None:
        """Have batches formed as the options say and the certificate allows."""
        options, dispatcher = self._options, self._dispatcher
        size = self.certificate.batch_limit(options.batch_size)
        present = dispatcher.options
        if (present.batch_size, present.max_batch_delay_s) != (size, options.max_batch_delay_s):
            dispatcher.reconfigure(batch_size=size, max_batch_delay_s=options.max_batch_delay_s, now=time.monotonic())

    async def stop(self) -> None:
        """Make no more checks. Callers that wait for one get Draining."""
        self._is_stopped = True
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        self._dispatcher.want_no_lane()
        orders = [*self._orders, *([self._out[2]] if self._out else [])]
        self._orders.clear()
        for order in orders:
            if order.outcome is not None and not order.outcome.done():
                order.outcome.set_exception(Draining())

    def describe(self, warm_ups: Sequence[float] = ()) -> dict[str, Any]:
        """What describe says under `batching`; `warm_ups` are the times of the workers' warm-ups in seconds."""
        described = self.certificate.describe(self._options.batch_size)
        if self._orders or self._out or self._reading:
            described["isChecking"] = True
        if warm_ups:
            described["warmUpSeconds"] = [round(seconds, 6) for seconds in warm_ups]
        if self.samples_batches:
            described["inService"] = self.in_service.describe()
        return described

    # ------------------------------------------------------------------------------------------- inside

    def _order(self, order: _Order) -> None:
        self._orders.append(order)
        self._next()

    def _next(self) -> None:
        if self._orders and self._out is None and not self._is_stopped:
            self._dispatcher.want_lane(self._lent, time.monotonic())

    def _take(self, order: _Order, checked: Checked) -> None:
        metrics = self._metrics
        if order.kind == "answers":
            _give(order, checked)
            return
        if order.kind == "service":
            if not order.inputs:
                return
            self.allowance.spend(checked.seconds)
            if checked.calls:
                seconds = checked.seconds / checked.calls
                self._item_s = seconds if not self._item_s else 0.8 * self._item_s + 0.2 * seconds
            metrics.batch_rechecks += 1
            metrics.recheck_seconds += checked.seconds
            if self.in_service.take(checked):
                metrics.batch_differences += 1
                log.warning("%s: a batch was not answered as its items alone: %s", self._name, sentence_of(checked))
            return
        has_passed = self.certificate.take(checked, order.size, time.time())
        metrics.batch_checks["passed" if has_passed else "failed"] += 1
        if has_passed:
            log.info("%s: batches are answered as single requests (%d compared)", self._name, checked.compared)
        else:
            self._tell_failure()
        self.apply()
        _give(order, checked)

    def _tell_failure(self) -> None:
        options = self._options
        limit = self.certificate.batch_limit(options.batch_size)
        what = "requests run one by one" if limit == 1 and options.batch_size > 1 else "batches are formed all the same"
        log.warning("%s: %s; %s", self._name, self.certificate.reason, what)
        self.apply()

    @property
    def _name(self) -> str:
        return f"{self._options.model} {self._options.version}"


def _give(order: _Order, checked: Checked) -> None:
    """Tell the caller that waits for a check, if there is one."""
    if order.outcome is not None and not order.outcome.done():
        cast("asyncio.Future[Checked]", order.outcome).set_result(checked)


def can_lend(options: PoolOptions) -> bool:
    """Whether workers of this version can be lent for a check: they run one batch after the other."""
    return options.sequences is None and not options.continuous_batching and not options.is_concurrent


def read_samples(samples: Sequence[Sample], folder: Path) -> list[list[Part]]:
    """The inputs that the samples stand for, one part `body` each; files are read from `folder`. Blocks.

    Raises BadInput for a file that is not there, or lies outside of the folder, and for too many bytes.
    """
    inputs: list[list[Part]] = []
    total = 0
    root = folder.resolve()
    for sample in samples:
        body = sample.body
        if sample.file:
            path = (folder / sample.file).resolve()
            if not path.is_relative_to(root):
                raise BadInput(f"The sample {sample.file!r} lies outside of the archive.")
            try:
                total += path.stat().st_size
                body = path.read_bytes() if total <= MOST_SAMPLE_BYTES else b""
            except OSError as error:
                raise BadInput(f"The sample {sample.file!r} of the archive cannot be read: {error.strerror}.") from None
        else:
            total += len(body)
        if total > MOST_SAMPLE_BYTES:
            raise BadInput(f"The samples have more than {MOST_SAMPLE_BYTES} bytes together.")
        inputs.append([Part("body", body, sample.content_type)])
    return inputs
