"""Counts the bytes of requests and answers that a server holds, and decides which bodies wait for room. Pure.

A body of at most `SMALL_BYTES` counts in a reserve of its own, so that small requests pass while large ones wait. Half
of the reserve is for small bodies that come in pieces, until they are whole. A longer body has a `Hold`. It asks for
its whole length when its header has come; a chunked body asks for a little more than it has, and for more as it grows.
The hold waits in line, and its connection is not read, until there is room. What came of the body before the connection
stopped reading counts in a second reserve of the same size. Answers that wait for their clients count, and are never
refused. Callers pass the time, in seconds on the monotonic clock.

    held by bodies                at most `limit`, less what answers and small bodies beyond their reserve hold
    small bodies                  at most `reserve`, half of it for those that have not come as a whole; beyond it what
                                  is free of `limit`
    first bytes of waiting bodies at most `reserve`

Nothing waits for ever: `turn` refuses a body that waited `PATIENCE_S`. When the first in line has waited `STUCK_S`,
`turn` makes room for it: it refuses bodies that arrive slowly, then the youngest of those that wait in the middle of
their bytes, until the first in line fits. Connections ask `is_pressed`, and refuse whole requests that they keep behind
an answer which their client does not take.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

SMALL_BYTES: Final = 64 * 1024
UNBOUNDED: Final = 1 << 62
RESERVE_SHARE: Final = 16
LEAST_RESERVE_BYTES: Final = 4 * 1024 * 1024
# The most bytes that one read of a connection brings.
READ_BYTES: Final = 256 * 1024
# A body is refused after this wait for room.
PATIENCE_S: Final = 5.0
# Others must make room for the first in line when it has waited this long.
STUCK_S: Final = 1.0
# A body that comes more slowly than this loses its place while others are stuck.
PRESSED_BYTES_PER_S: Final = 64 * 1024

Refusal = Literal["no_room", "too_slow", "untaken"]


# A protocol: `HttpConnection` is built upon this ledger.
class Reader(Protocol):
    """The connection that reads a body."""

    @property
    def is_reading(self) -> bool:
        """Whether the client holds the body up; False while the server itself does not read."""

    def go_on(self) -> None:
        """Go on reading: the body has room."""

    def give_up(self, why: Refusal) -> None:
        """Refuse the body, which has no room any more. Its hold is closed."""


class Hold:
    """The room of one body, from its first byte until `close`, or until its last reference is dropped."""

    __slots__ = (
        "_ledger",
        "ahead",
        "granted",
        "grows",
        "is_part",
        "is_small",
        "mark_at",
        "mark_bytes",
        "number",
        "reader",
        "received",
        "waits_since",
        "wanted",
    )

    def __init__(self, ledger: ByteLedger, number: int, reader: Reader | None, now: float) -> None:
        self._ledger = ledger
        self.number = number
        self.reader = reader
        self.granted = 0
        self.wanted = 0
        self.received = 0
        self.ahead = 0  # of `received`, what came before there was room for it
        self.is_small = False
        self.is_part = False  # a small one that has not come as a whole
        self.grows = False  # chunked: how long it will be is not known
        self.waits_since: float | None = None
        self.mark_at = now
        self.mark_bytes = 0

    def __lt__(self, other: Hold) -> bool:
        """Older ones come first."""
        return self.number < other.number

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for room, and nothing of it should be read."""
        return self.waits_since is not None

    def waited_s(self, now: float) -> float:
        """How long it has waited; 0 if it does not wait."""
        return 0.0 if self.waits_since is None else now - self.waits_since

    def take(self, size: int, now: float) -> bool:
        """Count bytes that have come. False: not even these have room, and the body must be refused."""
        self.received += size
        if self.is_small and self.received <= SMALL_BYTES:
            return self._ledger.take_part(self, size)
        if self.grows and self.received + READ_BYTES > self.granted and not self.is_waiting:
            self._ledger.grow(self, now)
        if not self.is_waiting:
            return True
        return self._ledger.take_ahead(self, max(0, self.received - self.granted))

    def complete(self) -> bool:
        """All of the body has come: keep room for its actual length. False if there is no room for it."""
        return self._ledger.complete(self)

    def close(self) -> None:
        """Give the room back; may be called twice."""
        self._ledger.close(self)

    def __del__(self) -> None:
        # Any thread may drop the last reference at any moment, so the ledger books it later.
        if self.granted:
            self._ledger.drop(self.granted, is_small=self.is_small, is_part=self.is_part)


