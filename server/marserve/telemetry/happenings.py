"""What else the server did: loads, deaths, evictions, roll-backs, stalls, collections. Bounded, no I/O, no clock.

A request that was slow is explained by what happened meanwhile, so each part notes what may hold others up. It is read
only for explanations and traces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

Kind = Literal["load", "death", "eviction", "scaling", "rollback", "stall", "collection", "download", "build"]

MOST_KEPT: Final = 4096
MAX_TEXT: Final = 200


class Happening(NamedTuple):
    """Something that took from `began` to `ended`, seconds on the monotonic clock; equal for a moment.

    `model` and `version` are empty for what concerns the whole server. `text` goes on where "… ms before, " ends.
    """

    kind: Kind
    began: float
    ended: float
    model: str
    version: str
    text: str

    def went_on(self, begin: float, end: float) -> bool:
        """Whether it went on at some time from `begin` to `end`."""
        return self.ended >= begin and self.began <= end

    def overlap_s(self, begin: float, end: float) -> float:
        """For how long of this time it went on."""
        return max(0.0, min(end, self.ended) - max(begin, self.began))


class Happenings:
    """The latest ones. All calls are made on the event loop, or with the interpreter's lock held for one append."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._kept: deque[Happening] = deque(maxlen=most)
        self.heard: Callable[[Happening], None] | None = None
        """Called with each one, on the thread that notes it; must not block."""

    def note(self, kind: Kind, began: float, ended: float, text: str, model: str = "", version: str = "") -> None:
        """Keep one; the oldest leaves for it."""
        happening = Happening(kind, began, ended, model, version, text[:MAX_TEXT])
        self._kept.append(happening)
        if self.heard is not None:
            self.heard(happening)

    def __iter__(self) -> Iterator[Happening]:
        """All, the oldest first."""
        return iter(list(self._kept))
