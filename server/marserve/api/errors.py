"""The status and the `type` word of each error over HTTP. The only file that knows both.

The table holds TorchServe's words where TorchServe has some (contract §1.5). It is looked up along the error's bases,
so a new error needs a line here only if it differs from its parent. Refusals of HTTP itself (a request that cannot be
read) are declared here too: no lower room uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

import msgspec

from marserve.api.come_back import come_back_in
from marserve.errors import (
    ApplyFailed,
    ApplyUnderWay,
    ArchiveExists,
    ArchiveNotAsSaid,
    ArchiveNotFound,
    BadArchive,
    BadDag,
    BadInput,
    BadSettings,
    BadWorkflow,
    BodyTooLarge,
    CannotProfile,
    CannotReplay,
    CleanUpTimedOut,
    ClientError,
    ControlClosed,
    DeadlinePassed,
    DefaultVersionInUse,
    DependencyFailed,
    DesiredStateDecides,
    DesiredStateMoved,
    DownloadFailed,
    DownloadNotFound,
    Draining,
    ExpiredKey,
    HandlerFailed,
    HandlerNotFound,
    InvalidToken,
    LabelNotFound,
    LoadFailed,
    ManagementClosed,
    MarserveError,
    MethodNotAllowed,
    MissingKey,
    ModelApiClosed,
    ModelNotFound,
    NoDescribeRoom,
    NotEnoughDevices,
    NotEnoughMemory,
    NothingToUndo,
    NoTicket,
    OtherArchiveThere,
    OutOfMemory,
    ProfileUnknown,
    QueueFull,
    RequestUnknown,
    RolloutNotFound,
    RolloutUnderWay,
    RouteNotFound,
    SequencesFull,
    ShadowNotFound,
    StoreNotWritable,
    SwapUnderWay,
    Thrown,
    TooManyUploads,
    TrustedByName,
    Unavailable,
    UnknownEncoding,
    UploadsClosed,
    VersionConflict,
    VersionInUse,
    VersionNotFound,
    WaitTooLong,
    WatchNotFound,
    WorkflowArchiveNotFound,
    WorkflowBusy,
    WorkflowConflict,
    WorkflowFailed,
    WorkflowNotFound,
    WouldUnload,
    WrongKey,
    without_stop,
)
from marserve.files.nearest import did_you_mean

INTERNAL = "InternalServerException"

# Of an error about a name that is missing: how many names are compared with it, of how many characters, and how many
# versions are named.
MOST_COMPARED: Final = 64
MOST_COMPARED_CHARACTERS: Final = 64
MOST_SHOWN: Final = 10


class HttpRefusal(MarserveError):
    """The request cannot be taken as HTTP. Its framing may be in doubt, so the connection closes after the answer."""


class MalformedRequest(HttpRefusal):
    """The request is not HTTP/1.1, or two servers could read it in two ways."""

    cause = "malformed"

    def __init__(self, what: str = "") -> None:
        super().__init__(f"Invalid HTTP message: {without_stop(what)}." if what else "Invalid HTTP message.")


class RequestTooSlow(HttpRefusal):
    """Header or body did not arrive in time."""

    cause = "too_slow"

    def __init__(self, part: str, limit_s: float) -> None:
        self.limit_s = limit_s
        super().__init__(f"The request's {part} did not arrive in time; the limit is {limit_s:g} seconds.")


class BodyTooSlow(HttpRefusal):
    """The body arrives more slowly than the least rate allowed."""

    cause = "too_slow"

    def __init__(self, least_bytes_per_s: int, window_s: float) -> None:
        super().__init__(
            f"The request's body arrives too slowly; at least {least_bytes_per_s} bytes a second are expected, "
            f"measured over {window_s:g} seconds."
        )


class TargetTooLong(HttpRefusal):
    """The request line is over its limit."""

    cause = "too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request line is longer than {limit_bytes} bytes.")


class HeadersTooLarge(HttpRefusal):
    """Too many header bytes, or too many header lines."""

    cause = "too_large"

    def __init__(self, limit: int, unit: str) -> None:
        super().__init__(f"The request's header has more than {limit} {unit}.")


class ExpectationFailed(HttpRefusal):
    """The request has an `Expect` other than `100-continue`."""

    cause = "malformed"

    def __init__(self) -> None:
        super().__init__("The only expectation that can be met is 100-continue.")


class ForeignOrigin(ClientError):
    """A browser sent a request for a page of another site, and no key shows that its user meant it.

    `origin` is the page's, empty where the browser does not name it.
    """

    cause = "foreign_origin"

    def __init__(self, origin: str) -> None:
        self.origin = origin
        page = f"a page of {_quoted(origin)}" if origin else "a page of another site"
        super().__init__(
            f"A browser sent this request for {page}. This address asks for no key, so what changes something, or "
            "follows the logs, is taken from no other site's pages, unless cors_allowed_origin names their origin."
        )


_HOST_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


class ForeignHost(ClientError):
    """The request is for a host that is not known to be this server."""

    cause = "foreign_host"

    def __init__(self, host: str) -> None:
        self.host = host
        name = re.sub(r":[0-9]{1,5}$", "", host)
        step = f"set allowed_hosts={name}" if _HOST_NAME.fullmatch(name) else "set allowed_hosts to its names"
        super().__init__(
            f"This request is for the host {_quoted(host)}, which is not a name of this server. If it is meant to be, "
            f"{step}; without keys, and on loopback, it answers for the machine's own names and those."
        )


class TooManyConnections(Unavailable):
    """The server, or the client's address, has as many connections as it may have."""

    cause = "connections"
    retry_after_s = 1.0

    def __init__(self, scope: str, limit: int) -> None:
        super().__init__(f"Too many connections: {limit} are open for {scope}. Close some, or try again later.")


