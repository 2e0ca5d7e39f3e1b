"""How a stream says that it breaks off."""

from __future__ import annotations

import json

import pytest

from marserve.api.errors import ErrorRules, error_body
from marserve.api.http.stream_errors import error_frame, with_exception
from marserve.errors import HandlerFailed, Thrown

ERROR = b'{\n  "code": 503\n}\n'


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream; charset=utf-8"])
def test_events_get_an_event_of_the_kind_error(kind: str) -> None:
    """Each line of the object is a line of its data, so a client's parser has the object back whole."""
    assert error_frame(kind, ERROR) == b'event: error\ndata: {\ndata:   "code": 503\ndata: }\n\n'


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/jsonl"])
def test_lines_get_a_line(kind: str) -> None:
    """One, whatever the object looked like."""
    assert error_frame(kind, ERROR) == b'{ "code": 503 }\n'


@pytest.mark.parametrize("kind", ["", "text/plain", "application/octet-stream", "text/event-streams"])
def test_bytes_get_none(kind: str) -> None:
    """They would be taken for a part of the answer."""
    assert error_frame(kind, ERROR) == b""


FRAME = b'event: error\ndata: {"code":500,"message":"Prediction failed"}\n\n'
THROWN = Thrown("ValueError", "two\nlines \ud800", "Traceback:\n  File /staged/h.py\nValueError\n")


def test_a_handlers_last_event_is_as_it_was_unless_a_setting_exposes_exceptions() -> None:
    """The traceback may say what clients must not read."""
    assert with_exception(FRAME, THROWN, ErrorRules()) == FRAME


@pytest.mark.parametrize("exposes", ["message", "traceback"])
def test_a_handlers_last_event_has_the_exception_that_a_body_has(exposes: str) -> None:
    """One more key of its one line, with the author's own paths, whatever the exception's text holds."""
    rules = ErrorRules(exposes=exposes, with_own_paths=lambda text: text.replace("/staged/", "/own/"))  # type: ignore[arg-type]
    body = json.loads(error_body(HandlerFailed(thrown=THROWN), rules))

    event, data, *end = with_exception(bytearray(FRAME), THROWN, rules).split(b"\n")

    assert (event, end) == (b"event: error", [b"", b""])
    assert json.loads(data.removeprefix(b"data: ")) == {
        "code": 500,
        "message": "Prediction failed",
        "exception": body["exception"],
    }
    assert ("  File /own/h.py" in body["exception"]["traceback"]) is (exposes == "traceback")


def test_a_last_event_of_another_form_stays_as_it_is() -> None:
    """Nothing is put where it would be no JSON."""
    assert with_exception(b"data: [1]\n\n", THROWN, ErrorRules(exposes="message")) == b"data: [1]\n\n"
