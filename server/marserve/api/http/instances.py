"""KServe's protocol V1: a request of many instances, each of which is an item of its own in the batcher.

`{"instances": [...]}` becomes as many requests of the data plane, and their answers `{"predictions": [...]}` in the
same order. The first one that fails is the whole request's error, by its index; the others are cancelled.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from secrets import randbits
from typing import Final

import msgspec

from marserve.api.decoding import breathe
from marserve.api.open_inference.request_parameters import STAND_INS
from marserve.errors import BadInput, HandlerFailed, MarserveError, QueueFull
from marserve.messages import Accepted, Answer, Part, Receiver, Request
from marserve.registry.catalogue.traffic import VERSION_HEADER

MAX_INSTANCES: Final = 65_536
# The most instances of one request that wait or run; the next one follows when one has ended.
MOST_AT_ONCE: Final = 256
# So many are submitted in one step of the event loop.
MOST_IN_A_STEP: Final = 32
# The most bytes of all answers together.
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
# A body up to this length is read on the event loop, and may hold the numbers that JSON has no words for.
QUICK_BYTES: Final = 2 * 1024
MOST_PYTHON_BYTES: Final = 256 * 1024

JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"

# After so many steps of a long body other threads get their turn.
BREATHE_AFTER: Final = 1024

# What a list is cut by. Lists of numbers, up to three deep (a picture), and texts are stepped over as a whole.
_PLAIN: Final = rb'[^\[\]{}"]*+'
_ROW: Final = rb"\[%b\]" % _PLAIN
_ROWS: Final = rb"\[%b(?:%b%b)*+\]" % (_PLAIN, _ROW, _PLAIN)
_PICTURE: Final = rb"\[%b(?:%b%b)*+\]" % (_PLAIN, _ROWS, _PLAIN)
_TEXT: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKENS = re.compile(rb"%b|%b|[\[\]{},]" % (_TEXT, _PICTURE), re.DOTALL).finditer
_NEEDED: Final = 'The body must be a JSON object with a list "instances"'


class _Body(msgspec.Struct):
    """The member that is read, as the text that it is."""

    instances: msgspec.Raw


class _Encoded(msgspec.Struct):
    """An instance that stands for bytes."""

    b64: str


_decode = msgspec.json.Decoder(_Body).decode
_decode_bytes = msgspec.json.Decoder(_Encoded).decode
_is_json = msgspec.json.Decoder(msgspec.Raw).decode


def read_instances(body: bytes | bytearray) -> list[Part]:
    """The instances of a body, each as the body of a request: its JSON, or the bytes of one `{"b64": "..."}`.

    Raises BadInput.
    """
    text = bytes(body)
    try:
        text.decode()  # what is skipped is not looked at
        found = _cut(bytes(_decode(text).instances))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _read_python(text)
    parts = []
    for number, instance in enumerate(found):
        parts.append(_part(instance, number))
        if number % BREATHE_AFTER == BREATHE_AFTER - 1:
            breathe()
    return parts


def _cut(text: bytes) -> list[bytes]:
    """The elements of a JSON list. A list of a million small ones takes a reader in C too long to give way in between.

    Raises BadInput for another value, and for too many elements.
    """
    if text[:1] != b"[":
        raise BadInput(f"{_NEEDED}.")
    found: list[bytes] = []
    depth, begin, end = 0, 1, len(text) - 1
    for number, token in enumerate(_TOKENS(text, 1, end)):
        if number % BREATHE_AFTER == BREATHE_AFTER - 1:
            breathe()
        word = token[0]
        if word == b",":
            if not depth:
                found.append(text[begin : token.start()].strip())
                begin = token.end()
                if len(found) >= MAX_INSTANCES:
                    raise BadInput(f"The request has more than {MAX_INSTANCES} instances; send fewer at once.")
        elif len(word) > 1:  # a text, or lists of numbers
            continue
        elif word in b"[{":
            depth += 1
        else:
            depth -= 1
    last = text[begin:end].strip()
    return [*found, last] if last else found


def _read_python(text: bytes) -> list[bytes]:
    """The instances of JSON with Python's words for NaN and infinity. Raises BadInput."""
    if len(text) > MOST_PYTHON_BYTES:
        raise BadInput(f"{_NEEDED}. NaN and Infinity are read in bodies of at most {MOST_PYTHON_BYTES} bytes.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    instances = document.get("instances") if isinstance(document, dict) else None
    if not isinstance(instances, list):
        raise BadInput(f"{_NEEDED}.")
    return [json.dumps(instance).encode() for instance in instances]


def _part(text: bytes, number: int) -> Part:
    if text[:1] == b"{" and b'"b64"' in text:
        try:
            return Part("body", base64.b64decode(_decode_bytes(text).b64), BYTES_TYPE)
        except msgspec.DecodeError:
            pass  # an object of another meaning
        except (binascii.Error, ValueError):
            raise BadInput(f'instances[{number}]: the text of "b64" is no base64.') from None
    return Part("body", text, JSON_TYPE)


class Instances:
    """One request while its instances are answered. `key` is `predictions` or `explanations`."""

    keeps_the_only_worker = False

    def __init__(
        self,
        submit: Callable[[Request, Receiver], Accepted],
        request: Request,
        parts: Sequence[Part],
        receiver: Receiver,
        key: str,
    ) -> None:
        self._submit = submit
        self._request = request
        self._parts = parts
        self._receiver = receiver
        self._key = key
        self._values: list[bytes] = [b""] * len(parts)
        self._bytes = 0
        self._jobs: dict[int, Accepted | None] = {}  # of the instances under way; None until `submit` has returned
        self._next = 0
        self._left = len(parts)
        self._most = MOST_AT_ONCE
        self._is_over = False
        self._is_submitting = False
        self._version_header: tuple[str, str] | None = None

    def begin(self) -> Instances:
        """Submit the first instances. Raises what the data plane raises for the first one."""
        if not self._parts:
            self._finish()
        self._go_on(raises=True)
        return self

    def cancel(self) -> None:
        """The client has gone: cancel all instances."""
        self._is_over = True
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            if job is not None:
                job.cancel()

    def hold(self) -> None:
        """The answer is made whole before any of it is written."""

    def resume(self) -> None:
        """As above."""

    def answered(self, number: int, answer: Answer, body: bytes) -> None:
        """An instance got its answer."""
        if self._is_over:
            return
        if answer.status >= 400:
            words = body.decode("utf-8", "replace").strip()[:500] or "Prediction failed"
            self.failed(number, HandlerFailed(words, answer.status))
            return
        self._jobs.pop(number, None)
        self._values[number] = value = as_json(body)
        self._bytes += len(value)
        if answer.headers and answer.headers[-1][0] == VERSION_HEADER:
            self._version_header = answer.headers[-1]
        if self._bytes > MAX_ANSWER_BYTES:
            self._end(
                BadInput(f"The answers to the instances have more than {MAX_ANSWER_BYTES} bytes; send fewer at once.")
            )
            return
        self._left -= 1
        if self._left:
            self._go_on()
        else:
            self._finish()

    def failed(self, number: int, error: MarserveError) -> None:
        """An instance got no answer, so the request gets none."""
        if self._is_over:
            return
        if isinstance(error, HandlerFailed | BadInput):  # of the handler, or of what reads its input
            words = f"instances[{number}]: {error.message}"
            header = error.version_header
            error = BadInput(words) if isinstance(error, BadInput) else HandlerFailed(words, error.code, error.thrown)
            error.version_header = header
        self._jobs.pop(number, None)
        self._end(error)

    def _go_on(self, *, raises: bool = False) -> None:
        """Submit further instances, until enough are under way or the queue is full."""
        if self._is_submitting:  # an answer that came while `submit` ran
            return
        self._is_submitting = True
        try:
            for _ in range(MOST_IN_A_STEP):
                if self._is_over or self._next >= len(self._parts) or len(self._jobs) >= self._most:
                    return
                self._submit_one(raises=raises and not self._next)
        finally:
            self._is_submitting = False
        asyncio.get_running_loop().call_soon(self._go_on)

    def _submit_one(self, *, raises: bool) -> None:
        """Submit the next instance; later if the queue has no place, and one of this request's own will make one."""
        number, part = self._next, self._parts[self._next]
        request = msgspec.structs.replace(
            self._request,
            parts=[part],
            key=randbits(62) | 1,  # instances share the request's id
            is_inner=self._request.is_inner or number > 0,
        )
        self._next += 1
        self._jobs[number] = None
        try:
            job = self._submit(request, _Instance(self, number))
        except MarserveError as error:
            self._jobs.pop(number, None)
            if raises:
                self._is_over = True
                raise
            if isinstance(error, QueueFull) and self._jobs:
                self._next, self._most = number, len(self._jobs)
            else:
                self.failed(number, error)
            return
        if number in self._jobs:
            self._jobs[number] = job
        elif self._is_over:
            job.cancel()

    def _end(self, error: MarserveError) -> None:
        self.cancel()
        self._receiver.on_error(error)

    def _finish(self) -> None:
        self._is_over = True
        body = b'{"%b": [%b]}' % (self._key.encode(), b", ".join(self._values))
        self._values = []
        headers = [("content-type", JSON_TYPE)]
        if self._version_header is not None:
            headers.append(self._version_header)
        self._receiver.on_answer(Answer(body, headers=headers))


class _Instance:
    """The receiver of one instance's answer; the pieces of a stream are put together."""

    __slots__ = ("_head", "_number", "_pieces", "_whole")

    def __init__(self, whole: Instances, number: int) -> None:
        self._whole = whole
        self._number = number
        self._pieces = bytearray()
        self._head: Answer | None = None

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self._whole.answered(self._number, answer, bytes(answer.body))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """A piece; the first one has status and headers."""
        self._head = self._head or piece
        self._pieces += piece.body
        if last:
            self._whole.answered(self._number, self._head, bytes(self._pieces))
        elif len(self._pieces) > MAX_ANSWER_BYTES:
            self._whole.failed(self._number, BadInput(f"Its answer has more than {MAX_ANSWER_BYTES} bytes."))

    def on_error(self, error: MarserveError) -> None:
        """No answer."""
        self._whole.failed(self._number, error)


def as_json(body: bytes) -> bytes:
    """A handler's answer as a JSON value: what is JSON stays, text becomes a string, and bytes `{"b64": "..."}`."""
    if not body:
        return b"null"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return b'{"b64": "%b"}' % base64.b64encode(body)
    # In the words of Python's writer for NaN and infinity, too; a number stands in for them.
    replaced = body
    for word, number in STAND_INS:
        replaced = replaced.replace(word, number)
    for read in (body, replaced):
        try:
            _is_json(read)
        except (msgspec.DecodeError, RecursionError):
            continue
        return body
    return msgspec.json.encode(text)
