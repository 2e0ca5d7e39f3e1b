"""Which handlers' `preprocess` may run beside the batch that computes, and what each thread sees of the context."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marserve_handlers.base import BaseHandler
from marserve_handlers.context import Context
from marserve_handlers.image_classifier import ImageClassifier
from marserve_handlers.metrics import MetricsCache
from marserve_handlers.support.overlapping.kept import kept_between
from marserve_handlers.support.overlapping.seam import BatchState, Overlap, OverlapContext, Prepared, open_overlap
from marserve_handlers.text_classifier import TextClassifier

COUNT = 0


def context_of() -> OverlapContext:
    """A context of a worker that overlaps."""
    return OverlapContext("m", "/m", {}, 4, None, "1", metrics=MetricsCache())


class View:
    """One request of a batch."""

    headers = server_headers = parts = ()
    deadline = None

    def __init__(self, id: str) -> None:
        self.id = id


class Plain(BaseHandler):
    """Its steps share what it was loaded with, and nothing else."""

    def initialize(self, context: Any) -> None:
        """As authors write it."""
        self.context = context
        self.scale = 2
        self.seen: list[Any] = []

    def preprocess(self, data: list[Any]) -> Any:
        """Reads what was loaded, and keeps something for itself."""
        self.seen.append(len(data))
        local = {"a": 1}
        local["b"] = self.scale
        return [self.double(value) for value in data]

    def double(self, value: Any) -> Any:
        """A step of the step."""
        return value * self.scale

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads what was loaded."""
        return [value + self.scale for value in data]

    def postprocess(self, data: Any) -> list[Any]:
        """Answers."""
        return list(data)


class KeepsAnAttribute(Plain):
    """What nearly every handler that keeps something does."""

    def preprocess(self, data: list[Any]) -> Any:
        """Leaves the sizes."""
        self.sizes = [len(value) for value in data]
        return data

    def postprocess(self, data: Any) -> list[Any]:
        """Cuts by them."""
        return [value[:size] for value, size in zip(data, self.sizes, strict=True)]


