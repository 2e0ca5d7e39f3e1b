"""The ratio of two builds from pairs of times."""

from __future__ import annotations

import pytest

from marserve.optimise.compare import describe_ratios
from marserve.optimise.ratio import Ratio, ratio_of


def test_the_median_of_nine_and_its_interval_leave_one_out_on_each_side() -> None:
    """One turn that was disturbed moves neither."""
    pairs = [(speed, 1.0) for speed in (9.0, 0.1, 2.0, 3.0, 2.5, 2.2, 2.4, 2.6, 2.1)]

    ratio = ratio_of(pairs)

    assert (ratio.middle, ratio.low, ratio.high) == (2.4, 2.0, 3.0)
    assert ratio.is_faster
    assert str(ratio) == "2.40 [2.00 to 3.00]"


@pytest.mark.parametrize(
    ("ratio", "said", "in_words"),
    [
        (Ratio(2.4, 2.0, 8.0), "2.40 [2.00 to 8.00]", "2.40 [2.00 to 8.00] times as fast"),
        (Ratio(2.4, 2.0, 8.01), "too noisy to say (2.00 to 8.01)", "too noisy to say (2.00 to 8.01)"),
        (Ratio(5.74, 2.81, 477.16), "too noisy to say (2.81 to 477)", "too noisy to say (2.81 to 477)"),
        (Ratio(0.0, 0.0, 0.07), "too noisy to say (0.00 to 0.07)", "too noisy to say (0.00 to 0.07)"),
        (Ratio(50.0, 45.55, 2e9), "too noisy to say (45.5 to ≥ 1000)", "too noisy to say (45.5 to ≥ 1000)"),
    ],
)
def test_an_interval_of_more_than_a_factor_of_four_says_nothing(ratio: Ratio, said: str, in_words: str) -> None:
    """It is shown with few digits; the numbers themselves stay what they are."""
    assert (str(ratio), ratio.in_words) == (said, in_words)
    [described] = describe_ratios({1: ratio})
    assert (described["middle"], described["low"], described["high"]) == (ratio.middle, ratio.low, ratio.high)
    assert described["isNoisy"] == said.startswith("too noisy")


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
