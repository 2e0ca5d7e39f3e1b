"""Which ranges of an object are fetched in which order, and up to which byte it is whole. Pure: no I/O, no locks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MIB = 1 << 20
FIRST_PART_BYTES = 4 * MIB
LEAST_PART_BYTES = 1 * MIB
MOST_PART_BYTES = 16 * MIB


@dataclass(slots=True)
class Part:
    """Bytes `begin` to before `end`, of which those before `at` are in the file."""

    begin: int
    end: int
    at: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in the file."""
        return self.at == self.end


def part_bytes(rest: int, connections: int) -> int:
    """The size of the parts of `rest` bytes: one part a connection, but neither tiny nor too much to lose."""
    each = -(-rest // max(1, connections))
    return min(max(each, LEAST_PART_BYTES), MOST_PART_BYTES)


class Parts:
    """The parts of an object of `size` bytes, the first of which ends at `first_end`.

    They are taken in order, so that the whole beginning grows steadily. `take` does not hand out the first part: its
    bytes come with the answer to the first request, which also describes the object.
    """

    def __init__(self, size: int, first_end: int, connections: int) -> None:
        each = part_bytes(size - first_end, connections)
        begins = [0, *range(first_end, size, each)]
        ends = [*begins[1:], size]
        self.all = [Part(begin, end, begin) for begin, end in zip(begins, ends, strict=True)]
        self.size = size
        self._waiting = deque(self.all[1:])
        self._whole = 0  # the number of whole parts at the beginning

    @property
    def first(self) -> Part:
        """The part at the object's beginning."""
        return self.all[0]

    def take(self) -> Part | None:
        """The earliest part that no connection has taken, or None."""
        return self._waiting.popleft() if self._waiting else None

    @property
    def is_waiting(self) -> bool:
        """Whether there is a part that no connection has taken."""
        return bool(self._waiting)

    def give_back(self, part: Part) -> None:
        """Return a part, for another connection to go on with before any later part."""
        self._waiting.appendleft(part)

    @property
    def front(self) -> int:
        """All bytes before this one are in the file."""
        while self._whole < len(self.all) and self.all[self._whole].is_whole:
            self._whole += 1
        return self.size if self._whole == len(self.all) else self.all[self._whole].at

    @property
    def have(self) -> int:
        """The number of bytes in the file, wherever they are."""
        return sum(part.at - part.begin for part in self.all)
