"""Which requests of a batch are of the Open Inference Protocol: the server marks them by one of its own headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marserve_handlers.context import Context, RequestView

MARK: Final = ("open_inference", "v2")
PACKED_BODY: Final = "open_inference_packed_body"
"""The server's header that says how a body is compressed, and how long it may become."""
HEADER_LENGTH: Final = b"inference-header-content-length"
"""Of a request with raw tensors: how many bytes of JSON stand before them."""
ANSWER_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
RAW_TYPE: Final = "application/octet-stream"
"""The content type of an answer with raw tensors."""


def is_marked(context: Context, place: int) -> bool:
    """Whether the request at a place of the batch came by a route of the protocol."""
    items = context.batch_items
    return place < len(items) and MARK in items[place].server_headers


def has_raw_tensors(item: RequestView) -> bool:
    """Whether the body of a request is more than JSON, or compressed, whatever its content type says."""
    server_headers = item.server_headers
    return MARK in server_headers and (
        header_length(item.headers) is not None or any(name == PACKED_BODY for name, _ in server_headers)
    )


def header_length(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """What a request's headers say of its JSON's length; None if they say nothing, so that all of it is JSON."""
    for name, value in headers:
        if len(name) == len(HEADER_LENGTH) and name.lower() == HEADER_LENGTH:
            return value.decode("latin-1")
    return None
