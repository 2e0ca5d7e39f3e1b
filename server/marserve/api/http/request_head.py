"""Reads the header of one request, and checks that it is within limits and can be read in one way only.

Pure: no sockets, no clock. The parser (llhttp, strict) has refused folded lines, bare CR and LF, NUL, two lengths, a
length beside chunks, and names that are no token. This file refuses what the parser lets pass (RELIABILITY A2, B2, B6).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from marserve.api.errors import ExpectationFailed, HeadersTooLarge, MalformedRequest, TargetTooLong
from marserve.api.http.inference import Route
from marserve.api.http.request_body import is_form
from marserve.api.request_ids import CLIENT_ID, read_client_id
from marserve.api.wishes import NO_WISHES, READERS
from marserve.errors import BadInput, BodyTooLarge, MethodNotAllowed
from marserve.settings.shown_address import hide_query
from marserve.telemetry.logs.access_log import legible
from marserve.telemetry.trace_context import TRACEPARENT

UNKNOWN_LENGTH = -1

# Parts of the value of `url`: its query (whose `&` may be unescaped), and its user information, escaped or not.
_KEY = re.compile(r"([?&]url=[^&?%]*(?:%(?!3[Ff])[^&?%]*)*)(?:\?.*|%3[Ff][^&]*)", re.DOTALL)
_VALUE = re.compile(r"([?&]url=)([^&]*)")
_SECRET = re.compile(r"([?&]secret=)[^&]*")
_USER = re.compile(
    r"([?&]url=[A-Za-z](?:[A-Za-z0-9+]|%2[Bb])*(?::|%3[Aa])(?:/|%2[Ff]){2})[^/&@?%]*(?:%(?!2[Ff]|40)[^/&@?%]*)*(?:@|%40)"
)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits for one client. Sizes in bytes, times in seconds.

    `upload_bytes` is the limit of an uploaded archive, which no memory holds whole; 0 where no archives are taken.
    A header must be complete `header_timeout_s` after its first byte; a new connection must send a byte within the same
    time. The first byte of a body must come within `body_timeout_s`; then at least `body_bytes_per_s` must come,
    measured over `body_window_s`. A connection closes when its client takes nothing of an answer for `stall_timeout_s`;
    of a stream at most `stream_buffer_bytes` wait for a slow client. `drain_idle_s`: how long a stopping server still
    reads from a connection without a request. `linger_s`: how long it reads from a refused client, so that the client
    gets the refusal rather than a reset.
    """

    header_bytes: int = 64 * 1024
    header_lines: int = 100
    request_line_bytes: int = 8 * 1024
    body_bytes: int = 6_553_500
    upload_bytes: int = 0
    body_chunks: int = 65_536
    pipelined_requests: int = 256
    connections: int = 8192
    connections_per_address: int = 2048
    stream_buffer_bytes: int = 8 * 1024 * 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_bytes_per_s: int = 1024
    body_window_s: float = 10.0
    keep_alive_s: float = 75.0
    stall_timeout_s: float = 60.0
    drain_idle_s: float = 0.5
    linger_s: float = 1.0


class Head:
    """One request's header, read. It does not change once it is made: identical headers share one.

    `headers` are those a handler may see, `lines` all of them. `body_bytes` is UNKNOWN_LENGTH for a chunked body.
    `line` is the request line, made fit for a log. `is_plain`: its answer has a body and the connection stays.
    `is_form`: its body is cut into fields. `is_upload`: the application takes its body piece by piece, and no memory
    holds it whole. `is_repeatable`: the same bytes always mean the same, whatever came before them. `fault` is what is
    wrong with the client's `wishes`; an inference route answers with it, and the connection stays. `client_id` is
    the client's `X-Request-Id`; empty without one that can be taken. `is_traced`: there is a `traceparent`.
    """

    __slots__ = (
        "body_bytes",
        "client_id",
        "content_type",
        "expects_continue",
        "fault",
        "headers",
        "is_form",
        "is_head",
        "is_http10",
        "is_plain",
        "is_repeatable",
        "is_traced",
        "is_upload",
        "keep_alive",
        "line",
        "lines",
        "method",
        "route",
        "wishes",
    )

    def __init__(self, method: bytes, target: bytes, version: str, keep_alive: bool, lines: Headers) -> None:
        self.method = method
        self.line = request_line(method, target, version)
        self.keep_alive = keep_alive
        self.lines = lines
        self.headers = lines
        self.is_head = method == b"HEAD"
        self.is_http10 = version == "1.0"
        self.is_plain = keep_alive and not self.is_head
        self.route: Route | None = None
        self.content_type: str | None = None
        self.is_form = False
        self.body_bytes = 0
        self.expects_continue = False
        self.is_repeatable = False
        self.is_upload = False
        self.is_traced = False
        self.client_id = ""
        self.wishes = NO_WISHES
        self.fault: BadInput | None = None


