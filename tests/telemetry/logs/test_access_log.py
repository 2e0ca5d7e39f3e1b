"""The access log's line, and that a line of a client's making stays one line."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from marserve.telemetry.logs.access_log import (
    AccessLog,
    AccessRecord,
    Sampling,
    TextAccessLog,
    access_line,
    legible,
)
from marserve.telemetry.logs.line_writer import LineWriter


class Taken:
    """Takes finished lines in the place of a writer: each text, and how many lines it has."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, int]] = []

    def write_lines(self, text: str, count: int) -> None:
        """Keep them."""
        self.texts.append((text, count))


def text_log(*writers: Taken) -> TextAccessLog:
    """A log whose writers' heads are a letter each: a, b."""
    made = [cast("LineWriter[AccessRecord]", each) for each in writers]
    return TextAccessLog(made, lambda _: ["a ", "b "][: len(writers)])


def test_a_line_reads_as_torchserve_writes_it() -> None:
    """Address with a leading slash, the request line in quotes, status, whole milliseconds."""
    line = access_line("127.0.0.1:64003", "POST", "/predictions/noop?a=1", "HTTP/1.1", 200, 118.4)

    assert line == '/127.0.0.1:64003 "POST /predictions/noop?a=1 HTTP/1.1" 200 118'
    assert access_line("::1:5", "GET", "/", "HTTP/1.1", 200, 0, "1f-2").endswith('HTTP/1.1" 200 0 1f-2')


def test_a_target_cannot_end_its_quotes_and_cannot_fill_memory() -> None:
    """A quote is written percent-encoded, and what is too long is cut."""
    quoted = access_line("::1:5", "GET", '/x" 200 1', "HTTP/1.1", 404, 0)
    long = access_line("::1:5", "GET", "/" + "x" * 8000, "HTTP/1.1", 404, 0)

    assert quoted.count('"') == 2
    assert len(long) < 2200


@pytest.mark.parametrize("evil", ["a\nb", "a\rb", "\x1b[2Ja", "a\x85b", "a\u2028b", "a\x00b", "\ud800"])
def test_a_target_cannot_break_its_line_or_reach_a_terminal(evil: str) -> None:
    """Control characters are written percent-encoded, each as the octet that the client sent."""
    line = access_line("::1:5", "GET", f"/é{evil}", "HTTP/1.1", 404, 0)

    assert line.isprintable()
    assert "/é" in line
    assert legible("/\x1b\x85\xe9") == "/%1B%85\xe9"


def test_a_share_of_the_requests_that_were_answered_well_is_kept() -> None:
    """The same ones whichever server decides, and about as many of any hundred."""
    sampling = Sampling(0.1, slow_ms=1000)
    ids = [f"2ae62faa-1122-43ad-a47f-{number:012x}" for number in range(20_000)]

    kept = [request_id for request_id in ids if sampling.keeps(request_id, 5, has_failed=False)]

    assert len(kept) == pytest.approx(2000, rel=0.05)
    assert kept == [each for each in ids if Sampling(0.1, 1000).keeps(each, 999, has_failed=False)]
    for turn in range(4):  # clients that take turns, as probes do, are all there
        assert len([each for each in kept if int(each[-12:], 16) % 4 == turn]) == pytest.approx(500, rel=0.15)


def test_requests_that_failed_or_were_slow_are_always_kept() -> None:
    """Whatever their ids are; a share of 0 has them alone, and 1 has all."""
    none, every = Sampling(0.0, slow_ms=1000), Sampling(1.0, slow_ms=1000)

    for number in range(1000):
        request_id = f"request-{number}"
        assert none.keeps(request_id, 0, has_failed=True)
        assert none.keeps(request_id, 1000, has_failed=False)
        assert not none.keeps(request_id, 999, has_failed=False)
        assert every.keeps(request_id, 0, has_failed=False)
    assert none.is_always(0, has_failed=True)
    assert none.is_always(1000, has_failed=False)
    assert not none.is_always(999, has_failed=False)


def test_without_writers_nothing_is_logged() -> None:
    """A server whose access log is off need not even make the line."""
    log = AccessLog()

    log.write("nothing")

    assert not log.is_on


def test_lines_of_one_step_of_the_loop_are_put_in_line_together() -> None:
    """Each behind its writer's head, and in order; the next step's on their own."""
    file, console = Taken(), Taken()
    log = text_log(file, console)

    async def steps() -> None:
        log.write("1")
        log.write("2")
        assert not file.texts
        await asyncio.sleep(0)
        log.write("3")
        await asyncio.sleep(0)

    asyncio.run(steps())

    assert file.texts == [("a 1\na 2", 2), ("a 3", 1)]
    assert console.texts == [("b 1\nb 2", 2), ("b 3", 1)]


def test_a_long_step_is_put_in_line_before_it_ends() -> None:
    """64 lines at a time: where there is no room they are dropped together. A flush brings the rest."""
    file = Taken()
    log = text_log(file)

    async def step() -> None:
        for number in range(100):
            log.write(f"{number}")
        assert [count for _, count in file.texts] == [64]
        log.flush()
        await asyncio.sleep(0)

    asyncio.run(step())

    assert [count for _, count in file.texts] == [64, 36]
    assert "\n".join(text for text, _ in file.texts) == "\n".join(f"a {number}" for number in range(100))


def test_without_a_loop_a_line_is_put_in_line_at_once() -> None:
    """As at the end of a server."""
    file = Taken()

    text_log(file).write("1")

    assert file.texts == [("a 1", 1)]