class KeepsInAHelper(Plain):
    """By way of another method, in what an attribute holds."""

    def preprocess(self, data: list[Any]) -> Any:
        """Leaves it to the helper."""
        return self._note(data)

    def _note(self, data: list[Any]) -> Any:
        self.found["size"] = len(data)
        return data

    found: dict[str, int] = {}  # noqa: RUF012 - as authors write it

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads it."""
        return data[: self.found["size"]]


class Appends(Plain):
    """To a list that a later step empties."""

    waiting: list[int] = []  # noqa: RUF012 - as authors write it

    def preprocess(self, data: list[Any]) -> Any:
        """Leaves something."""
        self.waiting.append(len(data))
        return data

    def postprocess(self, data: Any) -> list[Any]:
        """Takes it."""
        return list(data)[: self.waiting.pop()]


class FeedsBack(Plain):
    """The answer of a batch changes how the next one is read."""

    offset = 0

    def preprocess(self, data: list[Any]) -> Any:
        """Reads it."""
        return [value + self.offset for value in data]

    def postprocess(self, data: Any) -> list[Any]:
        """Sets it."""
        self.offset += 1
        return list(data)


class KeepsOnTheContext(Plain):
    """A context lives as long as the worker."""

    def preprocess(self, data: list[Any]) -> Any:
        """Leaves something there."""
        self.context.sizes = len(data)
        return data

    def postprocess(self, data: Any) -> list[Any]:
        """Reads it."""
        return list(data)[: self.context.sizes]


class UsesAGlobal(Plain):
    """A name of its module."""

    def preprocess(self, data: list[Any]) -> Any:
        """Sets it."""
        global COUNT
        COUNT = len(data)
        return data

    def postprocess(self, data: Any) -> list[Any]:
        """Sets it, too."""
        global COUNT
        COUNT -= 1
        return list(data)


class HasAHandle(Plain):
    """Which may call the steps in any order."""

    def handle(self, data: list[Any], context: Context) -> Any:
        """As it is."""
        return super().handle(data, context)


@pytest.mark.parametrize(
    ("cls", "kept"),
    [
        (Plain, []),
        (KeepsAnAttribute, ["sizes"]),
        (KeepsInAHelper, ["found"]),
        (Appends, ["waiting"]),
        (FeedsBack, ["offset"]),
        (KeepsOnTheContext, ["context"]),
        (UsesAGlobal, ["global COUNT"]),
        (ImageClassifier, []),
        (TextClassifier, ["input_text"]),
        (BaseHandler, []),
        (type("Unreadable", (Plain,), {}), None),
    ],
)
def test_what_preprocess_and_later_steps_share_is_found_in_the_source(
    cls: type[BaseHandler], kept: list[str] | None
) -> None:
    """With the methods that they call; None where there is no source."""
    assert kept_between(cls) == kept


def opened(cls: type[Any], envelope: str | None = None) -> tuple[Overlap | None, list[str]]:
    """The seam of a handler that is loaded, and what describe would say."""
    context = context_of()
    service = cls()
    if cls is not object:
        service.initialize(context) if isinstance(service, Plain) else None
    return open_overlap(service, context, envelope), context.load_warnings


@pytest.mark.parametrize(
    ("cls", "envelope", "why"),
    [
        (object, None, "does not extend BaseHandler"),
        (HasAHandle, None, "has a handle of its own"),
        (Plain, "body", "the envelope body stands before preprocess"),
        (KeepsAnAttribute, None, "preprocess and the later steps share self.sizes, which the next batch would change"),
        (UsesAGlobal, None, "share global COUNT"),
        (type("Unreadable", (Plain,), {}), None, "source cannot be read"),
    ],
)
def test_a_handler_whose_steps_cannot_be_taken_apart_is_served_serially(
    cls: type[Any], envelope: str | None, why: str
) -> None:
    """With a sentence in describe that names the reason."""
    overlap, warnings = opened(cls, envelope)

    assert overlap is None
    [warning] = warnings
    assert warning.startswith("overlapPreprocess is not used: ")
    assert why in warning


def test_a_handler_with_named_inputs_is_served_serially() -> None:
    """Its rows are read and computed in one call."""
    service, context = Plain(), context_of()
    service._named = object()

    assert open_overlap(service, context, None) is None
    assert "inputs have names" in context.load_warnings[0]


def test_handle_gets_what_was_prepared_for_its_rows_and_prepares_others_itself() -> None:
    """Once: a second call with the same rows prepares them again."""
    service, context = Plain(), context_of()
    service.initialize(context)
    overlap = open_overlap(service, context, None)
    assert overlap is not None
    rows: list[Any] = [1, 2]
    prepared = Prepared()
    prepared.rows = rows
    prepared.end([10, 20])
    context.begin_batch([View("a"), View("b")])

    overlap.expect(prepared)
    told = [service.handle(rows, context), service.handle(rows, context), service.handle([1, 2], context)]

    assert told == [[12, 22], [4, 6], [4, 6]]
    assert context.load_warnings == []


def test_what_preprocess_raised_is_raised_in_the_batchs_turn() -> None:
    """With its traceback."""
    prepared = Prepared()
    prepared.end(error=ValueError("no number"))

    with pytest.raises(ValueError, match="no number"):
        prepared.wait()
    assert prepared.wait() is None  # and is not kept


def in_a_thread(call: Callable[[], None]) -> None:
    """Run something in a thread of its own, to its end."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_each_thread_sees_its_own_batch_and_the_next_goes_on_with_what_was_said() -> None:
    """Ids, headers of the response, spans, and whose measurements are whose."""
    context = context_of()
    context.begin_batch([View("running")])
    context.request_processor[0].add_response_property("of", "running")
    items = [View("next"), View("mate")]
    state = BatchState(items)
    seen: list[Any] = []

    def preprocess() -> None:
        context.enter(state)
        seen.append(context.get_request_id(1))
        context.request_processor[0].add_response_property("of", "next")
        context.metrics.add_counter("read", 1)
        with context.span("reads"):
            pass
        with pytest.raises(RuntimeError, match="cannot call another model"):
            asyncio.run(context.call("other"))
        context.enter(None)
        seen.append(context.get_request_id(0))

    in_a_thread(preprocess)
    context.metrics.add_counter("computed", 1)
    before = context.get_request_id(0), context.response_of(0), list(context.spans)
    context.take_over(state)
    context.begin_batch(items)

    assert seen == ["mate", "running"]
    assert before == ("running", (200, "", [("of", "running")]), [])
    assert context.response_of(0) == (200, "", [("of", "next")])
    assert [name for name, _, _ in context.spans] == ["reads"]
    assert [value.request_ids for value in context.metrics.drain()] == ["next,mate", "running"]


def test_a_state_goes_to_no_other_batch_than_its_own() -> None:
    """A check may come in between."""
    context = context_of()
    context.take_over(BatchState([View("late")]))

    context.begin_batch([View("other")])

    assert context.get_request_id(0) == "other"
