"""The marks of lines that a worker prints and logs."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import traceback
from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.messages import Item
from marserve.worker.process import printed_lines
from marserve.worker.process.printed_lines import (
    MarkedStream,
    MarkFormatter,
    configure_output,
    running,
)
from marserve_handlers.support.line_owner import about, of_this_task

A, B = Item("a", [], b"", None, 1), Item("b~2", [], b"", None, 2, "theirs")


class Stream:
    """A stream over bytes in memory."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        self.plain = io.TextIOWrapper(self.bytes, "utf-8", write_through=True)
        self.marked = MarkedStream(self.plain)

    @property
    def text(self) -> str:
        """What was written."""
        self.marked.flush()
        return self.bytes.getvalue().decode()


@pytest.fixture
def stream() -> Iterator[Stream]:
    """A stream; afterwards nothing runs."""
    yield Stream()
    running.items = ()


def log_record(text: str, level: int = logging.ERROR) -> logging.LogRecord:
    """A record of the author's."""
    return logging.LogRecord("n", level, "p", 1, text, (), None)


def test_every_line_of_a_record_carries_its_level_and_its_requests(stream: Stream) -> None:
    """All but the last say that the record goes on. Parts of a request have its id."""
    running.items = [A, B]

    text = MarkFormatter().format(log_record("one\ntwo"))

    assert text == "\x1eERROR+ a,b/theirs\x1eone\n\x1eERROR a,b/theirs\x1etwo"


def test_an_authors_own_level_has_no_name() -> None:
    """It could hold anything."""
    record = log_record("one")
    record.levelname = "MY LEVEL"

    assert MarkFormatter().format(record) == "\x1e\x1eone"


def test_outside_of_batches_printed_lines_are_as_they_were(stream: Stream) -> None:
    """Of the load, and of threads that go on."""
    print("one\ntwo", file=stream.marked)
    print("three", end="", file=stream.marked)

    assert stream.text == "one\ntwo\nthree"


def test_printed_lines_belong_to_the_running_requests(stream: Stream) -> None:
    """Each has one mark, however it is pieced together."""
    running.items = [A]
    print("one", "two", file=stream.marked)
    stream.marked.writelines(["three\nfo", "ur\n\n"])
    print(end="", file=stream.marked)
    running.items = ()
    print("five", file=stream.marked)

    assert stream.text == "\x1e a\x1eone two\n\x1e a\x1ethree\n\x1e a\x1efour\n\x1e a\x1e\nfive\n"


@given(st.lists(st.text("ab\n\r\x1e", max_size=12), max_size=6))
def test_each_line_is_marked_once_however_its_text_is_cut(pieces: list[str]) -> None:
    """Empty ones, too. A piece that begins with a mark is a logged line, and begins one."""
    stream, begun = Stream(), [each for each in pieces if each and not each.startswith("\x1e")]
    running.items = [A]
    try:
        for piece in begun:
            assert stream.marked.write(piece) == len(piece)
    finally:
        running.items = ()

    lines = "".join(begun).split("\n")
    ends_open = bool(lines[-1])
    assert stream.text == "\n".join(f"\x1e a\x1e{line}" for line in lines[: len(lines) - (not ends_open)]) + (
        "" if ends_open or len(lines) == 1 else "\n"
    )


def test_a_line_that_began_before_the_batch_is_left_as_it_is(stream: Stream) -> None:
    """A mark stands at the begin of a line or nowhere."""
    print("one", end="", file=stream.marked)
    running.items = [A]
    print("two\nthree", file=stream.marked)

    assert stream.text == "onetwo\n\x1e a\x1ethree\n"


def test_a_logged_line_begins_a_line_of_its_own(stream: Stream) -> None:
    """So that its level is read."""
    print("50 %", end="", file=stream.marked)
    handler = logging.StreamHandler(stream.marked)
    handler.setFormatter(MarkFormatter())
    handler.emit(log_record("failed"))
    print("done", file=stream.marked)

    assert stream.text == "50 %\n\x1eERROR\x1efailed\ndone\n"


