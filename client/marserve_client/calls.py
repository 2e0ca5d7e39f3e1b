"""A call as data: what is sent, how the answer is read, how often it may be tried; and the steps that carry it out.

`carry_out` is the whole course of a call, without I/O: a generator that yields actions (`Try`, `Pause`, `Blocking`) and
is sent their outcomes. `client` and `aio` only do the actions, so both behave alike.
"""

from __future__ import annotations

import enum
import random
import re
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar
from urllib.parse import quote, urlencode

import httpx

from marserve_client.errors import (
    BadAnswer,
    BadInput,
    CallFailed,
    ConnectionLost,
    DeadlinePassed,
    NoConnection,
    refusal,
)
from marserve_client.retries import Repeat, Retries, pause_s

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Api = Literal["inference", "management"]

TIMEOUT_HEADER: Final = "x-marserve-timeout-ms"
MOST_TIMEOUT_MS: Final = 2**31 - 1
# The server gets the time that is left, and its answer that it is over (504, with a request id) is waited for a
# little longer.
GRACE_S: Final = 0.25
MOST_KNOWN_URLS: Final = 512
# RFC 9110, 5.6.2 and 5.5, without bytes beyond ASCII: httpx would refuse them in its own words.
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE: Final = re.compile(r"(?:[!-~](?:[\t -~]*[!-~])?)?")
_LENGTHS: Final = frozenset({"content-length", "transfer-encoding"})


class Default(enum.Enum):
    """The time of a call that names none: the client's."""

    DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return self.name


DEFAULT: Final = Default.DEFAULT
Timeout = float | None | Literal[Default.DEFAULT]
"""Seconds for the whole call, tries and pauses together; None: no bound."""


class Form(NamedTuple):
    """A form: its fields, and files as (field, file name, content, content type)."""

    fields: Mapping[str, str]
    files: tuple[tuple[str, str, bytes, str | None], ...]


class Reply(NamedTuple):
    """An answer. Of a call that streams, `response` is still open and `body` empty."""

    status: int
    headers: httpx.Headers
    body: bytes
    response: httpx.Response | None = None
    watch: Watch | None = None


@dataclass
class Call(Generic[T]):
    """One call. `read` makes its result of a reply below 300, and raises BadAnswer.

    `tells_deadline` sends the server the time that is left. `file` is sent as the body, piece by piece. With `streams`
    the result is the reply, still open; `silence_s` is the longest time without a byte of it.
    """

    method: str
    path: str
    read: Callable[[Reply], T]
    api: Api = "inference"
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] | None = None
    content: bytes | None = None
    form: Form | None = None
    file: Path | None = None
    model: str | None = None
    timeout: Timeout = DEFAULT
    repeat: Repeat = "if_unsent"
    tells_deadline: bool = False
    streams: bool = False
    silence_s: float | None = None

    def steps(self, session: Session) -> Steps[T]:
        """The course of the call."""
        return carry_out(self, session)


# -------------------------------------------------------------------------------------------------------------- hooks


@dataclass
class Sending:
    """A try that is about to be sent. What a hook writes into `headers` is sent with it.

    `url` is the whole address, `model` the model's name where the call is about one, `number` counts the tries of the
    call from 1.
    """

    method: str
    url: str
    model: str | None
    number: int
    headers: dict[str, str]


@dataclass(frozen=True)
class Sent:
    """What became of a try: of a stream, when it has ended. `seconds` is from the sending to the last byte.

    `error` is what is raised of it, unless the call is tried again. `status` is None without an answer.
    """

    status: int | None
    seconds: float
    request_id: str | None
    error: CallFailed | None


Before = Callable[[Sending], None]
After = Callable[[Sending, Sent], None]


# ------------------------------------------------------------------------------------------------------------ actions


class Try(NamedTuple):
    """Send this and bring the reply; errors of httpx go back to the steps. `options` are of httpx's `build_request`."""

    call: Call[Any]
    sending: Sending
    url: httpx.URL
    timeout: httpx.Timeout
    options: Mapping[str, Any]
    watch: Watch


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Blocking(NamedTuple):
    """Run this, which reads files: beside the event loop where there is one."""

    function: Callable[[], Any]


Action = Try | Pause | Blocking
Steps = Generator[Action, Any, T]


