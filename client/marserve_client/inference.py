"""The calls of the inference API: predictions, tensors, streams, health. Each function makes a call; none sends it."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, NamedTuple, TypeVar

import httpx

from marserve_client.calls import (
    DEFAULT,
    Blocking,
    Call,
    Doable,
    Form,
    Pause,
    Reply,
    Session,
    Several,
    Steps,
    Timeout,
    path_of,
)
from marserve_client.errors import (
    BadAnswer,
    BadInput,
    CallFailed,
    ConnectionLost,
    DeadlinePassed,
    NoConnection,
    NotFound,
    Overloaded,
    WrongKey,
)
from marserve_client.streams import Chunks, Decoder, Event, Events
from marserve_client.tensors import HEADER_LENGTH, Tensors, read_answer, write_request

T = TypeVar("T")
Json = dict[str, Any] | list[Any] | float | int | bool | None
Data = bytes | bytearray | memoryview | str | Path | BinaryIO | Json
"""A body: bytes, text, the content of a file, or what is sent as JSON."""
File = bytes | Path | BinaryIO | tuple[str, bytes, str]
"""A file of a form: its content, where it lies, an open file, or (name, content, content type)."""

PRIORITY_HEADER: Final = "x-marserve-priority"
VERSION_HEADER: Final = "x-marserve-version"
EVENT_STREAM: Final = "text/event-stream"
SILENCE_S: Final = 60.0
QUICK_S: Final = 10.0
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
_NO_ROUTE: Final = "ResourceNotFoundException"


class Answer(NamedTuple):
    """What a model answered. `headers` are httpx's, whose names have any case."""

    content: bytes
    status: int
    headers: httpx.Headers

    @property
    def text(self) -> str:
        """The body as UTF-8, with a replacement sign for bytes that are not UTF-8."""
        return self.content.decode("utf-8", "replace")

    @property
    def content_type(self) -> str:
        """The type that the server names, empty without one."""
        return str(self.headers.get("content-type", ""))

    @property
    def request_id(self) -> str | None:
        """The server's id of the request."""
        found: str | None = self.headers.get("x-request-id")
        return found

    @property
    def model_version(self) -> str | None:
        """The version that answered, where the server names it."""
        found: str | None = self.headers.get(VERSION_HEADER)
        return found

    def json(self) -> Any:
        """The body as JSON. Raises BadAnswer."""
        return read_json(self)


class Readiness(NamedTuple):
    """Whether requests should be sent, and if not, why."""

    is_ready: bool
    reasons: tuple[str, ...]


def read_json(answer: Answer | Reply) -> Any:
    """The body as JSON. Raises BadAnswer."""
    body = answer.content if isinstance(answer, Answer) else answer.body
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        shown = body[:80].decode("utf-8", "replace")
        raise BadAnswer(
            f"The answer is no JSON ({error}); it begins {shown!r}.",
            status=answer.status,
            request_id=answer.headers.get("x-request-id"),
        ) from None


def read_object(reply: Reply) -> dict[str, Any]:
    """The body as a JSON object. Raises BadAnswer."""
    document = read_json(reply)
    if not isinstance(document, dict):
        raise BadAnswer(
            f"The answer is no JSON object but {type(document).__name__}.",
            status=reply.status,
            request_id=reply.headers.get("x-request-id"),
        )
    return document


# -------------------------------------------------------------------------------------------------------- predictions


def predict(
    model: str,
    data: Data = None,
    *,
    version: str | None = None,
    files: Mapping[str, File] | None = None,
    content_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    priority: int | None = None,
    timeout: Timeout = DEFAULT,
) -> Doable[Answer]:
    """Send one input to a model, and return its answer.

    `data` is the body: bytes go as they are, a text as `text/plain`, a `Path` or an open binary file by its content
    (with the type that its name says), anything else as JSON. With `files` the body is a form: `data` is then a dict
    of its other fields, texts or JSON. `content_type` takes the place of the type found. `version` is a version or a
    label, `priority` 0 (most urgent) to 9, `headers` are sent as they are.

    `timeout` in seconds bounds the whole call with its retries, and is sent to the server. Raises CallFailed.
    """
    return _predict("predictions", Answering(), model, data, version, files, content_type, headers, priority, timeout)