def test_a_printed_traceback_is_one_record(stream: Stream) -> None:
    """With requests and without."""
    for items, ids in ((), ""), ([A], " a"):
        running.items = items
        try:
            raise ValueError("no")
        except ValueError:
            traceback.print_exc(file=stream.marked)
        print("after", file=stream.marked)
        lines = stream.text.rstrip("\n").split("\n")
        stream.bytes.truncate(0)
        stream.bytes.seek(0)

        *inside, last, after = lines
        assert all(line.startswith(f"\x1e+{ids}\x1e") for line in inside)
        assert len(inside) >= 3
        assert last == f"\x1e{ids}\x1eValueError: no"
        assert after == (f"\x1e{ids}\x1eafter" if ids else "after")


def test_threads_of_the_authors_see_the_batch(stream: Stream) -> None:
    """They have no context of their own."""
    running.items = [A]
    thread = Thread(target=lambda: print("one", file=stream.marked))
    thread.start()
    thread.join()

    assert stream.text == "\x1e a\x1eone\n"


def test_tasks_side_by_side_print_for_their_own_requests(stream: Stream) -> None:
    """Batches of `asyncCommunication`."""

    async def serve(item: Item) -> None:
        of_this_task.set([item])
        await asyncio.sleep(0)
        await asyncio.to_thread(print, "one", file=stream.marked)

    async def play() -> None:
        await asyncio.gather(serve(A), serve(B))

    asyncio.run(play())

    assert sorted(stream.text.split("\n")) == ["", "\x1e a\x1eone", "\x1e b/theirs\x1eone"]


def test_one_item_of_a_batch_can_be_spoken_of_alone(stream: Stream) -> None:
    """Its failure concerns no other."""
    running.items = [A, B]
    with about([A]):
        print("one", file=stream.marked)
    print("two", file=stream.marked)

    assert stream.text == "\x1e a\x1eone\n\x1e a,b/theirs\x1etwo\n"


def test_a_large_batch_has_the_first_ids_and_how_many_are_left_out() -> None:
    """Each of its lines would else be as long as all ids together."""
    running.items = [Item(f"{number:036}", [], b"", None) for number in range(256)]

    ids = running.ids().split(",")

    assert len(running.ids()) < 4200
    assert ids[-1] == f"+{256 - len(ids) + 1}"
    running.items = ()


def test_what_is_no_text_is_refused_as_by_any_stream(stream: Stream) -> None:
    """With Python's own words."""
    with pytest.raises(TypeError, match="must be str"):
        stream.marked.write(b"one")  # type: ignore[arg-type]


def test_the_streams_are_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker has its template's; the old stream is kept, as its end would close both."""
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, f"__{name}__", stream)
    monkeypatch.setattr(printed_lines.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(logging, "captureWarnings", lambda flag: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **how: None)

    configure_output()
    first = sys.stdout, sys.stderr
    configure_output()

    assert (sys.stdout, sys.stderr) == first == (sys.__stdout__, sys.__stderr__)
    assert all(isinstance(stream, MarkedStream) for stream in first)


@pytest.mark.parametrize("has_errors", [True, False])
def test_output_is_written_line_by_line_with_its_level(monkeypatch: pytest.MonkeyPatch, has_errors: bool) -> None:
    """A crash in C code is told where there is somewhere to tell it."""
    told: list[Any] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(reconfigure=lambda **how: told.append((name, how)), write=None)

    monkeypatch.setattr(sys, "stdout", stream("stdout"))
    monkeypatch.setattr(sys, "stderr", stream("stderr") if has_errors else None)
    monkeypatch.setattr(printed_lines.faulthandler, "enable", lambda: told.append("faulthandler"))
    monkeypatch.setattr(logging, "captureWarnings", lambda flag: told.append(flag))
    monkeypatch.setattr(logging, "basicConfig", lambda **how: told.append(how))

    configure_output()

    how = {"line_buffering": True, "errors": "backslashreplace"}
    basic = told.pop(2 if has_errors else 1)
    assert told == [("stdout", how), *([("stderr", how)] if has_errors else []), True, *(["faulthandler"] * has_errors)]
    (handler,) = basic["handlers"]
    assert (basic["level"], basic["force"], handler.stream) == (logging.INFO, True, sys.stdout)
    record = logging.LogRecord("n", logging.WARNING, "f", 1, "one\ntwo", None, None)
    assert handler.format(record) == "\x1eWARNING+\x1eone\n\x1eWARNING\x1etwo"
