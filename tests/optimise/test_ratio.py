"""The ratio of two builds from pairs of times."""

from __future__ import annotations

import pytest

from marserve.optimise.ratio import ratio_of


def test_the_median_of_nine_and_its_interval_leave_one_out_on_each_side() -> None:
    """One turn that was disturbed moves neither."""
    pairs = [(speed, 1.0) for speed in (9.0, 0.1, 2.0, 3.0, 2.5, 2.2, 2.4, 2.6, 2.1)]

    ratio = ratio_of(pairs)

    assert (ratio.middle, ratio.low, ratio.high) == (2.4, 2.0, 3.0)
    assert ratio.is_faster
    assert str(ratio) == "2.40 [2.00 to 3.00]"


def test_fewer_pairs_give_their_whole_span() -> None:
    """They show less."""
    ratio = ratio_of([(1.0, 2.0), (2.0, 1.0)])

    assert (ratio.low, ratio.high) == (0.5, 2.0)
    assert not ratio.is_faster
    assert not ratio.is_slower


def test_slower_in_all_is_slower() -> None:
    """The whole interval lies below one."""
    assert ratio_of([(1.0, 2.0)] * 9).is_slower


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(-1.0, 1.0)], [(float("nan"), 1.0)]])
def test_times_that_are_none_are_refused(pairs: list[tuple[float, float]]) -> None:
    """A ratio to nothing is none."""
    with pytest.raises(ValueError, match="measure"):
        ratio_of(pairs)
