"""The status of each error over gRPC, its description and its trailers. The only file that knows both sides.

The table is looked up along the error's bases, as the one of HTTP is (`errors.py`). An error that stands only in that
one has the status that its code stands for. A description is the sentence that HTTP's clients get. As `torchserve` it
has the name of TorchServe's class on a line of its own, which TorchServe's clients look for (contract §5).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from marserve.api.come_back import come_back_in
from marserve.api.errors import (
    AS_RECORDED,
    OVERLOAD,
    ErrorRules,
    RequestTooSlow,
    error_message,
    error_status,
    error_type,
)
from marserve.api.grpc.transport.status import StatusCode
from marserve.errors import (
    ArchiveNotFound,
    BadArchive,
    BadInput,
    BodyTooLarge,
    CleanUpTimedOut,
    ClientError,
    ClientGone,
    DeadlinePassed,
    DefaultVersionInUse,
    DependencyFailed,
    DesiredStateDecides,
    ExpiredKey,
    HandlerFailed,
    HandlerNotFound,
    InvalidToken,
    LabelNotFound,
    LoadFailed,
    MarserveError,
    MissingKey,
    ModelNotFound,
    NotEnoughDevices,
    NotEnoughMemory,
    RolloutNotFound,
    RolloutUnderWay,
    RunFailed,
    ShadowNotFound,
    SwapUnderWay,
    Unavailable,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
    WrongKey,
)

# A description travels as a header, which clients bound at 8 KiB. A character may take three bytes.
MAX_DESCRIPTION_CHARACTERS: Final = 2000
# gRPC clients with a retry policy wait this long before the next attempt; a negative number forbids it.
RETRY_PUSHBACK: Final = "grpc-retry-pushback-ms"


class MethodNotFound(ClientError):
    """The port has no such method."""

    def __init__(self, path: str) -> None:
        super().__init__(f"Method not found: {path.removeprefix('/')}")


class ModelApiDisabled(ClientError):
    """This server's settings allow no registering and unregistering."""

    cause = "model_api_disabled"

    def __init__(self) -> None:
        super().__init__("Model API disabled")


class ReportedInternal(MarserveError):
    """An error that one of TorchServe's services reports as INTERNAL; other services give it a status of its own."""

    def __init__(self, error: MarserveError) -> None:
        self.error = error
        super().__init__(str(error))


class SlowReader(MarserveError):
    """The client takes its stream too slowly: more waits for it than may."""

    cause = "slow_reader"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The client does not take its stream: {limit_bytes} bytes wait for it.")


class StalledReader(MarserveError):
    """The client has taken nothing of its stream for too long."""

    cause = "slow_reader"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The client has taken nothing of its stream for {limit_s:g} seconds.")


class GrpcStatus(NamedTuple):
    """An error as gRPC. `trailers` do not hold the request's id."""

    code: StatusCode
    description: str
    trailers: list[tuple[str, str]]


_HTTP = "org.pytorch.serve.http."
_MODEL = "org.pytorch.serve.archive.model."
_INTERNAL = f"{_HTTP}InternalServerException"

_TABLE: dict[type[BaseException], tuple[StatusCode, str]] = {
    BadInput: (StatusCode.INVALID_ARGUMENT, f"{_HTTP}BadRequestException"),
    BodyTooLarge: (StatusCode.RESOURCE_EXHAUSTED, f"{_HTTP}RequestEntityTooLargeException"),
    MethodNotFound: (StatusCode.UNIMPLEMENTED, ""),
    InvalidToken: (StatusCode.PERMISSION_DENIED, ""),
    MissingKey: (StatusCode.UNAUTHENTICATED, ""),
    ExpiredKey: (StatusCode.UNAUTHENTICATED, ""),
    WrongKey: (StatusCode.PERMISSION_DENIED, ""),
    ModelApiDisabled: (StatusCode.PERMISSION_DENIED, f"{_MODEL}ModelException"),
    ModelNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelNotFoundException"),
    VersionNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelVersionNotFoundException"),
    ArchiveNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelNotFoundException"),
    VersionConflict: (StatusCode.ALREADY_EXISTS, f"{_HTTP}ConflictStatusException"),
    DefaultVersionInUse: (StatusCode.FAILED_PRECONDITION, f"{_MODEL}InvalidModelVersionException"),
    DesiredStateDecides: (StatusCode.FAILED_PRECONDITION, f"{_HTTP}ConflictStatusException"),
    LabelNotFound: (StatusCode.NOT_FOUND, f"{_MODEL}ModelVersionNotFoundException"),
    ShadowNotFound: (StatusCode.NOT_FOUND, f"{_HTTP}ResourceNotFoundException"),
    RolloutNotFound: (StatusCode.NOT_FOUND, f"{_HTTP}ResourceNotFoundException"),
    RolloutUnderWay: (StatusCode.FAILED_PRECONDITION, f"{_HTTP}ConflictStatusException"),
    VersionInUse: (StatusCode.FAILED_PRECONDITION, f"{_HTTP}ConflictStatusException"),
    SwapUnderWay: (StatusCode.FAILED_PRECONDITION, f"{_HTTP}ConflictStatusException"),
    Unavailable: (StatusCode.UNAVAILABLE, f"{_HTTP}ServiceUnavailableException"),
    RequestTooSlow: (StatusCode.DEADLINE_EXCEEDED, f"{_HTTP}RequestTimeoutException"),
    DeadlinePassed: (StatusCode.DEADLINE_EXCEEDED, f"{_HTTP}RequestTimeoutException"),
    CleanUpTimedOut: (StatusCode.DEADLINE_EXCEEDED, f"{_HTTP}RequestTimeoutException"),
    ClientGone: (StatusCode.CANCELLED, ""),
    SlowReader: (StatusCode.RESOURCE_EXHAUSTED, ""),
    StalledReader: (StatusCode.RESOURCE_EXHAUSTED, ""),
    RunFailed: (StatusCode.INTERNAL, _INTERNAL),
    LoadFailed: (StatusCode.INTERNAL, _INTERNAL),
    NotEnoughDevices: (StatusCode.INTERNAL, "org.pytorch.serve.wlm.WorkerInitializationException"),
    NotEnoughMemory: (StatusCode.RESOURCE_EXHAUSTED, _INTERNAL),
    BadArchive: (StatusCode.INVALID_ARGUMENT, f"{_MODEL}InvalidModelException"),
    DependencyFailed: (StatusCode.INVALID_ARGUMENT, f"{_MODEL}ModelException"),
}

