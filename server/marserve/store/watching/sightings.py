"""What changed in a store between two looks at it, and which objects are complete. Pure: time is a number.

An object store shows an object when all of it is there. A folder shows a file from its first byte on, so a file counts
only when it has not changed for a while and is a complete archive. An object counts as removed only when it stays
missing, because a name is missing for a moment while it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from marserve.store.sources.source import Entry

ChangeKind = Literal["added", "replaced", "removed"]

# Spreads the looks of a fleet's servers, so that they do not all ask at the same moment.
JITTER = 0.1
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 300.0


@dataclass(frozen=True, slots=True)
class Change:
    """One object that was added, replaced or removed. `entry` is as it was last seen.

    `was_there`: the first look found it, so its age is unknown.
    """

    kind: ChangeKind
    entry: Entry
    was_there: bool = False


@dataclass(slots=True)
class Unsettled:
    """An object that is not reported yet: since when it has not changed, and what it still lacks."""

    entry: Entry
    since: float
    was_there: bool
    reason: str = ""


class Sightings:
    """The known objects of one store: takes every look and returns the changes.

    `settle_s` is how long an object must stay the same before it counts, `removal_s` how long it must be missing; both
    in seconds. `why_incomplete` says what a settled object still lacks, or returns None; it may block.
    """

    def __init__(
        self,
        *,
        settle_s: float = 0.0,
        removal_s: float = 5.0,
        why_incomplete: Callable[[Entry], str | None] = lambda entry: None,
    ) -> None:
        self._settle_s = settle_s
        self._removal_s = removal_s
        self._why_incomplete = why_incomplete
        self._known: dict[str, Entry] = {}
        self._missing: dict[str, float] = {}
        self._has_looked = False
        self.unsettled: dict[str, Unsettled] = {}

    def __len__(self) -> int:
        return len(self._known)

    def known(self, key: str) -> Entry | None:
        """The object as it was last reported; None if it was not, or was removed."""
        return self._known.get(key)

    def look(self, now: float, entries: Iterable[Entry]) -> list[Change]:
        """Take a whole listing; returns additions and replacements by time and name, then removals."""
        seen = {entry.key: entry for entry in entries}
        is_first, self._has_looked = not self._has_looked, True
        for key in [key for key in self.unsettled if key not in seen]:
            del self.unsettled[key]
        changes = [
            change
            for entry in sorted(seen.values(), key=_age)
            if (change := self._see(now, entry, was_there=is_first)) is not None
        ]
        for key in [key for key in self._known if key not in seen]:
            change = self._miss(now, key)
            if change is not None:
                changes.append(change)
        return changes

    def look_at(self, now: float, key: str, entry: Entry | None) -> list[Change]:
        """Take one object that was looked at alone; None: it is missing."""
        if entry is not None:
            change = self._see(now, entry, was_there=False)
        else:
            self.unsettled.pop(key, None)
            change = self._miss(now, key) if key in self._known else None
        return [] if change is None else [change]

    def next_look_at(self) -> float | None:
        """When the next look may find a change of objects that are not settled or are missing; None without any."""
        settling = [each.since + self._settle_s for each in self.unsettled.values() if not each.reason]
        leaving = [since + self._removal_s for since in self._missing.values()]
        return min([*settling, *leaving], default=None)

    def _see(self, now: float, entry: Entry, *, was_there: bool) -> Change | None:
        self._missing.pop(entry.key, None)
        known = self._known.get(entry.key)
        if known is not None and is_same(known, entry):
            self.unsettled.pop(entry.key, None)
            return None
        waiting = self.unsettled.get(entry.key)
        if waiting is None or not is_same(waiting.entry, entry):
            was_there = was_there or (waiting is not None and waiting.was_there)
            waiting = self.unsettled[entry.key] = Unsettled(entry, now, was_there)
        if now - waiting.since < self._settle_s:
            return None
        waiting.reason = self._why_incomplete(entry) or ""
        if waiting.reason:
            return None
        del self.unsettled[entry.key]
        self._known[entry.key] = entry
        return Change("added" if known is None else "replaced", entry, waiting.was_there and known is None)

    def _miss(self, now: float, key: str) -> Change | None:
        since = self._missing.setdefault(key, now)
        if now - since < self._removal_s:
            return None
        del self._missing[key]
        return Change("removed", self._known.pop(key))


def is_same(one: Entry, other: Entry) -> bool:
    """Whether two sightings show the same content: by ETag, else by size and time."""
    if one.etag is not None or other.etag is not None:
        return one.is_of(other)
    return (one.size, one.modified) == (other.size, other.modified)


def pause_s(interval_s: float, failures: int, chance: float) -> float:
    """The pause before the next look. `failures` are those in a row; `chance` is from 0 to below 1.

    A store that does not answer is asked again soon, then less and less often; jitter spreads a fleet's servers.
    """
    if not failures:
        return interval_s * (1 - JITTER + 2 * JITTER * chance)
    longest = max(LONGEST_RETRY_S, interval_s)
    base = min(longest, min(FIRST_RETRY_S, interval_s) * 2.0 ** min(failures - 1, 32))
    return base * (0.5 + 0.5 * chance)


def _age(entry: Entry) -> tuple[float, str]:
    return entry.modified or 0.0, entry.key
