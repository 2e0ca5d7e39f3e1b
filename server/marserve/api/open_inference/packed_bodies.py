"""Compressed bodies of inference requests: which are taken, and what their worker must know of them.

A worker decompresses them, never the server. So the server reads no parameters in them; the worker refuses a request
whose parameters are the server's to read, or whose tensors are in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from marserve.api.open_inference.shown import shown
from marserve.errors import UnknownEncoding
from marserve.messages import PACKED_BODY

ENCODING_HEADER: Final = b"content-encoding"

# What HTTP calls them (RFC 9110, 8.4.1), and what zlib's reader is asked for.
_KNOWN: Final = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


class Declaring(Protocol):
    """What knows which models declare their tensors: the registry."""

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """Whether a version does. Raises ModelNotFound or VersionNotFound."""
        ...


class PackedBodies:
    """Says for the worker how a body is compressed, and how long it may become."""

    def __init__(self, models: Declaring, most_bytes: int) -> None:
        """`most_bytes` is the limit of a body that is not compressed."""
        self._models = models
        self._most_bytes = most_bytes

    def header(self, model: str, version: str | None, encoding: str) -> tuple[str, str]:
        """The server's header for the worker of a body with this `Content-Encoding`.

        Raises UnknownEncoding for another one than gzip and deflate, and for a model that does not declare its
        tensors; ModelNotFound and VersionNotFound.
        """
        known = _KNOWN.get(encoding.lower())
        if known is None:
            raise UnknownEncoding(
                f"The body came with Content-Encoding: {shown(encoding)}; send it as gzip, as deflate, or as it is."
            )
        if not self._models.takes_tensors(model, version):
            raise UnknownEncoding(
                f"The body came with Content-Encoding: {shown(encoding)}, and the model {shown(model)} takes none, as "
                "it does not declare its tensors; send the body as it is."
            )
        return PACKED_BODY, f"{known} {self._most_bytes}"


def encoding_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """How a body is compressed, by its headers; None for one that is sent as it is."""
    found = [
        value.strip().decode("latin-1")
        for name, value in headers
        if len(name) == len(ENCODING_HEADER) and name.lower() == ENCODING_HEADER
    ]
    if not found:
        return None
    encoding = ", ".join(found)
    return None if encoding.lower() in ("", "identity") else encoding
