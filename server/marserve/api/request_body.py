"""From the bytes of a request to the named inputs that a handler sees (contract §1.3). Knows no sockets and no routes.

A body is one part called `body` unless it is a form. Every bound here is one that an honest client never meets; past
them, and for a form that cannot be read, BadInput says what was wrong.
"""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from multipart import MultipartError, ParserLimitReached, PushMultipartParser, parse_options_header

from marserve.errors import BadInput
from marserve.messages import Part

MAX_PARTS = 1024
MAX_PART_HEADERS = 16
MAX_PART_HEADER_BYTES = 8192
MAX_BOUNDARY_BYTES = 200
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"


def read_parts(body: bytes, content_type: str | None) -> list[Part]:
    """The inputs in `body`, in the order they stand there; of two with one name the handler sees the later.

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


def read_fields(encoded: bytes) -> list[Part]:
    """Decode a urlencoded form, or a query string.

    A field without `=` has an empty value. Names are UTF-8 (what is not becomes U+FFFD), values any bytes. Raises
    BadInput when there are more than MAX_PARTS.
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
    if b"+" in text:
        text = text.replace(b"+", b" ")
    return unquote_to_bytes(text) if b"%" in text else text


def _read_multipart(body: bytes, content_type: str) -> list[Part]:
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
        for event in parser.parse(body):
            if event is None:
                parts.append(Part(name, pieces[0] if len(pieces) == 1 else b"".join(pieces), part_type))
            elif isinstance(event, (bytes, bytearray)):
                pieces.append(bytes(event))
            else:
                name, pieces = event.name or "", []
                # Only a file's content type travels along; a file without one is octets (contract §1.3).
                part_type = None
                if event.filename is not None:
                    part_type = event.header("Content-Type") or "application/octet-stream"
        parser.close()
    except ParserLimitReached:
        raise BadInput(
            f"The multipart body is over a limit: at most {MAX_PARTS} parts, {MAX_PART_HEADERS} header lines a part, "
            f"{MAX_PART_HEADER_BYTES} bytes a line."
        ) from None
    except MultipartError as error:
        raise BadInput(f"The multipart body cannot be read: {error.args[0]}.") from None
    return parts
