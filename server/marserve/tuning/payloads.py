"""The bodies that a measurement sends, one after the other and from the beginning again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from marserve.errors import MarserveError

MOST_BYTES: Final = 1 << 30


class NoPayloads(MarserveError):
    """There is nothing to send, or nothing that can be held."""


class Payload(NamedTuple):
    """One request body; `content_type` is empty where nobody says it."""

    body: bytes
    content_type: str = ""
    name: str = ""


def read_payloads(files: Iterable[tuple[Path, str]]) -> list[Payload]:
    """Read files, each with its content type. Raises NoPayloads."""
    payloads, held = [], 0
    for path, content_type in files:
        try:
            held += path.stat().st_size
            if held > MOST_BYTES:
                raise NoPayloads(f"The inputs up to {path.name} hold {held:,} bytes; at most {MOST_BYTES:,} are held.")
            payloads.append(Payload(path.read_bytes(), content_type, path.name))
        except OSError as error:
            raise NoPayloads(f"{path} cannot be read: {error.strerror}.") from error
    if not payloads:
        raise NoPayloads("There is no input.")
    return payloads
