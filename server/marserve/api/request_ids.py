"""Request ids: they look like a UUID, and are made in a fraction of a microsecond."""

from __future__ import annotations

from uuid import uuid4


class RequestIds:
    """Makes the ids of one listener's requests: random, with a counter as the last group."""

    __slots__ = ("_last", "_prefix")

    def __init__(self) -> None:
        self._prefix = str(uuid4())[:24]
        self._last = 0

    def next(self) -> str:
        """An id that no other request has."""
        self._last += 1
        return f"{self._prefix}{self._last & 0xFFFF_FFFF_FFFF:012x}"