def explain(
    model: str,
    data: Data = None,
    *,
    version: str | None = None,
    files: Mapping[str, File] | None = None,
    content_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    priority: int | None = None,
    timeout: Timeout = DEFAULT,
) -> Doable[Answer]:
    """As `predict`, and the model's handler is asked for an explanation."""
    return _predict("explanations", Answering(), model, data, version, files, content_type, headers, priority, timeout)


@dataclass(frozen=True)
class Answering:
    """How an answer is taken: whole, or while it comes. `silence_s` is then the longest time without a byte."""

    streams: bool = False
    silence_s: float | None = None
    accept: str | None = None


def _predict(
    route: str,
    answering: Answering,
    model: str,
    data: Data,
    version: str | None,
    files: Mapping[str, File] | None,
    content_type: str | None,
    headers: Mapping[str, str] | None,
    priority: int | None,
    timeout: Timeout,
) -> Doable[Any]:
    path = path_of(route, model) if version is None else path_of(route, model, version)
    sent = _headers(headers, priority)
    if answering.accept is not None:
        sent.setdefault("accept", answering.accept)
    call: Call[Any] = Call(
        "POST",
        path,
        _whole if answering.streams else _answer,
        headers=sent,
        model=model,
        timeout=timeout,
        repeat="if_refused",
        tells_deadline=True,
        streams=answering.streams,
        silence_s=answering.silence_s,
    )
    if files is None and isinstance(data, (bytes, str)):
        _set_body(call, data, content_type)
        return call
    if files is None and not isinstance(data, Path) and not hasattr(data, "read"):
        _set_body(call, data, content_type)
        return call
    return Several(partial(_with_files, call, data, files, content_type))


def _answer(reply: Reply) -> Answer:
    return Answer(reply.body, reply.status, reply.headers)


def _whole(reply: Reply) -> Reply:
    return reply


def _headers(headers: Mapping[str, str] | None, priority: int | None) -> dict[str, str]:
    sent = {name.lower(): value for name, value in headers.items()} if headers else {}
    if priority is not None:
        if type(priority) is not int or not 0 <= priority <= 9:
            raise BadInput(f"priority: is {priority!r}; it must be a whole number from 0 (most urgent) to 9.")
        sent[PRIORITY_HEADER] = str(priority)
    return sent


def _set_body(call: Call[Any], data: Any, content_type: str | None, guessed: str | None = None) -> None:
    """The body of a call, and its type: the one that is given, else that of the call's headers, else the one found."""
    found = guessed
    if isinstance(data, bytes):
        call.content = data
    elif isinstance(data, str):
        call.content, found = data.encode(), "text/plain; charset=utf-8"
    elif isinstance(data, (bytearray, memoryview)):
        call.content = bytes(data)
    elif data is None:
        call.content = b""
    else:
        try:
            call.content = json.dumps(data, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(
                f"data: {type(data).__name__} cannot be sent as JSON ({error}); give bytes, text, a Path, an open "
                "file, or what JSON can say. Arrays are sent by infer()."
            ) from None
        found = "application/json"
    kind = content_type or found
    if kind is not None and (content_type is not None or "content-type" not in call.headers):
        call.headers = {**call.headers, "content-type": kind}


def _with_files(
    call: Call[T], data: Data, files: Mapping[str, File] | None, content_type: str | None, session: Session
) -> Steps[T]:
    """Read what is to be sent, then send it. It is read first, so that another try sends the same."""
    if files is None:
        _, content, guessed = yield Blocking(partial(_read_file, "data", data))
        _set_body(call, content, content_type, guessed)
    else:
        if content_type is not None:
            raise BadInput("content_type: a form has a type of its own; leave it out, or leave files out.")
        fields = _fields(data)
        read = []
        for name, file in files.items():
            read.append((name, *(yield Blocking(partial(_read_file, name, file)))))
        call.form = Form(fields, tuple(read))
    return (yield from call.steps(session))


def _fields(data: Data) -> dict[str, str]:
    """The fields of a form beside its files."""
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise BadInput(f"data: got {type(data).__name__}; beside files it is a dict of the form's other fields.")
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in data.items()}


