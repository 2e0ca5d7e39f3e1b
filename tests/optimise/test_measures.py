"""Errors of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from marserve.optimise.measures import may_be_scores, measure

WANTED = np.array([[1.0, -2.0, 4.0]], "f4")


def test_equal_arrays_have_no_error() -> None:
    """In any figure."""
    errors = measure(WANTED.copy(), WANTED, is_scores=True)

    assert (errors.sums.error, errors.sums.largest_error, errors.sums.new_nans) == (0.0, 0.0, 0)
    assert (errors.is_top1, errors.top5) == (True, 1.0)
    assert errors.sums.elements == 3


def test_errors_are_by_magnitude_and_do_not_cancel_out() -> None:
    """Half up and half down are one together."""
    errors = measure(WANTED + np.array([[0.5, -0.5, 0.0]], "f4"), WANTED)

    assert errors.sums.error == pytest.approx(1.0)
    assert errors.sums.wanted == pytest.approx(7.0)
    assert (errors.sums.largest_error, errors.sums.largest_wanted) == (0.5, 4.0)
    assert (errors.is_top1, errors.top5) == (None, None)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_is_no_finite_number_is_new_only_where_a_finite_one_was_wanted(strange: float) -> None:
    """A number in its place is as wrong."""
    seen = WANTED.copy()
    seen[0, 1] = strange

    assert measure(seen, WANTED).sums.new_nans == 1
    assert measure(seen, seen.copy()).sums.new_nans == 0
    assert measure(WANTED, seen).sums.new_nans == 1


def test_an_infinity_of_the_other_sign_is_new() -> None:
    """Both are infinite, and not alike."""
    assert measure(np.array([np.inf]), np.array([-np.inf])).sums.new_nans == 1


def test_another_best_class_is_seen_and_so_is_one_in_any_of_several_places() -> None:
    """Of a tagger, each word counts."""
    wanted = np.array([[[0.1, 0.9], [0.8, 0.2]]], "f4")
    seen = np.array([[[0.1, 0.9], [0.4, 0.6]]], "f4")

    assert measure(seen, wanted, is_scores=True).is_top1 is False
    assert measure(WANTED[:, ::-1], WANTED, is_scores=True).is_top1 is False


def test_the_five_best_are_compared_as_a_set() -> None:
    """Four of five are left."""
    wanted = np.arange(10, dtype="f4")[None]
    seen = wanted.copy()
    seen[0, [5, 4]] = seen[0, [4, 5]]

    errors = measure(seen, wanted, is_scores=True)

    assert errors.is_top1 is True
    assert errors.top5 == pytest.approx(0.8)


def test_whole_numbers_and_truth_values_are_compared_by_value() -> None:
    """Not by their bits."""
    assert measure(np.array([3, 4]), np.array([3, 5])).sums.error == 1.0
    assert measure(np.array([True]), np.array([False])).sums.error == 1.0


@pytest.mark.parametrize(
    ("seen", "wanted", "words"),
    [
        (np.zeros((1, 9)), np.zeros((1, 10)), r"it is \[1, 9\], wanted \[1, 10\]"),
        (np.array(["a"]), np.array([1.0]), "it is of type <U1, wanted float64, and"),
        (np.array([0], "M8[s]"), np.array([0], "M8[s]"), "neither numbers nor texts"),
    ],
)
def test_arrays_that_cannot_be_compared_are_refused(
    seen: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    wanted: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    words: str,
) -> None:
    """With both shapes or types."""
    with pytest.raises(ValueError, match=words):
        measure(seen, wanted)


def test_complex_numbers_are_two_real_ones_each() -> None:
    """A part that is lost is an error, and one that is no number is new."""
    wanted = np.array([3 + 4j, 1 - 2j], "c8")

    assert measure(wanted.copy(), wanted).sums.error == 0.0
    assert measure(wanted.conj(), wanted).sums.error == 12.0
    assert measure(wanted.real, wanted).sums.error == 6.0
    assert measure(wanted, wanted).sums.wanted == 10.0
    assert measure(np.array([complex(3, np.nan), 1 - 2j]), wanted).sums.new_nans == 1


def test_texts_are_equal_or_not() -> None:
    """The error is the share of those that differ."""
    wanted = np.array([["cat", "dog"], ["cow", "a longer one"]])
    seen = np.array([["cat", "dog"], ["cow", "dog"]])

    sums = measure(seen, wanted).sums

    assert (sums.error, sums.wanted, sums.largest_error, sums.elements) == (1.0, 4.0, 1.0, 4)
    assert measure(wanted.copy(), wanted).sums.error == 0.0


def test_half_precision_sums_do_not_overflow() -> None:
    """They are taken in double precision."""
    seen = np.full((1, 100), 60000, "f2")

    assert np.isfinite(measure(seen, np.zeros_like(seen)).sums.error)


def test_scores_have_two_classes_or_more() -> None:
    """And are floating numbers."""
    assert may_be_scores(WANTED)
    assert not may_be_scores(np.zeros((4, 1)))
    assert not may_be_scores(np.zeros((1, 3), "i8"))
    assert not may_be_scores(np.float32(1.0) * np.ones(()))
