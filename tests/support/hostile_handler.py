"""A handler whose texts, numbers and objects, at a request's word, are ones that no protocol carries.

The body is a name of `SAID` (the handler does that to its context, logs it, or raises it) or of `ANSWERED` (that is the
answer), or of one of them behind `stream` (a piece goes before it); everything else is echoed.
"""

from __future__ import annotations

import asyncio
import enum
import http
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from marserve_handlers.context import send_intermediate_predict_response
from marserve_handlers.errors import PredictionException

LONE = json.loads('"\\ud800 and \\udfff"')
CONTROLS = "a\0b\r\nX-Injected: c\x1b[2J\x85\u2028\u202e"
LONG = 3_000_000

log = logging.getLogger("hostile")


class Text(str):
    """Text of a class of the author's own, as numpy's `str_` is."""


class Stubborn(str):
    """Text that does not let itself be made anything else."""

    def __str__(self) -> str:
        return self

    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        """Raise."""
        raise RuntimeError("no")


class Number(int):
    """A number of a class of the author's own."""


class Raw(bytes):
    """Bytes of a class of the author's own."""


class Speechless:
    """Raises when it is asked for its words, what is no Exception."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt

    __str__ = __repr__


class SpeechlessError(RuntimeError):
    """An exception that raises what is no Exception when it is asked for its words."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    __repr__ = __str__


class Touchy(dict[str, int]):
    """A mapping that raises what is no Exception when it is looked at."""

    def items(self) -> Any:
        """Raise."""
        raise KeyboardInterrupt


class Dimension:
    """What looks like a dimension of a metric."""

    def __init__(self, name: object, value: object) -> None:
        self.name, self.value = name, value


class Meter:
    """What an author has put in the place of the metrics."""

    def __init__(self, values: object) -> None:
        self.values = values

    def drain(self) -> Any:
        """What was measured, or an exception."""
        if isinstance(self.values, BaseException):
            raise self.values
        return self.values


class Mood(enum.Enum):
    """An enumeration."""

    BAD = "bad"


def _raise(error: BaseException) -> None:
    raise error


def _chained() -> None:
    try:
        raise ValueError(LONE)
    except ValueError as error:
        error.add_note(LONE)
        raise RuntimeError(LONE) from error


def _circular() -> None:
    error = ValueError(LONE)
    error.__cause__ = error
    raise error


def _long_chain() -> None:
    last: ValueError | None = None
    for number in range(3000):
        error = ValueError(number)
        error.__cause__ = last
        last = error
    raise last or ValueError


def _nested() -> None:
    error: Exception = ValueError(LONE)
    for _ in range(2000):
        error = ExceptionGroup(LONE, [error])
    raise error


def _many_headers(context: Any) -> None:
    for number in range(100_000):
        context.set_response_header(0, f"X-{number}", "v" * 1000)


def _many_values(context: Any) -> None:
    for number in range(30_000):
        context.metrics.add_counter(f"many{number}", 1)


def _own_level(context: Any) -> None:
    logging.addLevelName(36, LONE)
    log.log(36, "a level that has no such name")


RAISED: dict[str, Callable[[], BaseException]] = {
    "lone surrogates": lambda: ValueError(LONE),
    "controls": lambda: ValueError(CONTROLS),
    "a long text": lambda: ValueError("x" * LONG),
    "no words": SpeechlessError,
    "no words of its argument": lambda: ValueError(Speechless()),
    "a syntax error": lambda: SyntaxError(LONE, (LONE, 1, 1, LONE)),
    "a group": lambda: ExceptionGroup(LONE, [ValueError(LONE), SpeechlessError()]),
    "told with lone surrogates": lambda: PredictionException(LONE, 400),
    "told with controls": lambda: PredictionException(CONTROLS, 400),
    "told at length": lambda: PredictionException("x" * LONG, 400),
    "told in an own class": lambda: PredictionException(Text("x"), Number(404)),
    "told stubbornly": lambda: PredictionException(Stubborn(LONE), 400),
    "told by something speechless": lambda: PredictionException(Speechless(), 400),  # type: ignore[arg-type]
    **{
        f"told with code {code!r:.20}": lambda code=code: PredictionException("x", code)
        for code in (10**30, -1, 100, 199, 204, 304, True, "500", math.nan, None)
    },
}

