"""The headers of every answer, and an answer's head as bytes. It knows no sockets.

Contract §1.4: request id, no caching, CORS if configured. Headers set by a handler are checked here, so that none of
them can become a second answer on the wire (RELIABILITY A11).
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
# A handler's headers of these names are dropped. The connection decides where an answer ends and whether it stays open;
# the request id and the caching headers are the server's, as in TorchServe.
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
# The cache of heads: how many, the longest one, and all together.
_MAX_KEPT, _MAX_KEPT_BYTES, _MAX_ALL_KEPT_BYTES = 512, 4096, 512 * 1024
# The most header bytes that a handler may set. Its worker has the same bound, but what it sends is not trusted.
MAX_HANDLER_BYTES = 64 * 1024
_FRAME_BYTES = 4


class ResponseHeaders:
    """Makes the heads of a listener's answers.

    `cors` are (name, value) pairs for every answer that lacks them. With several `origins` an answer names only the one
    of its request; `of` chooses. Raises BadSettings if one is not legal HTTP.
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
        # The head of nearly every answer: status 200, no headers from the handler, connection kept. The request id, the
        # body's length and the body are filled in. A CORS value may hold a `%`.
        self.plain = self.head(200, "", [], keep_alive=True).replace(b"%", b"%%") + (
            b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n%b"
        )

    def of(self, lines: Iterable[tuple[bytes, bytes]]) -> ResponseHeaders:
        """The heads for a request with these header lines. They name its origin if that is one of `origins`."""
        if not self._of_origins:
            return self
        asking = {value for name, value in lines if name.lower() == b"origin"}
        if len(asking) != 1:
            return self
        text = asking.pop().decode("latin-1").strip()
        return self._of_origins.get(read_origin(text) or text, self)

    def head(self, status: int, reason: str, headers: Sequence[tuple[str, str]], *, keep_alive: bool) -> bytes:
        """Status line and headers, up to the request id and the framing.

        Raises HandlerFailed for a name or value that is not legal HTTP, for too many bytes, and for a status that
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
        """Cache a head. Its key is about as long as the head itself."""
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
        """An ASGI answer's headers, with the server's own added where missing."""
        present = {name.lower() for name, _ in headers}
        added = [header for header in self.common if header[0] not in present or header[0] == b"vary"]
        return [*headers, *added, (REQUEST_ID, request_id.encode())]


def phrase_of(status: int) -> str:
    """The usual reason phrase of a status, or an empty text."""
    return _PHRASES.get(status, "")