# Statuses for a handler's own codes, which are HTTP's.
_BY_HTTP_CODE = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
_BY_HTTP_CLASS = {2: StatusCode.OK, 4: StatusCode.FAILED_PRECONDITION, 5: StatusCode.INTERNAL}


def grpc_status(error: BaseException, rules: ErrorRules = AS_RECORDED) -> GrpcStatus:
    """Status, description and trailers of an error; INTERNAL for what marserve did not raise on purpose.

    Statuses that `rules` give are HTTP's: 429 becomes RESOURCE_EXHAUSTED, a handler's 503 UNAVAILABLE, 500 INTERNAL.
    """
    if isinstance(error, ReportedInternal):
        return grpc_status(error.error, rules)._replace(code=StatusCode.INTERNAL)
    code, java_class = _entry(error)
    if isinstance(error, HandlerNotFound) and not rules.as_recorded:
        code, java_class = _TABLE[BadArchive]
    if isinstance(error, HandlerFailed):
        code = status_of_http(rules.handler_status if error.code is None else error.code)
    elif isinstance(error, OVERLOAD):
        code = status_of_http(rules.overload_status)
    message = shortened(error_message(error, rules))
    names_class = java_class and rules.as_recorded
    return GrpcStatus(code, f"{message}\n{java_class}" if names_class else message, _trailers(error))


def shortened(message: str) -> str:
    """An error's message as a description may have it: not too long, and in characters that UTF-8 has."""
    if len(message) > MAX_DESCRIPTION_CHARACTERS:
        message = message[:MAX_DESCRIPTION_CHARACTERS] + "…"
    return message.encode("utf-8", "replace").decode()


def status_of_http(code: int) -> StatusCode:
    """The status that stands for an HTTP code (contract §5.1)."""
    return _BY_HTTP_CODE.get(code) or _BY_HTTP_CLASS.get(code // 100, StatusCode.UNKNOWN)


def error_reason(error: BaseException) -> str:
    """TorchServe's name for the kind of error, for a refusal inside a stream."""
    return _entry(error)[1].rpartition(".")[2] or type(error).__name__


def _trailers(error: BaseException) -> list[tuple[str, str]]:
    trailers = []
    if isinstance(error, MarserveError) and error.cause is not None:
        trailers.append(("x-marserve-cause", error.cause))
    if isinstance(error, MarserveError) and error.version_header is not None:
        trailers.append(error.version_header)
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        seconds = come_back_in(error.retry_after_s, spread_s=error.retry_spread_s)
        trailers.append(("retry-after", str(seconds)))
        trailers.append((RETRY_PUSHBACK, str(seconds * 1000)))
    elif isinstance(error, HandlerFailed):
        # Retry policies repeat a call that was UNAVAILABLE, and the handler would fail each time.
        trailers.append((RETRY_PUSHBACK, "-1"))
    return trailers


def _entry(error: BaseException) -> tuple[StatusCode, str]:
    for kind in type(error).__mro__:
        entry = _TABLE.get(kind)
        if entry is not None:
            return entry
    return status_of_http(error_status(error)), f"{_HTTP}{error_type(error)}"
