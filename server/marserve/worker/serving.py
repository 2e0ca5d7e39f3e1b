"""A loaded model that is served: calls the author's code with a batch, and sends the results to the server.

Exceptions of the author's code end here: they are reported as data, never pickled. Knows the handler and the page that
it shares with the server; the loop reads the messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from marserve.errors import Thrown
from marserve.messages import (
    MAX_WARNINGS,
    AskHealth,
    AskLengths,
    Batch,
    Batches,
    Check,
    DeviceLost,
    DevicePeak,
    EndProfile,
    Health,
    Item,
    Loaded,
    Metrics,
    NotLoaded,
    Piece,
    Profile,
    Profiled,
    Raised,
    Result,
    Results,
    Span,
    Warned,
    Work,
)
from marserve.option_values import Sample
from marserve.shared_page import Page
from marserve.worker.asked.health import HealthCall
from marserve.worker.asked.lengths import FAILED, read_lengths
from marserve.worker.calls import Calls
from marserve.worker.connection import Connection
from marserve.worker.continuous_batching import begin_step, say_what_follows
from marserve.worker.device.device_loss import find_loss
from marserve.worker.device.device_memory import give_back, taken_bytes
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import (
    MAX_MESSAGE,
    build_of,
    checkpoint_of,
    cut,
    encode_value,
    engine_of,
    has_run_out,
    loss_told_by,
    metrics_of,
    misfit,
    raised,
    said_of_load,
    say,
    shown,
    thrown_by,
    thrown_of,
    warnings_since,
)
from marserve.worker.process.hindrances import Held, hindrances
from marserve.worker.process.own_process import leave
from marserve.worker.process.printed_lines import running
from marserve.worker.rank import Leader
from marserve.worker.rows import DistinctIds, InvalidJson, begin_unwatched, decode_value
from marserve_handlers.calling import ModelAnswer
from marserve_handlers.context import Context
from marserve_handlers.declared.answer import FailedEvent
from marserve_handlers.declared.open_inference.marking import has_raw_tensors
from marserve_handlers.errors import (
    BAD_HEADER,
    BAD_INPUT,
    CANCELLED,
    EXPIRED,
    HANDLER,
    MEMORY,
    TOO_LARGE,
    BadResponse,
    NobodyWaits,
)
from marserve_handlers.metrics import MetricsCache
from marserve_handlers.support.line_owner import about

if TYPE_CHECKING:
    from marserve.worker.profile import Measured
    from marserve_handlers.flops.watch import Watch

HAS_EXPIRED = Result(504, "", [], EXPIRED)
WAS_CANCELLED = Result(499, "", [], CANCELLED)
UNTOUCHED = Result(200, "", [])
UNTOUCHED_JSON = Result(200, "", [("content-type", "application/json")])

# With continuous batching a request comes again with each step: how many clients' ids are distinguished at a time.
MAX_KEPT_IDS = 4096

log = logging.getLogger("marserve.worker")


class ServedModel:
    """A model in service. With a `leader` the other ranks of a group make the calls that are made here."""

    def __init__(self, connection: Connection, page: Page, model: LoadedModel, leader: Leader | None = None) -> None:
        self._connection = connection
        self._page = page
        self._model = model
        self._leader = leader
        self._number = 0
        self.failed: list[str] = []
        """For each failed item of the running batch: the runtime's words on a lost device; empty for other errors."""
        self._most_rows = 0
        self._taken_bytes = 0
        self.distinct_ids = DistinctIds(most_kept=MAX_KEPT_IDS if model.load.is_continuous else 0)
        self.calls = Calls(connection, model.load.max_answer_bytes, reads=not model.load.is_concurrent)
        self._outcome: list[Result | None] | None = None  # while a batch of requests runs
        if not model.load.is_concurrent:
            model.context.begin_call = self._begin_call
            model.context.send_call = self._send_call
        self._health = HealthCall(model)
        self._measured: Measured | None = None  # while a profile is made
        self.flops_watch: Watch | None = None
        """What has the model's operations counted; a profile holds it, so that it shows the batches alone."""
        self._sent_warnings = MAX_WARNINGS  # until `Loaded` is sent no warnings are sent by themselves

    # ------------------------------------------------------------------------------------------- at the start

    def warm_up(self, model: LoadedModel, samples: Sequence[Sample]) -> tuple[float, list[str], str]:
        """Run the samples as `checks.warm_up` does, with `model`. Ends the process if the device is lost meanwhile."""
        from marserve.worker.checks import warm_up  # here for a quicker start: most models have no samples

        outcome = warm_up(self._watched(model), samples, self._share)
        loss = self.find_loss()
        if loss:
            self._connection.send(NotLoaded("device_lost", f"{loss}, by a warm-up input", ""))
            leave(1)
        return outcome

    def say_loaded(self, seconds: float, warm_up_s: float, problems: list[str], failure: str) -> None:
        """Tell the server that batches may come, how long the load took, and its warnings for describe."""
        self.send_metrics()
        warnings, computes_on = said_of_load(self._model.context)
        self._sent_warnings = len(warnings)
        self._taken_bytes = taken_bytes()
        has_length_of = self._model.length_of is not None
        warnings = problems + warnings
        self._connection.send(
            Loaded(
                seconds,
                warnings,
                warm_up_s,
                has_length_of,
                self._taken_bytes,
                computes_on,
                failure,
                self._model.declaration,
                self._model.health is not None,
                self._model.overlap is not None,
                *engine_of(self._model.context),
                *build_of(self._model.context),
                checkpoint_of(self._model.context),
            )
        )

    # ------------------------------------------------------------------------------------------- a batch

    def serve_batches(self, together: Batches, bodies: list[bytearray]) -> None:
        """Handle the batches of one frame, each as if it had come alone."""
        at = 0
        for batch in together.batches:
            end = at + sum(len(item.parts) for item in batch.items)
            self.serve_batch(batch, bodies[at:end])
            at = end

    def serve_batch(self, batch: Batch, bodies: list[bytearray]) -> None:
        """Handle one batch and answer it: one result an item, in order, or one message that the handler raised."""
        running.items = batch.items
        try:
            self._serve_batch(batch, bodies)
        finally:
            running.items = ()

    def _serve_batch(self, batch: Batch, bodies: list[bytearray]) -> None:
        began = time.monotonic()
        hindrances.begin()
        held = hindrances.before(began)
        items = self.distinct_ids.of(batch.items)
        if items is not batch.items:
            batch = Batch(batch.number, items)
        number = self._number = batch.number
        self._page.begin(number, began)
        live, rows, outcome = self.take_in(batch, bodies, began)
        if not rows:
            self._page.finish()
            self._connection.send(
                Results(number, 0.0, [result or HAS_EXPIRED for result in outcome]), [b""] * len(outcome)
            )
            return
        if self._leader is not None:
            self._leader.share(batch.items, bodies, once=True)
        context = self._model.context
        is_continuous = self._model.load.is_continuous
        if is_continuous:
            begin_step(context, live)
        else:
            context.begin_batch(live)
        context.send_pieces = lambda pieces: self._send_piece(pieces, outcome)
        context.ask_cancelled = lambda index: self._is_cancelled(index, outcome)
        answered: Sequence[Any] | None = None
        self._outcome = outcome
        failure: Raised | None = None
        handler_began = time.monotonic()
        try:
            answered = self._model.handle(rows, context)
            if not is_continuous:
                context.end_stream()
        except SystemExit:
            raise
        except BaseException as error:  # a cancelled coroutine's and an author's own, too: all are the handler's
            self.failed.append(loss_told_by(error))
            failure = raised(number, time.monotonic() - handler_began, error)
        handler_s = time.monotonic() - handler_began
        self._outcome = None
        if failure is None and (type(answered) is not list or len(answered) != len(rows)):
            failure = misfit(number, handler_s, answered, len(rows))
        if failure is None and is_continuous:
            failure = self._end_step(number, handler_s, answered)
        if failure is not None:
            self.end_if_lost(number, failure)
            recover(failure)
            self._page.finish()
            self.send_metrics()
            work = self.work_of(context, began, handler_began, handler_s, held)
            self._connection.send(msgspec.structs.replace(failure, work=work))
            return
        assert answered is not None
        results, out = self.encode(answered, outcome, context)
        if self.failed:
            self.end_if_lost(number)
        self._page.finish()
        self.send_metrics()
        work = self.work_of(context, began, handler_began, handler_s, held)
        self.send_results(Results(number, handler_s, results, work), out)
        if len(rows) > self._most_rows:
            self.note_peak(len(rows))

    def work_of(self, context: Context, began: float, handler_began: float, handler_s: float, held: Held) -> Work:
        """How the time of a batch was spent that began with these sums of what holds a worker up."""
        now = time.monotonic()
        collected_s, waited_s, printed_s = hindrances.after(now, now - began)
        spans = [Span(name, max(0.0, at - began), seconds) for name, at, seconds in context.spans]
        return Work(
            0.0 if self._page.clock_ahead_s else began,
            handler_began - began,
            max(0.0, now - handler_began - handler_s),
            max(0.0, collected_s - held.collected_s),
            max(0.0, waited_s - held.waited_s),
            max(0.0, printed_s - held.printed_s),
            spans,
        )

    async def _send_call(self, place: int, *what: Any) -> ModelAnswer:
        """Call another model on behalf of live item `place` of the running batch."""
        if self._outcome is None or self._leader is not None:
            raise RuntimeError("other models are called while a request is answered, and by workers of one process")
        positions = [position for position, result in enumerate(self._outcome) if result is None]
        return await self.calls.call(self._number, positions[place], *what)

    def _begin_call(self) -> None:
        """A handler that cuts its batch into several calls begins the next one: the response limit begins anew."""
        self._page.begin(self._number, time.monotonic())

    def note_peak(self, rows: int) -> None:
        """If more rows than ever were answered together, report a new peak of the device's memory to the server."""
        if rows <= self._most_rows:
            return
        self._most_rows = rows
        if self._model.load.gpu_id is None:
            return
        taken = taken_bytes()
        if taken > self._taken_bytes:
            self._taken_bytes = taken
            self._connection.send(DevicePeak(taken))

    def find_loss(self, *, wait: bool = True) -> str:
        """A sentence if something failed since the last call and the device is lost; else empty."""
        if not self.failed:
            return ""
        words, self.failed = self.failed, []
        loss = find_loss(words, self._model.load.gpu_id, wait=wait)
        if not loss and self._leader is not None:
            self._leader.ask_devices(wait=wait)
        return loss

    def end_if_lost(self, number: int, failure: Raised | None = None, *, wait: bool = True) -> None:
        """If the device is lost after an error of batch `number`, report that to the server, and end.

        The batch is not answered: the server has each of its items run once more by another worker, alone.
        """
        if failure is not None and not self.failed:
            self.failed.append("")
        loss = self.find_loss(wait=wait)
        if loss:
            log.error("%s", loss)
            self._connection.send(DeviceLost(number, loss, "" if failure is None else failure.traceback))
            leave(1)

    def _watched(self, model: LoadedModel) -> LoadedModel:
        """The same model, but each failed call is noted in `failed`: for calls whose errors the caller handles."""

        def call(rows: list[dict[str, Any]], context: Context) -> Any:
            try:
                return model.handle(rows, context)
            except BaseException as error:
                self.failed.append(loss_told_by(error))
                raise

        return model.calling(call)

    def send_results(self, message: Results, bodies: Sequence[bytes]) -> None:
        """Answer a batch; as one that raised, if its headers are more than the wire carries."""
        try:
            self._connection.send(message, bodies)
        except (ValueError, TypeError, OverflowError) as error:  # nothing was written yet
            self._connection.send(raised(message.number, message.handler_s, error))

    def _end_step(self, number: int, handler_s: float, answered: Any) -> Raised | None:
        """Set for each answer whether more follows. Returns the failure if the author's code raises, else None."""
        try:
            say_what_follows(self._model.context, answered)
        except SystemExit:
            raise
        except BaseException as error:
            return raised(number, handler_s, error)
        return None

    def take_in(
        self, batch: Batch, bodies: list[bytearray], now: float
    ) -> tuple[list[Item], list[dict[str, Any]], list[Result | None]]:
        """The live items, their rows, and for every item of the batch None, or the result with which it has ended."""
        has_cancels = self._page.has_cancels(batch.number)
        ahead_s = self._page.clock_ahead_s
        decode_input, refuses_bad_json = self._model.load.decode_input, self._model.load.refuses_bad_json
        outcome: list[Result | None] = []
        live: list[Item] = []
        rows: list[dict[str, Any]] = []
        at = 0
        for index, item in enumerate(batch.items):
            end = at + len(item.parts)
            if ahead_s and item.deadline is not None:
                item = msgspec.structs.replace(item, deadline=item.deadline - ahead_s)
            if item.deadline is not None and item.deadline <= now:
                outcome.append(HAS_EXPIRED)
            elif has_cancels and self._page.is_cancelled(batch.number, index):
                outcome.append(WAS_CANCELLED)
            else:
                row: dict[str, Any] = {}
                refusal: Result | None = None
                for (name, content_type), body in zip(item.parts, bodies[at:end], strict=True):
                    if not (content_type and decode_input) or has_raw_tensors(item):
                        row[name] = body
                        continue
                    try:
                        row[name] = decode_value(body, content_type, name=name, refuses_bad_json=refuses_bad_json)
                    except InvalidJson as error:
                        # Not the error, whose traceback has this frame: the cycle would keep the batch's bodies.
                        refusal = Result(error.error_code, cut(error.message, MAX_MESSAGE), [], BAD_INPUT)
                        break
                if refusal is None:
                    outcome.append(None)
                    live.append(item)
                    rows.append(row)
                else:
                    outcome.append(refusal)
            at = end
        return live, rows, outcome

    def encode(
        self, answers: Sequence[Any], outcome: list[Result | None], context: Context
    ) -> tuple[list[Result], list[bytes]]:
        """One result and one body for each item of the batch; an element that cannot be written fails alone."""
        response_of = context.response_of
        most = self._model.load.max_answer_bytes
        results: list[Result] = []
        bodies: list[bytes] = []
        index = 0
        for ended in outcome:
            if ended is not None:
                results.append(ended)
                bodies.append(b"")
                continue
            answer = answers[index]
            is_json = False
            body: bytes = b""
            thrown: Thrown | None = None
            response: tuple[int, str, list[tuple[str, str]]] | None = None
            try:
                response = response_of(index)
                if type(answer) is bytes:
                    body = answer
                elif isinstance(answer, BaseException):
                    self.failed.append(loss_told_by(answer))
                    with about(context.batch_items[index : index + 1]):
                        results.append(_failed_alone(answer, context.get_request_id(index)))
                    bodies.append(b"")
                    index += 1
                    continue
                else:
                    body, is_json = encode_value(answer)
                    if isinstance(answer, FailedEvent):
                        self.failed.append(loss_told_by(answer.error))
                        thrown = thrown_by(answer.error)
            except BadResponse as error:
                with about(context.batch_items[index : index + 1]):
                    log.error("the answer to request %s cannot be sent: %s", context.get_request_id(index), error)
                results.append(Result(503, str(error), [], BAD_HEADER, thrown_by(error)))
            except SystemExit:
                raise
            except BaseException as error:  # the author's own objects are written as text: anything may be raised
                with about(context.batch_items[index : index + 1]):
                    say(
                        logging.ERROR,
                        "the answer to request %s, of type %s, cannot be written: %s",
                        context.get_request_id(index),
                        type(answer).__name__,
                        shown(error),
                    )
                self.failed.append(loss_told_by(error))
                if has_run_out(error):
                    results.append(Result(507, "Out of resources", [], MEMORY))
                else:
                    said = "Unsupported model output data type."
                    results.append(Result(503, said, [], HANDLER, thrown_by(error)))
            else:
                if len(body) > most:
                    text = f"The answer has {len(body)} bytes, more than max_response_size, {most}."
                    results.append(Result(503, text, [], TOO_LARGE))
                    body = b""
                elif response is None and thrown is not None:
                    results.append(Result(200, "", [], None, thrown))
                elif response is None:
                    results.append(UNTOUCHED_JSON if is_json else UNTOUCHED)
                else:
                    status, reason, headers = response
                    if is_json and not any(name.lower() == "content-type" for name, _ in headers):
                        headers = [*headers, ("content-type", "application/json")]
                    results.append(Result(status, reason, headers, None, thrown))
            bodies.append(body)
            index += 1
        return results, bodies

    def _send_piece(self, pieces: Sequence[Any], outcome: list[Result | None]) -> None:
        """Send one piece of a stream for each live item, while the handler runs."""
        wanted = sum(result is None for result in outcome)
        if not isinstance(pieces, list) or len(pieces) != wanted:
            raise ValueError(f"an intermediate answer needs a list of {wanted} pieces, one for each row")
        may_break_off = self._leader is None or self._leader.may_break_off
        if (
            may_break_off
            and self._page.has_cancels(self._number)
            and all(self._is_cancelled(row, outcome) for row in range(wanted))
        ):
            raise NobodyWaits
        results, bodies = self.encode(pieces, outcome, self._model.context)
        self._connection.send(Piece(self._number, results), bodies)

    def _is_cancelled(self, index: int, outcome: list[Result | None]) -> bool:
        """Whether the client of live item `index` has gone."""
        if not self._page.has_cancels(self._number):
            return False
        positions = [position for position, result in enumerate(outcome) if result is None]
        return self._page.is_cancelled(self._number, positions[index])

    def send_metrics(self) -> None:
        """Send the handler's new measurements, and its new warnings for describe."""
        warnings = warnings_since(self._model.context, self._sent_warnings)
        if warnings:
            self._sent_warnings += len(warnings)
            self._connection.send(Warned(warnings))
        metrics = self._take_metrics()
        if metrics.values or metrics.dropped:
            self._connection.send(metrics)

    def _take_metrics(self) -> Metrics:
        """The handler's measurements since the last call."""
        metrics = self._model.context.metrics
        try:
            drain = getattr(metrics, "drain", None)  # the author may have put another object there
            values, dropped = metrics_of(drain()) if drain is not None else ([], 0)
            if isinstance(metrics, MetricsCache):
                dropped, metrics.dropped = dropped + int(metrics.dropped), 0
        except SystemExit:
            raise
        except BaseException as error:
            say(logging.ERROR, "what the handler measured cannot be read", error=error)
            values, dropped = [], 0
        return Metrics(values, max(0, dropped))

    # ------------------------------------------------------------------------------------------- a check

    def serve_check(self, check: Check, bodies: list[bytearray]) -> None:
        """Run a check and answer it. On the page each call of the handler is a batch of this number."""
        from marserve.worker.checks import run_check  # here for a quicker start: most workers never check

        model = self._model

        def answer_alone(item: Item, row: dict[str, Any]) -> tuple[Result, bytes]:
            begin_unwatched(model.context, [item])
            try:
                answered = model.handle([row], model.context)
                model.context.end_stream()
            except SystemExit:
                raise
            except BaseException as error:
                self.failed.append(loss_told_by(error))
                failure = raised(check.number, 0.0, error)
                recover(failure)
                return Result(failure.code, failure.message, [], failure.kind), b""
            if type(answered) is not list or len(answered) != 1:
                return Result(503, "number of batch response mismatched", [], HANDLER), b""
            results, out = self.encode(answered, [None], model.context)
            return results[0], out[0]

        self._page.begin(check.number, time.monotonic())
        self._share(check.items, bodies[: sum(len(item.parts) for item in check.items)])
        checked = run_check(
            self._watched(model), check, bodies, lambda: self._page.begin(check.number, time.monotonic()), answer_alone
        )
        self.end_if_lost(check.number)
        self._page.finish()
        self._take_metrics()  # dropped: measurements of a check belong to no request
        self._connection.send(checked)

    # ------------------------------------------------------------------------------------------- a profile

    def begin_profile(self, order: Profile) -> None:
        """Measure the batches from now on. A profile that is still under way is dropped."""
        from marserve.worker.profile import Measured  # here for a quicker start: most workers are never profiled

        self.end_profile(EndProfile(0, drop=True))
        if self.flops_watch is not None:
            self.flops_watch.hold()
        if self._leader is not None:
            self._leader.begin_profile(order)
        measured = self._measured = Measured(order, self._model)
        self._model = measured.model

        def serve_batch(batch: Batch, bodies: list[bytearray]) -> None:
            running.items = batch.items
            try:
                self._serve_measured(measured, batch, bodies)
            finally:
                running.items = ()

        self.__dict__["serve_batch"] = serve_batch  # in place of the method: without a profile nothing is looked at

    def end_profile(self, end: EndProfile) -> None:
        """End the profile and send what was measured, or drop it. Does nothing for one that has ended by itself."""
        measured = self._measured
        if measured is None or (end.number and end.number != measured.number):
            return
        if not end.drop:
            self._send_profile(measured)
            return
        self._stop_measuring(measured)
        measured.operators.drop()
        if self._leader is not None and measured.others is None:
            self._leader.end_profile(end)

    def _serve_measured(self, measured: Measured, batch: Batch, bodies: list[bytearray]) -> None:
        """Serve a batch and measure it; if the profile, or this rank's recording, is complete, end it for all ranks."""
        measured.run(batch, lambda: self._serve_batch(batch, bodies))
        if measured.is_complete:
            self._send_profile(measured)
        elif not measured.operators.is_recording:
            began = time.monotonic()
            self._end_others(measured)
            measured.own_s += time.monotonic() - began

    def _end_others(self, measured: Measured) -> None:
        """Have the other ranks end their recording, which has no bound of its own, once."""
        if self._leader is not None and measured.others is None:
            measured.others = self._leader.end_profile(EndProfile(measured.number))

    def _send_profile(self, measured: Measured) -> None:
        from marserve.worker.profile import threads  # as above

        ended = time.monotonic()
        self._stop_measuring(measured)
        operators = measured.operators
        operators.finish()
        traces = [(0, trace) for trace in operators.traces]
        self._end_others(measured)
        others, remarks = measured.others or ([], [])
        traces += others
        traces, too_large = measured.fitting(traces)
        if too_large:
            remarks.insert(0, too_large)
        self._connection.send(
            Profiled(
                measured.number,
                measured.began,
                ended,
                measured.batches,
                [rank for rank, _ in traces],
                operators.recorded,
                threading.get_native_id(),
                threads(),
                measured.knows_waiting,
                measured.own_s,
                operators.why_none,
                remarks[:MAX_WARNINGS],
            ),
            [trace for _, trace in traces],
        )

    def _stop_measuring(self, measured: Measured) -> None:
        measured.close()
        self._measured = None
        del self.__dict__["serve_batch"]
        self._model = self._model.calling(measured.inner)
        if self.flops_watch is not None:
            self.flops_watch.release()

    # ------------------------------------------------------------------------------------------- health

    def serve_health(self, ask: AskHealth) -> None:
        """Ask the handler whether the worker is well. If nothing else is sent meanwhile, the page shows a batch."""
        if ask.number:
            self._page.begin(ask.number, time.monotonic())
        self._answer_health(self._health.ask(ask))

    async def serve_health_beside(self, ask: AskHealth) -> None:
        """The same while batches run."""
        if ask.number:
            self._page.begin(ask.number, time.monotonic())
        self._answer_health(await self._health.ask_beside(ask))

    def _answer_health(self, health: Health) -> None:
        words = self._health.loss_words
        if words is not None:
            self.failed.append(words)
            self.end_if_lost(0, wait=not self._model.load.is_concurrent)
        if health.number:
            self._page.finish()
        self.send_metrics()
        self._connection.send(health)

    # ------------------------------------------------------------------------------------------- lengths

    def serve_lengths(self, ask: AskLengths, bodies: list[bytearray]) -> None:
        """Ask the handler how long these items are. On the page the batch after the question is not begun yet."""
        lengths = read_lengths(self._model, ask, bodies)
        if FAILED in lengths.lengths:
            self.failed.append("")
            self.end_if_lost(0)
        self._connection.send(lengths)

    def _share(self, items: Sequence[Item], bodies: Sequence[bytearray]) -> None:
        if self._leader is not None:
            self._leader.share(items, bodies, once=False)


def recover(failure: Raised) -> None:
    """If memory ran out, free what the batch left, so that the next batch has as much as before."""
    if failure.kind == MEMORY:
        give_back()


def _failed_alone(error: BaseException, request_id: object) -> Result:
    """The result for an exception that a handler returned in the place of one item's answer.

    It is logged, without a traceback if it is meant for the client, as the server logs one that is raised.
    """
    failure = raised(0, 0.0, error)
    thrown = thrown_of(failure)
    if thrown is None:
        say(logging.INFO, "Request %s: %s", request_id, failure.message)
    else:
        say(logging.ERROR, "Request %s: %s\n%s", request_id, failure.message, failure.traceback.rstrip())
    return Result(failure.code, failure.message, [], failure.kind, thrown)
