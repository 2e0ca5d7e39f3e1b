"""What else happened: loads, deaths, evictions, roll-backs, stalls, collections, floods. Bounded, no I/O, no clock.

A request that was slow is explained by what happened meanwhile, so each part notes what may hold others up. It is read
only for explanations and traces.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

Kind = Literal[
    "load", "death", "eviction", "scaling", "rollback", "stall", "collection", "download", "build", "flood", "printing"
]

MOST_KEPT: Final = 4096
MAX_TEXT: Final = 200
# What goes on is noted so often at most, and what pauses for longer begins anew.
BURST_S: Final = 1.0


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


class Burst(NamedTuple):
    """So much came from `began` until now."""

    began: float
    amount: int


class Bursts:
    """Finds when something that comes in many small amounts is worth a happening: `least` of it within a second.

    That is once when it begins, and then once a second while it goes on, each time from where the one before ended.
    """

    __slots__ = ("_amount", "_began", "_last", "_least", "_next_at")

    def __init__(self, least: int) -> None:
        self._least = least
        self._amount = 0
        self._began = self._last = self._next_at = -math.inf

    def add(self, now: float, amount: int = 1) -> Burst | None:
        """So much more came; returns what is to be noted now, if anything is."""
        if now - self._last > BURST_S or (self._amount < self._least and now - self._began > BURST_S):
            self._began, self._amount = now, 0
        self._last = now
        self._amount += amount
        if self._amount < self._least or now < self._next_at:
            return None
        found = Burst(self._began, self._amount)
        self._began, self._amount, self._next_at = now, 0, now + BURST_S
        return found