_NO_ROOM = {
    "no_room": "The server holds as many bytes of requests and answers as it may",
    "too_slow": "The request's body arrives too slowly to keep its place while others wait for room",
    "untaken": "The request waits behind an answer that its client does not take, and others wait for its room",
}


class NoRoomForBody(Unavailable):
    """The server holds as many bytes of requests and answers as it may."""

    retry_after_s = 1.0

    def __init__(self, limit_bytes: int, why: str = "no_room") -> None:
        self.cause = "bytes_in_flight" if why == "no_room" else "bytes_in_flight_slow"
        super().__init__(f"{_NO_ROOM[why]} (max_bytes_in_flight, {limit_bytes} bytes). Try again later.")


class ErrorAnswer(NamedTuple):
    """An error as HTTP: status, the whole body, and all headers of its own, the content type among them."""

    status: int
    body: bytes
    headers: list[tuple[str, str]]


_TABLE: dict[type[BaseException], tuple[int, str]] = {
    MalformedRequest: (400, "BadRequestException"),
    RequestTooSlow: (408, "RequestTimeoutException"),
    BodyTooSlow: (408, "RequestTimeoutException"),
    TargetTooLong: (414, "RequestUriTooLongException"),
    HeadersTooLarge: (431, "RequestHeaderFieldsTooLargeException"),
    ExpectationFailed: (417, "ExpectationFailedException"),
    ClientError: (400, "BadRequestException"),
    BadInput: (400, "BadRequestException"),
    BodyTooLarge: (413, "RequestEntityTooLargeException"),
    UnknownEncoding: (415, "UnsupportedMediaTypeException"),
    RouteNotFound: (404, "ResourceNotFoundException"),
    MethodNotAllowed: (405, "MethodNotAllowedException"),
    InvalidToken: (400, "InvalidKeyException"),
    MissingKey: (401, "InvalidKeyException"),
    ExpiredKey: (401, "InvalidKeyException"),
    WrongKey: (403, "InvalidKeyException"),
    ManagementClosed: (403, "ManagementClosedException"),
    ControlClosed: (403, "ManagementClosedException"),
    ModelApiClosed: (403, "ModelException"),
    ForeignOrigin: (403, "ForeignOriginException"),
    ForeignHost: (403, "ForeignHostException"),
    ModelNotFound: (404, "ModelNotFoundException"),
    VersionNotFound: (404, "ModelVersionNotFoundException"),
    ArchiveNotFound: (404, "ModelNotFoundException"),
    RequestUnknown: (404, "ResourceNotFoundException"),
    ProfileUnknown: (404, "ResourceNotFoundException"),
    CannotReplay: (409, "ConflictStatusException"),
    CannotProfile: (409, "ConflictStatusException"),
    ArchiveExists: (500, INTERNAL),
    DownloadFailed: (400, "DownloadArchiveException"),
    DownloadNotFound: (404, "ResourceNotFoundException"),
    OtherArchiveThere: (409, "ConflictStatusException"),
    ArchiveNotAsSaid: (400, "BadRequestException"),
    TrustedByName: (403, "UploadRefusedException"),
    StoreNotWritable: (403, "UploadRefusedException"),
    UploadsClosed: (403, "UploadRefusedException"),
    VersionConflict: (409, "ConflictStatusException"),
    WorkflowNotFound: (404, "WorkflowNotFoundException"),
    WorkflowArchiveNotFound: (404, "WorkflowNotFoundException"),
    WatchNotFound: (404, "ResourceNotFoundException"),
    WorkflowConflict: (409, "ConflictStatusException"),
    WorkflowFailed: (500, "WorkflowException"),
    DesiredStateDecides: (409, "ConflictStatusException"),
    DesiredStateMoved: (409, "ConflictStatusException"),
    ApplyUnderWay: (409, "ConflictStatusException"),
    NothingToUndo: (409, "ConflictStatusException"),
    WouldUnload: (409, "ConflictStatusException"),
    ApplyFailed: (500, "DesiredStateException"),
    LabelNotFound: (404, "ModelVersionNotFoundException"),
    ShadowNotFound: (404, "ResourceNotFoundException"),
    RolloutNotFound: (404, "ResourceNotFoundException"),
    RolloutUnderWay: (409, "ConflictStatusException"),
    VersionInUse: (409, "ConflictStatusException"),
    SwapUnderWay: (409, "ConflictStatusException"),
    DefaultVersionInUse: (403, "InvalidModelVersionException"),
    Unavailable: (503, "ServiceUnavailableException"),
    DeadlinePassed: (504, "RequestTimeoutException"),
    OutOfMemory: (507, INTERNAL),
    LoadFailed: (500, INTERNAL),
    NotEnoughDevices: (500, "WorkerInitializationException"),
    NotEnoughMemory: (507, INTERNAL),
    CleanUpTimedOut: (408, "RequestTimeoutException"),
    BadArchive: (400, "InvalidModelException"),
    DependencyFailed: (400, "ModelException"),
    BadWorkflow: (400, "InvalidWorkflowException"),
    BadDag: (400, "InvalidDAGException"),
    BadSettings: (400, "BadRequestException"),
    MarserveError: (500, INTERNAL),
}

