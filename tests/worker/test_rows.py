"""Requests whose clients chose the same id, as handlers see them."""

from __future__ import annotations

from marserve.messages import Item
from marserve.worker.rows import DistinctIds


def item(request_id: str, key: int = 0) -> Item:
    """A request without parts."""
    return Item(request_id, [], b"", None, key)


def ids(items: list[Item]) -> list[str]:
    """The ids that handlers see."""
    return [each.id for each in items]


def test_ids_that_the_server_made_cost_nothing() -> None:
    """The very list is passed on."""
    items = [item("a"), item("b")]

    assert DistinctIds().of(items) is items


def test_two_requests_of_one_batch_have_two_ids() -> None:
    """A handler that keeps something by the id keeps both; alone each has its client's."""
    distinct = DistinctIds()

    assert ids(distinct.of([item("a", 1), item("b"), item("a", 2)])) == ["a", "b", "a~2"]
    assert ids(distinct.of([item("a", 3)])) == ["a"]


def test_a_request_that_comes_again_with_each_step_keeps_its_id() -> None:
    """Though the one before it has ended, and while its place in the batch changes."""
    distinct = DistinctIds(most_kept=3)
    first, second = item("a", 1), item("a", 2)

    assert ids(distinct.of([first])) == ["a"]
    assert ids(distinct.of([first, second])) == ["a", "a~2"]
    assert ids(distinct.of([second])) == ["a~2"]
    assert ids(distinct.of([second, first])) == ["a~2", "a"]


def test_no_more_ids_are_kept_than_allowed() -> None:
    """The one that was not seen for longest goes first."""
    distinct = DistinctIds(most_kept=2)

    assert ids(distinct.of([item("a", 1), item("a", 2), item("a", 3)])) == ["a", "a~2", "a~3"]
    assert ids(distinct.of([item("a", 3)])) == ["a~3"]
    assert ids(distinct.of([item("a", 1)])) == ["a"]
    assert ids(distinct.of([item("b", 4), item("c", 5)])) == ["b", "c"]
    assert ids(distinct.of([item("a", 2)])) == ["a"]


def test_an_id_is_free_again_when_its_batch_has_ended() -> None:
    """Where batches run side by side."""
    distinct = DistinctIds()
    first = distinct.of([item("a", 1)], keep=True)
    second = distinct.of([item("a", 2)], keep=True)
    assert ids(first + second) == ["a", "a~2"]

    distinct.forget(first)
    distinct.forget(first)

    assert ids(distinct.of([item("a", 3)], keep=True)) == ["a"]