SAID: dict[str, Callable[[Any], object]] = {
    **{f"raise {name}": lambda context, make=make: _raise(make()) for name, make in RAISED.items()},
    "raise a chain": lambda context: _chained(),
    "raise a circle": lambda context: _circular(),
    "raise a long chain": lambda context: _long_chain(),
    "raise a nest": lambda context: _nested(),
    **{
        f"phrase {number}": lambda context, phrase=phrase: context.set_response_status(200, phrase, 0)
        for number, phrase in enumerate([LONE, CONTROLS, Text("x"), Stubborn(LONE), "x" * LONG, Speechless(), 5, "ä☃"])
    },
    **{
        f"status {number}": lambda context, status=status: context.set_response_status(status, "", 0)
        for number, status in enumerate(
            [Number(201), http.HTTPStatus.CREATED, 10**30, -1, 100, 199, 204, 999, 1000, "200", math.nan, Speechless()]
        )
    },
    **{
        f"header name {number}": lambda context, name=name: context.set_response_header(0, name, "v")
        for number, name in enumerate([LONE, CONTROLS, Text("x-a"), Stubborn("x-b"), "", "ä", 5, None, Speechless()])
    },
    **{
        f"header value {number}": lambda context, value=value: context.set_response_header(0, "x-a", value)
        for number, value in enumerate([LONE, CONTROLS, Text("x"), Stubborn(LONE), "☃", 5, None, b"x", Speechless()])
    },
    **{
        f"content type {number}": lambda context, value=value: context.set_response_content_type(0, value)
        for number, value in enumerate([LONE, CONTROLS, Text("text/plain"), "", 5])
    },
    "many headers": _many_headers,
    "a list of headers": lambda context: setattr(context.request_processor[0], "_response_header", [1]),
    "processors that are none": lambda context: setattr(context, "request_processor", [object()] * 9),
    "processors of another kind": lambda context: setattr(context, "_processors", 5),
    "request ids of another kind": lambda context: setattr(context, "request_ids", 5),
    **{
        f"metric name {number}": lambda context, name=name: context.metrics.add_counter(name, 1)
        for number, name in enumerate([LONE, CONTROLS, Text("x"), Stubborn(LONE), "", "x" * 100_000])
    },
    **{
        f"metric unit {number}": lambda context, unit=unit: context.metrics.add_metric("unit", 1, unit)
        for number, unit in enumerate([LONE, CONTROLS, Text("ms"), "x" * 100_000])
    },
    **{
        f"metric value {number}": lambda context, value=value: context.metrics.add_counter("value", value)
        for number, value in enumerate([10**400, math.nan, math.inf, -1, "x", None, Number(3), Speechless()])
    },
    **{
        f"metric dimension {number}": lambda context, number=number, name=name: context.metrics.add_counter(
            f"dimension{number}", 1, dimensions=[Dimension(name, name)]
        )
        for number, name in enumerate([LONE, CONTROLS, Text("x"), 5, None, object(), Speechless()])
    },
    **{
        f"metric request {number}": lambda context, number=number, request=request: context.metrics.add_metric_to_cache(
            f"request{number}", "ms", []
        ).add_or_update(1, [], request_id=request)
        for number, request in enumerate([LONE, 5, Speechless()])
    },
    "many metric values": _many_values,
    **{
        f"a meter {number}": lambda context, values=values: setattr(context, "metrics", Meter(values))
        for number, values in enumerate([[(1, 2, 3), 5, LONE], ValueError(LONE), KeyboardInterrupt(), 5, None])
    },
    "no meter": lambda context: setattr(context, "metrics", object()),
    **{
        f"log {number}": lambda context, value=value: log.error("%s", value)
        for number, value in enumerate([LONE, CONTROLS, "x" * 1_000_000, "line\n" * 1000])
    },
    "log at an own level": _own_level,
    "log what does not fit": lambda context: log.error("%d", "x"),
    **{
        f"print {number}": lambda context, value=value: print(value)  # noqa: T201
        for number, value in enumerate([LONE, CONTROLS, "\x1eERROR\x1etold\x1e"])
    },
    "warn": lambda context: warnings.warn(LONE, stacklevel=1),
    "write bytes": lambda context: os.write(1, bytes(range(256)) + b"\n"),
}

ANSWERED: dict[str, Any] = {
    f"answer {number}": answer
    for number, answer in enumerate(
        [
            *(LONE, CONTROLS, Text("x"), Stubborn("x"), Raw(b"x"), memoryview(b"x"), None, 10**400, math.nan, Mood.BAD),
            *(
                {LONE: LONE},
                {1: 2, None: 3, (1, 2): 3},
                {Text("a"): Text("b")},
                {"a": b"b"},
                {"a": math.inf},
                Touchy(a=1),
            ),
            *(ValueError(LONE), PredictionException(LONE, 400), PredictionException(Speechless(), 10**30)),  # type: ignore[arg-type]
            *(SpeechlessError(), Speechless(), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(LONE)),
        ]
    )
}

KINDS = [*SAID, *ANSWERED]


def _words(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield bytes(next(iter(row.values()))).decode()


def _one(word: str, context: Any) -> Any:
    if word in SAID:
        SAID[word](context)
    return ANSWERED.get(word, word)


def handle(rows: list[dict[str, Any]] | None, context: Any) -> Any:
    """One element a row."""
    if rows is None:
        return None
    answers = []
    for word in _words(rows):
        if word.startswith("stream "):
            word = word.removeprefix("stream ")
            send_intermediate_predict_response([_one(word, context)] * len(rows), None, "", 200, context)
        answers.append(_one(word, context))
    return answers


async def handle_async(rows: list[dict[str, Any]] | None, context: Any) -> Any:
    """As `handle`, as a coroutine."""
    if rows is not None:
        await asyncio.sleep(0)
    return handle(rows, context)