class Doable(Protocol[T_co]):
    """Something with steps: one call, or several."""

    def steps(self, session: Session) -> Generator[Action, Any, T_co]:
        """Its course."""


@dataclass
class Several(Generic[T]):
    """Calls one after another, as a function of the session says."""

    course: Callable[[Session], Steps[T]]

    def steps(self, session: Session) -> Steps[T]:
        """Its course."""
        return self.course(session)


class Watch:
    """The clock of one try: how much time is left, and the note to the hooks when it has ended, once."""

    def __init__(self, session: Session, sending: Sending, ends: float | None) -> None:
        self._session, self._sending, self._ends = session, sending, ends
        self._begun = session.clock()
        self._has_ended = False
        self.status: int | None = None
        self.request_id: str | None = None
        self.received_bytes = 0

    def saw(self, reply: httpx.Response) -> None:
        """The head of an answer has come."""
        self.status, self.request_id = reply.status_code, reply.headers.get("x-request-id")

    def check(self, count: int = 0) -> None:
        """`count` more bytes have come. Raises DeadlinePassed."""
        self.received_bytes += count
        if self._ends is not None and self._session.clock() > self._ends + GRACE_S:
            raise self.too_late()

    def _is_over(self) -> bool:
        """Whether the time of the call is over; the last thousandths do not count, as timers may be early."""
        return self._ends is not None and self._session.clock() > self._ends - 0.005

    def too_late(self) -> DeadlinePassed:
        """The error of a call whose time is over."""
        what = f"{self._sending.method} {self._sending.url}"
        taken_s = self._session.clock() - self._begun
        came = f" after {self.received_bytes} bytes of its answer" if self.received_bytes else ""
        return DeadlinePassed(
            f"The time for {what} was over after {taken_s:.3g} s{came}; give it a longer timeout, or a smaller input.",
            request_id=self.request_id,
        )

    def failure(self, error: Exception) -> CallFailed:
        """The error of what happened to the connection."""
        if isinstance(error, CallFailed):
            return error
        where = self._sending.url
        if isinstance(error, httpx.PoolTimeout):
            return DeadlinePassed(
                f"All connections to {where} were busy until the call's time was over; raise max_connections."
            )
        if isinstance(error, httpx.ConnectTimeout) and self._is_over():
            return self.too_late()
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return NoConnection(f"No server answers at {where} ({_reason(error)}).")
        if isinstance(error, httpx.TimeoutException):
            return self.too_late()
        if isinstance(error, httpx.DecodingError):
            return BadAnswer(
                f"The answer of {where} has another encoding than it says ({_reason(error)}).",
                status=self.status,
                request_id=self.request_id,
            )
        came = f"after {self.received_bytes} bytes of its answer" if self.status is not None else "before an answer"
        lost = ConnectionLost(
            f"The connection to {where} broke {came} ({_reason(error)}).",
            request_id=self.request_id,
        )
        # A head without a body counts, too: the server has begun to answer.
        lost.received_bytes = self.received_bytes or (self.status is not None)
        return lost

    def end(self, error: CallFailed | None) -> None:
        """Tell the hooks; later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        for after in self._session.after:
            seconds = self._session.clock() - self._begun
            after(self._sending, Sent(self.status, seconds, self.request_id, error))


def _reason(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__


# ------------------------------------------------------------------------------------------------------------ session


@dataclass
class Session:
    """What all calls of a client share. `addresses` has no address of an API that the client was given none for."""

    addresses: Mapping[Api, str]
    key: Callable[[Api], str | None]
    retries: Retries
    timeout_s: float | None
    connect_timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    before: tuple[Before, ...] = ()
    after: tuple[After, ...] = ()
    urls: dict[str, httpx.URL] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random

    def prepare(self, call: Call[Any], number: int, left_s: float | None) -> Try:
        """The next try of a call, with `left_s` of its time left. Raises BadInput without an address."""
        address = self.addresses.get(call.api)
        if address is None:
            raise BadInput(f"{call.api}: this client has no address of that API; make it with {call.api}='http://…'.")
        headers = {**self.headers, **call.headers}
        key = self.key(call.api)
        if key and "authorization" not in call.headers:
            headers["authorization"] = f"Bearer {key}"
        connect_s, read_s = self.connect_timeout_s, call.silence_s
        if left_s is not None:
            if call.tells_deadline:
                headers[TIMEOUT_HEADER] = str(min(max(int(left_s * 1000), 1), MOST_TIMEOUT_MS))
            connect_s = min(connect_s, left_s)
            read_s = left_s + GRACE_S if read_s is None else min(read_s, left_s + GRACE_S)
        url = address + call.path if call.query is None else f"{address}{call.path}?{urlencode(call.query)}"
        sending = Sending(call.method, url, call.model, number, headers)
        for before in self.before:
            before(sending)
        _check_headers(headers, call.file)
        options: dict[str, Any] = {"headers": headers}
        if call.form is not None:
            options["data"] = call.form.fields
            options["files"] = [(name, (file, content, kind)) for name, file, content, kind in call.form.files]
        watch = Watch(self, sending, None if left_s is None else self.clock() + left_s)
        return Try(call, sending, self._url(url), httpx.Timeout(read_s, connect=connect_s, pool=left_s), options, watch)

    def _url(self, url: str) -> httpx.URL:
        """The address as httpx has it, read once: that takes 40 us, and a program asks few addresses many times."""
        known = self.urls.get(url)
        if known is None:
            if len(self.urls) >= MOST_KNOWN_URLS:
                self.urls.clear()
            try:
                known = httpx.URL(url)
            except httpx.InvalidURL as error:
                raise BadInput(f"The address of the call cannot be sent ({_reason(error)}).") from None
            self.urls[url] = known
        return known


def _check_headers(headers: Mapping[str, str], file: Path | None) -> None:
    """Raise BadInput for what cannot be sent, without its value: it may be a key. A `file` comes with its length."""
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise BadInput(f"headers: {name!r} is no name of a header.")
        if file is None and name.lower() in _LENGTHS:
            raise BadInput(f"headers: {name} is found from the body; leave it out.")
        if _HEADER_VALUE.fullmatch(value) is None:
            raise BadInput(
                f"headers: the value of {name} cannot be sent; it must be printable ASCII, without spaces or line ends "
                "around it. (That of authorization is the client's key, unless it was given as a header.)"
            )


def carry_out(call: Call[T], session: Session) -> Steps[T]:
    """The course of a call: tries, pauses between them, its result. Raises CallFailed."""
    timeout_s = session.timeout_s if call.timeout is DEFAULT else call.timeout
    if timeout_s is not None and not timeout_s > 0:
        raise BadInput(f"timeout: is {timeout_s}; it must be more than 0 seconds, or None for no bound.")
    if timeout_s is not None and timeout_s > MOST_TIMEOUT_MS / 1000:  # neither the header nor a socket takes more
        timeout_s = None
    ends = None if timeout_s is None else session.clock() + timeout_s
    number, left_s = 1, timeout_s
    while True:
        action = session.prepare(call, number, left_s)
        watch = action.watch
        failure: CallFailed | None = None
        try:
            reply: Reply = yield action
            if reply.status < 300:
                result = call.read(reply)
                if not call.streams:
                    watch.end(None)
                return result
            failure = refusal(reply.status, reply.headers, reply.body)
        except (httpx.HTTPError, CallFailed) as error:
            failure = watch.failure(error)
            failure.__cause__ = None if failure is error else error
        except BaseException:
            watch.end(None)
            raise
        watch.end(failure)
        if ends is not None:
            left_s = ends - session.clock()
        pause = pause_s(
            session.retries, failure, number=number, repeat=call.repeat, left_s=left_s, chance=session.chance()
        )
        if pause is None:
            raise failure
        yield Pause(pause)
        number += 1
        if ends is not None:
            left_s = max(ends - session.clock(), 0.001)


def path_of(*words: str) -> str:
    """A path of these words, each escaped. Raises BadInput for one that would be another path."""
    for word in words:
        if not isinstance(word, str) or word in ("", ".", "..") or not _is_encodable(word):
            raise BadInput(
                f"name: {word!r} names no model, version, label or file; it must be a text that is not empty."
            )
    return "/" + "/".join(quote(word, safe="") for word in words)


def _is_encodable(word: str) -> bool:
    """Whether it has no half surrogate pairs."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True
