"""The access log's line, and that a line of a client's making stays one line."""

from __future__ import annotations

import pytest

from marserve.telemetry.logs.access_log import AccessLog, access_line, legible


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


def test_without_writers_nothing_is_logged() -> None:
    """A server whose access log is off need not even make the line."""
    log = AccessLog()

    log.write("nothing")

    assert not log.is_on
