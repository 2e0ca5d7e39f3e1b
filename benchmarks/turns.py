"""Turns: who is compared is measured in short pieces, one right after the other, again and again.

Others at work on the machine come and go within seconds. A round of one long piece for each server would give the noise
to one of them; in short pieces all have their share of it. Knows no servers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import TypeVar

from load_generator import Load

Name = TypeVar("Name")
Seen = TypeVar("Seen")


def turn(names: Sequence[Name], number: int) -> list[Name]:
    """The names in an order that begins with another one each time."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def in_turns(
    names: Sequence[Name], number: int, pieces: int, measure: Callable[[Name], Seen]
) -> dict[Name, list[Seen]]:
    """Measure each name `pieces` times; what each of them saw. `number` is the round's."""
    seen: dict[Name, list[Seen]] = defaultdict(list)
    for piece in range(pieces):
        for name in turn(names, number + piece):
            seen[name].append(measure(name))
    return dict(seen)


def rate(loads: Sequence[Load]) -> float:
    """Requests a second over pieces of the same length."""
    return mean(load.per_second for load in loads)


def p50_ms(loads: Sequence[Load]) -> float:
    """The median time, of pieces."""
    return median(load.p50_ms for load in loads)
