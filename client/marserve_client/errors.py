"""The errors of calls: one class for each kind of answer, all below `CallFailed`.

    CallFailed
      NoConnection       no connection came about, so the server got nothing
      ConnectionLost     the connection broke after the request had begun: whether the server ran it is not known
      DeadlinePassed     the time of the call was over: here, or as the server found (504, 408)
      BadAnswer          an answer that no server of these protocols sends
      Refused            the server's own words, of any status that has no class of its own
        BadInput         400; also what is refused here before anything is sent (`status` is None then)
        WrongKey         401 and 403 about the key, and TorchServe's 400
        Forbidden        403 for other reasons
        NotFound         404; the message names what is there, where the server tells it
        Conflict         409
        TooLarge         413
        Overloaded       429 and 503; `retry_after_s` says when to come again, if the server does
        ServerFailed     500, 507 and other 5xx; `exception` has what a handler raised, where the server shows it

Pure: nothing is sent or read here. What each status means is in docs/overload.md and docs/architecture.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# A handler's `BadInput` puts the name of the field before its message, and so do tensors.
_FIELD = re.compile(r"([^\s:]{1,80}): ")
_KEY_TYPE = "InvalidKeyException"
# Of a body that is no error object: so much of it is shown.
_SHOWN_CHARACTERS = 200


class RemoteException(NamedTuple):
    """What a handler raised; `traceback` has its lines, none where the server does not show them."""

    type: str
    message: str
    traceback: tuple[str, ...] = ()


class CallFailed(Exception):
    """A call that got no answer to use.

    `message` is one sentence. `status` is that of the answer, None without one. `request_id` is the server's, under
    which its logs have more. `cause` is the class of cause of `x-marserve-cause`, `type` the server's word for the
    error, `reason` why a model could not be loaded (management). `retry_after_s` is after how many seconds another try
    may succeed, if the server says so. `document` is the body of the answer as an object, empty if it was none.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_id: str | None = None,
        cause: str | None = None,
        type: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
        document: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.request_id = request_id
        self.cause = cause
        self.type = type
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.document: Mapping[str, Any] = document or {}

    def __str__(self) -> str:
        facts = [self.reason.rstrip(".")] if self.reason else []
        facts += [f"status {self.status}"] if self.status is not None else []
        facts += [f"request {self.request_id}"] if self.request_id else []
        return f"{self.message} ({', '.join(facts)})" if facts else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {key: value for key, value in vars(self).items() if key != "message"}
        return _made_again, (type(self), self.message, facts)


def _made_again(kind: type[CallFailed], message: str, facts: dict[str, Any]) -> CallFailed:
    """For pickles: errors come back from other processes as they were."""
    error = kind(message)
    vars(error).update(facts)
    return error


class NoConnection(CallFailed):
    """No connection to the server came about: nothing of the request has been sent."""


class ConnectionLost(CallFailed):
    """The connection broke after `received_bytes` of an answer; whether the server ran the request is not known."""

    received_bytes: int = 0


class DeadlinePassed(CallFailed, TimeoutError):
    """The call took longer than its `timeout`, as the server found (`status` 504 or 408) or this client did (None)."""


class BadAnswer(CallFailed):
    """The answer cannot be read: cut, of another form, or not from a server of this protocol."""


class Refused(CallFailed):
    """The server refused the request, or failed at it."""


class BadInput(Refused, ValueError):
    """The input does not fit. `status` is None where it was refused here, before anything was sent."""

    @property
    def field(self) -> str | None:
        """The field or tensor that does not fit, as the message names it before a colon; else None."""
        found = _FIELD.match(self.message)
        return found[1] if found else None


class WrongKey(Refused):
    """The key is missing, expired or wrong."""


class Forbidden(Refused):
    """The server does not take this order, or not from here."""


class NotFound(Refused):
    """The model, version or other thing is not there."""

    @property
    def arriving(self) -> list[dict[str, Any]]:
        """Archives that the server is fetching for the name, as describe has them."""
        found = self.document.get("arriving")
        return found if isinstance(found, list) else []


class Conflict(Refused):
    """It does not go with what is there or under way."""


class TooLarge(Refused):
    """The body is larger than the server takes."""


class Overloaded(Refused):
    """The server cannot take it now: full, draining, or without a worker."""


class ServerFailed(Refused):
    """The server, the model's handler or its worker failed."""

    @property
    def exception(self) -> RemoteException | None:
        """What the handler raised, where the server's settings show it (`expose_errors`)."""
        found = self.document.get("exception")
        if not isinstance(found, dict):
            return None
        lines = found.get("traceback")
        shown = tuple(map(str, lines)) if isinstance(lines, list) else ()
        return RemoteException(str(found.get("type", "")), str(found.get("message", "")), shown)


_BY_STATUS: dict[int, type[CallFailed]] = {
    400: BadInput,
    401: WrongKey,
    403: Forbidden,
    404: NotFound,
    408: DeadlinePassed,
    409: Conflict,
    413: TooLarge,
    429: Overloaded,
    503: Overloaded,
    504: DeadlinePassed,
}


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> CallFailed:
    """The error of an answer that is no success. `headers` is asked by names in lower case."""
    document = _object(body)
    kind = document.get("type")
    message = document.get("message") or document.get("error")
    if not isinstance(message, str) or not message:
        message = _shown(status, headers, body)
    return class_of(status, kind)(
        message,
        status=status,
        request_id=headers.get("x-request-id"),
        cause=headers.get("x-marserve-cause"),
        type=kind if isinstance(kind, str) else None,
        reason=headers.get("x-marserve-reason"),
        retry_after_s=read_retry_after(headers.get("retry-after")),
        document=document,
    )


def class_of(status: int, kind: object = None) -> type[CallFailed]:
    """The class of a status; `kind` is the server's word, which tells a wrong key also where TorchServe says 400."""
    if kind == _KEY_TYPE:
        return WrongKey
    return _BY_STATUS.get(status) or (ServerFailed if status >= 500 else Refused)


def read_retry_after(value: str | None) -> float | None:
    """`Retry-After` in seconds. None without one, and for a date: clocks differ, and marserve sends seconds."""
    text = (value or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _shown(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """For an answer that is no error object: another server's page, or a handler's own body."""
    if 300 <= status < 400 and "location" in headers:
        return f"The address leads elsewhere ({headers['location']}); name that one."
    text = body.decode("utf-8", "replace").strip()
    if not text:
        return f"The answer was {status} without a message."
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
