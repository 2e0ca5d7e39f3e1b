"""Tensors in memory that the client shares: read from a file, and written into it.

The server has checked which file, and which bytes of it. It is read and written by position and never mapped: a client
that shrinks its file while it is used gets 400, and no process a SIGBUS. What is read is a copy, so that the client
cannot change values after they were checked.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from marserve_handlers.errors import BadInput

if TYPE_CHECKING:
    from marserve_handlers.declared.arrays import Array

SHARED_TENSORS: Final = "open_inference_shared_tensors"
"""The server's header that says where tensors lie."""

# Neither a link is followed nor a pipe waited for, if such a thing has taken the file's place.
_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Span(NamedTuple):
    """Bytes of a file that has this identity: `size` of them from `offset` on."""

    path: str
    device: int
    inode: int
    offset: int
    size: int


class SharedTensors(NamedTuple):
    """Where the inputs and the outputs of a request lie that are in shared memory, by name."""

    inputs: Mapping[str, Span]
    outputs: Mapping[str, Span]


NONE: Final = SharedTensors({}, {})


def shared_tensors(server_headers: Iterable[tuple[str, str]]) -> SharedTensors:
    """What the server says of a request's shared memory."""
    for name, value in server_headers:
        if name == SHARED_TENSORS:
            document = json.loads(value)
            inputs, outputs = (
                {tensor: Span(*span) for tensor, span in document[kind].items()} for kind in ("inputs", "outputs")
            )
            return SharedTensors(inputs, outputs)
    return NONE


def read_span(span: Span, name: str) -> Array:
    """A copy of the bytes: uint8. `name` is the tensor's. Raises BadInput if they are not there any more."""
    buffer = np.empty(span.size, np.uint8)
    view = buffer.data
    at = 0
    with _opened(span, os.O_RDONLY, name) as descriptor:
        while at < span.size:
            count = os.preadv(descriptor, [view[at:]], span.offset + at)
            if not count:
                raise BadInput(
                    f"its region's file ends at {span.offset + at}; it was shrunk after it was registered", name
                )
            at += count
    return buffer


def write_span(span: Span, name: str, values: bytes | memoryview) -> None:
    """Write an output's bytes, no more than the span has. Raises BadInput if the file cannot take them any more."""
    view = memoryview(values)
    end = span.offset + len(view)
    at = 0
    with _opened(span, os.O_WRONLY, name) as descriptor:
        if os.fstat(descriptor).st_size < end:  # written all the same, it would grow again
            raise BadInput(f"its region's file ends before {end}; it was shrunk after it was registered", name)
        try:
            while at < len(view):
                at += os.pwrite(descriptor, view[at:], span.offset + at)
        except OSError as error:
            raise BadInput(f"its region's file cannot be written: {error.strerror}", name) from None


@contextlib.contextmanager
def _opened(span: Span, mode: int, name: str) -> Iterator[int]:
    """The file, if it is still the one that was registered. Raises BadInput."""
    try:
        descriptor = os.open(span.path, mode | _SAFELY)
    except OSError as error:
        raise BadInput(
            f"its region's file cannot be opened: {error.strerror}; it must stay there while it is registered",
            name,
        ) from None
    try:
        found: Any = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (span.device, span.inode):
            raise BadInput(
                "another file has the name of its region's file; unregister the region, and register it again", name
            )
        yield descriptor
    finally:
        os.close(descriptor)