# Errors that mean a full or stopping server; a setting may give them another status than 503.
OVERLOAD = (
    *(QueueFull, NoTicket, SequencesFull, NoDescribeRoom, WaitTooLong, WorkflowBusy, Draining, TooManyConnections),
    *(NoRoomForBody, TooManyUploads),
)

_encoder = msgspec.json.Encoder()


class ErrorRules(NamedTuple):
    """What settings say of errors' statuses, for all surfaces. The defaults are TorchServe's.

    `overload_status` is that of a full or stopping server (429, for clients that retry only on that), `handler_status`
    that of a handler that failed without a status of its author's choice. Unless `exposes` is off, the body of a
    handler's failure has a key `exception`: what was raised, with its traceback where it says so. Unless
    `as_recorded`, messages are marserve's own, an error about a name that is missing names what is there, and the type
    of a handler's 4xx is that of a client's mistake. `with_own_paths` gives what was raised the paths of its
    author's files.
    """

    overload_status: int = 503
    handler_status: int = 503
    exposes: Literal["off", "message", "traceback"] = "off"
    as_recorded: bool = True
    with_own_paths: Callable[[str], str] = str


AS_RECORDED: Final = ErrorRules()


def error_status(error: BaseException, rules: ErrorRules = AS_RECORDED) -> int:
    """The status of an error; 500 for what marserve did not raise on purpose."""
    if isinstance(error, HandlerFailed):
        if error.code is None:
            return rules.handler_status
        # The author chooses, but neither 1xx nor 413, which is about the request (contract §1.5).
        if error.code == 413:
            return 507
        return error.code if 200 <= error.code <= 999 else 500
    if isinstance(error, HandlerNotFound) and not rules.as_recorded:
        return _TABLE[BadArchive][0]
    if isinstance(error, LoadFailed) and error.out_of_memory:
        return 507
    if isinstance(error, WorkflowFailed | ApplyFailed) and error.is_authors:
        return 400
    if isinstance(error, OVERLOAD):
        return rules.overload_status
    return _entry(error)[0]


def error_type(error: BaseException, rules: ErrorRules = AS_RECORDED) -> str:
    """TorchServe's word for the kind of error."""
    if not rules.as_recorded and isinstance(error, HandlerFailed) and 400 <= error_status(error, rules) < 500:
        return _entry(BadInput(error.message))[1]
    if not rules.as_recorded and isinstance(error, HandlerNotFound):
        return _TABLE[BadArchive][1]
    return _entry(error)[1]


def error_message(error: BaseException, rules: ErrorRules = AS_RECORDED) -> str:
    """The sentence for the client. That of an unforeseen error says nothing of it: its text may hold anything."""
    if not isinstance(error, MarserveError):
        return "The server failed to handle the request."
    if rules.as_recorded:
        return error.message
    if isinstance(error, ModelNotFound | VersionNotFound):
        return error.message + _what_is_there(error)
    return error.own_message


