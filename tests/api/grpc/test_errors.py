"""Tests for errors over gRPC: one table, TorchServe's words, and what travels along."""

from __future__ import annotations

import pytest

from marserve import errors
from marserve.api.errors import ErrorRules, error_status
from marserve.api.grpc.errors import (
    MAX_DESCRIPTION_CHARACTERS,
    ModelApiDisabled,
    ReportedInternal,
    SlowReader,
    error_reason,
    grpc_status,
    status_of_http,
)
from support.inventory import inventory

JAVA = "org.pytorch.serve."


@pytest.mark.parametrize(
    ("error", "code", "description"),
    [
        (errors.BadInput("no"), "INVALID_ARGUMENT", f"no\n{JAVA}http.BadRequestException"),
        (
            errors.ModelNotFound("m"),
            "NOT_FOUND",
            f"Model not found: m\n{JAVA}archive.model.ModelNotFoundException",
        ),
        (
            errors.VersionNotFound("m", "2"),
            "NOT_FOUND",
            f"Model version: 2 does not exist for model: m\n{JAVA}archive.model.ModelVersionNotFoundException",
        ),
        (errors.ArchiveNotFound("gone"), "NOT_FOUND", f"gone\n{JAVA}archive.model.ModelNotFoundException"),
        (
            errors.VersionConflict("m", "1"),
            "ALREADY_EXISTS",
            f"Model version 1 is already registered for model m\n{JAVA}http.ConflictStatusException",
        ),
        (
            errors.DefaultVersionInUse("m"),
            "FAILED_PRECONDITION",
            f"Cannot remove default version for model m\n{JAVA}archive.model.InvalidModelVersionException",
        ),
        (
            errors.CleanUpTimedOut("m"),
            "DEADLINE_EXCEEDED",
            f"Timed out while cleaning resources: m\n{JAVA}http.RequestTimeoutException",
        ),
        (
            errors.Draining(),
            "UNAVAILABLE",
            f"The server is shutting down and takes no more requests.\n{JAVA}http.ServiceUnavailableException",
        ),
        (errors.WorkerDied("killed"), "INTERNAL", f"Worker died.\n{JAVA}http.InternalServerException"),
        (errors.OutOfMemory(), "INTERNAL", f"Out of resources\n{JAVA}http.InternalServerException"),
        (errors.HandlerFailed(), "UNAVAILABLE", f"Prediction failed\n{JAVA}http.InternalServerException"),
        (errors.HandlerFailed("nothing", 404), "NOT_FOUND", f"nothing\n{JAVA}http.InternalServerException"),
        (
            errors.DeadlinePassed("queue"),
            "DEADLINE_EXCEEDED",
            f"The request's deadline passed before it was answered.\n{JAVA}http.RequestTimeoutException",
        ),
        (
            errors.LoadFailed("m", "1"),
            "INTERNAL",
            f"Failed to start workers for model m version: 1\n{JAVA}http.InternalServerException",
        ),
        (errors.BadArchive("torn"), "INVALID_ARGUMENT", f"torn\n{JAVA}archive.model.InvalidModelException"),
        (ModelApiDisabled(), "PERMISSION_DENIED", f"Model API disabled\n{JAVA}archive.model.ModelException"),
        (
            errors.InvalidToken("Authorization"),
            "PERMISSION_DENIED",
            "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
        ),
        (
            ReportedInternal(errors.ModelNotFound("m")),
            "INTERNAL",
            f"Model not found: m\n{JAVA}archive.model.ModelNotFoundException",
        ),
        (SlowReader(5), "RESOURCE_EXHAUSTED", "The client does not take its stream: 5 bytes wait for it."),
        (
            KeyError("secret"),
            "INTERNAL",
            f"The server failed to handle the request.\n{JAVA}http.InternalServerException",
        ),
    ],
)
def test_an_error_has_a_status_and_torchserves_words(error: BaseException, code: str, description: str) -> None:
    """The sentence of HTTP, and the name of TorchServe's class below it where it has one."""
    status = grpc_status(error)

    assert (status.code.name, status.description) == (code, description)


