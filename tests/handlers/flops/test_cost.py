"""What a batch of any size takes, from counts of some sizes (`flops/cost.py`)."""

from __future__ import annotations

import pytest

from marserve_handlers.flops.cost import Cost, NotCounted, fit


def test_a_line_is_found_with_what_each_batch_takes_whatever_its_size() -> None:
    """As of a network that makes something of its weights in each call."""
    cost = fit(lambda rows: 1000 + 24 * rows, 3)

    assert cost == Cost(1000.0, 24.0)
    assert cost.of(16) == 1000 + 24 * 16


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_what_grows_unevenly_counts_as_it_did_in_the_batch_that_was_seen(rows: int) -> None:
    """Attention over the rows of a batch."""
    assert fit(lambda rows: 10 * rows * rows, rows) == Cost(0.0, 10.0 * rows)


def test_a_bend_beyond_two_rows_is_seen() -> None:
    """A model that does more for large batches."""
    assert fit(lambda rows: 100 + (rows if rows < 4 else 10 * rows), 1) == Cost(0.0, 101.0)


def test_a_model_of_one_size_counts_for_that_size() -> None:
    """An exported program may take no other."""

    def count(rows: int) -> int:
        if rows != 8:
            raise NotCounted("fixed")
        return 800

    assert fit(count, 8) == Cost(0.0, 100.0)


def test_a_size_that_was_served_and_cannot_be_counted_is_a_failure() -> None:
    """Its reason is kept."""

    def count(rows: int) -> int:
        raise NotCounted("no numbers")

    with pytest.raises(NotCounted, match="no numbers"):
        fit(count, 2)
