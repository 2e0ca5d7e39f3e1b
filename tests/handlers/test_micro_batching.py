"""Micro-batches through a handler's steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from marserve_handlers.base import BaseHandler
from marserve_handlers.micro_batching import HANDLER_METHODS, MicroBatching
from support.model_context import FakeItem, make_context


class Steps(BaseHandler):
    """A handler whose steps say which thread and which piece they had."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()
        self.pieces: list[tuple[int, int]] = []
        self.micro: MicroBatching | None = None

    def preprocess(self, data: list[Any]) -> Any:
        """The bodies."""
        self.threads.add(threading.current_thread().name)
        if self.micro is not None:
            self.pieces.append((self.micro.get_micro_batch_idx(), len(data)))
        return [row["body"] for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Doubles; refuses what is negative."""
        if any(number < 0 for number in data):
            raise ValueError(f"negative: {data}")
        return [number * 2 for number in data]

    def postprocess(self, data: Any) -> list[Any]:
        """As text."""
        return [str(number) for number in data]

    def describe_handle(self) -> Any:
        """A description."""
        return "described"


def rows(*numbers: int) -> list[dict[str, int]]:
    """A batch."""
    return [{"body": number} for number in numbers]


@pytest.fixture
def steps() -> Any:
    """A handler, and micro-batches of two around it; its threads are proven gone."""
    handler = Steps()
    handler.micro = MicroBatching(handler, 2)
    yield handler
    handler.micro.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("micro-batch")]


def test_answers_come_in_the_rows_order(steps: Any) -> None:
    """Cut in pieces of two, each step in a thread of its own."""
    context = make_context()
    context.begin_batch([FakeItem() for _ in range(5)])

    assert steps.micro(rows(1, 2, 3, 4, 5), context) == ["2", "4", "6", "8", "10"]
    assert steps.pieces == [(0, 2), (1, 2), (2, 1)]
    assert steps.threads == {"micro-batch preprocess"}
    assert [value.name for value in context.metrics.drain()] == ["HandlerTime"]


def test_several_threads_keep_the_order_too(steps: Any) -> None:
    """`parallelism`, and fewer threads afterwards."""
    steps.micro.parallelism = {"preprocess": 3, "inference": 2}
    assert steps.micro.handle(rows(*range(20))) == [str(number * 2) for number in range(20)]
    assert [len(steps.micro.thread_groups[step]) for step in HANDLER_METHODS] == [3, 2, 1]

    steps.micro.parallelism = {"preprocess": 1}
    assert steps.micro.handle(rows(1)) == ["2"]
    assert len(steps.micro.thread_groups["preprocess"]) == 1


def test_what_a_step_raises_is_raised_for_the_batch(steps: Any) -> None:
    """And the next batch is answered."""
    with pytest.raises(ValueError, match=r"negative: \[-1\]"):
        steps.micro.handle(rows(1, 2, -1))

    assert steps.micro.handle(rows(1, 2, 3)) == ["2", "4", "6"]


def test_describe_requests_are_not_cut(steps: Any) -> None:
    """They have no rows to speak of."""
    context = make_context()
    context.begin_batch([FakeItem(server_headers=[("describe", "True")])])

    assert steps.micro(rows(1), context) == ["described"]


@pytest.mark.parametrize(
    "wrong", [{"micro_batch_size": 0}, {"parallelism": {"train": 1}}, {"parallelism": {"inference": 0}}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """With a sentence."""
    with pytest.raises(ValueError, match=r"must be a whole number above 0|the steps are"):
        MicroBatching(Steps(), **wrong)
