"""The author's values and errors on their way out of a worker: as text, numbers and bytes for the wire.

An author's object may do anything when it is turned into text: raise even a BaseException, or give text without end.
Only `encode_value` raises for that.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import logging
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import msgspec

from marserve.errors import Thrown, without_stop
from marserve.messages import MAX_METRIC_VALUES, MAX_WARNINGS, CheckpointRead, Metric, NotLoaded, Raised
from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.errors import BAD_INPUT, HANDLER, PREDICTION, ModelNotLoadable, describe_failure
from marserve_handlers.support.devices.device_errors import is_out_of_memory, words_of_loss
from marserve_handlers.support.distributions import advice_for

# In characters. Longer text is cut, which a line in it says.
MAX_MESSAGE = 1 << 20
MAX_TRACEBACK = 64 << 10
MAX_NAME = 200
MAX_SAID = 8 << 10
MAX_SENTENCE = 2000
# Kinds of failures with which an author answers a client, unless their status is 500 or more.
MEANT = (PREDICTION, BAD_INPUT)
_KINDS = ("counter", "gauge", "histogram")

log = logging.getLogger("marserve.worker")


def exact(text: str) -> str:
    """The same text as a plain `str`, whatever class it is of (`numpy.str_`, an author's own)."""
    return text if type(text) is str else str.__str__(text)


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text, at most about `most` characters; lone surrogates are escaped."""
    text = _cut(exact(text), most)
    escaped = text.encode("utf-8", "backslashreplace").decode()
    return text if len(escaped) == len(text) else _cut(escaped, most)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters are left out …\n{text[-(most - most // 4) :]}"


def words_of(value: object) -> str:
    """`str(value)`, or a phrase if that raises."""
    try:
        return cut(str(value), MAX_MESSAGE)
    except BaseException:
        return f"{name_of(value)}, which cannot be shown"


def name_of(value: object) -> str:
    """The name of its class, cut: an author may have made it as long as any text."""
    name: str = type.__dict__["__name__"].__get__(type(value))  # its metaclass is not asked
    return cut(name, MAX_NAME)


def shown(error: BaseException) -> str:
    """`repr(error)`, or a phrase if that raises."""
    try:
        return exact(repr(error))
    except BaseException:
        return f"{name_of(error)}, which cannot be shown"


def why_not_loaded(error: BaseException) -> str:
    """A clause about a load that failed, without a full stop: marserve's own sentence, else the exception as it is."""
    own = isinstance(error, ModelNotLoadable)
    return f"it does not load: {without_stop(words_of(error)) if own else shown(error)}"


def has_run_out(error: BaseException) -> bool:
    """Whether the error says that memory ran out; False if it cannot be read."""
    try:
        return is_out_of_memory(error)
    except BaseException:
        return False


def loss_told_by(error: BaseException) -> str:
    """The words of a runtime's error for a lost device; empty for other errors."""
    try:
        return words_of_loss(error)
    except BaseException:
        return ""


def traceback_of(error: BaseException) -> str:
    """The traceback of an author's exception, at most about `MAX_TRACEBACK` characters."""
    try:
        text = "".join(traceback.format_exception(error))
        text += "".join(f"{note}\n" for note in _notes_of(error) if note not in text)  # Python 3.10 leaves them out
        return cut(text, MAX_TRACEBACK)
    except BaseException:
        return f"{name_of(error)}, whose traceback cannot be shown"


def _notes_of(error: BaseException) -> list[str]:
    """The texts among the notes of an exception, which Python 3.10 neither adds nor shows."""
    notes = getattr(error, "__notes__", None)
    return [exact(note) for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def say(level: int, message: str, *values: object, error: BaseException | None = None) -> None:
    """Log, wherever the author's code has put the streams; failures of logging are ignored."""
    with contextlib.suppress(BaseException):
        log.log(level, message, *values, exc_info=error)


def said_of_load(context: Any) -> tuple[list[str], str]:
    """The handler's warnings about its load, for describe, and what the model runs on."""
    with contextlib.suppress(BaseException):
        warnings = [words_of(each)[:MAX_SENTENCE] for each in list(context.load_warnings)[:MAX_WARNINGS]]
        return warnings, words_of(context.computes_on)[:MAX_NAME]
    return [], ""


def engine_of(context: Any) -> tuple[str, list[str]]:
    """The runtime with its version, and the instructions that its kernels depend on; empty where none is said."""
    with contextlib.suppress(BaseException):
        engine = words_of(context.engine)[:MAX_NAME]
        if engine:
            from marserve_handlers.optimising.machine import cpu_flags  # here: few models need it

            return engine, cpu_flags()
    return "", []


def build_of(context: Any) -> tuple[str, dict[str, float]]:
    """The build that was to serve and does not, and the ratios of one that does; empty for none."""
    with contextlib.suppress(BaseException):
        ratios = {words_of(rows)[:MAX_NAME]: float(ratio) for rows, ratio in context.build_ratios.items()}
        return words_of(context.refused_build)[:MAX_NAME], ratios
    return "", {}


def checkpoint_of(context: Any) -> CheckpointRead | None:
    """How the weights of a checkpoint, or a rank's part of a divided model, came.

    None without either, or where the handler loads the checkpoint by itself.
    """
    with contextlib.suppress(BaseException):
        checkpoint = context.checkpoint if context.share is None else context.share
        if checkpoint is not None and checkpoint.seconds is not None:
            return CheckpointRead(int(checkpoint.size), int(checkpoint.mapped), float(checkpoint.seconds))
    return None


def warnings_since(context: Any, sent: int) -> list[str]:
    """The handler's warnings for describe after the first `sent`."""
    with contextlib.suppress(BaseException):
        warnings = context.load_warnings
        if len(warnings) > sent:
            return [words_of(each)[:MAX_SENTENCE] for each in list(warnings)[sent:MAX_WARNINGS]]
    return []


def metrics_of(values: Iterable[Any]) -> tuple[list[Metric], int]:
    """A handler's measurements, and how many of its values cannot be sent."""
    metrics: list[Metric] = []
    dropped = 0
    for value in values:
        metric = _metric_of(value) if len(metrics) < MAX_METRIC_VALUES else None
        if metric is None:
            dropped += 1
        else:
            metrics.append(metric)
    return metrics, dropped


def _metric_of(value: Any) -> Metric | None:
    """One value for the wire; None if the wire cannot carry it. Names that are not `str` are written as text."""
    try:
        name, number, unit, kind, dimensions, request_ids = value
        pairs = [(key, text) for key, text in dimensions]
        if not (type(name) is type(unit) is type(request_ids) is str and all(type(t) is str for p in pairs for t in p)):
            name, unit, request_ids = words_of(name), words_of(unit), words_of(request_ids)
            pairs = [(words_of(key), words_of(text)) for key, text in pairs]
        return Metric(name, float(number), unit, kind, pairs, request_ids) if kind in _KINDS else None
    except SystemExit:
        raise
    except BaseException as error:  # an object of the author's own
        say(logging.ERROR, "a measured value cannot be sent: %s", shown(error))
        return None


def encode_value(value: Any) -> tuple[bytes, bool]:
    """The body of a handler's element (contract §1.4), and whether it is a JSON document that was made here.

    Raises TypeError or ValueError for values that JSON cannot express.
    """
    if type(value) is JsonAnswer:
        return value.body, True
    if isinstance(value, bytes | bytearray):
        return b"".join((value,)), False  # plain bytes, also for a class of the author's own
    if isinstance(value, str):
        return str.encode(value), False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue(), False
    # json's own writer is C only without an indent; msgspec indents the result many times faster than json would.
    text = json.dumps(value)
    try:
        body = msgspec.json.format(text, indent=2).encode()
    except msgspec.DecodeError:  # NaN and Infinity: not JSON, but TorchServe's clients are used to them
        return json.dumps(value, indent=2).encode(), False
    # A number or a word alone goes out without a type, as from TorchServe: its clients read it as text.
    return body, text[:1] in "[{"


def raised(number: int, handler_s: float, error: BaseException) -> Raised:
    """The message about an exception of the author's code. Its text may be made by the author's code, too."""
    try:
        failure = describe_failure(error)
        message = cut(failure.message, MAX_MESSAGE)
        name, said = name_of(error), cut(" ".join([words_of(error), *_notes_of(error)]), MAX_SAID)
        return Raised(number, handler_s, failure.kind, message, failure.code, traceback_of(error), name, said)
    except BaseException as worse:
        text = f"{name_of(error)}, which cannot be shown:\n{traceback_of(worse)}"
        return Raised(number, handler_s, HANDLER, "Prediction failed", 503, text, name_of(error))


def thrown_by(error: BaseException) -> Thrown | None:
    """The exception behind the failure of one item; None for an answer that its author meant for the client."""
    return thrown_of(raised(0, 0.0, error))


def thrown_of(failure: Raised) -> Thrown | None:
    """The exception behind a failure; None for an answer that its author meant for the client."""
    if failure.kind in MEANT and failure.code < 500:
        return None
    return Thrown(failure.error_type, failure.error_text, failure.traceback)


def misfit(number: int, handler_s: float, answered: Any, rows: int) -> Raised | None:
    """The failure if a handler did not return a list with one element a row; None if it did."""
    if type(answered) is not list:
        detail = f"handle() returned {type(answered).__name__}; it must return a list with one element a row"
        if inspect.iscoroutine(answered):
            answered.close()
            detail += ". A handler that is a coroutine needs asyncCommunication: true in the model's configuration"
        return Raised(number, handler_s, HANDLER, "Invalid model predict output", 503, detail, "TypeError", detail)
    if len(answered) != rows:
        detail = f"handle() returned {len(answered)} elements for {rows} rows; it must return one a row"
        said = "number of batch response mismatched"
        return Raised(number, handler_s, HANDLER, said, 503, detail, "ValueError", detail)
    return None


def not_loaded(error: BaseException) -> NotLoaded:
    """The message about a failed load; the server writes the traceback to the author's log."""
    try:
        return _not_loaded(error)
    except BaseException as worse:  # the author's exception cannot be turned into text
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
    if isinstance(error, ModuleNotFoundError) and isinstance(error.name, str):
        advice = advice_for(error.name)
        said = f"{said.rstrip('.')}. {advice}" if advice else said
    return NotLoaded(kind, cut(said[:2000], 2000), traceback_of(error))
