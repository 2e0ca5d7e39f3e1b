"""What a handler gets when it calls another model of its server: an answer, or a failure that it may pass on."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve_handlers.errors import PredictionException


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Another model's answer. Of a stream `body` has all pieces."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


class CallFailed(PredictionException):
    """The other model gave no answer. A handler that does not catch it passes status and message on to its client."""


def body_of(value: Any, content_type: str | None = None) -> tuple[bytes, str | None]:
    """The bytes of a request, and their content type: bytes as they are, text, an array as `.npy`, else JSON."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), content_type
    if isinstance(value, str):
        return value.encode(), content_type or "text/plain"
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        import numpy  # here: the request has an array

        file = io.BytesIO()
        numpy.save(file, value, allow_pickle=False)
        return file.getvalue(), content_type or "application/x-npy"
    return json.dumps(value).encode(), content_type or "application/json"
