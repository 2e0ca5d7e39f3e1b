"""Tests for models that yield: pieces, events, ends, errors, clients that go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from marserve_handlers import BadInput, Event, model
from marserve_handlers.declared.answer import FailedEvent
from marserve_handlers.declared.declaration import DeclarationError
from marserve_handlers.errors import NobodyWaits
from marserve_handlers.support.line_owner import of_this_task
from support.declared_models import Opening
from support.model_context import FakeItem

SSE = "text/html, text/event-stream;q=0.9"
CLOSED: list[str] = []


@model
def count(item: str) -> Iterator[str]:
    """Counts to a number; `bad…` raises after that."""
    number = int(item.removeprefix("bad"))
    try:
        for each in range(number):
            yield f"{each} "
        if item.startswith("bad"):
            raise RuntimeError("bad")
    finally:
        CLOSED.append(item)


@model
async def acount(item: str) -> AsyncIterator[str]:
    """The same, asynchronous."""
    number = int(item.removeprefix("bad"))
    try:
        for each in range(number):
            yield f"{each} "
        if item.startswith("bad"):
            raise RuntimeError("bad")
    finally:
        CLOSED.append(item)


@model
def events(item: str) -> Iterator[Event]:
    """An event with all members, then what the item says."""
    yield Event("a\nb", event="token", id="1")
    if item == "bad":
        raise BadInput("too long", "prompt")
    if item == "worse":
        raise RuntimeError("secret")
    yield Event({"text": "c"})


class Sending:
    """A model whose pieces are kept: for each request what was sent, exceptions included, and what came last."""

    def __init__(self, target: Any, *requests: bytes, accept: str = "", gone: set[int] | None = None) -> None:
        CLOSED.clear()
        self.opening = Opening(target)
        context = self.opening.context
        self.sent: list[list[Any]] = [[] for _ in requests]

        def take(pieces: list[Any]) -> None:
            if gone is not None and len(gone) == len(requests):
                raise NobodyWaits
            for kept, piece in zip(self.sent, pieces, strict=True):
                if piece:
                    kept.append(piece)

        context.send_pieces = take
        context.ask_cancelled = lambda place: gone is not None and place in gone
        items = [
            FakeItem(str(place), headers=[(b"Accept", accept.encode())] if accept else [])
            for place in range(len(requests))
        ]
        self.last = self.opening.answer(*requests, items=items)


@pytest.mark.parametrize("target", [count, acount])
def test_pieces_are_sent_as_they_are_made(target: Any) -> None:
    """A batch's streams end by themselves; nothing is left for the end."""
    sending = Sending(target, b"2", b"3")

    assert sending.sent == [[b"0 ", b"1 "], [b"0 ", b"1 ", b"2 "]]
    assert sending.last == [b"", b""]
    assert sending.opening.context.get_response_content_type(0) == "text/plain; charset=utf-8"


@pytest.mark.parametrize("target", [count, acount])
def test_a_failure_before_the_first_piece_is_an_answer(target: Any) -> None:
    """With a status of its own; for the only request it is raised."""
    sending = Sending(target, b"bad0", b"1")

    assert [str(piece) for piece in sending.sent[0]] == ["bad"]
    assert sending.sent[1] == [b"0 "]
    with pytest.raises(RuntimeError, match="bad"):
        Sending(target, b"bad0")
    with pytest.raises(ValueError, match="invalid literal"):
        Sending(target, b"x")


@pytest.mark.parametrize("target", [count, acount])
def test_a_failure_in_the_middle_ends_its_stream_alone(target: Any) -> None:
    """The exception takes the place of its next piece."""
    sending = Sending(target, b"bad1", b"2")

    first, failure = sending.sent[0]
    assert (first, str(failure)) == (b"0 ", "bad")
    assert sending.sent[1] == [b"0 ", b"1 "]


@pytest.mark.parametrize("target", [count, acount])
def test_nothing_yielded_is_said_in_a_sentence(target: Any) -> None:
    """An empty answer would hide the mistake."""
    with pytest.raises(RuntimeError, match="count ended without a yield"):
        Sending(target, b"0")


@pytest.mark.parametrize("target", [count, acount])
def test_a_generator_whose_client_has_gone_is_closed(target: Any) -> None:
    """Its mates go on."""
    sending = Sending(target, b"5", b"2", gone={0})

    assert sending.sent == [[], [b"0 ", b"1 "]]


