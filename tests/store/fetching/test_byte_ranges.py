"""Which ranges are fetched: none twice, none left out, in order; and up to where an object is whole."""

from __future__ import annotations

import itertools
import random

import pytest

from marserve.store.fetching.byte_ranges import (
    FIRST_PART_BYTES,
    LEAST_PART_BYTES,
    MIB,
    MOST_PART_BYTES,
    Part,
    Parts,
    part_bytes,
)

SIZES = [
    *(1, 4095, LEAST_PART_BYTES, FIRST_PART_BYTES, FIRST_PART_BYTES + 1, 50 * MIB, 50 * MIB + 13, 1024 * MIB),
    *(FIRST_PART_BYTES + MOST_PART_BYTES * 8, 3 * 1024 * MIB + 7),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("connections", [1, 2, 8, 64])
def test_parts_cover_an_object_without_gap_or_overlap(size: int, connections: int) -> None:
    """In order, none larger than may be lost with a connection."""
    parts = Parts(size, min(size, FIRST_PART_BYTES), connections).all

    assert parts[0].begin == 0
    assert parts[-1].end == size
    assert all(before.end == after.begin for before, after in itertools.pairwise(parts))
    assert all(0 < part.end - part.begin <= max(FIRST_PART_BYTES, MOST_PART_BYTES) for part in parts)


@pytest.mark.parametrize(
    ("rest", "connections", "each"),
    [
        (1, 8, LEAST_PART_BYTES),
        (46 * MIB, 8, -(-46 * MIB // 8)),
        (46 * MIB, 1, MOST_PART_BYTES),
        (1020 * MIB, 8, MOST_PART_BYTES),
    ],
)
def test_parts_are_as_many_as_connections_until_they_are_too_large(rest: int, connections: int, each: int) -> None:
    """A small rest is shared out at once, a large one in turns."""
    assert part_bytes(rest, connections) == each


def test_the_first_part_is_never_taken() -> None:
    """Its bytes are coming already."""
    parts = Parts(50 * MIB, FIRST_PART_BYTES, 8)

    taken = []
    while (part := parts.take()) is not None:
        taken.append(part)

    assert parts.first not in taken
    assert [parts.first, *taken] == parts.all
    assert not parts.is_waiting


def test_what_is_given_back_is_taken_next() -> None:
    """What comes first holds up the digest."""
    parts = Parts(50 * MIB, FIRST_PART_BYTES, 8)
    first, second = parts.take(), parts.take()
    assert first is not None
    assert second is not None

    parts.give_back(first)

    assert parts.take() is first


def test_the_front_is_where_everything_before_it_is_there() -> None:
    """Whatever the order in which bytes come."""
    parts = Parts(10, 4, 2)
    assert parts.all == [Part(0, 4, 0), Part(4, 10, 4)]

    parts.all[1].at = 10
    assert (parts.front, parts.have) == (0, 6)
    parts.all[0].at = 3
    assert (parts.front, parts.have) == (3, 9)
    parts.all[0].at = 4
    assert (parts.front, parts.have) == (10, 10)


def test_the_front_never_goes_back_and_ends_at_the_size() -> None:
    """Over 200 random orders of writing."""
    for seed in range(200):
        dice = random.Random(seed)
        size = dice.randrange(1, 40 * MIB)
        parts = Parts(size, min(size, FIRST_PART_BYTES), dice.choice([2, 3, 8]))
        open_parts, front = list(parts.all), 0
        while open_parts:
            part = dice.choice(open_parts)
            part.at += dice.randrange(1, part.end - part.at + 1)
            if part.is_whole:
                open_parts.remove(part)
            assert front <= parts.front <= parts.have
            front = parts.front
        assert front == parts.front == size
