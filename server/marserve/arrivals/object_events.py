"""Events of object stores, in one form for all stores. Pure data.

An event is a hint: it names a place where something may have changed. The watch then reads the store itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

MOST_SEQUENCERS = 10_000


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """One object that was put or removed, by its store's message: `place` is `s3://bucket`, `key` is decoded.

    `sequencer` orders the events of one key, as S3 and Google Cloud Storage number them; None if the event has no
    number. An event of marserve's own form may name a watch in place of a place.
    """

    happened: Literal["there", "gone"]
    key: str
    place: str = ""
    watch: str = ""
    etag: str | None = None
    sequencer: str | None = None

    @property
    def shown(self) -> str:
        """The object, for answers and logs."""
        return f"{self.place or self.watch}/{self.key}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to one event: `look`, or `ignore` with the reason."""

    event: ObjectEvent
    action: Literal["look", "ignore"]
    reason: str = ""
    watch: str = ""

    def document(self) -> dict[str, str]:
        """As the sender gets it."""
        members = {"object": self.event.shown[:2048], "event": self.event.happened, "action": self.action}
        if self.watch:
            members["watch"] = self.watch
        if self.reason:
            members["reason"] = self.reason
        return members


class Sequencers:
    """Detects events that come after a newer one of their object. Bounded: the least recent are forgotten."""

    def __init__(self, most: int = MOST_SEQUENCERS) -> None:
        self._most = most
        self._last: OrderedDict[str, str] = OrderedDict()

    def is_stale(self, event: ObjectEvent) -> bool:
        """Whether a newer event of this object came before; if not, this one is the newest now."""
        if event.sequencer is None:
            return False
        key = f"{event.place}/{event.key}"
        last = self._last.get(key)
        if last is not None:
            width = max(len(last), len(event.sequencer))
            # As S3 has it: the shorter one is padded on the right.
            if event.sequencer.ljust(width, "0").upper() < last.ljust(width, "0").upper():
                return True
        self._last[key] = event.sequencer
        self._last.move_to_end(key)
        while len(self._last) > self._most:
            self._last.popitem(last=False)
        return False
