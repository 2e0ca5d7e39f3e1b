"""Claims of `marserve.store.watching.sightings`: what two looks at a store tell, and when an object counts as
finished."""

from __future__ import annotations

import random
import time

import pytest

from marserve.store.sources.source import Entry
from marserve.store.watching.sightings import LONGEST_RETRY_S, Change, Sightings, is_same, pause_s


def an(key: str, etag: str | None = '"1"', size: int = 10, modified: float = 0.0) -> Entry:
    """An entry."""
    return Entry(key, size, etag, modified)


def told(changes: list[Change]) -> list[tuple[str, str]]:
    """Kind and key of each change."""
    return [(change.kind, change.entry.key) for change in changes]


def test_what_comes_changes_and_goes_is_told_once() -> None:
    """Each of the three kinds of change is told at one look and no more."""
    sightings = Sightings(removal_s=5)

    assert told(sightings.look(0, [an("a.mar"), an("b.mar")])) == [("added", "a.mar"), ("added", "b.mar")]
    assert sightings.look(1, [an("a.mar"), an("b.mar")]) == []
    assert told(sightings.look(2, [an("a.mar", '"2"'), an("b.mar")])) == [("replaced", "a.mar")]
    assert sightings.look(3, [an("a.mar", '"2"')]) == []
    assert told(sightings.look(8, [an("a.mar", '"2"')])) == [("removed", "b.mar")]
    assert sightings.look(9, [an("a.mar", '"2"')]) == []
    assert len(sightings) == 1


def test_only_what_the_first_look_found_was_there() -> None:
    """What a server finds at its start is told from what came later, also when it settles later."""
    sightings = Sightings(settle_s=2)
    sightings.look(0, [an("old.mar")])
    sightings.look(1, [an("old.mar"), an("new.mar")])

    changes = sightings.look(10, [an("old.mar"), an("new.mar")])

    assert {change.entry.key: change.was_there for change in changes} == {"old.mar": True, "new.mar": False}


def test_a_replacement_was_never_there() -> None:
    """An object of the start that changes later is news."""
    sightings = Sightings()
    sightings.look(0, [an("a.mar")])

    (change,) = sightings.look(1, [an("a.mar", '"2"')])

    assert (change.kind, change.was_there) == ("replaced", False)


def test_a_growing_file_counts_once_it_has_kept_still() -> None:
    """Each change of a file begins its settling time anew."""
    sightings = Sightings(settle_s=2)
    assert sightings.look(0, [an("a.mar", None, 1, 0.0)]) == []
    assert sightings.look(1.5, [an("a.mar", None, 2, 1.5)]) == []
    assert sightings.next_look_at() == 3.5
    assert sightings.look(3.4, [an("a.mar", None, 2, 1.5)]) == []

    assert told(sightings.look(3.5, [an("a.mar", None, 2, 1.5)])) == [("added", "a.mar")]
    assert sightings.next_look_at() is None


def test_a_file_that_keeps_still_but_is_cut_is_never_told_until_it_changes() -> None:
    """An upload that stopped midway waits, with its reason, and asks for no extra looks."""
    whole = False
    sightings = Sightings(settle_s=2, why_incomplete=lambda entry: None if whole else "it has no end record")
    sightings.look(0, [an("a.mar", None, 5)])

    for second in range(2, 60):
        assert sightings.look(second, [an("a.mar", None, 5)]) == []
    assert sightings.unsettled["a.mar"].reason == "it has no end record"
    assert sightings.next_look_at() is None
    whole = True
    sightings.look(60, [an("a.mar", None, 9)])

    assert told(sightings.look(62, [an("a.mar", None, 9)])) == [("added", "a.mar")]


def test_a_replacement_that_is_not_finished_leaves_the_old_one_known() -> None:
    """While a file is written over, nothing is told; when it is put back as it was, nothing ever is."""
    sightings = Sightings(settle_s=2)
    sightings.look(0, [an("a.mar", None, 5, 1.0)])
    sightings.look(2, [an("a.mar", None, 5, 1.0)])

    assert sightings.look(3, [an("a.mar", None, 3, 3.0)]) == []
    assert sightings.look(4, [an("a.mar", None, 5, 1.0)]) == []
    assert sightings.look(60, [an("a.mar", None, 5, 1.0)]) == []
    assert sightings.known("a.mar") == an("a.mar", None, 5, 1.0)
    assert sightings.unsettled == {}


def test_what_is_missing_for_a_moment_is_not_gone() -> None:
    """Delete and put again between two looks is a replacement at most, never a removal."""
    sightings = Sightings(removal_s=5)
    sightings.look(0, [an("a.mar")])

    assert sightings.look(1, []) == []
    assert sightings.next_look_at() == 6
    assert sightings.look(2, [an("a.mar")]) == []
    assert sightings.look(7, []) == []
    assert told(sightings.look(12, [])) == [("removed", "a.mar")]
    assert told(sightings.look(13, [an("a.mar")])) == [("added", "a.mar")]


def test_a_file_that_goes_before_it_was_finished_was_never_there() -> None:
    """An upload under a temporary name that is renamed leaves no trace of the first name."""
    sightings = Sightings(settle_s=2)
    sightings.look(0, [an("up.mar")])

    assert sightings.look(1, [an("done.mar")]) == []
    assert told(sightings.look(3, [an("done.mar")])) == [("added", "done.mar")]
    assert sightings.look(60, [an("done.mar")]) == []


