"""The headers every answer has, and an answer's head as bytes. Knows no sockets.

Contract §1.4: request id, no caching, CORS where it is configured. What a handler sets is checked here, so that nothing
it returns can become a second answer on the wire (RELIABILITY A11).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus

from marserve.api.browsers import Origin, read_origin, write_origin
from marserve.errors import BadSettings, HandlerFailed

REQUEST_ID = b"x-request-id"
ALLOW_ORIGIN, VARY = "access-control-allow-origin", "vary"
_NO_CACHE = (
    ("pragma", "no-cache"),
    ("cache-control", "no-cache; no-store, must-revalidate, private"),
    ("expires", "Thu, 01 Jan 1970 00:00:00 UTC"),
)
# What says where an answer ends, or what becomes of the connection, is the connection's to say; a handler's word for
# it is dropped. The request id and the caching headers are ours as they are TorchServe's.
_OURS = frozenset(
    [
        *("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "x-request-id"),
        *(name for name, _ in _NO_CACHE),
    ]
)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*").fullmatch
_NOT_REASON = re.compile(r"[^\t\x20-\x7e\x80-\xff]+")
_PHRASES = {int(status): status.phrase for status in HTTPStatus}
# Heads that are kept: how many, how long each may be, and how long all of them.
_MAX_KEPT, _MAX_KEPT_BYTES, _MAX_ALL_KEPT_BYTES = 512, 4096, 512 * 1024
# What a handler may set in one answer. Its worker holds it, too; a worker's bytes are not believed.
MAX_HANDLER_BYTES = 64 * 1024
_FRAME_BYTES = 4


class ResponseHeaders:
    """Makes the heads of a listener's answers.

    `cors` are (name, value) pairs for every answer that lacks them. With several `origins` an answer names the one that
    asks in the place of them all: `of` chooses. Raises BadSettings when one is no legal HTTP.
    """

    def __init__(self, cors: Sequence[tuple[str, str]] = (), origins: Sequence[str] = ()) -> None:
        self._of_origins: dict[Origin | str, ResponseHeaders] = {}
        if origins:
            cors = [(name, value) for name, value in cors if name.lower() != ALLOW_ORIGIN]
            cors.append((VARY, "Origin"))
            self._of_origins = {
                read_origin(each) or each: ResponseHeaders([(ALLOW_ORIGIN, write_origin(each)), *cors])
                for each in origins
            }
        self.has_origins = bool(origins)
        for name, value in cors:
            if not _NAME(name) or not _VALUE(value):
                raise BadSettings(f"{value!r} cannot be sent as {name}: it must be one line of Latin-1 text")
        self._cors = tuple((name.lower(), value) for name, value in cors)
        self._kept: dict[tuple[int, str, bool, tuple[tuple[str, str], ...]], bytes] = {}
        self._kept_bytes = 0
        self.common = [(name.encode(), value.encode("latin-1")) for name, value in (*_NO_CACHE, *self._cors)]
        # For the answer that nearly every request gets: status 200, nothing set by the handler, connection kept. The
        # request id, the body's length and the body complete it.
        # `%` stands in none of the constant parts but may stand in a CORS value.
        self.plain = self.head(200, "", [], keep_alive=True).replace(b"%", b"%%") + (
            b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
        )

    def of(self, lines: Iterable[tuple[bytes, bytes]]) -> ResponseHeaders:
        """The heads of answers to a request with these header lines; to one of no such origin they name none."""
        if not self._of_origins:
            return self
        asking = {value for name, value in lines if name.lower() == b"origin"}
        if len(asking) != 1:
            return self
        text = asking.pop().decode("latin-1").strip()
        return self._of_origins.get(read_origin(text) or text, self)

    def head(self, status: int, reason: str, headers: Sequence[tuple[str, str]], *, keep_alive: bool) -> bytes:
        """Status line and headers up to where the request id and the framing follow.

        Raises HandlerFailed when a name or value is no legal HTTP, when all of them are too long, or when the status
        cannot end a request. A line break in the reason becomes a space.
        """
        key = (status, reason, keep_alive, tuple(headers))
        kept = self._kept.get(key)
        if kept is None:
            kept = self._make(status, reason, headers, keep_alive)
            if len(kept) <= _MAX_KEPT_BYTES:
                self._keep(key, kept)
        return kept

    def _keep(self, key: tuple[int, str, bool, tuple[tuple[str, str], ...]], head: bytes) -> None:
        """Remember a head. The key's texts are about as long as the head."""
        if len(self._kept) >= _MAX_KEPT or self._kept_bytes + len(head) > _MAX_ALL_KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[key] = head
        self._kept_bytes += len(head)

    def _make(self, status: int, reason: str, headers: Sequence[tuple[str, str]], keep_alive: bool) -> bytes:
        if not 200 <= status <= 999:
            raise HandlerFailed(f"The handler answered with status {status}; it must be 200 to 999.", 500)
        size = len(reason) + sum(len(name) + len(value) + _FRAME_BYTES for name, value in headers)
        if size > MAX_HANDLER_BYTES:
            raise HandlerFailed(
                f"The handler set response headers of {size} bytes; they may have {MAX_HANDLER_BYTES} in all.", 500
            )
        lines = [f"HTTP/1.1 {status} {_NOT_REASON.sub(' ', reason)}"]
        seen = set()
        for name, value in headers:
            if not _NAME(name):
                raise HandlerFailed(f"The handler set a response header whose name is no HTTP: {name[:80]!r}", 500)
            if not _VALUE(value):
                raise HandlerFailed(f"The handler set response header {name[:80]!r} to a value that is no HTTP.", 500)
            word = name.lower()
            if word not in _OURS:
                seen.add(word)
                lines.append(f"{name}: {value.strip()}")
        lines += [f"{name}: {value}" for name, value in self._cors if name not in seen or name == VARY]
        lines += [f"{name}: {value}" for name, value in _NO_CACHE]
        lines.append("connection: keep-alive\r\n" if keep_alive else "connection: close\r\n")
        return "\r\n".join(lines).encode("latin-1")

    def complete(self, headers: Sequence[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
        """An ASGI answer's headers with ours added where they are missing."""
        present = {name.lower() for name, _ in headers}
        added = [header for header in self.common if header[0] not in present or header[0] == b"vary"]
        return [*headers, *added, (REQUEST_ID, request_id.encode())]


def phrase_of(status: int) -> str:
    """The usual reason phrase of a status; empty where it has none."""
    return _PHRASES.get(status, "")
