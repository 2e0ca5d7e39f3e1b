"""Writes what some requests and their answers hold to the server's log, for debugging: off unless it is asked for.

Only while the server's log is at the level DEBUG, of a share of the requests, bounded, and without what may be secret:
JSON, forms and texts are read, and values under hidden names are replaced. What cannot be read is not shown.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from marserve.errors import MarserveError
from marserve.messages import Answer, Part, Receiver, Request, line_ids
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.bodies")

HIDDEN: Final = "…"
# Never shown, whatever the rules are.
ALWAYS_HIDDEN: Final = ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key")
# JSON, forms and text up to this length are read, as that happens on the event loop.
READ_BYTES: Final = 8 * 1024
# Of a form so much: its fields are many, and each is decoded by itself.
FORM_BYTES: Final = 4 * 1024
MOST_HEADERS, MOST_HEADER_CHARACTERS = 50, 200
_FORM: Final = "application/x-www-form-urlencoded"
_PART_OF_FORM: Final = re.compile("content-disposition: *form-data", re.IGNORECASE)
# What may stand before and behind JSON, a byte order mark among it, and what JSON begins with that may hold names.
_BEFORE_JSON: Final = "\ufeff \t\r\n"
_BEGINS_JSON: Final = ("{", "[", '"')
# The length of `{"k":1}`: no shorter text holds a name and its value.
_LEAST_JSON: Final = 7
# A name in a text, and its value from its end on: to the quote's end, to the next separator, or, in brackets, all.
_HAS_NAMES: Final = re.compile("[:=>]").search
_NAME: Final = re.compile(r"(?<![\w.-])[\w.-]+(?=[\"'\\]*\s*[:=>])")
_VALUE: Final = re.compile(
    r"[\"'\\]*\s*[:=>]+\s*((?:(?:bearer|basic|digest)\s+)?(?:(\\*[\"']).*?(?:\2|\Z)|[\[{].*|[^\s&,;<>\"']+))",
    re.DOTALL | re.IGNORECASE,
)
# A member that says what a document is the value of, as of a tensor or a pair; and what stands beside it openly.
_NAMING: Final = ("name", "key", "field")
_BESIDE: Final = (*_NAMING, "shape", "datatype", "type")
# A name in what is JSON in part, also within a text of it.
_NAMES: Final = re.compile(rb'"([^"\\\x00-\x1f]{1,200})\\*"\s*:')


class Hiding:
    """The names whose values are not shown; `*` in a pattern stands for any characters.

    Neither case nor the difference of `-`, `_` and blank counts.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        words = "|".join(map(_pattern_of, (*patterns, *ALWAYS_HIDDEN)))
        self._hides = re.compile(rf"\s*(?:{words})\s*", re.IGNORECASE | re.DOTALL).fullmatch

    def hides(self, name: str) -> bool:
        """Whether what has this name is not shown."""
        return self._hides(name) is not None

    def value(self, value: Any) -> Any:
        """A value of JSON without what is under hidden names: also in texts, and beside a hidden name in a pair."""
        if isinstance(value, dict):
            names_secret = any(self._names(value.get(key)) for key in _NAMING)
            return {
                key: HIDDEN if self.hides(key) or (names_secret and key not in _BESIDE) else self.value(each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            if len(value) == 2 and self._names(value[0]):
                return [value[0], HIDDEN]
            return [self.value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """A text without what is hidden in it: as JSON, or else behind a name as `name=…`, `name: …` and `<name>…`."""
        if not text:
            return text
        if len(text) >= _LEAST_JSON and text.lstrip(_BEFORE_JSON)[:1] in _BEGINS_JSON:
            with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
                read = msgspec.json.decode(text.strip(_BEFORE_JSON))
                return msgspec.json.encode(self.value(read)).decode()
        if not _HAS_NAMES(text):
            return text
        shown, at = [], 0
        for name in _NAME.finditer(text):
            if name.start() >= at and self.hides(name[0]) and (found := _VALUE.match(text, name.end())):
                shown += [text[at : found.start(1)], HIDDEN]
                at = found.end()
        return "".join([*shown, text[at:]])

    def found_in(self, part: Part) -> str:
        """The first name in a part whose value is not to be shown, its own included; empty if there is none.

        What looks like JSON and cannot be read is searched for names of its kind. Blocks for as long as reading takes.
        """
        if part.name != "body" and self.hides(part.name):
            return part.name
        essence = (part.content_type or "").partition(";")[0].strip().lower()
        body = part.body
        if essence == _FORM:
            fields = parse_qsl(bytes(body).decode("utf-8", "replace"), keep_blank_values=True)
            return next((name for name, _ in fields if self.hides(name)), "")
        if "json" not in essence and bytes(body[:64]).lstrip(_BEFORE_JSON.encode())[:1] not in (b"{", b"["):
            is_text = (not essence or essence.startswith("text/")) and len(body) <= READ_BYTES
            shown = self.body(body, part.content_type, READ_BYTES) if is_text else ""
            return "a value in a text" if HIDDEN in shown and HIDDEN.encode() not in bytes(body) else ""
        try:
            read = msgspec.json.decode(body)
            return self._found_in(read)
        except (msgspec.DecodeError, ValueError, RecursionError):
            names = (match[1].decode("utf-8", "replace") for match in _NAMES.finditer(body))
            return next((name for name in names if self.hides(name)), "")

    def _found_in(self, value: Any) -> str:
        """The first such name in a value of JSON, in texts and pairs as `value` finds them."""
        if isinstance(value, str):
            return self._found_in_text(value)
        if isinstance(value, dict):
            named = (value[key] for key in _NAMING if key in value and self._names(value[key]))
            first = next((key for key in value if self.hides(key)), "") or next(named, "")
            return first or self._found_in(list(value.values()))
        if isinstance(value, list):
            if len(value) == 2 and self._names(value[0]):
                return str(value[0])
            return next((name for each in value if (name := self._found_in(each))), "")
        return ""

    def _found_in_text(self, text: str) -> str:
        if len(text) >= _LEAST_JSON and text.lstrip(_BEFORE_JSON)[:1] in _BEGINS_JSON:
            with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
                return self._found_in(msgspec.json.decode(text.strip(_BEFORE_JSON)))
        return "a value in a text" if HIDDEN in self.text(text) and HIDDEN not in text else ""

    def header(self, name: str, value: str) -> str:
        """A header as it is shown."""
        shown = HIDDEN if self.hides(name) else self.text(value)
        return shown if len(shown) <= MOST_HEADER_CHARACTERS else shown[:MOST_HEADER_CHARACTERS] + HIDDEN

    def body(self, body: bytes | bytearray, content_type: str | None, most: int) -> str:
        """At most `most` characters of a body, without what is hidden; what cannot be read is only counted."""
        essence = (content_type or "").partition(";")[0].strip().lower()
        start = bytes(body[:READ_BYTES]).lstrip(_BEFORE_JSON.encode())[:1]
        if "json" in essence or start in (b"{", b"["):
            if len(body) > READ_BYTES:
                return f"{len(body)} bytes of JSON"
            try:
                read = msgspec.json.decode(bytes(body).strip(_BEFORE_JSON.encode()))
                text = msgspec.json.encode(self.value(read)).decode()
            except (msgspec.DecodeError, ValueError, RecursionError):
                return f"{len(body)} bytes, which are not JSON"
        elif essence == _FORM:
            fields = parse_qsl(bytes(body[:FORM_BYTES]).decode("utf-8", "replace"), keep_blank_values=True)
            text = "&".join(f"{name}={HIDDEN if self.hides(name) else self.text(value)}" for name, value in fields)
        elif not essence or essence.startswith("text/"):
            try:
                text = body.decode() if len(body) <= READ_BYTES else bytes(body[:READ_BYTES]).decode("utf-8", "ignore")
            except UnicodeDecodeError:
                return f"{len(body)} bytes"
            # Another encoding, or the parts of a form, whose names stand apart from their values.
            if "\0" in text or _PART_OF_FORM.search(text):
                return f"{len(body)} bytes"
            text = self.text(text)
        else:
            return f"{len(body)} bytes"
        return text if len(text) <= most else text[:most] + HIDDEN

    def _names(self, value: Any) -> bool:
        """Whether this is a hidden name; a text of several words is none."""
        return isinstance(value, str) and not any(map(str.isspace, value)) and self.hides(value)


def _pattern_of(word: str) -> str:
    pieces = [re.sub("[-_ ]", "-", piece).split("-") for piece in word.split("*")]
    return ".*".join("[-_ ]".join(map(re.escape, piece)) for piece in pieces)


class BodySamples:
    """Has a share of the requests written to the log when they end. `most` is how much of each body."""

    def __init__(self, share: float, most: int, hiding: Hiding, draw: Callable[[], float] = random.random) -> None:
        self._share = share
        self._most = most
        self._hiding = hiding
        self._draw = draw

    def watch(self, model: str, request: Request, receiver: Receiver) -> Receiver:
        """The receiver of a request, or one in its place that writes what is answered.

        Requests whose tensors lie in shared memory are left out.
        """
        if not log.isEnabledFor(logging.DEBUG) or self._draw() >= self._share or request.shares_memory:
            return receiver
        return _Watched(self, model, self._asked(request), line_ids([request]), receiver)

    def _asked(self, request: Request) -> dict[str, Any]:
        return {
            "headers": self._headers(
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers[:MOST_HEADERS]
            ),
            "parts": [self._part(part) for part in request.parts[:MOST_HEADERS]],
        }

    def _headers(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        return {name[:MOST_HEADER_CHARACTERS]: self._hiding.header(name, value) for name, value in headers}

    def _part(self, part: Part) -> dict[str, Any]:
        hides = part.name != "body" and self._hiding.hides(part.name)
        shown = HIDDEN if hides else self._hiding.body(part.body, part.content_type, self._most)
        return {"name": part.name[:MOST_HEADER_CHARACTERS], "bytes": len(part.body), "body": shown}

    def answered(self, answer: Answer) -> dict[str, Any]:
        """An answer that came whole."""
        headers: Sequence[tuple[str, str]] = answer.headers[:MOST_HEADERS]
        content_type = next((value for name, value in headers if name.lower() == "content-type"), None)
        return {
            "status": answer.status,
            "headers": self._headers(headers),
            "bytes": len(answer.body),
            "body": self._hiding.body(answer.body, content_type, self._most),
        }


class _Watched(Receiver):
    """Passes an answer on, and writes it with its request to the log when it has ended."""

    __slots__ = ("_asked", "_ids", "_model", "_pieces", "_samples", "_size", "receiver")

    def __init__(self, samples: BodySamples, model: str, asked: dict[str, Any], ids: str, receiver: Receiver) -> None:
        self.receiver = receiver
        self._samples, self._model, self._asked, self._ids = samples, model, asked, ids
        self._pieces = self._size = 0

    def on_answer(self, answer: Answer) -> None:
        """Pass on the whole answer."""
        self.receiver.on_answer(answer)
        self._write(self._samples.answered(answer))

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Pass on a piece; only their number and length is written."""
        self.receiver.on_piece(piece, last)
        self._pieces += 1
        self._size += len(piece.body)
        if last:
            self._write({"pieces": self._pieces, "bytes": self._size})

    def on_error(self, error: MarserveError) -> None:
        """Pass on the error."""
        self.receiver.on_error(error)
        self._write({"error": error.cause or type(error).__name__})

    def _write(self, answer: dict[str, Any]) -> None:
        document = {"model": self._model, "request": self._asked, "answer": answer}
        log.debug("Body sample: %s", msgspec.json.encode(document).decode(), extra=caused_by("", self._ids))
