"""What a worker says of two answers to one request: by numbers, and by the handler's own word."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from marserve.messages import Check, Load, Result
from marserve.option_values import Tolerance
from marserve.worker.checks import run_check
from marserve.worker.load import LoadedModel
from marserve_handlers.context import Context
from marserve_handlers.support.comparing.class_scores import compare_scores
from marserve_handlers.support.comparing.compared_answer import ComparedAnswer

JSON = [("content-type", "application/json")]


def loaded(compare: Any = None) -> LoadedModel:
    """A model whose handler is never called."""
    load = Load("m", "2.0", "", "h.py", None, None, 1)
    return LoadedModel(lambda rows, context: [], Context("m", "", None, 1, None, "0"), load, compare=compare)


def compare(
    pairs: list[tuple[bytes, bytes]],
    how: Literal["tolerance", "handler", "scores"],
    by: Any = None,
    limit_s: float = 60.0,
) -> tuple[int, int, list[tuple[str, int, str, str, str]], int]:
    """Compared, found, the differences, and how often it was said that a call begins."""
    calls: list[None] = []
    check = Check(7, [], 1, Tolerance(1e-3, 1e-6), limit_s, [Result(200, "", JSON)] * (2 * len(pairs)), how)
    bodies = [bytearray(body) for pair in pairs for body in pair]
    checked = run_check(loaded(by), check, bodies, lambda: calls.append(None), lambda item, row: pytest.fail("no run"))
    assert checked.number == 7
    return checked.compared, checked.found, checked.differences, len(calls)


def test_numbers_may_differ_a_little_and_words_not_at_all() -> None:
    """As JSON means it, not as it is written."""
    pairs = [
        (b'{"y": 1.0, "l": "cat"}', b'{"l": "cat", "y": 1.0001}'),
        (b'{"y": 1.0}', b'{"y": 1.1}'),
        (b'{"l": "cat"}', b'{"l": "dog"}'),
    ]

    compared, found, differences, calls = compare(pairs, "tolerance")

    assert (compared, found, calls) == (3, 2, 3)
    assert differences == [("answers", 1, "y", "1.1", "1.0"), ("answers", 2, "l", "'dog'", "'cat'")]


def test_a_status_of_its_own_differs() -> None:
    """Whatever the body."""
    check = Check(1, [], 1, Tolerance(), 60.0, [Result(200, "", JSON), Result(201, "", JSON)], "tolerance")

    checked = run_check(loaded(), check, [bytearray(b"1")] * 2, lambda: None, lambda item, row: pytest.fail("no run"))

    assert checked.differences == [("answers", 0, "status", "201", "200")]


def test_scores_agree_by_their_best_class_whatever_their_error() -> None:
    """Of labels and of lists; labels that only one of the two names are left out of the error."""
    pairs = [
        (b'{"cat": 0.8, "dog": 0.2}', b'{"cat": 0.6, "fox": 0.3}'),
        (b"[0.1, 0.9]", b"[0.2, 0.8]"),
        (b'{"cat": 0.8, "dog": 0.2}', b'{"cat": 0.4, "dog": 0.6}'),
        (b"[0.1, 0.9]", b'{"message": "no"}'),
        (b"text", b"text"),
    ]

    compared, found, differences, _ = compare(pairs, "scores")

    assert (compared, found) == (3, 1)
    assert differences[0] == ("answers", 2, "best class", "dog", "cat")
    assert [(run, item) for run, item, *_ in differences[1:]] == [("failed", 3), ("failed", 4)]
    assert "neither an object nor a list of finite numbers" in differences[1][3]
    assert "holds no class scores" in differences[2][3]

    errors = compare_scores(pairs[0][1], pairs[0][0])
    assert (errors.seen, errors.wanted) == ("cat", "cat")
    assert (errors.error, errors.magnitude) == (pytest.approx(0.2), pytest.approx(0.8))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (True, []),
        ("", []),
        (False, [("answers", 0, "", "b'2'", "b'1'")]),
        ("the box moved", [("answers", 0, "the box moved", "b'2'", "b'1'")]),
    ],
)
def test_the_handler_has_the_last_word(told: Any, expected: list[Any]) -> None:
    """True or nothing is alike; False, or what differs in words, is not."""
    given: list[tuple[ComparedAnswer, ComparedAnswer]] = []

    def by(primary: ComparedAnswer, shadow: ComparedAnswer) -> Any:
        given.append((primary, shadow))
        return told

    compared, _, differences, _ = compare([(b"1", b"2")], "handler", by)

    assert (compared, differences) == (1, expected)
    primary, shadow = given[0]
    assert (primary.value(), shadow.value(), primary.status) == (1, 2, 200)
    assert primary.headers == {"content-type": "application/json"}


@pytest.mark.parametrize("by", [None, lambda primary, shadow: 1 / 0, lambda primary, shadow: None])
def test_a_comparison_that_fails_is_told_as_such(by: Any) -> None:
    """No method, an exception, an answer that is none; the pairs after it are compared."""
    compared, found, differences, _ = compare([(b"1", b"1")], "handler", by)

    assert (compared, found) == (0, 0)
    assert differences[0][0] == "failed"
    assert "compare failed: " in differences[0][3]


def test_what_takes_too_long_is_given_up() -> None:
    """And said of each pair that is left."""
    compared, _, differences, _ = compare([(b"1", b"1")] * 3, "tolerance", limit_s=-1.0)

    assert compared == 0
    assert [(run, item) for run, item, *_ in differences] == [("failed", 0), ("failed", 1), ("failed", 2)]
