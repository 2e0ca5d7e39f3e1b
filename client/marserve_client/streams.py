"""Answers in pieces: raw chunks, or Server-Sent Events. `Stream` is read by `for`, `AsyncStream` by `async for`.

A decoder makes items of bytes (`Chunks`, `Events`), pure and for both. The server notices that a stream was closed and
ends the handler's work; so does leaving the `with` block, or dropping the stream.
"""

from __future__ import annotations

import codecs
import contextlib
import json
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import httpx

from marserve_client.calls import Watch
from marserve_client.errors import BadAnswer, CallFailed, class_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound="Stream[Any]")
A = TypeVar("A", bound="AsyncStream[Any]")

# Characters of one event; a stream without line ends would fill the memory.
MOST_EVENT_CHARACTERS = 64 * 1024 * 1024


class Event(NamedTuple):
    """A Server-Sent Event. `event` is `message` where the server names none; `id` is the last one that came."""

    data: str
    event: str = "message"
    id: str | None = None

    def json(self) -> object:
        """The data as JSON. Raises ValueError."""
        return json.loads(self.data)


class Decoder(Protocol[T_co]):
    """Makes items of bytes as they come."""

    def feed(self, piece: bytes) -> Iterator[T_co]:
        """The items that these bytes complete, one after another. Raises CallFailed behind those before it."""


class Chunks:
    """Bytes as they come. A chunk is what one read of the connection gave: pieces of a handler may come together."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The piece itself, unless it is empty."""
        if piece:
            yield piece


class Events:
    """Server-Sent Events (WHATWG HTML, section 9.2.6): lines that end in LF, CR or CRLF, comments, fields.

    marserve ends a stream by the event `end`, which is left out, and a failed one by `error` with `code` and `message`
    (and `exception`, where the server shows it), which is raised. An event that is cut off is dropped, as the standard
    says.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._rest: list[str] = []
        self._ends_in_cr = False
        self._data: list[str] = []
        self._characters = 0
        self._name = ""
        self._id: str | None = None

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that these bytes complete. Raises CallFailed for the server's `error`, and BadAnswer."""
        text = self._decoder.decode(piece)
        if not text:
            return
        if self._ends_in_cr and text[0] == "\n":
            text = text[1:]
        self._ends_in_cr = text.endswith("\r")
        self._characters += len(text)
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            whole = line if not self._rest else "".join((*self._rest, line))
            self._rest.clear()
            event = self._line(whole)
            if event is not None:
                yield event
        if rest:
            self._rest.append(rest)
        if self._characters > MOST_EVENT_CHARACTERS:
            raise BadAnswer(f"An event of the stream has more than {MOST_EVENT_CHARACTERS} characters.", status=200)

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> Event | None:
        name, data, self._name, self._data, self._characters = self._name, self._data, "", [], 0
        if not data:
            return None
        event = Event("\n".join(data), name or "message", self._id)
        if name == "end" and event.data == "{}":
            return None
        if name == "error":
            _raise_error(event)
        return event


def _raise_error(event: Event) -> None:
    """Raise what marserve's event `error` says; another server's is an event like others."""
    try:
        said = event.json()
    except (ValueError, RecursionError):
        return
    if not isinstance(said, dict) or said.keys() - {"exception"} != {"code", "message"}:
        return
    code, message = said["code"], said["message"]
    if type(code) is int and isinstance(message, str):
        raise class_of(code)(message, status=code, document=said)


class Reading(Generic[T]):
    """What both streams have: the head of the answer, items that wait to be taken, how it ended."""

    def __init__(self, response: httpx.Response, decoder: Decoder[T], watch: Watch) -> None:
        self._response, self._decoder, self._watch = response, decoder, watch
        self._items: deque[T] = deque()
        self._error: CallFailed | None = None
        self._is_over = False

    @property
    def status(self) -> int:
        """The status of the answer."""
        return self._response.status_code

    @property
    def headers(self) -> httpx.Headers:
        """Its headers."""
        return self._response.headers

    @property
    def request_id(self) -> str | None:
        """The server's id of the request."""
        return self._watch.request_id

    @property
    def model_version(self) -> str | None:
        """The version that answers, where the server names it."""
        found: str | None = self._response.headers.get("x-marserve-version")
        return found

    def _took(self, piece: bytes) -> None:
        """A piece has come. An error of the decoder waits until the items before it are taken."""
        self._watch.check(len(piece))
        for item in self._decoder.feed(piece):
            self._items.append(item)

    def _ended(self, error: Exception | None = None) -> None:
        """The stream is over, by this error if any, which is raised behind the items that wait."""
        self._is_over = True
        if error is not None:
            self._error = self._watch.failure(error)
            self._error.__cause__ = None if self._error is error else error
            self._error.request_id = self._error.request_id or self.request_id
        self._watch.end(self._error)

    def _raise_error(self) -> None:
        """Raise how it ended, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class Stream(Reading[T]):
    """The items of an answer, in order. Raises CallFailed where it breaks off; what has come before is not lost."""

    def __init__(self, response: httpx.Response, decoder: Decoder[T], watch: Watch) -> None:
        super().__init__(response, decoder, watch)
        self._pieces = response.iter_bytes()

    def __iter__(self: S) -> S:
        return self

    def __next__(self) -> T:
        while not self._items:
            if self._is_over:
                self._raise_error()
                raise StopIteration
            try:
                self._took(next(self._pieces))
            except StopIteration:
                self._ended()
            except (httpx.HTTPError, CallFailed) as error:
                self._ended(error)
                self._response.close()
        return self._items.popleft()

    def close(self) -> None:
        """Read no further: the connection closes, and the server ends the work."""
        self._items.clear()
        if not self._is_over:
            self._ended()
        self._response.close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A loop that was left by `break` drops the stream: the server is not to work on for it.
        if not getattr(self, "_is_over", True):
            with contextlib.suppress(Exception):
                self.close()


class AsyncStream(Reading[T]):
    """As `Stream`, read by `async for`. Close it, or use `async with`: dropping it alone closes nothing."""

    def __init__(self, response: httpx.Response, decoder: Decoder[T], watch: Watch) -> None:
        super().__init__(response, decoder, watch)
        self._pieces = response.aiter_bytes()

    def __aiter__(self: A) -> A:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._is_over:
                self._raise_error()
                raise StopAsyncIteration
            try:
                self._took(await self._pieces.__anext__())
            except StopAsyncIteration:
                self._ended()
            except (httpx.HTTPError, CallFailed) as error:
                self._ended(error)
                await self._response.aclose()
            except BaseException:  # cancelled: the server is to end the work
                await self.aclose()
                raise
        return self._items.popleft()

    async def aclose(self) -> None:
        """Read no further: the connection closes, and the server ends the work."""
        self._items.clear()
        if not self._is_over:
            self._ended()
        await self._response.aclose()

    async def __aenter__(self: A) -> A:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
