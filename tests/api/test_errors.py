"""Which status, type word, message and headers each error has over HTTP."""

from __future__ import annotations

import json

import pytest

from marserve import errors
from marserve.api.errors import (
    BodyTooSlow,
    ErrorRules,
    ExpectationFailed,
    HeadersTooLarge,
    HttpRefusal,
    MalformedRequest,
    RequestTooSlow,
    TargetTooLong,
    TooManyConnections,
    error_answer,
    error_body,
    error_headers,
    error_message,
    error_status,
    error_type,
)
from marserve.api.grpc.errors import grpc_status

TABLE = [
    (errors.BadInput("what"), 400, "BadRequestException"),
    (errors.BodyTooLarge(10), 413, "RequestEntityTooLargeException"),
    (errors.UnknownEncoding("br"), 415, "UnsupportedMediaTypeException"),
    (errors.RouteNotFound(), 404, "ResourceNotFoundException"),
    (errors.MethodNotAllowed(), 405, "MethodNotAllowedException"),
    (errors.ModelNotFound("m"), 404, "ModelNotFoundException"),
    (errors.VersionNotFound("m", "1"), 404, "ModelVersionNotFoundException"),
    (errors.ArchiveNotFound("empty url"), 404, "ModelNotFoundException"),
    (errors.VersionConflict("m", "1"), 409, "ConflictStatusException"),
    (errors.DefaultVersionInUse("m"), 403, "InvalidModelVersionException"),
    (errors.NoWorker("m"), 503, "ServiceUnavailableException"),
    (errors.QueueFull("m"), 503, "ServiceUnavailableException"),
    (errors.NoTicket("m"), 503, "ServiceUnavailableException"),
    (errors.Draining(), 503, "ServiceUnavailableException"),
    (errors.FingerprintRefused("m", 60), 503, "ServiceUnavailableException"),
    (errors.DeadlinePassed("queue"), 504, "RequestTimeoutException"),
    (errors.WorkerDied("crash"), 500, "InternalServerException"),
    (errors.OutOfMemory(), 507, "InternalServerException"),
    (errors.HandlerFailed(), 503, "InternalServerException"),
    (errors.HandlerFailed("custom failure", 513), 513, "InternalServerException"),
    (errors.HandlerFailed("too large", 413), 507, "InternalServerException"),
    (errors.HandlerFailed("no status", 7), 500, "InternalServerException"),
    (errors.LoadFailed("m", "1"), 500, "InternalServerException"),
    (errors.NotEnoughDevices("m", 4, 2), 500, "WorkerInitializationException"),
    (errors.LoadFailed("m", "1", out_of_memory=True), 507, "InternalServerException"),
    (errors.CleanUpTimedOut("m"), 408, "RequestTimeoutException"),
    (errors.BadArchive("Model name is not defined."), 400, "InvalidModelException"),
    (errors.UnsafeArchive("../x", "outside"), 400, "InvalidModelException"),
    (errors.DependencyFailed("Custom pip package installation failed for model m"), 400, "ModelException"),
    (errors.BadFrame("short"), 500, "InternalServerException"),
    (MalformedRequest(), 400, "BadRequestException"),
    (RequestTooSlow("header", 10), 408, "RequestTimeoutException"),
    (BodyTooSlow(1024, 10), 408, "RequestTimeoutException"),
    (TargetTooLong(8192), 414, "RequestUriTooLongException"),
    (HeadersTooLarge(100, "lines"), 431, "RequestHeaderFieldsTooLargeException"),
    (ExpectationFailed(), 417, "ExpectationFailedException"),
    (TooManyConnections("the server", 8), 503, "ServiceUnavailableException"),
    (RuntimeError("secret"), 500, "InternalServerException"),
]


@pytest.mark.parametrize(("error", "status", "word"), TABLE, ids=lambda value: type(value).__name__)
def test_an_error_has_the_contracts_status_and_word(error: Exception, status: int, word: str) -> None:
    """The body says the same as the status line, and has three members."""
    answer = error_answer(error)

    document = json.loads(answer.body)
    assert list(document) == ["code", "type", "message"]
    assert (answer.status, document["code"], document["type"]) == (status, status, word)
    assert ("content-type", "application/json") in answer.headers


def test_clients_of_the_open_inference_protocol_find_the_message_under_their_key() -> None:
    """On its paths alone, and not in TorchServe's answers."""
    error, rules = errors.ModelNotFound("m"), ErrorRules(as_recorded=False)

    document = json.loads(error_body(error, rules, is_open_inference=True))

    assert document["error"] == document["message"]
    assert "error" not in json.loads(error_body(error, rules))
    assert "error" not in json.loads(error_body(error, ErrorRules(), is_open_inference=True))


