"""Answers that are no success, as errors: their class, what they carry, how they read."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from marserve_client import errors
from marserve_client.errors import BadInput, CallFailed, NotFound, RemoteException, ServerFailed, refusal

HEADERS = {"x-request-id": "r-1", "x-marserve-cause": "queue_full", "retry-after": "3"}


def body(code: int, kind: str = "SomeException", message: str = "It is so.", **more: Any) -> bytes:
    """An error as the server writes it."""
    return json.dumps({"code": code, "type": kind, "message": message, **more}).encode()


@pytest.mark.parametrize(
    ("status", "kind", "name"),
    [
        (400, "BadRequestException", "BadInput"),
        (400, "InvalidKeyException", "WrongKey"),  # TorchServe's status for a wrong key
        (401, "InvalidKeyException", "WrongKey"),
        (403, "InvalidKeyException", "WrongKey"),
        (403, "ManagementClosedException", "Forbidden"),
        (404, "ModelNotFoundException", "NotFound"),
        (405, "MethodNotAllowedException", "Refused"),
        (408, "RequestTimeoutException", "DeadlinePassed"),
        (409, "ConflictStatusException", "Conflict"),
        (413, "RequestEntityTooLargeException", "TooLarge"),
        (429, "ServiceUnavailableException", "Overloaded"),
        (503, "ServiceUnavailableException", "Overloaded"),
        (504, "RequestTimeoutException", "DeadlinePassed"),
        (500, "InternalServerException", "ServerFailed"),
        (507, "InternalServerException", "ServerFailed"),
        (302, "", "Refused"),
        (999, "", "ServerFailed"),
    ],
)
def test_each_status_has_its_class(status: int, kind: str, name: str) -> None:
    """By the status, and by the server's word for a key."""
    assert type(refusal(status, {}, body(status, kind))) is getattr(errors, name)


def test_an_error_carries_what_the_server_said() -> None:
    """Message, status, request, cause, type, when to come again, and the whole body."""
    error = refusal(503, HEADERS, body(503, "ServiceUnavailableException", "Full."))

    assert (error.message, error.status, error.request_id, error.cause) == ("Full.", 503, "r-1", "queue_full")
    assert (error.type, error.retry_after_s) == ("ServiceUnavailableException", 3.0)
    assert error.document["code"] == 503
    assert str(error) == "Full. (status 503, request r-1)"
    failed = refusal(500, {"x-marserve-reason": "No module named x."}, body(500, message="Failed to start workers"))
    assert failed.reason == "No module named x."
    assert str(failed) == "Failed to start workers (No module named x, status 500)"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("pair: expected float32 [2], got [3]", "pair"),
        ("inputs[0].name: expected a name", "inputs[0].name"),
        ("Parameter url is required.", None),
        ("Invalid HTTP message: no host.", None),
        ("http://host is wrong: it is", None),
    ],
)
def test_a_bad_inputs_field_is_the_word_before_the_colon(message: str, field: str | None) -> None:
    """As handlers and tensors write it; a sentence has none."""
    error = refusal(400, {}, body(400, message=message))

    assert isinstance(error, BadInput)
    assert error.field == field


def test_a_handlers_exception_is_shown_where_the_server_shows_it() -> None:
    """With its traceback, without one, and not at all."""
    raised = {"type": "ValueError", "message": "no", "traceback": ["line 1", "line 2"]}
    whole, bare = refusal(500, {}, body(500, exception=raised)), refusal(500, {}, body(500))
    odd = refusal(500, {}, body(500, exception={"traceback": 3}))

    assert isinstance(whole, ServerFailed)
    assert whole.exception == RemoteException("ValueError", "no", ("line 1", "line 2"))
    assert isinstance(bare, ServerFailed)
    assert bare.exception is None
    assert isinstance(odd, ServerFailed)
    assert odd.exception == RemoteException("", "", ())


def test_what_is_not_there_may_be_on_its_way() -> None:
    """Archives that the server is fetching."""
    error = refusal(404, {}, body(404, arriving=[{"archive": "m.mar"}]))

    assert isinstance(error, NotFound)
    assert error.arriving == [{"archive": "m.mar"}]
    assert isinstance(bare := refusal(404, {}, body(404)), NotFound)
    assert bare.arriving == []


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (502, b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (500, b"", "The answer was 500 without a message."),
        (500, b"[1]", "[1]"),
        (500, b'{"message": 3}', '{"message": 3}'),
        (500, b"[" * 100_000, "[" * 200 + "..."),
        (500, b"\xff", "\ufffd"),
        (400, b'{"error": "in the protocol\'s key"}', "in the protocol's key"),
        (307, b"", "The address leads elsewhere (http://there/); name that one."),
    ],
)
def test_an_answer_of_another_form_is_shown(status: int, content: bytes, message: str) -> None:
    """A proxy's page, nothing, or what no server writes: no other error comes of it."""
    assert refusal(status, {"location": "http://there/"}, content).message == message


def test_an_answer_that_leads_nowhere_is_not_said_to_lead_elsewhere() -> None:
    """As 304, which answers a condition that the caller sent."""
    assert refusal(304, {}, b"").message == "The answer was 304 without a message."


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("2", 2.0), (" 2 ", 2.0), ("-1", None), ("1e3", None), ("Wed, 21 Oct 2026", None)],
)
def test_only_whole_seconds_say_when_to_come_again(value: str | None, seconds: float | None) -> None:
    """A date is not used, since clocks differ."""
    assert errors.read_retry_after(value) == seconds
    assert errors.read_retry_after("9" * 400) is None


@pytest.mark.parametrize("kind", [CallFailed, errors.DeadlinePassed, BadInput, errors.ConnectionLost])
def test_an_error_comes_out_of_a_pickle_as_it_was(kind: type[CallFailed]) -> None:
    """Pools of processes send them so."""
    error = kind("It is so.", status=400, request_id="r-1", document={"a": 1})

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is kind
    assert (str(again), again.message, again.document) == (str(error), "It is so.", {"a": 1})


def test_times_and_inputs_are_caught_as_python_names_them() -> None:
    """`except TimeoutError` and `except ValueError` do."""
    assert issubclass(errors.DeadlinePassed, TimeoutError)
    assert issubclass(BadInput, ValueError)
