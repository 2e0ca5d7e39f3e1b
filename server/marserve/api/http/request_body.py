"""From the bytes of a request to the named inputs that a handler sees (contract §1.3). Knows no sockets and no routes.

A body that is no form is one part called `body`. An honest client never meets the bounds. Beyond them, and for a form
that cannot be read, BadInput says what was wrong.

What a form holds costs more to decode than its length: `is_quick` decides by a few counts which forms may be decoded on
the event loop. A thread decodes the others, in slices, and lets the loop run between two of them.
"""

from __future__ import annotations

import re
from binascii import a2b_qp
from collections.abc import Iterator
from typing import Final

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser, parse_options_header

from marserve.api.decoding import MAX_PARTS, breathe
from marserve.errors import BadInput, without_stop
from marserve.messages import Part

MAX_PART_HEADERS = 16
MAX_PART_HEADER_BYTES = 8192
MAX_BOUNDARY_BYTES = 200
MAX_CONTENT_TYPE_CHARACTERS = 1024
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"

# Up to these lengths a form may be decoded on the loop, if its content is cheap.
QUICK_BYTES: Final = 64 * 1024
QUICK_FILE_BYTES: Final = 256 * 1024
# What it may hold: escapes and fields of a urlencoded form are decoded one by one, as are lines of a part's header and
# their parameters. A form over `QUICK_BYTES` with few lines holds one or two files, whose bytes cost nothing.
QUICK_ESCAPES: Final = 8000
ESCAPES_PER_FIELD: Final = 16
QUICK_LINES: Final = 200
PARAMETERS_PER_LINE: Final = 4
QUICK_LINES_OF_FILES: Final = 10
# A long body is decoded in slices of this length.
SLICE_BYTES: Final = 32 * 1024

_PLUS_TO_SPACE = bytes(0x20 if byte == 0x2B else byte for byte in range(256))
_NO_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def read_parts(body: bytes, content_type: str | None) -> list[Part]:
    """The inputs in `body`, in their order. Of two with one name the handler sees the later.

    `content_type` is the request's, as the client wrote it, or None. Raises BadInput when a form cannot be read.
    """
    if content_type is not None and is_form(content_type):
        if content_type[:10].lower() == "multipart/":
            return _read_multipart(body, content_type)
        return read_fields(body)
    return [Part("body", body, content_type)]


def is_form(content_type: str) -> bool:
    """Whether a body of this type is cut into fields. Parameters and case do not matter."""
    return content_type.partition(";")[0].strip().lower() in (FORM, MULTIPART)


def is_quick(body: bytes | bytearray, content_type: str) -> bool:
    """Whether a form is decoded within a step of the loop, whatever it holds."""
    if content_type[:10].lower() == "multipart/":
        if len(body) > QUICK_FILE_BYTES:
            return False
        lines = body.count(b"\r\n")
        if len(body) > QUICK_BYTES:
            return lines <= QUICK_LINES_OF_FILES
        return lines + (body.count(b";") + body.count(b"\\")) // PARAMETERS_PER_LINE <= QUICK_LINES
    if len(body) > QUICK_BYTES:
        return False
    return body.count(b"%") + ESCAPES_PER_FIELD * body.count(b"&") <= QUICK_ESCAPES


def read_fields(encoded: bytes) -> list[Part]:
    """Decode a urlencoded form, or a query string.

    A field without `=` has an empty value. Names are UTF-8 (other bytes become U+FFFD), values any bytes. Raises
    BadInput for more than MAX_PARTS.
    """
    if not encoded:
        return []
    if encoded.count(b"&") >= MAX_PARTS:
        raise BadInput(
            f"The form has more than {MAX_PARTS} fields. A body that is no form needs a Content-Type of its own."
        )
    parts = []
    for field in encoded.split(b"&"):
        if field:
            name, _, value = field.partition(b"=")
            parts.append(Part(_decode(name).decode("utf-8", "replace"), _decode(value)))
    return parts


def _decode(text: bytes) -> bytes:
    """A name or value with its escapes decoded. A `%` that begins no escape stays."""
    if b"+" in text:
        text = text.translate(_PLUS_TO_SPACE)
    if b"%" not in text:
        return text
    if len(text) <= SLICE_BYTES:
        return _unescape(text)
    pieces, begin = [], 0
    while begin < len(text):
        end = begin + SLICE_BYTES
        # An escape must not be cut in two.
        cut = text.rfind(b"%", end - 2, end)
        if cut >= 0 and end < len(text):
            end = cut
        pieces.append(_unescape(text[begin:end]))
        begin = end
        breathe()
    return b"".join(pieces)


def _unescape(text: bytes) -> bytes:
    """Decode `%xx` as quoted-printable's `=xx`, for which Python has a decoder in C."""
    text = _NO_ESCAPE.sub(b"%25", text)
    return a2b_qp(text.replace(b"=", b"=3D").replace(b"%", b"="))


def _read_multipart(body: bytes, content_type: str) -> list[Part]:
    if len(content_type) > MAX_CONTENT_TYPE_CHARACTERS:
        raise BadInput(f"The Content-Type of a form may have {MAX_CONTENT_TYPE_CHARACTERS} characters.")
    boundary = parse_options_header(content_type)[1].get("boundary", "")
    if not boundary or len(boundary) > MAX_BOUNDARY_BYTES:
        raise BadInput(
            f"The Content-Type multipart/form-data needs a boundary of 1 to {MAX_BOUNDARY_BYTES} characters."
        )
    if not body:
        raise BadInput("The multipart body is empty; it must end with its closing boundary.")
    parts: list[Part] = []
    name, part_type = "", None
    pieces: list[bytes] = []
    try:
        parser = PushMultipartParser(
            boundary,
            max_header_size=MAX_PART_HEADER_BYTES,
            max_header_count=MAX_PART_HEADERS,
            max_segment_count=MAX_PARTS,
        )
        for event in _events(parser, body):
            if event is None:
                parts.append(Part(name, pieces[0] if len(pieces) == 1 else b"".join(pieces), part_type))
            elif isinstance(event, (bytes, bytearray)):
                pieces.append(bytes(event))
            else:
                name, pieces = event.name or "", []
                # Only files keep their content type; a file without one is octets (contract §1.3).
                part_type = None
                if event.filename is not None:
                    part_type = event.header("Content-Type") or "application/octet-stream"
        parser.close()
    except ParserLimitReached as error:
        _let_go(error)
        raise BadInput(
            f"The multipart body is over a limit: at most {MAX_PARTS} parts, {MAX_PART_HEADERS} header lines a part, "
            f"{MAX_PART_HEADER_BYTES} bytes a line."
        ) from None
    except MultipartError as error:
        _let_go(error)
        raise BadInput(f"The multipart body cannot be read: {without_stop(error.args[0])}.") from None
    return parts


def _let_go(error: MultipartError) -> None:
    """The parser and its frames keep the error, and its traceback them: a cycle that would keep the body."""
    error.with_traceback(None)


def _events(parser: PushMultipartParser, body: bytes) -> Iterator[MultipartSegment | bytes | bytearray | None]:
    """The parser's events for the body; a long body is fed in slices."""
    if len(body) <= QUICK_FILE_BYTES and is_quick(body, MULTIPART):
        yield from parser.parse(body)
        return
    for begin in range(0, len(body), SLICE_BYTES):
        yield from parser.parse(body[begin : begin + SLICE_BYTES])
        breathe()