def test_every_error_that_has_a_status_says_something() -> None:
    """No message is empty."""
    assert all(json.loads(error_body(error))["message"] for error, _, _ in TABLE)


def test_the_body_is_laid_out_as_torchserve_lays_it_out() -> None:
    """Two spaces, one line end, nothing escaped that need not be."""
    body = error_body(errors.HandlerFailed('grüß "<&>"', 422))

    assert body == (
        '{\n  "code": 422,\n  "type": "InternalServerException",\n  "message": "grüß \\"<&>\\""\n}\n'.encode()
    )


def test_a_message_that_is_no_unicode_is_still_json() -> None:
    """A lone surrogate becomes a question mark."""
    assert json.loads(error_body(errors.HandlerFailed("a\ud800b")))["message"] == "a?b"


def test_what_nobody_foresaw_says_nothing() -> None:
    """Its text may hold paths, names, anything (RELIABILITY A9)."""
    assert b"secret" not in error_body(RuntimeError("secret"))


def test_retry_after_is_told_where_it_is_known_when_trying_again_may_pay() -> None:
    """In whole seconds, never zero; `come_back.py` chooses which."""
    assert dict(error_headers(errors.QueueFull("m", retry_after_s=2.1)))["retry-after"] in {"3", "4", "5"}
    assert dict(error_headers(errors.QueueFull("m", retry_after_s=0.0)))["retry-after"] in {"1", "2", "3"}
    assert error_headers(errors.NoWorker("m")) == [("x-marserve-cause", "no_worker")]


def test_being_full_may_be_429_by_setting() -> None:
    """What is full or going, and nothing else."""
    assert error_status(errors.QueueFull("m"), ErrorRules(429)) == 429
    assert error_status(errors.NoTicket("m"), ErrorRules(429)) == 429
    assert error_status(errors.Draining(), ErrorRules(429)) == 429
    assert error_status(errors.NoWorker("m"), ErrorRules(429)) == 503
    assert error_status(errors.HandlerFailed(), ErrorRules(429)) == 503
    assert b'"code": 429' in error_body(errors.QueueFull("m"), ErrorRules(429))


def test_a_handlers_failure_has_the_status_of_the_setting_unless_its_author_chose_one() -> None:
    """`handler_error_status`: 503 as TorchServe, or 500, which no client sends again."""
    rules = ErrorRules(handler_status=500)

    assert error_status(errors.HandlerFailed(), rules) == 500
    assert error_status(errors.HandlerFailed("busy", 503), rules) == 503
    assert json.loads(error_body(errors.HandlerFailed(), rules))["code"] == 500


@pytest.mark.parametrize("root", [errors.ClientError, errors.Unavailable, errors.BadArchive, HttpRefusal])
def test_nothing_that_the_client_can_mend_is_a_500(root: type[errors.MarserveError]) -> None:
    """Also errors that are added below these later."""
    tree = [*root.__subclasses__()]
    for kind in tree:
        tree.extend(kind.__subclasses__())

    statuses = {error_status(kind.__new__(kind)) for kind in tree}
    assert not statuses & {500, 501, 502, 504, 507}


def test_a_model_that_does_not_fit_is_507_and_one_that_finds_no_room_now_503() -> None:
    """Only the second is worth trying again; both say their cause."""
    never = errors.NotEnoughMemory("m", "1.0", needed_bytes=3, source="declared", could_be_had=1, budget_bytes=2)
    now = errors.NoMemoryNow("m", retry_after_s=1.2)

    assert (error_status(never), error_status(now)) == (507, 503)
    assert error_headers(never) == [("x-marserve-cause", "no_memory")]
    assert [name for name, _ in error_headers(now)] == ["retry-after", "x-marserve-cause"]


THROWN = errors.Thrown(
    "ValueError", "no \ud800 weights", "Traceback (most recent call last):\n  File h.py\nValueError\n"
)


def test_a_body_has_no_exception_unless_a_setting_asks_for_it() -> None:
    """The traceback may say what clients must not read."""
    assert set(json.loads(error_body(errors.HandlerFailed(thrown=THROWN)))) == {"code", "type", "message"}


def test_an_exposed_exception_is_one_more_key() -> None:
    """`expose_errors`: type and message, and with `traceback` its lines."""
    said = json.loads(error_body(errors.HandlerFailed(thrown=THROWN), ErrorRules(exposes="message")))
    whole = json.loads(error_body(errors.HandlerFailed(thrown=THROWN), ErrorRules(exposes="traceback")))

    assert said.pop("exception") == {"type": "ValueError", "message": "no ? weights", "traceback": []}
    assert set(said) == {"code", "type", "message"}
    assert whole["exception"]["traceback"] == ["Traceback (most recent call last):", "  File h.py", "ValueError"]