class ByteLedger:
    """The books of one server. Used by one thread; `drop` may be called by any thread.

    `on_room` is called, by any thread, when room was given back while a body waits: `turn` should follow soon.
    """

    def __init__(self, limit: int, on_room: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self.reserve = max(LEAST_RESERVE_BYTES, limit // RESERVE_SHARE)
        self.half = self.reserve // 2
        self.on_room = on_room
        self.bodies = 0
        self.small = 0
        self.parts = 0
        self.ahead = 0
        self.answers = 0
        self.waiting: list[Hold] = []
        self._reading: dict[Hold, None] = {}  # large ones whose bytes still come
        self._dropped: deque[tuple[int, bool, bool]] = deque()
        self._last_number = 0

    # ------------------------------------------------------------------------------------------- figures

    @property
    def room(self) -> int:
        """Bytes that a large body could have now; below 0 when answers hold more than the limit leaves."""
        if self._dropped:
            self._settle()
        half = self.half
        return self.limit - self.bodies - self.answers - max(0, self.small - half) - max(0, self.parts - half)

    def figures(self) -> dict[str, int]:
        """Bytes held, by what they are."""
        self._settle()
        return {
            "bodies": self.bodies,
            "small_bodies": self.small + self.parts,
            "waiting": self.ahead,
            "answers": self.answers,
        }

    # ------------------------------------------------------------------------------------------- small bodies

    def take_small(self, size: int) -> bool:
        """Count a small body until `release_small`; False if there is no room for it."""
        if not self._has_room_for_small(size):
            return False
        self.small += size
        return True

    def _has_room_for_small(self, size: int) -> bool:
        self._settle()
        return self.small + size <= self.half or self.small + size - max(self.half, self.small) <= self.room

    def release_small(self, size: int) -> None:
        """A small body takes no room any more."""
        self.small -= size
        if self.waiting:
            self.on_room()

    # ------------------------------------------------------------------------------------------- bodies

    def take(self, size: int) -> Hold | None:
        """Room for a body that has come as a whole; None if there is not enough."""
        hold = self._new(None, 0.0)
        hold.received = size
        return hold if self._grant(hold, size) else None

    def open(self, length: int | None, reader: Reader, now: float) -> Hold:
        """A hold for a body of this length (None: chunked) whose bytes begin to come. A large one may have to wait."""
        hold = self._new(reader, now)
        hold.grows = length is None
        if length is None or length <= SMALL_BYTES:
            hold.is_small = hold.is_part = True
            return hold
        hold.wanted = length
        self._reading[hold] = None
        self._ask(hold, now)
        return hold

    def take_part(self, hold: Hold, size: int) -> bool:
        """Count a piece of a small body. Bodies in pieces leave half of the reserve to bodies that are whole."""
        self._settle()
        half = self.half
        if self.parts + size > half and self.parts + size - max(half, self.parts) > self.room:
            return False
        self.parts += size
        hold.granted += size
        return True

    def grow(self, hold: Hold, now: float) -> None:
        """Ask for room for the next read of a chunked body that is no longer small. It may have to wait for that."""
        hold.wanted = min(max(hold.received + READ_BYTES, 2 * hold.granted), max(self.limit, hold.received))
        self._reading[hold] = None
        self._ask(hold, now)

    def take_ahead(self, hold: Hold, size: int) -> bool:
        """Count what has come of a waiting body; False if that is more than the reserve."""
        self.ahead += size - hold.ahead
        hold.ahead = size
        return self.ahead <= self.reserve

    def complete(self, hold: Hold) -> bool:
        """See `Hold.complete`."""
        self._reading.pop(hold, None)
        if hold.is_waiting:
            self._leave_line(hold)
            hold.wanted = hold.received
            if not self._grant(hold, hold.received):
                self.close(hold)
                return False
        self._give_back(hold, hold.granted - hold.received)
        hold.reader = None
        return True

    def close(self, hold: Hold) -> None:
        """See `Hold.close`."""
        self._reading.pop(hold, None)
        self._leave_line(hold)
        self._give_back(hold, hold.granted)
        hold.reader = None

    def drop(self, size: int, *, is_small: bool, is_part: bool) -> None:
        """Give back the room of a hold whose last reference was dropped."""
        self._dropped.append((size, is_small, is_part))
        if self.waiting:
            self.on_room()

    def is_pressed(self, now: float) -> bool:
        """Whether the first in line is stuck, or a small body that comes now might be refused."""
        if self.waiting and self.waiting[0].waited_s(now) >= STUCK_S:
            return True
        return not self._has_room_for_small(SMALL_BYTES)

    # ------------------------------------------------------------------------------------------- answers

    def count_answers(self, size: int) -> None:
        """Add to the bytes that wait for their clients; `size` is negative when they were taken."""
        self.answers += size
        if size < 0 and self.waiting:
            self.on_room()

    # ------------------------------------------------------------------------------------------- turns

    def turn(self, now: float) -> None:
        """Let bodies go on that have room now, and refuse those that waited too long. To be called every second."""
        self._settle()
        self._serve()
        for hold in [hold for hold in self.waiting if hold.waited_s(now) >= PATIENCE_S]:
            self._refuse(hold, "no_room")
        self._serve()
        if self.waiting and self.waiting[0].waited_s(now) >= STUCK_S:
            self._make_room(self.waiting[0], now)
            self._serve()
        for hold in self._reading:
            if now - hold.mark_at >= STUCK_S or hold.is_waiting:
                hold.mark_at, hold.mark_bytes = now, hold.received

    def _make_room(self, first: Hold, now: float) -> None:
        """Refuse other bodies until the first in line can go on."""
        slow = [hold for hold in self._reading if not hold.is_waiting and self._is_slow(hold, now)]
        stuck = [hold for hold in self.waiting if hold is not first and hold.granted]
        refused: list[tuple[Hold, Refusal]] = [(hold, "too_slow") for hold in slow]
        refused += [(hold, "no_room") for hold in reversed(stuck)]
        for hold, why in refused:
            if self._fits(first):
                return
            self._refuse(hold, why)

    @staticmethod
    def _is_slow(hold: Hold, now: float) -> bool:
        passed = now - hold.mark_at
        is_behind = hold.received - hold.mark_bytes < PRESSED_BYTES_PER_S * passed
        return passed >= STUCK_S and is_behind and hold.reader is not None and hold.reader.is_reading

    def _serve(self) -> None:
        while self.waiting and self._fits(self.waiting[0]):
            hold = self.waiting[0]
            self._leave_line(hold)
            self._grant(hold, hold.wanted)
            if hold.reader is not None:
                hold.reader.go_on()

    def _refuse(self, hold: Hold, why: Refusal) -> None:
        reader = hold.reader
        self.close(hold)
        if reader is not None:
            reader.give_up(why)

    # ------------------------------------------------------------------------------------------- inside

    def _new(self, reader: Reader | None, now: float) -> Hold:
        self._last_number += 1
        return Hold(self, self._last_number, reader, now)

    def _ask(self, hold: Hold, now: float) -> None:
        """Grant what the hold wants, or put it in line: older holds that wait go first."""
        if (not self.waiting or hold < self.waiting[0]) and self._grant(hold, hold.wanted):
            return
        hold.waits_since = now
        insort(self.waiting, hold)

    def _fits(self, hold: Hold) -> bool:
        """Whether there is room for what a waiting hold wants."""
        return hold.wanted - (0 if hold.is_small else hold.granted) <= self.room

    def _grant(self, hold: Hold, wanted: int) -> bool:
        if wanted <= SMALL_BYTES and not hold.granted:
            if self.take_small(wanted):
                hold.is_small, hold.granted = True, wanted
            return hold.is_small
        had = 0 if hold.is_small else hold.granted
        if wanted - had > self.room:
            return False
        if hold.is_small:  # until now it counted as small
            self._lessen(hold.granted, is_small=True, is_part=hold.is_part)
            hold.is_small = hold.is_part = False
        self.bodies += wanted - had
        hold.granted = wanted
        return True

    def _give_back(self, hold: Hold, size: int) -> None:
        hold.granted -= size
        self._lessen(size, is_small=hold.is_small, is_part=hold.is_part)
        if size and self.waiting:
            self.on_room()

    def _leave_line(self, hold: Hold) -> None:
        self.ahead -= hold.ahead
        hold.ahead = 0
        if hold.waits_since is not None:
            hold.waits_since = None
            self.waiting.remove(hold)

    def _settle(self) -> None:
        """Book the holds that were dropped meanwhile."""
        while self._dropped:
            size, is_small, is_part = self._dropped.popleft()
            self._lessen(size, is_small=is_small, is_part=is_part)

    def _lessen(self, size: int, *, is_small: bool, is_part: bool) -> None:
        if is_part:
            self.parts -= size
        elif is_small:
            self.small -= size
        else:
            self.bodies -= size


class HeldBytes(bytearray):
    """A body that keeps its room until its last reference is dropped."""

    __slots__ = ("hold",)

    hold: Hold


# Families of metrics that the ledger keeps itself, and what reads their numbers off it.
FAMILIES: Final[list[tuple[str, Callable[[ByteLedger], Mapping[str, float]]]]] = [
    ("marserve_bytes_in_flight", ByteLedger.figures),
    ("marserve_bytes_in_flight_limit", lambda ledger: {"": ledger.limit}),
]
