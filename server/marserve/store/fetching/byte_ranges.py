"""Which ranges of an object are fetched in which order, and up to where it is whole. Pure: no I/O, no locks."""

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
    """How large the parts of `rest` bytes are: one for each connection, but neither tiny nor much to lose."""
    each = -(-rest // max(1, connections))
    return min(max(each, LEAST_PART_BYTES), MOST_PART_BYTES)


class Parts:
    """The parts of an object of `size` bytes, the first of which ends at `first_end`.

    They are taken in order, so that what is whole from the beginning on grows steadily. The first part is not among
    those that are taken: whoever asked what the object is has its bytes coming already.
    """

    def __init__(self, size: int, first_end: int, connections: int) -> None:
        each = part_bytes(size - first_end, connections)
        begins = [0, *range(first_end, size, each)]
        ends = [*begins[1:], size]
        self.all = [Part(begin, end, begin) for begin, end in zip(begins, ends, strict=True)]
        self.size = size
        self._waiting = deque(self.all[1:])
        self._whole = 0  # so many parts from the beginning on are whole

    @property
    def first(self) -> Part:
        """The part at the object's beginning."""
        return self.all[0]

    def take(self) -> Part | None:
        """The earliest part that nobody has; None when there is none."""
        return self._waiting.popleft() if self._waiting else None

    @property
    def is_waiting(self) -> bool:
        """Whether there is a part that nobody has."""
        return bool(self._waiting)

    def give_back(self, part: Part) -> None:
        """Somebody else is to go on with it, before anything that comes later."""
        self._waiting.appendleft(part)

    @property
    def front(self) -> int:
        """Before this byte everything is in the file."""
        while self._whole < len(self.all) and self.all[self._whole].is_whole:
            self._whole += 1
        return self.size if self._whole == len(self.all) else self.all[self._whole].at

    @property
    def have(self) -> int:
        """How many bytes are in the file, wherever they belong."""
        return sum(part.at - part.begin for part in self.all)
