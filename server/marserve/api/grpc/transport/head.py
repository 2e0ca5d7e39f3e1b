"""Reads the header of a call: its method, deadline, compression and metadata; and writes statuses as trailers. Pure.

Names are lower case, values are text; those of names that end in `-bin` are bytes, which travel as base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import quote

from marserve.api.grpc.transport.framing import ENCODINGS, IDENTITY
from marserve.api.grpc.transport.status import StatusCode
from marserve.errors import BadInput

CONTENT_TYPE: Final = b"application/grpc"
_SECONDS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_TIMEOUT_DIGITS: Final = 8
# What HTTP/2 and gRPC keep for themselves; all else is metadata.
_OF_PROTOCOL: Final = frozenset((b"te", b"content-type"))
# Each field counts as so many bytes more than its name and value have (RFC 9113 §6.5.2).
_FIELD_BYTES: Final = 32
# What a status message may hold as it is: printable ASCII but the percent sign.
_PLAIN: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")

Metadata = tuple[tuple[str, str | bytes], ...]


class NotGrpc(Exception):
    """A request of HTTP/2 that is no call; `http_status` is its answer."""

    def __init__(self, http_status: int, message: str) -> None:
        self.http_status = http_status
        super().__init__(message)


class CallHead(NamedTuple):
    """What stands at the beginning of a call. `fault` is what is wrong with it, to be answered as the call's status.

    `path` is `package.Service/Method`. `timeout_s`: what the client gives the call, None: as long as it takes.
    `encoding` is how compressed messages of the client are compressed. `answer_encoding` is how those of the answer may
    be: as the client's, if it takes that, else not at all.
    """

    path: str
    timeout_s: float | None
    encoding: str
    answer_encoding: str
    metadata: Metadata
    fault: BadInput | None


def read_head(fields: Iterable[tuple[bytes, bytes]]) -> CallHead:
    """Read the fields of a header. Raises NotGrpc."""
    method = path = content_type = b""
    timeout_s: float | None = None
    encoding, fault = IDENTITY, None
    accepted = b""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        if name[:1] == b":":
            if name == b":path":
                path = value
            elif name == b":method":
                method = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            try:
                timeout_s = _read_timeout(value)
            except BadInput as error:
                fault = error
        elif name == b"grpc-encoding":
            encoding = value.decode("latin-1")
        elif name == b"grpc-accept-encoding":
            accepted = value
        elif name not in _OF_PROTOCOL:
            try:
                metadata.append((name.decode("latin-1"), _read_value(name, value)))
            except BadInput as error:
                fault = error
    if method != b"POST":
        raise NotGrpc(405, f"This port speaks gRPC: a call is a POST, not {_shown(method)}.")
    if not content_type.startswith(CONTENT_TYPE):
        shown = _shown(content_type)
        raise NotGrpc(415, f"This port speaks gRPC: content-type begins with application/grpc, not {shown}.")
    path_of_method = path.decode("latin-1").removeprefix("/")
    return CallHead(path_of_method, timeout_s, encoding, _answer_encoding(encoding, accepted), tuple(metadata), fault)


def header_bytes(fields: Iterable[tuple[bytes, bytes]]) -> int:
    """How many bytes a header has, as HTTP/2 counts them."""
    return sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)


def trailers(code: StatusCode, description: str, metadata: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """The fields that end a call."""
    fields = [(b"grpc-status", b"%d" % code.value[0])]
    if description:
        fields.append((b"grpc-message", quote(description, safe=_PLAIN).encode()))
    fields += [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in metadata]
    return fields


def refusal_of_encoding(encoding: str) -> BadInput | None:
    """What is wrong with the compression that a client names."""
    if encoding in ENCODINGS:
        return None
    return BadInput(f"grpc-encoding is {encoding[:50]!r}, and this server reads {', '.join(ENCODINGS)}.")


def _answer_encoding(encoding: str, accepted: bytes) -> str:
    if encoding == IDENTITY:
        return IDENTITY
    takes = {name.strip() for name in accepted.decode("latin-1").split(",")}
    return encoding if encoding in ENCODINGS and encoding in takes else IDENTITY


def _read_timeout(value: bytes) -> float:
    number, unit = value[:-1], value[-1:]
    if not number.isdigit() or len(number) > _MOST_TIMEOUT_DIGITS or unit not in _SECONDS:
        raise BadInput(f"grpc-timeout is {_shown(value)}; it is up to 8 digits and one of H, M, S, m, u, n.")
    return int(number) * _SECONDS[unit]


def _read_value(name: bytes, value: bytes) -> str | bytes:
    if not name.endswith(b"-bin"):
        return value.decode("latin-1")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadInput(f"The value of {_shown(name)} is no base64, which names that end in -bin have.") from None


def _shown(value: bytes) -> str:
    return repr(value[:50].decode("latin-1"))
