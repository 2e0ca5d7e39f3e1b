"""Tests for what counts as an answer of another shape. Which versions are fit, `test_swapping.py` asks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve.messages import Answer
from marserve.registry.changes.trial import find_other_shape


def answer(value: Any) -> Answer:
    """An answer with a JSON body."""
    return Answer(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (3, 0.25),
        ("cat", "dog"),
        ([0.1, 0.9], [0.4, 0.3, 0.3]),
        ([], [1]),
        ([1], []),
        ({"label": "cat", "score": 0.9}, {"score": 1, "label": "dog"}),
        ({"label": None}, {"label": "cat"}),
        ([{"box": [1, 2], "label": "cat"}], [{"label": "dog", "box": [1, 2]}] * 3),
    ],
)
def test_other_values_are_no_other_shape(before: Any, after: Any) -> None:
    """A better model says something else: that is what it is for."""
    assert find_other_shape(answer(before), answer(after)) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (3, "3", "$ is a text, and was a number"),
        (1, True, "$ is true or false, and was a number"),
        ({"label": "cat"}, ["cat"], "$ is a list, and was an object"),
        ({"label": "cat", "score": 1}, {"label": "cat"}, "$ has no 'score' any more"),
        ({"label": "cat"}, {"label": "cat", "score": 1}, "$ has a new 'score'"),
        ({"top": [{"score": 1}]}, {"top": [{"score": "1"}]}, "$.top[0].score is a text, and was a number"),
        ([[1]], [[[1]]], "$[0][0] is a list, and was a number"),
    ],
)
def test_another_shape_is_found_and_told(before: Any, after: Any, words: str) -> None:
    """By its place in the answer."""
    assert find_other_shape(answer(before), answer(after)) == words


def test_json_and_what_is_none_are_not_the_same() -> None:
    """Two answers that are no JSON may be anything."""
    picture, other = Answer(b"\x89PNG..."), Answer(b"GIF89a")

    assert find_other_shape(picture, other) is None
    assert find_other_shape(picture, answer({})) == "it is JSON, and was none"
    assert find_other_shape(answer({}), picture) == "it is no JSON any more"


def test_an_answer_too_deep_to_be_read_is_no_json() -> None:
    """It ends no server."""
    assert find_other_shape(Answer(b"[" * 100_000), Answer(b"[" * 100_000)) is None