def test_a_rename_is_an_arrival_at_once_and_a_removal_later() -> None:
    """The new name is told without waiting for the old one to count as gone."""
    sightings = Sightings(removal_s=5)
    sightings.look(0, [an("a.mar")])

    assert told(sightings.look(1, [an("b.mar")])) == [("added", "b.mar")]
    assert told(sightings.look(6, [an("b.mar")])) == [("removed", "a.mar")]


def test_one_object_can_be_looked_at_alone() -> None:
    """An event's object is seen without a listing; the listing that follows has nothing to add."""
    sightings = Sightings(removal_s=5)
    sightings.look(0, [an("a.mar")])

    assert told(sightings.look_at(1, "b.mar", an("b.mar"))) == [("added", "b.mar")]
    assert sightings.look_at(1, "b.mar", an("b.mar")) == []
    assert told(sightings.look_at(2, "b.mar", an("b.mar", '"2"'))) == [("replaced", "b.mar")]
    assert sightings.look_at(3, "a.mar", None) == []
    assert sightings.look_at(3, "never.mar", None) == []
    assert sightings.look(4, [an("a.mar"), an("b.mar", '"2"')]) == []
    sightings.look_at(5, "a.mar", None)
    assert told(sightings.look_at(10, "a.mar", None)) == [("removed", "a.mar")]


def test_what_came_is_told_in_order_of_its_time() -> None:
    """The later of two versions is told later, whatever their names."""
    sightings = Sightings()

    changes = sightings.look(0, [an("a.mar", modified=9), an("b.mar", modified=3), an("c.mar", modified=9)])

    assert told(changes) == [("added", "b.mar"), ("added", "a.mar"), ("added", "c.mar")]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (an("a", '"1"'), an("a", '"1"', modified=9), True),
        (an("a", '"1"'), an("a", '"2"'), False),
        (an("a", '"1"', 1), an("a", '"1"', 2), False),
        (an("a", '"1"'), an("a", None), False),
        (an("a", None, 1, 5.0), an("a", None, 1, 5.0), True),
        (an("a", None, 1, 5.0), an("a", None, 1, 6.0), False),
        (an("a", None, 1, 5.0), an("a", None, 2, 5.0), False),
    ],
)
def test_content_is_told_by_etag_else_by_size_and_time(one: Entry, other: Entry, same: bool) -> None:
    """An ETag decides where there is one."""
    assert is_same(one, other) is same
    assert is_same(other, one) is same


@pytest.mark.parametrize("seed", range(20))
def test_a_world_that_comes_to_rest_is_known_as_it_is(seed: int) -> None:
    """However names come, grow, change and go, what was told adds up to what is there, and never to half an object."""
    chance = random.Random(seed)
    now, world, told_of = 0.0, {}, {}
    sightings = Sightings(
        settle_s=2,
        removal_s=3,
        why_incomplete=lambda entry: "cut" if entry.size % 2 else None,  # type: ignore[operator]
    )

    def take() -> None:
        for change in sightings.look(now, [an(key, None, *what) for key, what in world.items()]):
            key = change.entry.key
            assert (change.kind == "added") is (key not in told_of)
            if change.kind == "removed":
                del told_of[key]
                continue
            assert change.entry.size % 2 == 0, "half an object was told"  # type: ignore[operator]
            told_of[key] = (change.entry.size, change.entry.modified)

    for _ in range(300):
        now += chance.random()
        key = f"{chance.randrange(6)}.mar"
        if chance.random() < 0.3:
            world.pop(key, None)
        else:
            world[key] = (chance.randrange(10), now)
        take()
    for _ in range(4):
        now += 3
        take()

    assert set(told_of) <= set(world)
    assert {key: what for key, what in told_of.items() if world[key][0] % 2 == 0} == {
        key: what for key, what in world.items() if what[0] % 2 == 0
    }


def test_five_thousand_keys_are_compared_well_within_a_second() -> None:
    """The promised bound for a look is a second; three times that is allowed here."""
    sightings = Sightings()
    sightings.look(0, [an(f"models/{number}.mar") for number in range(5000)])
    entries = [an(f"models/{number}.mar") for number in range(5000)]

    begin = time.perf_counter()
    changes = sightings.look(1, entries)

    assert changes == []
    assert time.perf_counter() - begin < 3


def test_pauses_grow_with_failures_and_never_fall_together() -> None:
    """A store that answers is asked about every interval; one that does not, soon, then ever more seldom, bounded."""
    assert pause_s(30, 0, 0.0) == pytest.approx(27)
    assert pause_s(30, 0, 0.999) == pytest.approx(33, abs=0.1)
    assert [pause_s(30, failures, 1.0) for failures in range(1, 7)] == [1, 2, 4, 8, 16, 32]
    assert pause_s(30, 1000, 1.0) == LONGEST_RETRY_S
    assert pause_s(30, 3, 0.0) == 2
    assert pause_s(3600, 1000, 1.0) == 3600
    assert pause_s(0.2, 1, 1.0) == 0.2