def request_line(method: bytes, target: bytes, version: str) -> str:
    """`POST /predictions/noop HTTP/1.1`, fit for one line of a log: bounded, no quotation marks, no control characters.

    The parameter `url`, an address to fetch from, is shown without parts that may be a key; `secret` is not shown.
    """
    text = target.decode("latin-1")
    if "secret=" in text:
        text = _SECRET.sub(r"\1…", text)
    if "url=" in text:
        text = _VALUE.sub(_hide, _USER.sub(r"\1", _KEY.sub(r"\1?…", text)))
    return f"{method.decode('latin-1')} {legible(text)} HTTP/{version}"


def _hide(found: re.Match[str]) -> str:
    """A value of `url` without other parts that may be a key; unchanged if it has none."""
    address = unquote(found[2])
    shown = hide_query(address)
    if shown == address:
        return found[0]
    return found[1] + "…".join(quote(part, safe="/:@?#=") for part in shown.split("…"))


def read_head(
    method: bytes,
    target: bytes,
    version: str,
    keep_alive: bool,
    lines: Headers,
    limits: HttpLimits,
    match: Callable[[bytes], Route | None],
) -> Head:
    """Read a header whose bytes the parser has accepted; `match` finds inference routes.

    Raises an HttpRefusal, MethodNotAllowed (methods of other protocols) or BodyTooLarge (by its announced length).
    """
    if len(method) + len(target) + len("  HTTP/1.1\r\n") > limits.request_line_bytes:
        raise TargetTooLong(limits.request_line_bytes)
    if len(lines) > limits.header_lines:
        raise HeadersTooLarge(limits.header_lines, "lines")
    if version not in ("1.1", "1.0"):
        raise MalformedRequest("the version must be HTTP/1.1 or HTTP/1.0")
    if method in _FOREIGN_METHODS:
        raise MethodNotAllowed
    if target[:1] != b"/" or b"#" in target:
        _check_odd_target(method, target)
        lines = _name_host(target, lines)
    head = Head(method, target, version, keep_alive, lines)
    has_own_id = _read_lines(head, lines, is_ping=_PING(target) is not None)
    if method != b"OPTIONS":
        head.route = match(target)
    if limits.upload_bytes and method == b"PUT" and target.startswith(_UPLOADS):
        head.is_upload = True
        if head.body_bytes > limits.upload_bytes:
            raise BodyTooLarge(limits.upload_bytes, "max_upload_size")
    elif head.body_bytes > limits.body_bytes:
        raise BodyTooLarge(limits.body_bytes)
    head.is_repeatable = (
        head.route is not None
        and keep_alive
        and not has_own_id  # most clients send another with each request
        and not head.is_traced  # and of this one, too
        and not head.expects_continue
        and head.body_bytes != UNKNOWN_LENGTH
    )
    return head


def header_bytes(lines: Headers) -> int:
    """How many bytes these lines took on the wire, their separators and ends included."""
    return sum(len(name) + len(value) for name, value in lines) + 4 * len(lines)


def strip_upgrade(lines: Headers) -> Headers:
    """The lines without an offer to change protocol, which the server is free to ignore (RFC 9110 §7.8)."""
    kept = []
    for name, value in lines:
        word = name.lower()
        if word == b"connection":
            tokens = [token for token in value.split(b",") if token.strip().lower() != b"upgrade"]
            if tokens:
                kept.append((name, b",".join(tokens)))
        elif word != b"upgrade":
            kept.append((name, value))
    return kept


