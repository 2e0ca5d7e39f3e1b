"""The worker's end: read a batch, hand it to the author's code, write the answers. One thread, blocking.

Knows the wire, the page it shares with the server, and the handler; no settings, no store, no HTTP. What the author's
code raises ends here: it is reported as data, never pickled, and the loop goes on. The end of the connection is the
end of the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from marserve import wire
from marserve.allocator import BY_WORKER, keep_large_blocks
from marserve.messages import (
    MAX_WARNINGS,
    AskLengths,
    Batch,
    Batches,
    Check,
    DeviceLost,
    DevicePeak,
    Hello,
    Item,
    Load,
    Loaded,
    Metrics,
    NotLoaded,
    Piece,
    Raised,
    Rank,
    Result,
    Results,
    Stop,
    ToServer,
    Warned,
)
from marserve.shared_page import Page
from marserve.worker.continuous_batching import begin_step, say_what_follows
from marserve.worker.device.device_loss import find_loss
from marserve.worker.device.device_memory import give_back, taken_bytes
from marserve.worker.device.device_use import check_device_use
from marserve.worker.load import LoadedModel, enter_model_folder, load_model
from marserve.worker.memory_limit import limit_memory
from marserve.worker.outgoing import (
    MAX_MESSAGE,
    cut,
    has_run_out,
    loss_told_by,
    metrics_of,
    name_of,
    said_of_load,
    say,
    shown,
    traceback_of,
    warnings_since,
)
from marserve.worker.rank import LOOK_FOR_ENDS_S, Follower, Leader, Peer, open_store
from marserve_handlers.context import Context
from marserve_handlers.device_errors import is_out_of_memory
from marserve_handlers.errors import (
    BAD_HEADER,
    CANCELLED,
    EXPIRED,
    HANDLER,
    MEMORY,
    TOO_LARGE,
    BadResponse,
    NobodyWaits,
    describe_failure,
)
from marserve_handlers.metrics import MetricsCache

if TYPE_CHECKING:
    from marserve.worker.coroutines import ConcurrentLoop

RECEIVE_BYTES = 256 * 1024
HAS_EXPIRED = Result(504, "", [], EXPIRED)
WAS_CANCELLED = Result(499, "", [], CANCELLED)
UNTOUCHED = Result(200, "", [])
UNTOUCHED_JSON = Result(200, "", [("content-type", "application/json")])

# Marks the level of a log line on its way to the server; see `pool/worker_end/output.py`.
LEVEL_MARK = "\x1e"

log = logging.getLogger("marserve.worker")


class Connection:
    """The worker's blocking end of the socket to the server."""

    def __init__(self, sock: socket) -> None:
        self._sock = sock
        self._decoder = wire.worker_decoder()
        self._sock.setblocking(True)

    def receive(self) -> list[tuple[Any, list[Any]]]:
        """Wait for the next messages. Raises EOFError when the server is gone."""
        while True:
            messages = self.receive_some()
            if messages:
                return messages

    def fileno(self) -> int:
        """The socket's descriptor, to wait until there is something to receive."""
        return self._sock.fileno()

    def receive_some(self) -> list[tuple[Any, list[Any]]]:
        """The messages that are whole once what has come is read. Raises EOFError when the server is gone."""
        data = self._sock.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError
        return self._decoder.feed(data)

    def send(self, message: ToServer, bodies: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Write one message whole."""
        for buffer in wire.encode(message, bodies):
            self._sock.sendall(buffer)


class WorkerLoop:
    """One worker: loads a model unless a template has, then serves batches until told to stop.

    `more` are the descriptors of a rank of a group: rank 0 has the listening socket of the store and one socket to each
    other rank in order, the others have one to rank 0.
    """

    def __init__(
        self, connection: Connection, page: Page, model: LoadedModel | None = None, more: Sequence[int] = ()
    ) -> None:
        self._connection = connection
        self._page = page
        self._model = model
        self._more = more
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._store: object | None = None
        self._number = 0
        self.failed: list[str] = []
        """What runtimes said in the errors of the running batch's failed items; empty for other errors."""
        self._most_rows = 0
        self._taken_bytes = 0
        self._told_warnings = MAX_WARNINGS  # before the model is loaded none

    def run(self) -> NoReturn:
        """Serve until the server says stop or is gone, then end the process."""
        try:
            self._connection.send(Hello(os.getpid(), sys.version.split()[0]))
            if self._model is not None:
                self._ready(0.0)
            while True:
                for message, bodies in self._connection.receive():
                    if type(message) is Batch:
                        self.serve_batch(message, bodies)
                        bodies.clear()  # not kept while the next ones are awaited
                    elif type(message) is Batches:
                        self.serve_batches(message, bodies)
                        bodies.clear()
                    elif type(message) is AskLengths:
                        self.serve_lengths(message, bodies)
                        bodies.clear()
                    elif type(message) is Check:
                        self.serve_check(message, bodies)
                    elif type(message) is Load:
                        self._load(message)
                    elif type(message) is Stop:
                        leave(0)
                    if self._leader is not None:
                        self._leader.settle()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            leave(0)
        except SystemExit as error:  # the author's code asked to end; its status is what the server is told
            leave(exit_status(error))
        except BaseException:  # ours to mend; a thread that the author's code left must not keep the process
            with contextlib.suppress(BaseException):  # it may have left no stream to print to
                traceback.print_exc()
            leave(1)

    def _load(self, load: Load) -> None:
        began = time.monotonic()
        try:
            limit_memory(load.memory_limit_bytes)
            enter_model_folder(load)
            stay_on(load.cpus)
            use_threads(load.threads)
            if load.rank is not None:
                self._join(load.rank)
            self._model = load_model(load)
            check_device_use(self._model)
            if self._leader is not None:
                self._model = self._leader.lead(self._model)
        except SystemExit:
            raise
        except BaseException as error:
            if load.rank is not None:  # if another rank's end is what it complains of, this one is ended meanwhile
                time.sleep(LOOK_FOR_ENDS_S)
            self._connection.send(not_loaded(error))
            leave(1)
        self._ready(time.monotonic() - began)

    def _join(self, place: Rank) -> None:
        """Take this process's place in its group; the other ranks may be looking for the store already."""
        descriptors = list(self._more)
        for descriptor in descriptors:  # what the author's code starts has no business with them
            os.set_inheritable(descriptor, False)
        if place.rank == 0:
            self._store = open_store(place, descriptors.pop(0))
            peers = [Peer(rank, socket(fileno=descriptor)) for rank, descriptor in enumerate(descriptors, 1)]
            self._leader = Leader(place, peers, self._connection, self._page)
        else:
            leader = Peer(0, socket(fileno=descriptors[0]))
            self._follower = Follower(place, leader, self._connection, self._page)

    def _ready(self, seconds: float) -> None:
        assert self._model is not None
        keep_large_blocks(BY_WORKER)  # not before: what loading frees should go back
        warm_up_s = 0.0
        problems: list[str] = []
        concurrent: ConcurrentLoop | None = None
        if self._model.load.is_concurrent:
            from marserve.worker.coroutines import ConcurrentLoop  # here: few models need an event loop

            concurrent = ConcurrentLoop(self, self._connection, self._page, self._model)
        if self._model.load.warm_up and (self._model.load.rank is None or self._model.load.rank.rank == 0):
            from marserve.worker.checks import warm_up  # here: most models have nothing to warm up with

            model = self._model if concurrent is None else concurrent.one_by_one()
            warm_up_s, problems = warm_up(self._watched(model), self._model.load.warm_up, self._share_for_calls)
            loss = self.find_loss()
            if loss:
                self._connection.send(NotLoaded("device_lost", f"{loss}, by a warm-up input", ""))
                leave(1)
        self.send_metrics()
        has_length_of = self._model.length_of is not None
        warnings, computes_on = said_of_load(self._model.context)
        problems += warnings
        self._told_warnings = len(warnings)
        self._taken_bytes = taken_bytes()
        self._connection.send(Loaded(seconds, problems, warm_up_s, has_length_of, self._taken_bytes, computes_on))
        if self._follower is not None:
            self._follower.follow(self._model)
        if concurrent is not None:
            concurrent.serve()

    def _share_for_calls(self, items: Sequence[Item], bodies: Sequence[bytearray]) -> None:
        if self._leader is not None:
            self._leader.share(items, bodies, once=False)

    # ------------------------------------------------------------------------------------------- a check

    def serve_check(self, check: Check, bodies: list[bytearray]) -> None:
        """Run a check and answer it. To whoever watches the page each call of the handler is a batch of this number."""
        from marserve.worker.checks import begin, run_check  # here: most workers are never asked to

        model = self._model
        assert model is not None

        def answer_alone(item: Item, row: dict[str, Any]) -> tuple[Result, bytes]:
            begin(model.context, [item])
            try:
                answered = model.handle([row], model.context)
                model.context.end_stream()
            except SystemExit:
                raise
            except BaseException as error:
                self.failed.append(loss_told_by(error))
                told = raised(check.number, 0.0, error)
                recover(told)
                return Result(told.code, told.message, [], told.kind), b""
            if type(answered) is not list or len(answered) != 1:
                return Result(503, "number of batch response mismatched", [], HANDLER), b""
            results, out = self.encode(answered, [None], model.context)
            return results[0], out[0]

        self._page.begin(check.number, time.monotonic())
        self._share_for_calls(check.items, bodies[: sum(len(item.parts) for item in check.items)])
        checked = run_check(
            self._watched(model), check, bodies, lambda: self._page.begin(check.number, time.monotonic()), answer_alone
        )
        self.end_if_lost(check.number)
        self._page.finish()
        self._take_metrics()  # what a check measured belongs to no request
        self._connection.send(checked)

    # ------------------------------------------------------------------------------------------- lengths

    def serve_lengths(self, ask: AskLengths, bodies: list[bytearray]) -> None:
        """Ask the handler how long these items are. Whoever watches the page sees the batch behind it not begun yet."""
        from marserve.worker.lengths import FAILED, read_lengths  # here: most models are never asked

        assert self._model is not None
        lengths = read_lengths(self._model, ask, bodies)
        if FAILED in lengths.lengths:
            self.failed.append("")
            self.end_if_lost(0)
        self._connection.send(lengths)

    # ------------------------------------------------------------------------------------------- a batch

    def serve_batches(self, together: Batches, bodies: list[bytearray]) -> None:
        """Handle the batches of one frame, each as though it had come alone."""
        at = 0
        for batch in together.batches:
            end = at + sum(len(item.parts) for item in batch.items)
            self.serve_batch(batch, bodies[at:end])
            at = end

    def serve_batch(self, batch: Batch, bodies: list[bytearray]) -> None:
        """Handle one batch and answer it: one result an item, in order, or one message that it raised."""
        assert self._model is not None
        began = time.monotonic()
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
        failure: Raised | None = None
        handler_began = time.monotonic()
        try:
            answered = self._model.handle(rows, context)
            if not is_continuous:
                context.end_stream()
        except SystemExit:
            raise
        except BaseException as error:  # a cancelled coroutine's, an author's own: all of them are the handler's
            self.failed.append(loss_told_by(error))
            failure = raised(number, time.monotonic() - handler_began, error)
        handler_s = time.monotonic() - handler_began
        if failure is None and (type(answered) is not list or len(answered) != len(rows)):
            failure = misfit(number, handler_s, answered, len(rows))
        if failure is None and is_continuous:
            failure = self._end_step(number, handler_s, answered)
        if failure is not None:
            self.end_if_lost(number, failure)
            recover(failure)
            self._page.finish()
            self.send_metrics()
            self._connection.send(failure)
            return
        assert answered is not None
        results, out = self.encode(answered, outcome, context)
        if self.failed:
            self.end_if_lost(number)
        self._page.finish()
        self.send_metrics()
        self.send_results(Results(number, handler_s, results), out)
        if len(rows) > self._most_rows:
            self.note_peak(len(rows))

    def note_peak(self, rows: int) -> None:
        """So many rows were answered together, more than ever: tell the server what of the device that has taken."""
        assert self._model is not None
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
        """What is said of a lost device, where something has failed since the last time this was asked; else empty."""
        if not self.failed:
            return ""
        assert self._model is not None
        words, self.failed = self.failed, []
        loss = find_loss(words, self._model.load.gpu_id, wait=wait)
        if not loss and self._leader is not None:
            self._leader.ask_devices(wait=wait)
        return loss

    def end_if_lost(self, number: int, failure: Raised | None = None, *, wait: bool = True) -> None:
        """Where an error of batch `number` came of a lost device: tell the server, and end.

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
        """The same model, of which it is noted when a call fails: for calls whose errors others deal with."""

        def call(rows: list[dict[str, Any]], context: Context) -> Any:
            try:
                return model.handle(rows, context)
            except BaseException as error:
                self.failed.append(loss_told_by(error))
                raise

        return LoadedModel(call, model.context, model.load, model.length_of, model.compare)

    def send_results(self, message: Results, bodies: Sequence[bytes]) -> None:
        """Answer a batch; as one that raised, where all that the handler set besides is more than the wire carries."""
        try:
            self._connection.send(message, bodies)
        except (ValueError, TypeError, OverflowError) as error:  # nothing was written yet
            self._connection.send(raised(message.number, message.handler_s, error))

    def _end_step(self, number: int, handler_s: float, answered: Any) -> Raised | None:
        """Have it said of each answer whether more follows; what the author's code raises over that, or None."""
        assert self._model is not None
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
        """The items that are still wanted, their rows, and for every item of the batch None or how it ended already."""
        assert self._model is not None
        has_cancels = self._page.has_cancels(batch.number)
        ahead_s = self._page.clock_ahead_s
        decode_input = self._model.load.decode_input
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
                outcome.append(None)
                live.append(item)
                row: dict[str, Any] = {}
                for (name, content_type), body in zip(item.parts, bodies[at:end], strict=True):
                    row[name] = decode_value(body, content_type) if content_type and decode_input else body
                rows.append(row)
            at = end
        return live, rows, outcome

    def encode(
        self, answers: Sequence[Any], outcome: list[Result | None], context: Context
    ) -> tuple[list[Result], list[bytes]]:
        """One result and one body an item of the batch; an element that cannot be written fails alone."""
        assert self._model is not None
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
            response: tuple[int, str, list[tuple[str, str]]] | None = None
            try:
                response = response_of(index)
                if type(answer) is bytes:
                    body = answer
                elif isinstance(answer, BaseException):
                    self.failed.append(loss_told_by(answer))
                    results.append(_failed_alone(answer))
                    bodies.append(b"")
                    index += 1
                    continue
                else:
                    body, is_json = encode_value(answer)
            except BadResponse as error:
                log.error("the answer to request %s cannot be sent: %s", context.get_request_id(index), error)
                results.append(Result(503, str(error), [], BAD_HEADER))
            except SystemExit:
                raise
            except BaseException as error:  # the author's own objects are asked to show themselves: anything may come
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
                    results.append(Result(503, "Unsupported model output data type.", [], HANDLER))
            else:
                if len(body) > most:
                    text = f"The answer has {len(body)} bytes, more than max_response_size, {most}."
                    results.append(Result(503, text, [], TOO_LARGE))
                    body = b""
                elif response is None:
                    results.append(UNTOUCHED_JSON if is_json else UNTOUCHED)
                else:
                    status, reason, headers = response
                    if is_json and not any(name.lower() == "content-type" for name, _ in headers):
                        headers = [*headers, ("content-type", "application/json")]
                    results.append(Result(status, reason, headers))
            bodies.append(body)
            index += 1
        return results, bodies

    def _send_piece(self, pieces: Sequence[Any], outcome: list[Result | None]) -> None:
        """One piece of a stream for each live item; what the handler sends while it runs."""
        assert self._model is not None
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
        """Send what the handler measured, and noted for describe, since the last time."""
        assert self._model is not None
        warnings = warnings_since(self._model.context, self._told_warnings)
        if warnings:
            self._told_warnings += len(warnings)
            self._connection.send(Warned(warnings))
        metrics = self._take_metrics()
        if metrics.values or metrics.dropped:
            self._connection.send(metrics)

    def _take_metrics(self) -> Metrics:
        """What the handler measured since the last time."""
        assert self._model is not None
        metrics = self._model.context.metrics
        try:
            drain = getattr(metrics, "drain", None)  # an author may have put an object of his own there
            values, dropped = metrics_of(drain()) if drain is not None else ([], 0)
            if isinstance(metrics, MetricsCache):
                dropped, metrics.dropped = dropped + int(metrics.dropped), 0
        except SystemExit:
            raise
        except BaseException as error:
            say(logging.ERROR, "what the handler measured cannot be read", error=error)
            values, dropped = [], 0
        return Metrics(values, max(0, dropped))


# ------------------------------------------------------------------------------------------------ values


def decode_value(body: bytearray, content_type: str) -> Any:
    """What a handler sees of a value with this content type (contract §1.3)."""
    essence = content_type.partition(";")[0]
    if essence == "application/json":
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            log.warning("a body that says it is JSON is none (%s); the handler gets its bytes", error)
            return body
    if essence.startswith("text"):
        try:
            return body.decode()
        except UnicodeDecodeError:
            return body
    return body


def encode_value(value: Any) -> tuple[bytes, bool]:
    """The body that a handler's element becomes (contract §1.4), and whether it is a JSON document of our making.

    Raises TypeError or ValueError for what JSON cannot say.
    """
    if isinstance(value, bytes | bytearray):
        return b"".join((value,)), False  # plain bytes, whatever class of the author's own it is
    if isinstance(value, str):
        return str.encode(value), False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue(), False
    # json's own writer is C only without an indent; msgspec lays the result out, many times faster than json would.
    text = json.dumps(value)
    try:
        body = msgspec.json.format(text, indent=2).encode()
    except msgspec.DecodeError:  # NaN and Infinity: no JSON, but what TorchServe's clients are used to
        return json.dumps(value, indent=2).encode(), False
    # A number or a word alone goes out without a type, as from TorchServe: its clients read it as text.
    return body, text[:1] in "[{"


def raised(number: int, handler_s: float, error: BaseException) -> Raised:
    """The message about an exception of the author's. Asking it for its text may itself run code of the author's."""
    try:
        told = describe_failure(error)
        message = cut(told.message, MAX_MESSAGE)
        return Raised(number, handler_s, told.kind, message, told.code, traceback_of(error))
    except BaseException as worse:
        text = f"{name_of(error)}, which cannot be shown:\n{traceback_of(worse)}"
        return Raised(number, handler_s, HANDLER, "Prediction failed", 503, text)


def recover(failure: Raised) -> None:
    """Where memory ran out, give back what the batch left: the next one finds a worker as before."""
    if failure.kind == MEMORY:
        give_back()


def misfit(number: int, handler_s: float, answered: Any, rows: int) -> Raised | None:
    """What is told where a handler did not return a list with one element a row; None where it did."""
    if type(answered) is not list:
        told = f"handle() returned {type(answered).__name__}; it must return a list with one element a row"
        if inspect.iscoroutine(answered):
            answered.close()
            told += ". A handler that is a coroutine needs asyncCommunication: true in the model's configuration"
        return Raised(number, handler_s, HANDLER, "Invalid model predict output", 503, told)
    if len(answered) != rows:
        told = f"handle() returned {len(answered)} elements for {rows} rows; it must return one a row"
        return Raised(number, handler_s, HANDLER, "number of batch response mismatched", 503, told)
    return None


def _failed_alone(error: BaseException) -> Result:
    """What an exception is told as that a handler put in the place of one item's answer: its mates have theirs."""
    told = raised(0, 0.0, error)
    say(logging.ERROR, "one item of a batch failed\n%s", told.traceback.rstrip())
    return Result(told.code, told.message, [], told.kind)


# What models need that marserve's extras bring.
EXTRAS = {"torch": "torch", "onnxruntime": "onnx", "huggingface_hub": "hf"}


def not_loaded(error: BaseException) -> NotLoaded:
    """What a failed load is told as; the traceback goes to the author's log by way of the server."""
    try:
        return _not_loaded(error)
    except BaseException as worse:  # the author's exception cannot say what it is
        return NotLoaded("load_failed", name_of(error), traceback_of(worse))


def _not_loaded(error: BaseException) -> NotLoaded:
    if is_out_of_memory(error):
        kind = "out_of_memory"
    elif isinstance(error, ModuleNotFoundError):
        kind = "missing_module"
    elif isinstance(error, ImportError):
        kind = "import_error"
    elif isinstance(error, FileNotFoundError):
        kind = "missing_file"
    else:
        kind = "load_failed"
    said = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    if isinstance(error, ModuleNotFoundError) and isinstance(error.name, str) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        said = f"{said.rstrip('.')}. The extra {extra} of marserve brings it: pip install 'marserve[{extra}]'"
    return NotLoaded(kind, cut(said[:2000], 2000), traceback_of(error))


# ------------------------------------------------------------------------------------------------ the process


class LevelFormatter(logging.Formatter):
    """Message text alone, as TorchServe's workers print it, behind a mark that carries the level to the server."""

    def format(self, record: logging.LogRecord) -> str:
        """One record; every line of it carries the mark."""
        mark = f"{LEVEL_MARK}{record.levelname}{LEVEL_MARK}"
        return mark + super().format(record).replace("\n", "\n" + mark)


def configure_output() -> None:
    """Logging at INFO to standard output, and both streams written line by line: the server reads them as they come."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LevelFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in C code says where it was in Python, and that line is kept for describe


def stay_on(cpus: Sequence[int]) -> None:
    """Keep this process, and all that it starts from now on, to these processors; to any where there are none.

    A processor that was taken away since the server looked at them is left out; where all were, the process stays.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning("the worker does not stay on the processors near its device: %s", error)


def use_threads(threads: int) -> None:
    """Let the numeric libraries use `threads` threads (0: all cores that this process may use)."""
    if not threads:
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def exit_status(error: SystemExit) -> int:
    """The status that `sys.exit` was given: none is 0, what is no number is 1."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def leave(status: int) -> NoReturn:
    """End the process at once, output flushed: no thread or exit hook of the author's code may keep it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # the author's code may have closed it, or put anything in its place
            stream.flush()
    os._exit(status)
