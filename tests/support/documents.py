"""Answers of a server, read as the documents that the API description names."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def document_of(kind: type[T], answer: bytes | Any) -> T:
    """The answer as such a document; fails for a member that the document does not have, or of another type."""
    told = json.loads(answer) if isinstance(answer, bytes) else answer
    read = msgspec.convert(told, kind)
    assert msgspec.to_builtins(read) == told
    return read