def _read_file(field: str, file: Any) -> tuple[str, bytes, str | None]:
    """Name, content and type of a file. Raises BadInput for one that cannot be read."""
    if isinstance(file, tuple):
        name, content, kind = file
        return name, content, kind
    if isinstance(file, (bytes, bytearray, memoryview)):
        return field, bytes(file), None
    try:
        if isinstance(file, Path):
            name, content = file.name, file.read_bytes()
        else:
            name, content = Path(str(getattr(file, "name", field))).name, file.read()
    except OSError as error:
        raise BadInput(f"{field}: {error.filename or file} cannot be read ({error.strerror or error}).") from None
    except AttributeError:
        raise BadInput(
            f"{field}: got {type(file).__name__}; a file is bytes, a Path, an open file, or (name, bytes, type)."
        ) from None
    if not isinstance(content, bytes):
        raise BadInput(f"{field}: the file is open for text; open it with 'rb'.")
    return name, content, mimetypes.guess_type(name)[0]


# ------------------------------------------------------------------------------------------------------------- streams


@dataclass
class Opening(Generic[T]):
    """A call whose answer is read while it comes, and what makes items of its bytes."""

    call: Doable[Reply]
    decoder: Callable[[], Decoder[T]]


def stream(
    model: str,
    data: Data = None,
    *,
    version: str | None = None,
    files: Mapping[str, File] | None = None,
    content_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    priority: int | None = None,
    timeout: Timeout = None,
    silence: float | None = SILENCE_S,
) -> Opening[bytes]:
    """As `predict`, and the answer comes in pieces: an iterator of chunks of bytes.

    Errors before the first piece are raised by this call, later ones by the iterator. `silence` in seconds is the
    longest time without a byte, `timeout` that of the whole stream, sent to the server. Close the iterator, or
    use it by `with`, to end the work early.
    """
    answering = Answering(streams=True, silence_s=silence)
    call = _predict("predictions", answering, model, data, version, files, content_type, headers, priority, timeout)
    return Opening(call, Chunks)


def events(
    model: str,
    data: Data = None,
    *,
    version: str | None = None,
    files: Mapping[str, File] | None = None,
    content_type: str | None = None,
    headers: Mapping[str, str] | None = None,
    priority: int | None = None,
    timeout: Timeout = None,
    silence: float | None = SILENCE_S,
) -> Opening[Event]:
    """As `stream`, and the answer is asked for as Server-Sent Events: an iterator of `Event`.

    The server's last event, `end`, is left out; its event `error` is raised as the error of that status.
    """
    answering = Answering(streams=True, silence_s=silence, accept=EVENT_STREAM)
    call = _predict("predictions", answering, model, data, version, files, content_type, headers, priority, timeout)
    return Opening(call, Events)


# ------------------------------------------------------------------------------------------------------------- tensors


def infer(
    model: str,
    inputs: Mapping[str, Any],
    *,
    version: str | None = None,
    outputs: Sequence[str] | None = None,
    datatypes: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    priority: int | None = None,
    timeout: Timeout = DEFAULT,
) -> Call[Tensors]:
    """Send named tensors by the Open Inference Protocol, and return the outputs by name.

    `inputs` are arrays of numpy, tensors of torch, or nested lists; each has the batch axis. `outputs` names those that
    are wanted, `datatypes` the protocol's type (`FP32`, `BYTES`, …) of inputs that do not say it themselves. Outputs
    are arrays of numpy, or nested lists where it is not installed. Raises BadInput with the tensor's name.
    """
    path = path_of("v2", "models", model, *(() if version is None else ("versions", version)), "infer")
    body, described = write_request(inputs, datatypes=datatypes, outputs=outputs, parameters=parameters)
    return Call(
        "POST",
        path,
        _read_tensors,
        headers={**_headers(headers, priority), **described},
        content=body,
        model=model,
        timeout=timeout,
        repeat="if_refused",
        tells_deadline=True,
    )


def _read_tensors(reply: Reply) -> Tensors:
    headers = reply.headers
    return read_answer(reply.body, headers.get(HEADER_LENGTH), headers.get("x-request-id"))


