"""What the author's values become on their way out of a worker: text and numbers that the wire carries.

An author's object may do anything when it is asked for its words: raise, also what is no Exception, or give text
without end. Nothing here raises for that.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterable
from typing import Any

from marserve.messages import MAX_METRIC_VALUES, MAX_WARNINGS, Metric
from marserve_handlers.device_errors import is_out_of_memory, words_of_loss

# In characters. What is longer is cut, and says so.
MAX_MESSAGE = 1 << 20
MAX_TRACEBACK = 64 << 10
MAX_NAME = 200
MAX_SENTENCE = 2000
_KINDS = ("counter", "gauge", "histogram")

log = logging.getLogger("marserve.worker")


def exact(text: str) -> str:
    """The same text as a plain `str`, whatever class it is of (`numpy.str_`, an author's own)."""
    return text if type(text) is str else str.__str__(text)


def cut(text: str, most: int) -> str:
    """At most about `most` characters of a text, its beginning and its end, as it travels: lone surrogates escaped."""
    text = _cut(exact(text), most)
    escaped = text.encode("utf-8", "backslashreplace").decode()
    return text if len(escaped) == len(text) else _cut(escaped, most)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters are left out …\n{text[-(most - most // 4) :]}"


def words_of(value: object) -> str:
    """`str(value)`, or what can be said of it otherwise."""
    try:
        return cut(str(value), MAX_MESSAGE)
    except BaseException:
        return f"{name_of(value)}, which cannot be shown"


def name_of(value: object) -> str:
    """The name of its class, which an author may have made as long as any text."""
    name: str = type.__dict__["__name__"].__get__(type(value))  # whatever its metaclass says
    return cut(name, MAX_NAME)


def shown(error: BaseException) -> str:
    """`repr(error)`, or what can be said of it otherwise."""
    try:
        return exact(repr(error))
    except BaseException:
        return f"{name_of(error)}, which cannot be shown"


def has_run_out(error: BaseException) -> bool:
    """Whether memory ran out, as far as the error can be asked."""
    try:
        return is_out_of_memory(error)
    except BaseException:
        return False


def loss_told_by(error: BaseException) -> str:
    """What a runtime says in an error of a device that is lost; empty where it says nothing of that."""
    try:
        return words_of_loss(error)
    except BaseException:
        return ""


def traceback_of(error: BaseException) -> str:
    """The traceback of an author's exception, at most about `MAX_TRACEBACK` characters."""
    try:
        return cut("".join(traceback.format_exception(error)), MAX_TRACEBACK)
    except BaseException:
        return f"{name_of(error)}, whose traceback cannot be shown"


def say(level: int, message: str, *values: object, error: BaseException | None = None) -> None:
    """Log, wherever the author's code has put the streams; what cannot be logged is left out."""
    with contextlib.suppress(BaseException):
        log.log(level, message, *values, exc_info=error)


def said_of_load(context: Any) -> tuple[list[str], str]:
    """What the handler said of its load: sentences for describe, and what the model runs on."""
    with contextlib.suppress(BaseException):
        warnings = [words_of(each)[:MAX_SENTENCE] for each in list(context.load_warnings)[:MAX_WARNINGS]]
        return warnings, words_of(context.computes_on)[:MAX_NAME]
    return [], ""


def warnings_since(context: Any, told: int) -> list[str]:
    """What the handler has noted for describe since `told` of its sentences were told."""
    with contextlib.suppress(BaseException):
        warnings = context.load_warnings
        if len(warnings) > told:
            return [words_of(each)[:MAX_SENTENCE] for each in list(warnings)[told:MAX_WARNINGS]]
    return []


def metrics_of(values: Iterable[Any]) -> tuple[list[Metric], int]:
    """What a handler measured, and how many of its values no metric can have."""
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
    """One value as the wire carries it; None if it cannot. Names that are not `str` are written as text."""
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
