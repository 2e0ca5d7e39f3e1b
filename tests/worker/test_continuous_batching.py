"""Tests for continuous batching inside a worker: which header says of an answer whether more follows."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.messages import Item, pack_head
from marserve.worker.continuous_batching import begin_step, say_what_follows
from marserve_handlers.context import Context


def context_of(*ids: str) -> Context:
    """A context at a step with these requests."""
    context = Context("m", "", None, 1, None, "0")
    begin_step(context, [Item(each, [], pack_head([], []), None) for each in ids])
    return context


def said_of(context: Context, rows: int) -> list[str | None]:
    """The header of each row's answer."""
    return [context.get_response_headers(index).get("ts_stream_next") for index in range(rows)]


def test_criteria_are_asked_of_each_answer() -> None:
    """True ends it, False lets it go on, None leaves it to what the handler set."""
    context = context_of("a", "b", "c", "d")
    context.set_response_header(2, "ts_stream_next", "true")
    context.stopping_criteria = [lambda answer: answer == "end", lambda _: False, lambda _: None, lambda _: None]

    say_what_follows(context, ["end", "more", "more", "end"])

    assert said_of(context, 4) == ["false", "true", "true", None]


def test_criteria_may_be_a_map_of_rows() -> None:
    """As TorchServe's."""
    context = context_of("a", "b")
    criteria: Any = {0: lambda _: True, 1: lambda _: False}
    context.stopping_criteria = criteria

    say_what_follows(context, ["x", "y"])

    assert said_of(context, 2) == ["false", "true"]


def test_without_criteria_the_handler_s_own_header_counts() -> None:
    """And where there is none either, nothing is said: the answer has ended."""
    context = context_of("a", "b")
    context.set_response_header(0, "ts_stream_next", "true")

    say_what_follows(context, ["x", "y"])

    assert said_of(context, 2) == ["true", None]


def test_criteria_stay_until_others_are_set() -> None:
    """A handler may set them when a request is new, and never again."""
    context = context_of("a")
    context.stopping_criteria = [lambda _: False]

    begin_step(context, [Item("a", [], pack_head([], []), None)])
    say_what_follows(context, ["x"])

    assert said_of(context, 1) == ["true"]


def test_a_piece_sent_within_a_step_says_nothing_of_the_next() -> None:
    """`send_intermediate_predict_response` marks what follows in the same step."""
    context = context_of("a")
    context.begin_stream()

    say_what_follows(context, ["x"])

    assert said_of(context, 1) == ["false"]


def test_an_exception_in_the_place_of_an_answer_is_not_judged() -> None:
    """It ends its row by itself."""
    context = context_of("a", "b")
    context.stopping_criteria = [lambda answer: answer.lower() == "end"] * 2

    say_what_follows(context, [ValueError("no"), "more"])

    assert said_of(context, 2) == [None, "true"]


def test_what_the_criteria_raise_is_raised() -> None:
    """The author's code is asked, and one for each row is needed."""
    context = context_of("a", "b")
    context.stopping_criteria = [lambda _: False]

    with pytest.raises(IndexError):
        say_what_follows(context, ["x", "y"])