@pytest.mark.parametrize(
    "error",
    [
        errors.BadInput("no"),
        errors.HandlerFailed("odd", code=409),
        ReportedInternal(errors.BadInput("no")),
        ModelApiDisabled(),
        KeyError("m"),
    ],
)
def test_as_marserve_a_description_is_one_sentence(error: BaseException) -> None:
    """Its status is as ever."""
    recorded, own = grpc_status(error), grpc_status(error, ErrorRules(as_recorded=False))

    assert (own.code, own.description) == (recorded.code, recorded.description.partition("\n")[0])
    assert "org.pytorch.serve" in recorded.description


def test_codes_of_handlers_become_the_inventorys_statuses() -> None:
    """Every line of `grpc_status_by_http_code`."""
    table = inventory("grpc_status_by_http_code")
    examples = {"other 2xx": 204, "other 4xx": 418, "other 5xx": 507, "else": 302}

    for word, name in table.items():
        code = examples.get(word) or int(word)
        assert grpc_status(errors.HandlerFailed("x", code)).code.name == name, word

    assert len(table) == 16


def test_what_only_http_knows_has_the_status_of_its_code() -> None:
    """An error that somebody adds there needs no line here."""
    for error in (errors.RouteNotFound(), errors.MethodNotAllowed(), errors.BadSettings("x"), errors.NoWorker("m")):
        assert grpc_status(error).code is status_of_http(error_status(error))


def test_a_full_server_is_unavailable_or_as_the_setting_says() -> None:
    """`unavailable_status=429` is for clients that retry on nothing else."""
    assert grpc_status(errors.QueueFull("m")).code.name == "UNAVAILABLE"
    assert grpc_status(errors.QueueFull("m"), ErrorRules(429)).code.name == "RESOURCE_EXHAUSTED"
    assert grpc_status(errors.NoWorker("m"), ErrorRules(429)).code.name == "UNAVAILABLE"


def test_a_handlers_failure_is_internal_where_http_says_500() -> None:
    """Its code derives from `handler_error_status`; a retry policy is forbidden either way."""
    status = grpc_status(errors.HandlerFailed(), ErrorRules(handler_status=500))

    assert status.code.name == "INTERNAL"
    assert dict(status.trailers)["grpc-retry-pushback-ms"] == "-1"


def test_cause_and_time_to_retry_travel_along() -> None:
    """The latter in the word that gRPC's own retries heed too."""
    trailers = dict(grpc_status(errors.QueueFull("m", retry_after_s=0.25)).trailers)

    seconds = trailers.pop("retry-after")
    assert trailers == {"x-marserve-cause": "queue_full", "grpc-retry-pushback-ms": f"{seconds}000"}


def test_a_handlers_failure_forbids_another_try_and_nothing_else_does() -> None:
    """Whatever status its author chose; a worker that died and a full device say nothing."""
    told = {
        type(error).__name__: dict(grpc_status(error).trailers).get("grpc-retry-pushback-ms")
        for error in (
            errors.HandlerFailed(),
            errors.WorkerDied("killed"),
            errors.OutOfMemory("x"),
            errors.NoWorker("m"),
            errors.Draining(),
            RuntimeError("x"),
        )
    }
    chosen = dict(grpc_status(errors.HandlerFailed("busy", 404)).trailers)

    assert told.pop("Draining") in {"1000", "2000", "3000"}
    assert told.pop("HandlerFailed") == chosen["grpc-retry-pushback-ms"] == "-1"
    assert set(told.values()) == {None}


def test_a_description_is_bounded_and_encodable() -> None:
    """It travels as a header; a handler may have said anything."""
    status = grpc_status(errors.HandlerFailed("ä\ud800" * MAX_DESCRIPTION_CHARACTERS))

    assert len(status.description) < MAX_DESCRIPTION_CHARACTERS + 100
    assert status.description.encode()


def test_a_refusal_inside_a_stream_names_torchserves_class() -> None:
    """Without its package."""
    assert error_reason(errors.ModelNotFound("m")) == "ModelNotFoundException"
    assert error_reason(SlowReader(1)) == "SlowReader"
