"""Tests for the sorts of values that options have; what each key takes of them is tested where the archive is read."""

from __future__ import annotations

import pytest

from marserve.option_values import (
    CHECKPOINT,
    DEVICE_IDS,
    DURATION,
    PART,
    PEAKS,
    SHARE,
    Kind,
    Unusable,
    at_least,
    between,
    milliseconds,
    raised_to,
    seconds,
    words,
)


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (raised_to(1), -3, 1),
        (at_least(2), 2, 2),
        (between(0, 9), 9, 9),
        (seconds(at_least(1)), 3, 3.0),
        (milliseconds(at_least(0)), 250, 0.25),
        (DURATION, 12.5, 12.5),
        (SHARE, 1, 1.0),
        (words("any", "all"), "ALL", "all"),
        (DEVICE_IDS, [2, 0], (2, 0)),
        (PEAKS, "auto", {}),
        (PEAKS, "2e12", {"": 2e12}),
        (PEAKS, {"float32": 1, "bfloat16": 4e12}, {"float32": 1.0, "bfloat16": 4e12}),
    ],
)
def test_what_is_written_is_read_again_as_the_same(kind: Kind, given: object, meant: object) -> None:
    """A document that the server writes says what the server has."""
    assert kind.read(given) == meant
    assert kind.read(kind.write(meant)) == meant


@pytest.mark.parametrize(
    ("kind", "given", "right"),
    [
        (raised_to(1), True, "a whole number"),
        (at_least(2), 1, "a whole number of 2 or more"),
        (between(0, 9), 10, "a whole number from 0 to 9"),
        (DURATION, 0, "a number of seconds above 0"),
        (SHARE, 1.1, "a number from 0 to 1"),
        (PART, 1, "a number from 0 to below 1"),
        (PART, -0.1, "a number from 0 to below 1"),
        (words("any", "all"), "none", "one of any, all"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_what_it_must_be(kind: Kind, given: object, right: str) -> None:
    """The sentence stands in describe's warnings and in the errors of a desired state."""
    with pytest.raises(Unusable, match=f"^{right}$"):
        kind.read(given)


def test_times_are_written_as_whole_numbers_where_they_are_some() -> None:
    """As clients of TorchServe expect them; no limit is 0."""
    written = [DURATION.write(value) for value in (300.0, 2.5, None)]

    assert written == [300, 2.5, 0]
    assert [type(value) for value in written] == [int, float, int]
    assert milliseconds(at_least(0)).write(0.1) == 100


@pytest.mark.parametrize(
    "given", [0, -1, True, "fast", float("nan"), float("inf"), {}, [], None, {"float32": 0}, {"float32": True}, {1: 2}]
)
def test_a_peak_is_auto_or_a_number_by_itself_or_by_dtype(given: object) -> None:
    """Zero would make every share infinite."""
    with pytest.raises(Unusable, match="auto, a number of FLOPs a second, or a map of dtypes to such numbers"):
        PEAKS.read(given)


def test_a_checkpoint_whose_name_no_folder_can_have_is_refused() -> None:
    """Half a character ended a registration with a status of 500."""
    with pytest.raises(Unusable, match="half a character"):
        CHECKPOINT.read("weights-\ud800")
