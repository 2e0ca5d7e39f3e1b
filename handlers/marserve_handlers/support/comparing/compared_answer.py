"""What a handler's `compare(primary, shadow)` is given: two answers to one request, as clients would get them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """One answer: its bytes, its status, its headers with names in lower case."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def value(self) -> Any:
        """What the body holds as JSON. Raises ValueError where it holds none."""
        return json.loads(self.body)