@pytest.mark.parametrize("target", [count, acount])
def test_all_are_closed_once_no_client_waits(target: Any) -> None:
    """The batch ends with NobodyWaits, wherever the generators stand."""
    CLOSED.clear()
    gone: set[int] = set()
    opening = Opening(target)
    opening.context.ask_cancelled = lambda place: False

    def take(pieces: list[Any]) -> None:
        raise NobodyWaits

    opening.context.send_pieces = take
    with pytest.raises(NobodyWaits):
        opening.answer(b"5", b"6")

    assert sorted(CLOSED) == ["5", "6"]
    assert not gone


def test_events_are_framed_where_they_are_accepted() -> None:
    """Lines of data, a name, an id; JSON for what is no text; and an end."""
    sending = Sending(events, b"good", accept=SSE)

    assert sending.sent == [[b"event: token\nid: 1\ndata: a\ndata: b\n\n", b'data: {"text":"c"}\n\n']]
    assert sending.last == [b"event: end\ndata: {}\n\n"]
    assert sending.opening.context.get_response_content_type(0) == "text/event-stream"


@pytest.mark.parametrize(
    ("request_", "data"),
    [
        (b"bad", b'{"code":400,"message":"prompt: too long"}'),
        (b"worse", b'{"code":500,"message":"Prediction failed"}'),
    ],
)
def test_a_failed_stream_of_events_ends_with_an_error(
    request_: bytes, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The message of an error for the client; of any other one only the log has the words."""
    sending = Sending(events, request_, accept=SSE)

    assert sending.last == [b"event: error\ndata: %b\n\n" % data]
    assert isinstance(sending.last[0], FailedEvent)
    assert type(sending.last[0].error).__name__ == ("BadInput" if request_ == b"bad" else "RuntimeError")
    assert ("secret" in caplog.text) is (request_ == b"worse")
    assert ("Request 0: its stream failed after 1 event\n" in caplog.text) is (request_ == b"worse")


@pytest.mark.parametrize("accept", ["", "*/*", "text/event-stream;q=0", "text/event-stream;q=0.4, text/plain"])
def test_events_are_lines_where_they_are_not_accepted(accept: str) -> None:
    """A client that asked for nothing, or refuses them, gets the data."""
    sending = Sending(events, b"good", accept=accept)

    assert sending.sent == [[b"a\nb\n", b'{"text":"c"}\n']]
    assert sending.last == [b""]


def test_other_values_are_json_lines() -> None:
    """With their content type."""

    @model
    def numbers(item: str) -> Iterator[dict[str, int]]:
        yield {"a": 1}
        yield {"a": 2}

    sending = Sending(numbers, b"")

    assert sending.sent == [[b'{"a":1}\n', b'{"a":2}\n']]
    assert sending.opening.context.get_response_content_type(0) == "application/x-ndjson"


def test_an_events_name_is_one_line() -> None:
    """Else a client's text could forge events."""
    with pytest.raises(ValueError, match="is one line of text"):
        Event("x", event="a\ndata: b").frame()


def test_streams_are_declared() -> None:
    """With what their pieces are."""
    assert Opening(count).declaration["output"] == {"type": "text", "contentType": "text/plain", "stream": True}
    assert Opening(events).declaration["output"] == {
        "type": "events",
        "contentType": "text/event-stream",
        "stream": True,
    }


def _no_yield(item: str) -> AsyncIterator[str]:
    raise NotImplementedError


def _stacked(x: Any) -> Iterator[Any]:
    yield x


def test_a_stream_without_a_yield_is_refused() -> None:
    """At load, by its annotation."""
    with pytest.raises(DeclarationError, match="_no_yield is annotated as a stream, and has no yield"):
        Opening(model(_no_yield))


def test_what_a_stream_logs_belongs_to_its_request_alone() -> None:
    """At each of its pieces."""

    @model
    def owners(item: str) -> Iterator[str]:
        for _ in range(2):
            yield ",".join(each.id for each in of_this_task.get() or ())

    sending = Sending(owners, b"a", b"b")

    assert [b"".join(pieces) for pieces in sending.sent] == [b"00", b"11"]