def test_an_answer_meant_for_the_client_exposes_nothing() -> None:
    """An author's 4xx has no exception, nor has an error of the server's own."""
    rules = ErrorRules(exposes="traceback")

    for error in (errors.HandlerFailed("no", 422), errors.BadInput("no"), errors.WorkerDied("crash")):
        assert set(json.loads(error_body(error, rules))) == {"code", "type", "message"}


OURS = ErrorRules(as_recorded=False)


@pytest.mark.parametrize(
    ("code", "type_"),
    [
        (400, "BadRequestException"),
        (422, "BadRequestException"),
        (500, "InternalServerException"),
        (None, "InternalServerException"),
    ],
)
def test_a_handlers_status_for_a_clients_mistake_has_its_type(code: int | None, type_: str) -> None:
    """A client that reads the type does not take its own mistake for the server's; TorchServe has one type."""
    error = errors.HandlerFailed("pixels: got 3", code)

    assert json.loads(error_body(error, OURS))["type"] == type_
    assert json.loads(error_body(error))["type"] == "InternalServerException"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.ModelNotFound("digts", {"cats", "digits"}), "Model not found: digts; did you mean digits?"),
        (errors.ModelNotFound("zebra", {"cats", "digits"}), "Model not found: zebra"),
        (errors.ModelNotFound("x" * 10_000, {"x" * 100}), f"Model not found: {'x' * 10_000}"),
        (errors.ModelNotFound("m", ()), "Model not found: m; no model is registered"),
        (errors.ModelNotFound("m"), "Model not found: m"),
        (
            errors.VersionNotFound("m", "3", known=("1.0", "2.0")),
            "Model version: 3 does not exist for model: m; it has 1.0, 2.0",
        ),
        (errors.VersionNotFound("m", "3"), "Model version: 3 does not exist for model: m"),
    ],
)
def test_an_error_about_a_missing_name_names_what_is_there(error: errors.MarserveError, said: str) -> None:
    """The nearest model, a model's versions; where TorchServe's words hold they stay as recorded."""
    assert json.loads(error_body(error, OURS))["message"] == said
    assert json.loads(error_body(error))["message"] == error.message


def test_of_many_versions_a_few_are_named() -> None:
    """An answer is no list of a registry."""
    known = tuple(str(number) for number in range(12))

    said = json.loads(error_body(errors.VersionNotFound("m", "x", known=known), OURS))["message"]

    assert said.endswith("it has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")


OWN = ErrorRules(as_recorded=False)


@pytest.mark.parametrize("error", [error for error, _, _ in TABLE], ids=lambda value: type(value).__name__)
def test_no_answer_of_marserve_has_torchserves_stray_words(error: Exception) -> None:
    """They name a call of its API, a class of Java's, or a number of 1 in the plural; as recorded they stay."""
    said = error_message(error, OWN)

    assert said.strip()
    for words in ("scale workers API", "null", "No enough", "Given URL", "cleaning resources", "Failures: ["):
        assert words not in said


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (errors.VersionConflict("m", "1.0"), "Model m has a version 1.0 already. Unregister or swap that one, or give"),
        (errors.NoWorker("m", "1.0"), "Model m version 1.0 has no worker; scaling it starts some (`marserve scale m 1"),
        (
            errors.NoWorker("m", death="killed"),
            "Model m has no worker: they ended, the last one by killed. The model's",
        ),
        (errors.QueueFull("m"), "As many requests wait for model m as may (jobQueueSize). Try again later."),
        (errors.SequencesFull("m", "too_many_sequences"), "Model m has as many sequences as it may (maxNumSequence)."),
        (errors.LoadFailed("m", None), "Model m was not loaded: its workers failed."),
        (errors.SwapFailed("m", "2", "1", "why"), "Version 2 of model m was not taken, version 1 goes on answering"),
        (errors.LabelTaken("m", "blue"), "blue is a label of model m or to become one"),
    ],
)
def test_marserve_answers_in_its_own_words(error: errors.MarserveError, own: str) -> None:
    """The error's own sentence, where it is TorchServe's, stays for its clients."""
    assert error_message(error, OWN).startswith(own)
    assert error_message(error) == str(error)


def test_an_archive_without_a_handler_is_its_author_s_mistake() -> None:
    """TorchServe answers 500, as the workers of the registration cannot start."""
    error = errors.HandlerNotFound("m", "1.0", "no handler is named")

    assert (error_status(error), error_type(error)) == (500, "InternalServerException")
    assert (error_status(error, OWN), error_type(error, OWN)) == (400, "InvalidModelException")
    assert error_message(error, OWN) == "Model m cannot be loaded: no handler is named."
    assert grpc_status(error).code.name == "INTERNAL"
    assert grpc_status(error, OWN).code.name == "INVALID_ARGUMENT"