def _what_is_there(error: ModelNotFound | VersionNotFound) -> str:
    """The end of a sentence about a missing name: the name it may stand for, or a model's versions.

    All models are never listed: a client of one need not learn of the others. Few names are compared, as the time of it
    is the event loop's.
    """
    if isinstance(error, ModelNotFound):
        if error.known is None:
            return ""
        if not error.known:
            return "; no model is registered"
        if len(error.model) > MOST_COMPARED_CHARACTERS:
            return ""
        return did_you_mean(error.model, islice(error.known, MOST_COMPARED))
    if not error.known:
        return ""
    shown = list(islice(error.known, MOST_SHOWN))
    more = f" and {len(error.known) - MOST_SHOWN} more" if len(error.known) > MOST_SHOWN else ""
    return f"; it has {', '.join(shown)}{more}"


def error_body(error: BaseException, rules: ErrorRules = AS_RECORDED, *, is_open_inference: bool = False) -> bytes:
    """The error object, `code`, `type` and `message`, indented by two, with a line end (contract §1.5).

    With `rules.exposes` it has `exception` as well, if a handler raised one. Beyond TorchServe's answers it has
    `reason`, where an archive or a version could not be taken, and on routes of the Open Inference Protocol and of
    KServe's V1 `error`, which their clients read.
    """
    document: dict[str, Any] = {
        "code": error_status(error, rules),
        "type": error_type(error, rules),
        "message": error_message(error, rules).encode("utf-8", "replace").decode(),
    }
    if is_open_inference and not rules.as_recorded:
        document["error"] = document["message"]
    reason = "" if rules.as_recorded else reason_of(error)
    if without_stop(reason) not in document["message"]:
        document["reason"] = reason.encode("utf-8", "replace").decode()
    if rules.exposes != "off" and isinstance(error, HandlerFailed) and error.thrown is not None:
        document["exception"] = exposed(error.thrown, rules)
    return msgspec.json.format(_encoder.encode(document), indent=2) + b"\n"


def reason_of(error: BaseException) -> str:
    """Why an archive, a workflow or a version could not be taken, if its sentence does not say so; else empty.

    Only the management API raises these; its clients may see the reason.
    """
    if not isinstance(error, LoadFailed | BadWorkflow | WorkflowFailed | DownloadFailed):
        return ""
    return "" if error.reason in error.message else error.reason


def exposed(thrown: Thrown, rules: ErrorRules) -> dict[str, Any]:
    """What was raised, for the body of an answer; `traceback` has its lines, or none."""
    lines = thrown.traceback.rstrip().splitlines() if rules.exposes == "traceback" else []
    texts = [rules.with_own_paths(text) for text in (thrown.type, thrown.message, *lines)]
    kind, message, *lines = [text.encode("utf-8", "replace").decode() for text in texts]
    return {"type": kind, "message": message, "traceback": lines}


def error_headers(error: BaseException) -> list[tuple[str, str]]:
    """Headers of an error beside its content type: `retry-after` (whole seconds), `x-marserve-cause`,
    `www-authenticate`, `allow`."""
    headers = []
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        headers.append(("retry-after", str(come_back_in(error.retry_after_s, spread_s=error.retry_spread_s))))
    if isinstance(error, MarserveError) and error.cause is not None:
        headers.append(("x-marserve-cause", error.cause))
    if isinstance(error, MarserveError) and error.version_header is not None:
        headers.append(error.version_header)
    if isinstance(error, InvalidToken):
        headers.append(("www-authenticate", "Bearer"))
    if isinstance(error, MethodNotAllowed) and error.methods:
        headers.append(("allow", ", ".join(error.methods)))
    return headers


def error_answer(
    error: BaseException, rules: ErrorRules = AS_RECORDED, *, is_open_inference: bool = False
) -> ErrorAnswer:
    """Status, body and headers of an error at once; the content type `application/json` is among the headers."""
    return ErrorAnswer(
        error_status(error, rules),
        error_body(error, rules, is_open_inference=is_open_inference),
        [("content-type", "application/json"), *error_headers(error)],
    )


def _quoted(text: str) -> str:
    """A client's own word, bounded and quoted for a sentence."""
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def _entry(error: BaseException) -> tuple[int, str]:
    for kind in type(error).__mro__:
        entry = _TABLE.get(kind)
        if entry is not None:
            return entry
    return 500, INTERNAL