def _check_odd_target(method: bytes, target: bytes) -> None:
    """Let an absolute target and the asterisk of OPTIONS pass (RFC 9112 §3.2), nothing else."""
    is_absolute = target[:7].lower() == b"http://" or target[:8].lower() == b"https://"
    if b"#" in target or not (is_absolute or target[:1] == b"/" or (method, target) == (b"OPTIONS", b"*")):
        raise MalformedRequest("the target is neither a path nor an http URL")


def _name_host(target: bytes, lines: Headers) -> Headers:
    """The lines, with the host of an absolute target in place of each `Host`: the target has precedence."""
    _, absolute, rest = target.partition(b"://")
    if not absolute:
        return lines
    host = re.split(rb"[/?]", rest, maxsplit=1)[0]
    return [(name, host if name.lower() == b"host" else value) for name, value in lines]


def _read_lines(head: Head, lines: Headers, *, is_ping: bool) -> bool:
    """Read what the lines say; returns whether there is an `X-Request-Id`.

    `is_ping`: TorchServe's health check, which old balancers ask for without a Host.
    """
    hosts = ids = 0
    hidden = False
    for name, value in lines:
        what = _NOTABLE.get(name) or _NOTABLE.get(name.lower())
        if what is None:
            continue
        if what == "host":
            hosts += 1
            if not _HOST(value):
                raise MalformedRequest("the Host is no host name")
        elif what == "length":
            head.body_bytes = int(value)
        elif what == "type":
            head.content_type = value.decode("latin-1")
            head.is_form = is_form(head.content_type)
        elif what == "hidden":
            hidden = True
        elif what == "trace":
            head.is_traced = True
        elif what == "id":
            ids += 1
            head.client_id = read_client_id(value) if ids == 1 else ""
        elif what in READERS:
            try:
                head.wishes = head.wishes.adding(what, value)
            except BadInput as error:
                head.fault = error
        elif what == "encoding":
            if value.strip().lower() != b"chunked" or head.body_bytes == UNKNOWN_LENGTH or head.is_http10:
                raise MalformedRequest("the only Transfer-Encoding that can be read is chunked, once, in HTTP/1.1")
            head.body_bytes = UNKNOWN_LENGTH
        elif not head.is_http10:  # HTTP/1.0 knows no Expect (RFC 9110 §10.1.1)
            if value.strip().lower() != b"100-continue":
                raise ExpectationFailed
            head.expects_continue = True
    if hosts != 1 and (hosts or not (head.is_http10 or is_ping)):
        raise MalformedRequest("a request has exactly one Host")
    if head.body_bytes == 0:
        head.expects_continue = False
    if hidden:
        # Handlers take these for the server's own headers, so a client must not be able to send them (contract, Q4).
        head.headers = [line for line in lines if _NOTABLE.get(line[0].lower()) != "hidden"]
    return ids > 0


# Names are first looked up as written: these spellings cover nearly every client and save a copy in lower case.
_NOTABLE = {
    spelling: what
    for name, what in (
        (b"host", "host"),
        (b"content-length", "length"),
        (b"content-type", "type"),
        (b"transfer-encoding", "encoding"),
        (b"expect", "expect"),
        (b"describe", "hidden"),
        (b"explain", "hidden"),
        (b"url_path", "hidden"),
        (CLIENT_ID.encode(), "id"),
        (TRACEPARENT, "trace"),
        *((name.encode(), name) for name in READERS),
    )
    for spelling in (name, name.title())
}

_FOREIGN_METHODS = frozenset(
    b"CONNECT PRI SOURCE DESCRIBE ANNOUNCE SETUP PLAY PAUSE TEARDOWN GET_PARAMETER SET_PARAMETER REDIRECT RECORD "
    b"FLUSH".split()
)

_UPLOADS = b"/archives/"

_PING = re.compile(rb"/ping/?(?:\?.*)?", re.DOTALL).fullmatch

# A host as in an address bar, with or without port. RFC 3986 allows more, but no client sends it.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+(?:%25[\w.~-]+)?\]|[\w.~%!$&'()*+,;=-]*)(?::\d*)?", re.ASCII).fullmatch
