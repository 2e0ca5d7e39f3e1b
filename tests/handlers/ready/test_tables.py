"""Rows of features as JSON has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from marserve_handlers.errors import BadInput
from marserve_handlers.ready.tables import Columns, as_document, is_table, scored


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "features: expected a list of numbers, got 'abc'"),
        ([1, 2], "features: expected 3 numbers, got 2"),
        ([1, "2", 3], "features[1]: expected a number, got '2'"),
        ([1, True, 3], "features[1]: expected a number, got True"),
        ([1, math.inf, 3], "features[1]: expected a number, got inf"),
        ([1, None, 3], "features[1]: expected a number, got null; this model takes no missing values"),
        ([1, math.nan, 3], "features[1]: expected a number, got null; this model takes no missing values"),
        ({"features": [1, 2]}, "features: expected 3 numbers, got 2"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, "d: is not known; the columns are a, b, c"),
        ({"a": 1, "c": 3}, "b: is missing"),
        ({"a": 1, "b": "x", "c": 3}, "features[1]: expected a number, got 'x'"),
    ],
)
def test_a_row_that_does_not_fit_is_named(value: Any, message: str) -> None:
    """With its field, what was expected and what came."""
    columns = Columns(3, ("a", "b", "c"), takes_missing=False)

    with pytest.raises(BadInput) as caught:
        columns.read(value, "")

    assert caught.value.message == message


def test_a_place_in_a_list_of_rows_is_named() -> None:
    """Of a model without names of columns, too."""
    columns = Columns(None, takes_missing=True)

    with pytest.raises(BadInput, match=r"\[1\]\[0\]: expected a number, got \[2\]"):
        columns.read([[2]], "[1]")
    with pytest.raises(BadInput, match=r"\[1\]: expected a list of numbers, or .*the model names no columns"):
        columns.read({"a": 1}, "[1]")


def test_rows_are_lists_objects_of_columns_or_features() -> None:
    """All are the same numbers, in the order of the columns; null is a missing value."""
    columns = Columns(2, ("a", "b"), takes_missing=True)

    for value in ([1, 2.5], {"features": [1, 2.5]}, {"features": b"[1, 2.5]"}, {"b": 2.5, "a": 1}):
        row = columns.read(value, "")
        assert row.dtype == np.float64
        assert row.tolist() == [1, 2.5]
    assert np.isnan(columns.read([None, 1], "")).tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "has_rows"),
    [([1, 2], False), ([[1, 2]], True), ([{"a": 1}], True), ({"a": 1}, False), ([], False), ([[1], 2], False)],
)
def test_a_list_of_lists_is_several_rows(value: Any, has_rows: bool) -> None:
    """A list of numbers is one."""
    assert is_table(value) is has_rows


def test_json_without_a_content_type_is_read() -> None:
    """What is not JSON is refused with the place."""
    assert as_document(bytearray(b"[1, 2]")) == [1, 2]
    assert as_document([1]) == [1]
    with pytest.raises(BadInput, match=r"The request is not JSON: .* line 1 column 2"):
        as_document("{1")


def test_scores_are_named_by_labels() -> None:
    """One number of two classes is the second one's probability."""
    assert scored(np.array([0.25, 1.0]), None) == [0.25, 1.0]
    assert scored(np.array([0.25]), ["no", "yes"]) == [{"no": 0.75, "yes": 0.25}]
    assert scored(np.array([[0.5, 0.5]]), ["a", "b"]) == [{"a": 0.5, "b": 0.5}]