def metadata(model: str, *, version: str | None = None, timeout: Timeout = QUICK_S) -> Call[dict[str, Any]]:
    """The model's versions, and the tensors that it takes and gives, as the Open Inference Protocol says them."""
    path = path_of("v2", "models", model, *(() if version is None else ("versions", version)))
    return Call("GET", path, read_object, model=model, timeout=timeout, repeat="reads")


# -------------------------------------------------------------------------------------------------------------- health


def is_alive(*, timeout: Timeout = QUICK_S) -> Several[bool]:
    """Whether a server answers at the inference address. One try."""

    def course(session: Session) -> Steps[bool]:
        try:
            yield from Call("GET", "/livez", read_object, timeout=timeout, repeat="once").steps(session)
        except (BadInput, WrongKey):
            raise
        except CallFailed:
            return False
        return True

    return Several(course)


def readiness(*, timeout: Timeout = QUICK_S) -> Several[Readiness]:
    """Whether requests should be sent to this server, and if not, why."""

    def course(session: Session) -> Steps[Readiness]:
        try:
            document = yield from Call("GET", "/readyz", read_object, timeout=timeout, repeat="reads").steps(session)
        except Overloaded as refused:
            if "reasons" not in refused.document:
                raise
            return Readiness(False, _reasons(refused.document))
        return Readiness(True, _reasons(document))

    return Several(course)


def _reasons(document: Mapping[str, Any]) -> tuple[str, ...]:
    found = document.get("reasons")
    return tuple(map(str, found)) if isinstance(found, list) else ()


def wait_until_ready(model: str | None = None, *, version: str | None = None, timeout: float = 60.0) -> Several[None]:
    """Wait until the server can be sent requests, or this model of it answers.

    A server that is not up yet and a model that is not there yet are waited for. Raises DeadlinePassed after `timeout`
    seconds, with what was in the way, and at once what waiting cannot mend, such as a wrong key.

    For a model the Open Inference Protocol is asked, which is on under `marserve`. Where it is off the management
    address is asked, if the client has one.
    """
    if model is not None:
        path_of(model, *(() if version is None else (version,)))
    return Several(partial(_wait, model, version, timeout))


def _wait(model: str | None, version: str | None, timeout_s: float, session: Session) -> Steps[None]:
    ends = session.clock() + timeout_s
    pause_s, asks_management = _FIRST_LOOK_S, False
    before: CallFailed | str | None = None
    while True:
        left_s = max(ends - session.clock(), 0.001)
        found = yield from _look(model, version, min(QUICK_S, left_s), asks_management, session)
        if found is None:
            return
        if before is not None and isinstance(found, DeadlinePassed) and found.status is None:
            found = before  # the last look had no time left: what the one before saw says more
        before = found
        if isinstance(found, NotFound) and found.type == _NO_ROUTE and not asks_management:
            if "management" not in session.addresses or version is not None:
                raise found
            asks_management = True
            continue
        if session.clock() + pause_s >= ends:
            what = "The server" if model is None else f"Model {model}" + (f" {version}" if version else "")
            last = f"{found.message.rstrip('.')}" if isinstance(found, CallFailed) else found
            raise DeadlinePassed(
                f"{what} was not ready after {timeout_s:g} s: {last}.",
                request_id=found.request_id if isinstance(found, CallFailed) else None,
            ) from (found if isinstance(found, CallFailed) else None)
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)


def _look(
    model: str | None, version: str | None, timeout_s: float, asks_management: bool, session: Session
) -> Steps[CallFailed | str | None]:
    """None if it is ready, else what is in the way. Raises what waiting cannot mend."""
    call: Call[dict[str, Any]]
    if model is None:
        call = Call("GET", "/readyz", read_object)
    elif asks_management:
        call = Call("GET", path_of("v1", "models", model), read_object, api="management")
    else:
        versions = () if version is None else ("versions", version)
        call = Call("GET", path_of("v2", "models", model, *versions, "ready"), read_object)
    call.model, call.timeout, call.repeat = model, timeout_s, "once"
    try:
        document = yield from call.steps(session)
    except (NoConnection, ConnectionLost, NotFound, DeadlinePassed) as failure:
        return failure
    except Overloaded as refused:
        reasons = _reasons(refused.document)
        return "; ".join(reasons) if reasons else "it is not ready" if "ready" in refused.document else refused
    return None if document.get("ready", True) is True else "it is not ready"
