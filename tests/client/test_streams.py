"""Server-Sent Events and chunks of bytes, wherever the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve_client import errors, streams
from marserve_client.errors import BadAnswer
from marserve_client.streams import Chunks, Event, Events
from marserve_handlers.declared import events as handlers_events

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def decoded(*pieces: bytes) -> list[Event]:
    """The events of these pieces."""
    decoder = Events()
    return [event for piece in pieces for event in decoder.feed(piece)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        ("data: a\n\n", [Event("a")]),
        ("data: a\r\rdata: b\r\n\r\n", [Event("a"), Event("b")]),
        ("data:a\ndata: b\ndata:  c\ndata\n\n", [Event("a\nb\n c\n")]),
        ("event: token\ndata: a\n\ndata: b\n\n", [Event("a", "token"), Event("b")]),
        ("id: 7\ndata: a\n\ndata: b\n\nid\ndata: c\n\n", [Event("a", id="7"), Event("b", id="7"), Event("c", id="")]),
        (": a comment\ndata: a\nretry: 10\nother: x\n\n", [Event("a")]),
        ("\ufeffdata: a\n\n", [Event("a")]),
        ("event: token\n\n\n\n", []),  # an event without data is none
        ("data: cut off", []),
        ("data: cut off\n", []),
        ("id: 1\0\ndata: a\n\n", [Event("a")]),
    ],
)
def test_events_are_read_as_the_standard_says(text: str, events: list[Event]) -> None:
    """Line ends, comments, fields, and what is cut off; also byte by byte."""
    content = text.encode()

    assert decoded(content) == events
    assert decoded(*(content[at : at + 1] for at in range(len(content)))) == events


@given(
    st.lists(st.builds(handlers_events.Event, TEXTS, TEXTS.filter(lambda text: text not in ("", "end", "error")))),
    st.lists(st.integers(0, 400)),
)
def test_what_handlers_yield_comes_out(sent: list[handlers_events.Event], cuts: list[int]) -> None:
    """As the handlers' own writer frames it, cut anywhere."""
    try:
        frames = [event.frame() for event in sent]
    except ValueError:  # a name of several lines
        return
    content = b"".join(frames)
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})

    came = decoded(*(content[a:b] for a, b in itertools.pairwise(edges)))

    lines = [event.data.replace("\r\n", "\n").replace("\r", "\n") for event in sent]
    assert [(each.data, each.event) for each in came] == [
        (line, event.event) for line, event in zip(lines, sent, strict=True)
    ]


def test_marserves_end_is_left_out_and_its_error_is_raised() -> None:
    """As the error of that status, behind the events that came before."""
    decoder = Events()
    assert list(decoder.feed(handlers_events.END)) == []

    items = decoder.feed(b"data: a\n\n" + handlers_events.error_frame(400, "age: expected int"))
    assert next(items) == Event("a")
    with pytest.raises(errors.BadInput, match="age: expected int") as failed:
        next(items)
    assert failed.value.status == 400


def test_what_a_handler_raised_in_a_stream_comes_with_its_error() -> None:
    """Where the server shows it."""
    exception = '{"type": "ValueError", "message": "no luck", "traceback": ["at line 3"]}'
    data = f'{{"code": 500, "message": "Prediction failed", "exception": {exception}}}'

    with pytest.raises(errors.ServerFailed, match="Prediction failed") as failed:
        decoded(f"event: error\ndata: {data}\n\n".encode())

    assert failed.value.exception == ("ValueError", "no luck", ("at line 3",))


@pytest.mark.parametrize(
    "data",
    [
        *("{}", "no", "[1]", '{"code": "a", "message": "b"}', '{"code": 1, "message": "", "a": 1}'),
        *('{"code": 1, "message": null}', "[" * 100_000),
    ],
)
def test_an_error_of_another_server_is_an_event(data: str) -> None:
    """Only marserve's form is known to be one."""
    assert decoded(f"event: error\ndata: {data}\n\n".encode()) == [Event(data, "error")]
    assert decoded(f"event: end\ndata: {data} \n\n".encode()) == [Event(f"{data} ", "end")]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends no line end does not fill the memory."""
    monkeypatch.setattr(streams, "MOST_EVENT_CHARACTERS", 1000)
    with pytest.raises(BadAnswer, match="more than 1000 characters"):
        decoded(*[b"x" * 100] * 11)


def test_many_small_events_are_not_one_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is for one event."""
    monkeypatch.setattr(streams, "MOST_EVENT_CHARACTERS", 1000)

    assert len(decoded(*[b"data: " + b"x" * 100 + b"\n\n"] * 50)) == 50


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    """A sign in their place, and the stream goes on."""
    assert decoded(b"data: \xff\n\n") == [Event("\ufffd")]


def test_data_is_read_as_json() -> None:
    """A handler that yields objects writes them so."""
    assert Event('{"a": 1}').json() == {"a": 1}
    with pytest.raises(ValueError, match="Expecting"):
        Event("no").json()


def test_chunks_are_the_bytes_that_came() -> None:
    """Nothing is joined or cut."""
    decoder = Chunks()

    assert [item for piece in (b"ab", b"", b"c") for item in decoder.feed(piece)] == [b"ab", b"c"]
