"""The decorator that times a handler's steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from marserve_handlers.support.timing import timed, timeit
from support.model_context import make_context


class Handler:
    """Two steps, one of which fails."""

    context: Any = None

    @timed
    def preprocess(self, data: int, *, factor: int = 1) -> int:
        """Some work."""
        return data * factor

    @timed
    def fail(self) -> None:
        """No work."""
        raise KeyError("x")


def test_a_profiled_step_is_a_metric() -> None:
    """With `handler: {profile: true}` each call adds its time in milliseconds."""
    handler = Handler()
    handler.context = make_context(config={"handler": {"profile": True}})

    assert handler.preprocess(3, factor=2) == 6

    (value,) = handler.context.metrics.drain()
    assert (value.name, value.unit, value.kind) == ("ts_handler_preprocess", "Milliseconds", "gauge")
    assert value.value >= 0


@pytest.mark.parametrize("config", [None, {}, {"handler": None}, {"handler": {"profile": False}}, {"handler": "x"}])
def test_nothing_is_measured_unless_asked_for(config: Any) -> None:
    """No configuration, no metric."""
    handler = Handler()
    handler.context = make_context(config=config)

    assert handler.preprocess(3) == 3
    assert handler.context.metrics.drain() == []


def test_a_handler_without_context_just_runs() -> None:
    """Unit tests call steps on their own."""
    assert Handler().preprocess(3) == 3


def test_a_failing_step_keeps_its_exception() -> None:
    """And adds no metric."""
    handler = Handler()
    handler.context = make_context(config={"handler": {"profile": True}})

    with pytest.raises(KeyError):
        handler.fail()
    assert handler.context.metrics.drain() == []
    assert handler.preprocess.__name__ == "preprocess"


def test_any_function_may_be_timed(caplog: pytest.LogCaptureFixture) -> None:
    """Its name and its time go to the log, also when it raises."""

    @timeit
    def divide(number: int) -> float:
        return 1 / number

    with caplog.at_level(logging.INFO):
        assert divide(2) == 0.5
        with pytest.raises(ZeroDivisionError):
            divide(0)

    assert [message.rpartition(" took ")[0].rpartition(".")[2] for message in caplog.messages] == ["divide", "divide"]
