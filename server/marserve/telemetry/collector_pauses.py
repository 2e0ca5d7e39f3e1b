"""Pauses of the server's own garbage collector, which hold all requests up: happenings, from 5 ms on."""

from __future__ import annotations

import gc
from time import monotonic
from typing import Any, Final

from marserve.telemetry.happenings import Happenings

KEPT_FROM_S: Final = 0.005


class CollectorPauses:
    """Watches this process's collector from `begin` to `end`. A collection costs two looks at the clock."""

    def __init__(self, happenings: Happenings) -> None:
        self._happenings = happenings
        self._since = 0.0

    def begin(self) -> None:
        """Watch from now on."""
        gc.callbacks.append(self._on_collection)

    def end(self) -> None:
        """Watch no longer."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the collector, on whatever thread it runs."""
        now = monotonic()
        if phase == "start":
            self._since = now
        elif self._since and now - self._since >= KEPT_FROM_S:
            text = f"the server collected garbage of generation {info['generation']}"
            self._happenings.note("collection", self._since, now, text)
