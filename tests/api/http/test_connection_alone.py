"""One connection without a socket: what of its reading, its turns, its limits and its end can be told step by step."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.api.browsers import BrowserRules
from marserve.api.byte_ledger import PATIENCE_S, SMALL_BYTES, ByteLedger
from marserve.api.http import connection as http_connection
from marserve.api.http.connection import READ_AHEAD, READ_AHEAD_BYTES, SLICE_BYTES
from marserve.api.http.large_answers import LargeAnswers
from marserve.api.http.request_head import HttpLimits
from marserve.api.tokens import Tokens
from marserve.errors import QueueFull
from support.bare_connection import Bare, Clock, Wire, set_clock, turn_loop

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
OFFER = ("Connection: upgrade", "Upgrade: h2c")
EXPECT = "Expect: 100-continue"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that connections see."""
    return set_clock(monkeypatch)


def head(target: str = "/predictions/held", *lines: str, method: str = "POST") -> bytes:
    """A header."""
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def post(body: bytes = b"", target: str = "/predictions/held", *lines: str) -> bytes:
    """A request with a length."""
    return head(target, *lines, f"Content-Length: {len(body)}") + body


ECHO = "/predictions/echo"


# ------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("offer", [(), OFFER], ids=["plain", "upgrade"])
async def test_lines_behind_a_chunked_body_are_headers_of_no_request(offer: tuple[str, ...]) -> None:
    """Neither of the one that they end, read once more without its offer, nor of the next."""
    bare = Bare()
    trailers = b"X-Trailer: 1\r\nExplain: True\r\n\r\n"
    chunked = head(ECHO, "Transfer-Encoding: chunked", *offer) + b"2\r\nhi\r\n0\r\n" + trailers

    bare.say(chunked[:-9])
    bare.say(chunked[-9:])
    bare.say(post(b"next", ECHO))

    assert [job.body for job in bare.plane.submitted] == [b"hi", b"next"]
    for job in bare.plane.submitted:
        assert b"X-Trailer" not in [name for name, _ in job.request.headers]
    assert bare.statuses == [200, 200]


@pytest.mark.parametrize("is_one_read", [True, False])
async def test_a_read_of_many_chunks_is_parsed_in_steps_between_which_others_are_served(
    clock: Clock, is_one_read: bool
) -> None:
    """Nothing more is read until all of it has been; then the request is whole, and the connection reads on."""
    bare = Bare()
    pieces = b"1\r\na\r\n" * 5000
    begin, end = head(ECHO, "Transfer-Encoding: Chunked"), pieces + b"0\r\n\r\n"
    if not is_one_read:
        bare.say(begin)
    clock.step = 0.0006  # two looks at the clock are more than a step may take

    bare.say(begin + end if is_one_read else end)

    assert bare.connection.body_bytes < 5000
    assert not bare.wire.is_open
    assert bare.plane.submitted == []
    await turn_loop(20)
    assert [job.body for job in bare.plane.submitted] == [b"a" * 5000]
    assert bare.wire.is_open


async def test_a_step_of_many_chunks_ends_when_its_time_is_over(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment itself: the second slice is parsed in the next step, on a clock that stands still too."""
    bare = Bare()
    monkeypatch.setattr(http_connection, "SLICES_S", 0.0)

    bare.say(head(ECHO, "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 5000)

    assert bare.connection.body_bytes < SLICE_BYTES / 6
    bare.connection.connection_lost(None)
    await turn_loop()


async def test_a_body_that_comes_in_pieces_is_held_once() -> None:
    """Each piece is added to what is there: else a large body would be copied with each of its reads."""
    bare = Bare()
    bare.say(head(ECHO, "Content-Length: 3") + b"1")
    bare.say(b"2")
    held = bare.connection.body

    bare.say(b"3")

    assert bare.statuses == [200]
    assert held == b"123"


async def test_an_empty_line_is_no_request() -> None:
    """Also where nothing was read before it."""
    bare = Bare()

    bare.say(b"\r\n")
    bare.say(post(b"", ECHO))

    assert bare.statuses == [200]


@pytest.mark.parametrize("before", ["whole", "in its body"])
async def test_a_body_with_a_length_is_parsed_as_it_came_whatever_it_says(clock: Clock, before: str) -> None:
    """Only chunks take time by their number."""
    bare = Bare()
    body = b"Transfer-Encoding: chunked" * 1000
    clock.step = 1.0
    bare.say(head("/predictions/held", f"Content-Length: {len(body) + 5}"))

    bare.say(body if before == "in its body" else body + b"12345")

    assert bare.connection.body_bytes >= len(body)
    assert bare.wire.is_open


async def test_a_header_that_goes_on_may_tell_of_chunks_later(clock: Clock) -> None:
    """Its read is cut into steps as well, though it names no chunks itself."""
    bare = Bare()
    clock.step = 1.0
    bare.say(head(ECHO, "Transfer-Encoding: chunked")[:-2])

    bare.say(b"\r\n" + b"1\r\na\r\n" * 5000)

    assert 0 < bare.connection.body_bytes < 5000
    assert not bare.wire.is_open
    bare.connection.connection_lost(None)
    await turn_loop()


async def test_a_connection_that_is_refused_within_a_read_hears_no_more_of_it(clock: Clock) -> None:
    """The rest of a flood is thrown away; one answer tells why."""
    bare = Bare(HttpLimits(body_chunks=10))

    bare.say(head(ECHO, "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 5000)
    bare.say(post(b"more", ECHO))

    assert bare.statuses == [400]
    assert bare.counts.refused == {"malformed": 1}
    assert bare.wire.is_open, "what it still sends is read and dropped, so that it reads the answer and not a reset"
    assert bare.wire.end == ["half-closed"]


async def test_a_known_header_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an answer is being made, or with a body of another length, it is."""
    bare = Bare()
    bare.say(post(b"12345", ECHO))
    parsed: list[int] = []
    receive = bare.connection._receive
    monkeypatch.setattr(bare.connection, "_receive", lambda data: (parsed.append(len(data)), receive(data)))

    bare.say(post(b"54321", ECHO))
    assert parsed == []
    bare.say(post(b"54321", ECHO) + b"\r\n")
    assert len(parsed) == 1
    bare.say(post())
    bare.say(post(b"12345", ECHO))
    assert len(parsed) == 3
    assert [job.body for job in bare.plane.submitted] == [b"12345", b"54321", b"54321", b""]


@pytest.mark.parametrize(
    "more",
    [
        (b"\r\n", b""),  # bytes before it are not its header's
        (b"", b"\r\n"),  # nor those behind it
        (post(b"1", ECHO), b""),
        # The end of a body that began with an earlier read.
        (head(ECHO, "Content-Length: 8") + b"|POST /x ", b""),
    ],
)
async def test_only_what_was_one_request_and_nothing_else_is_remembered(more: tuple[bytes, bytes]) -> None:
    """What stands before or behind it in one read would be taken for a part of it the next time."""
    bare = Bare()

    first, _, rest = more[0].partition(b"|")
    if rest:
        bare.say(first)
    bare.say((rest or first) + post(b"12345", ECHO) + more[1])

    known = head(ECHO, "Content-Length: 5")
    assert set(bare.connection.listener.heads) <= {known}
    for body in (b"abcde", b"fghij"):
        bare.say(post(body, ECHO))
    assert [job.body for job in bare.plane.submitted[-2:]] == [b"abcde", b"fghij"]


async def test_a_page_of_another_site_reaches_no_inference_route_that_needs_no_key() -> None:
    """Other clients do; the application's routes have a guard of their own."""
    bare = Bare(browser_rules=BrowserRules("http"))
    for target, lines in (
        (ECHO, ("Origin: http://evil.example",)),
        ("/other", ("Origin: http://evil.example",)),
        (ECHO, ()),
    ):
        bare.open(wire := Wire()).data_received(post(b"x", target, *lines))
        await turn_loop()
        assert wire.written.startswith(b"HTTP/1.1 403 ") is (target == ECHO and bool(lines))
    assert len(bare.plane.submitted) == 1


async def test_an_inference_route_needs_the_inference_key_before_its_body_is_read(tmp_path: Path) -> None:
    """Another kind's key is none."""
    tokens = Tokens(tmp_path / "key_file.json", 60.0)
    tokens.write()
    keys = {kind: entry["key"] for kind, entry in json.loads((tmp_path / "key_file.json").read_text()).items()}
    for kind, passes in (("inference", True), ("management", False)):
        bare = Bare(tokens=tokens)
        bare.say(head(ECHO, f"Authorization: Bearer {keys[kind]}", "Content-Length: 2"))
        assert bool(bare.statuses) is not passes
        bare.say(b"hi")
        assert [job.body for job in bare.plane.submitted] == [b"hi"] * passes


# ------------------------------------------------------------------------------------------------- limits of a header


async def test_a_header_that_is_still_coming_is_refused_at_its_limit_and_not_before() -> None:
    """By the bytes of its lines and its request line, by the lines, by the target; the answer names which."""
    limits = HttpLimits(header_bytes=1000, request_line_bytes=500, header_lines=10)
    line = b"A: %b\r\n" % (b"a" * 95)

    def told(*reads: bytes) -> list[int]:
        bare = Bare(limits)
        for read in reads:
            bare.say(read)
        said.append(bytes(bare.wire.written))
        return bare.statuses

    said: list[bytes] = []

    begin = b"POST /predictions/echo HTTP/1.1\r\n"
    fits = b"A: " + b"a" * (1500 - len(begin) - 3)
    assert told(begin, fits) == []
    assert told(begin, fits + b"a") == [431]
    assert b"has more than 1000 bytes" in said[-1]
    assert told(begin + fits) == []
    assert told(begin + fits + b"a") == [431]
    assert told(begin + b"A: b\r\n" * 9, b"A: b\r\n") == []
    assert told(begin + b"A: b\r\n" * 10 + b"A: b\r\nA", b":") == [431]
    assert b"has more than 10 lines" in said[-1]
    assert told(b"GET /" + b"a" * 499) == []
    assert told(b"GET /" + b"a" * 500) == [414]
    assert told(begin + line, line * 8 + b"\r\n") == [400], "within its limits; it has no Host"


@pytest.mark.parametrize(("more", "statuses"), [(0, [200]), (1, [200, 431])])
async def test_of_a_read_that_held_the_end_of_another_request_no_byte_counts_as_header(
    more: int, statuses: list[int]
) -> None:
    """How many of them are header is not known; those of later reads are."""
    bare = Bare(HttpLimits(header_bytes=1000, request_line_bytes=500))
    bare.say(post(b"", ECHO) + b"P")
    rest = b"OST /predictions/echo HTTP/1.1\r\nA: "

    bare.say(rest + b"a" * (1500 - len(rest) + more))

    assert bare.statuses == statuses


async def test_a_header_has_its_time_from_its_first_byte(clock: Clock) -> None:
    """Dribbling does not move it, and the next request has its own."""
    bare = Bare(HttpLimits(header_timeout_s=10.0))
    connection = bare.connection
    bare.say(b"POST /predictions/echo HTTP/1.1\r\nHost: ")
    for now in (1005.0, 1009.0):
        clock.now = now
        bare.say(b"x")
        connection.check(now)
    bare.say(b"\r\nContent-Length: 0\r\n\r\n")
    clock.now = 1020.0
    bare.say(b"POST /pre")
    connection.check(1029.9)
    assert bare.statuses == [200]

    connection.check(1030.0)

    assert bare.statuses == [200, 408]
    assert b"The request's header did not arrive in time; the limit is 10 seconds." in bare.wire.written
    assert bare.log.lines[-1].split('"')[1].startswith("POST /pre")


async def test_a_header_behind_one_that_is_read_again_without_its_offer_has_limits_of_its_own(clock: Clock) -> None:
    """Its time from its first byte on, and its bytes without those of the body before it."""
    bare = Bare(HttpLimits(header_bytes=1000, request_line_bytes=500, header_timeout_s=10.0))
    body = b"x" * 5000
    bare.say(post(body, ECHO, *OFFER) + b"POST /predictions/echo HTTP/1.1\r\n")
    bare.connection.check(1009.9)
    assert [job.body for job in bare.plane.submitted] == [body]
    assert bare.statuses == [200]

    bare.connection.check(1010.0)

    assert bare.statuses == [200, 408]


async def test_what_surrounds_chunks_is_bounded_by_what_a_header_may_have() -> None:
    """Beside the frame that every chunk has; the bound is told."""
    limits = HttpLimits(header_bytes=1000)
    for extra, statuses in ((990, []), (1100, [431])):
        bare = Bare(limits)
        bare.say(head(ECHO, "Transfer-Encoding: chunked") + b"1\r\na\r\n")
        bare.say(b"1;" + b"x" * extra)
        assert bare.statuses == statuses
    assert b"has more than 1000 bytes" in bare.wire.written


async def test_a_defect_while_a_header_is_read_is_a_500_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With its traceback, and its client, whose share of the log is limited."""
    bare = Bare()

    def fail(target: bytes) -> None:
        raise RuntimeError("ours")

    bare.connection.listener.match = fail
    bare.say(post(b"", ECHO))

    assert bare.statuses == [500]
    assert b"ours" not in bare.wire.written
    assert bare.counts.refused == {"unreadable": 1}
    [record] = caplog.records
    assert record.exc_info is not None
    assert (str(record.exc_info[1]), vars(record)["client"]) == ("ours", "10.0.0.9")


# ------------------------------------------------------------------------------------------------- limits of time


async def test_an_idle_connection_has_its_time_by_whether_it_has_asked_anything(clock: Clock) -> None:
    """Closed when it is over, from the last answer on; not while a request is answered."""
    limits = HttpLimits(header_timeout_s=10.0, keep_alive_s=75.0)
    silent, asked, busy = Bare(limits), Bare(limits), Bare(limits)
    asked.say(post(b"", ECHO))
    busy.say(post())
    busy.connection.check(5000.0)
    clock.now = 1050.0
    busy.plane.submitted[0].answer()
    wire = Wire()
    another = asked.open(wire)  # whose first request has a header that is known already
    another.data_received(post(b"", ECHO))
    another.check(1124.9)
    assert wire.end == []
    application = Bare(limits)
    clock.now = 1060.0
    application.say(post(b"", "/other"))
    await turn_loop()

    for bare, last, over in (
        (silent, 1009.9, 1010.0),
        (asked, 1074.9, 1075.0),
        (busy, 1124.9, 1125.0),
        (application, 1134.9, 1135.0),
    ):
        bare.connection.check(last)
        assert bare.wire.end == []
        bare.connection.check(over)
        assert bare.wire.end == ["closed"]
        bare.connection.check(over + 100)
        assert bare.wire.end == ["closed"]


async def test_a_body_must_come_fast_enough_over_each_window(clock: Clock) -> None:
    """Its first byte within its time; then so many bytes a second, judged window by window."""
    limits = HttpLimits(body_timeout_s=30.0, body_window_s=10.0, body_bytes_per_s=100)
    silent, slow = Bare(limits), Bare(limits)
    for bare in (silent, slow):
        bare.say(head(ECHO, "Content-Length: 90000"))
    silent.connection.check(1029.9)
    assert silent.statuses == []
    silent.connection.check(1030.0)
    assert silent.statuses == [408]
    assert b"The request's body did not arrive in time; the limit is 30 seconds." in silent.wire.written

    slow.say(b"x")
    clock.now = 1005.0
    slow.say(b"x" * 999)
    slow.connection.check(1009.9)
    slow.connection.check(1010.0)
    slow.say(b"x" * 1200)
    slow.connection.check(1022.0)
    slow.say(b"x" * 999)
    slow.connection.check(1031.9)
    assert slow.statuses == []
    slow.connection.check(1032.0)
    assert slow.statuses == [408]
    assert b"slow" in bytes(slow.wire.written).lower() or b"bytes" in bytes(slow.wire.written)


async def test_a_client_that_the_server_keeps_waiting_is_not_slow(clock: Clock) -> None:
    """While nothing is read, and while it waits to be asked for its body: its time begins anew afterwards."""
    limits = HttpLimits(body_timeout_s=30.0, body_window_s=10.0)
    waits, asks = Bare(limits, ledger=ByteLedger(MIB)), Bare(limits)
    full = waits.table.ledger.take(MIB)
    assert full is not None
    waits.say(head(ECHO, f"Content-Length: {MIB}") + b"x")
    asks.say(post() + head(ECHO, EXPECT, "Content-Length: 2"))
    for bare in (waits, asks):
        bare.connection.check(2000.0)
        assert bare.statuses == []
    asks.plane.submitted[0].answer()
    full.close()
    waits.table.ledger.turn(1001.0)

    waits.connection.check(2009.9)
    asks.connection.check(2029.9)
    assert (waits.statuses, asks.statuses) == ([], [200, 100])
    waits.connection.check(2010.0)
    asks.connection.check(2030.0)
    assert (waits.statuses, asks.statuses) == ([408], [200, 100, 408])


async def test_a_client_that_takes_nothing_is_cut_off_and_one_that_takes_a_little_is_not(clock: Clock) -> None:
    """What is written meanwhile does not count as taken; an answer that has gone out starts no clock."""
    bare = Bare(HttpLimits(stall_timeout_s=60.0))
    connection, wire = bare.connection, bare.wire
    bare.say(post())
    bare.plane.submitted[0].piece(b"x" * 5000)
    connection.check(1000.0)
    wire.unsent = 5000
    connection.check(1001.0)
    bare.plane.submitted[0].piece(b"x" * 5000)
    wire.unsent += 5000
    connection.check(1050.0)
    wire.unsent -= 1
    connection.check(1060.9)
    connection.check(1120.8)
    bare.plane.submitted[0].piece(b"x" * 5000)
    connection.check(1120.85)  # as much was taken as was written
    assert wire.end == []
    connection.check(1180.8)
    wire.unsent = 0
    connection.check(1180.84)
    connection.check(1300.0)
    bare.plane.submitted[0].piece(b"x" * 5000)
    wire.unsent = 5010  # with the frame of the chunk: nothing of it was taken
    connection.check(1301.0)
    connection.check(1359.9)
    assert wire.end == [], "a client that had nothing to take did not stall"

    connection.check(1360.0)

    assert wire.end == ["aborted"]
    assert bare.counts.refused == {"slow_reader": 1}


async def test_a_stalled_client_is_cut_off_though_its_connection_closes_already(clock: Clock) -> None:
    """The server has no more to say, and would wait for ever."""
    bare = Bare(HttpLimits(stall_timeout_s=60.0))
    bare.say(post(b"", ECHO, "Connection: close"))
    bare.wire.unsent = 10
    bare.connection.check(1000.0)
    bare.connection.check(1059.0)
    assert bare.wire.end == ["closed"]

    bare.connection.check(1061.0)

    assert bare.wire.end == ["closed", "aborted"]


async def test_a_large_answer_leaves_memory_when_its_client_is_seen_to_be_slow(tmp_path: Path) -> None:
    """Judged by what it took between two looks."""
    answers = LargeAnswers(tmp_path)
    bare = Bare(large_answers=answers)
    bare.say(post())
    bare.connection.pause_writing()
    bare.plane.submitted[0].answer(b"x" * (2 * MIB))

    bare.connection.check(1000.0)
    assert answers.on_disk_bytes == 0
    bare.connection.check(1001.0)

    assert answers.on_disk_bytes == 2 * MIB
    bare.connection.connection_lost(None)
    async with asyncio.timeout(5):
        while answers.on_disk_bytes or answers.in_memory_bytes:
            await asyncio.sleep(0.001)
    answers.close()


# ------------------------------------------------------------------------------------------------- 100-continue


async def test_a_large_body_that_has_room_is_asked_for_at_once_and_one_that_has_none_when_it_has() -> None:
    """Else the client would send what is not read, or wait for ever."""
    ledger = ByteLedger(2 * MIB)
    has_room, waits = Bare(ledger=ledger), Bare(ledger=ledger)
    asking = head(ECHO, EXPECT, f"Content-Length: {MIB}")
    assert has_room.say(asking) == CONTINUE
    other = ledger.take(MIB)

    assert waits.say(asking) == b""
    assert not waits.wire.is_open
    del other
    ledger.turn(1.0)

    assert waits.wire.written == CONTINUE
    assert waits.wire.is_open
    waits.say(b"x" * MIB)
    assert waits.statuses == [100, 200]


async def test_a_body_behind_an_answer_is_asked_for_when_both_its_turn_and_its_room_have_come() -> None:
    """Whichever is the later, and once."""
    ledger = ByteLedger(MIB)
    asking = head(ECHO, EXPECT, f"Content-Length: {MIB}")
    for room_first in (True, False):
        bare, other = Bare(ledger=ledger), ledger.take(MIB)
        bare.say(post() + asking)

        def give_room() -> None:
            nonlocal other
            other = None
            ledger.turn(1.0)

        steps: list[Callable[[], None]] = [give_room, bare.plane.submitted[0].answer]
        for step in steps if room_first else reversed(steps):
            assert CONTINUE not in bare.wire.written
            step()

        assert bare.statuses == [200, 100]
        bare.say(b"x" * MIB)
        assert bare.statuses == [200, 100, 200]
        bare.plane.submitted.clear()


async def test_a_client_that_sends_its_body_unasked_is_not_asked_for_it_behind_its_answer() -> None:
    """A 100 that nobody waits for would be taken for the next answer."""
    bare = Bare()

    bare.say(post() + post(b"hi", ECHO, EXPECT))
    bare.plane.submitted[0].answer()

    assert bare.statuses == [200, 200]


# ------------------------------------------------------------------------------------------------- turns


async def test_so_many_requests_are_read_ahead_and_then_reading_rests_until_they_have_had_their_turn() -> None:
    """The eighth is enough; so is one with a large body."""
    bare = Bare()
    bare.say(post() * READ_AHEAD)
    assert bare.wire.is_open
    bare.say(post())
    assert not bare.wire.is_open
    for number in range(READ_AHEAD):
        assert not bare.wire.is_open
        bare.plane.submitted[number].answer()
    assert bare.wire.is_open
    bare.plane.submitted[-1].answer()

    bare.say(post() + post(b"x" * READ_AHEAD_BYTES))
    assert bare.wire.is_open
    bare.say(post(b"x" * (READ_AHEAD_BYTES + 1)))
    assert not bare.wire.is_open
    assert bare.statuses == [200] * (READ_AHEAD + 1)


@pytest.mark.parametrize("last", [ECHO, "/other"])
@pytest.mark.parametrize("waiting", [ECHO, "/other"])
async def test_the_limit_of_requests_sent_ahead_is_reached_and_not_passed(waiting: str, last: str) -> None:
    """As many as it says wait; the next is refused in its turn, and those before it are answered."""
    for count, refused in ((3, {}), (4, {"malformed": 1})):
        bare = Bare(HttpLimits(pipelined_requests=3))
        bare.say(post() + post(b"", waiting) * (count - 1) + post(b"", last))
        assert bare.counts.refused == refused
        bare.plane.submitted[0].answer()
        await turn_loop(30)
        assert bare.statuses == [200] * 4 + [400] * (count - 3)


async def test_an_application_s_answer_lets_the_next_request_go_on_and_is_counted() -> None:
    """In the order in which they came."""
    bare = Bare()
    bare.say(post(b"1", "/other") + post(b"2", ECHO) + post(b"3", "/other"))
    await turn_loop(30)

    assert bare.wire.written.index(b"/other 1") < bare.wire.written.rindex(b"/other 3")
    assert bare.statuses == [200, 200, 200]
    assert bare.connection.server_state.total_requests == 2
    assert not bare.connection.is_busy


async def test_an_answer_that_closes_drops_what_waits_behind_it_and_gives_its_room_back() -> None:
    """The client said `close`, or the server goes: nothing behind is run, and nothing is held."""
    for is_leaving in (False, True):
        ledger = ByteLedger(MIB)
        bare = Bare(ledger=ledger)
        lines = () if is_leaving else ("Connection: close",)
        bare.say(post(b"", "/predictions/held", *lines) + post(b"x" * 300) * is_leaving)
        if is_leaving:
            bare.connection.part_after_next_answer()
        bare.plane.submitted[0].answer()

        assert len(bare.plane.submitted) == 1
        assert b"connection: close" in bare.wire.written
        assert bare.wire.end == (["half-closed"] if is_leaving else ["closed"])
        assert ledger.small == 0
        assert bare.say(post(b"", ECHO)) == b""


async def test_a_stream_that_ends_with_its_connection_drops_what_is_still_being_read(clock: Clock) -> None:
    """HTTP/1.0 knows the end of a stream by the connection's end: a request behind it would run for no answer."""
    bare = Bare()
    bare.say(b"POST /predictions/held HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
    [streams] = bare.plane.submitted
    clock.step = 0.0006
    bare.say(head(ECHO, "Transfer-Encoding: chunked") + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")

    streams.piece(b"first")
    streams.piece(b"last", last=True)
    await turn_loop(30)
    bare.say(post(b"", ECHO))

    assert bare.wire.end == ["closed"]
    assert bare.plane.submitted == [streams]
    assert bare.statuses == [200]


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("sent", "line", "cause"),
    [
        (post(b"x" * 20, ECHO), "POST /predictions/echo HTTP/1.1", "too_large"),
        (
            head(ECHO, "Transfer-Encoding: chunked") + b"14\r\n" + b"x" * 20,
            "POST /predictions/echo HTTP/1.1",
            "too_large",
        ),
        (head(ECHO, "Expect: another"), "POST /predictions/echo HTTP/1.1", None),
        (b"nonsense\r\n\r\n", "- - HTTP/1.1", "malformed"),
        (b"PUT /" + b"a" * 10_000, "PUT /aaaa", "too_large"),
    ],
)  # fmt: skip
async def test_a_refusal_is_logged_with_what_is_known_of_its_request_and_counted_once(
    sent: bytes, line: str | None, cause: str | None
) -> None:
    """The operator sees whose request it was, and not the one before it."""
    bare = Bare(HttpLimits(body_bytes=10))
    bare.say(post(b"x" * 10, ECHO, "A: before"))
    bare.say(sent)

    assert len(bare.statuses) == 2
    assert sum(bare.counts.refused.values()) == 1
    [_, logged] = bare.log.lines
    assert logged.startswith("/10.0.0.9:4711 ")
    if line is not None:
        assert logged.split('"')[1].startswith(line)
    if cause is not None:
        assert bare.counts.refused == {cause: 1}
    assert bare.wire.end == ["half-closed"]


async def test_an_application_that_has_begun_to_answer_is_not_followed_by_a_second_answer() -> None:
    """Cut off in the middle; closed where it had said everything; refused in its place where it had said nothing."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/silent":
            more = scope["path"] == "/begun"
            headers = [] if more else [(b"content-length", b"2")]
            if scope["path"] == "/last":
                headers.append((b"connection", b"close"))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"ok", "more_body": more})
        while (await receive())["type"] != "http.disconnect":
            pass
        go.set()

    for path, statuses, end in (
        ("/begun", [200], ["aborted"]),
        ("/whole", [200], ["half-closed"]),
        ("/last", [200], ["closed"]),
        ("/silent", [413], ["half-closed"]),
    ):
        go.clear()
        bare = Bare(HttpLimits(body_bytes=10), app=app)
        bare.say(head(path, "Transfer-Encoding: chunked") + b"5\r\nxxxxx\r\n")
        await turn_loop(10)
        bare.say(b"14\r\n" + b"x" * 20)
        assert (bare.statuses, bare.wire.end) == (statuses, end), path
        async with asyncio.timeout(5):
            await go.wait()


async def test_an_application_s_request_that_is_refused_behind_another_is_never_run() -> None:
    """Its refusal comes in its turn."""
    bare = Bare(HttpLimits(body_bytes=10))

    bare.say(post() + head("/other", "Transfer-Encoding: chunked") + b"14\r\n" + b"x" * 20)
    bare.plane.submitted[0].answer()
    await turn_loop(10)

    assert bare.statuses == [200, 413]
    assert b"/other" not in bare.wire.written


async def test_a_request_that_is_refused_behind_an_application_s_leaves_that_one_alone() -> None:
    """It is answered to its end, and then the refusal."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    bare = Bare(HttpLimits(body_bytes=10), app=app)
    bare.say(head("/other", method="GET") + head(ECHO, "Transfer-Encoding: chunked") + b"14\r\n" + b"x" * 20)
    await turn_loop()
    assert bare.statuses == []
    go.set()
    await turn_loop()

    assert bare.statuses == [200, 413]


async def test_a_refusal_behind_an_answer_waits_for_it_and_the_client_is_heard_out() -> None:
    """Closed after a moment, so that it reads the answer and not a reset."""
    bare = Bare(HttpLimits(linger_s=0.01))
    bare.say(post() + b"nonsense\r\n\r\n")
    assert bare.statuses == []

    bare.plane.submitted[0].answer()

    assert bare.statuses == [200, 400]
    assert bare.wire.end == ["half-closed"]
    async with asyncio.timeout(5):
        while bare.wire.end != ["half-closed", "closed"]:
            await asyncio.sleep(0.005)


# ------------------------------------------------------------------------------------------------- room


async def test_bodies_announced_count_before_they_come_and_are_let_go_of_at_their_end() -> None:
    """With the connection, with a refusal; a body over all of it is refused unread."""
    ledger = ByteLedger(MIB)
    gone, refused = Bare(ledger=ledger), Bare(HttpLimits(body_chunks=1), ledger=ledger)
    gone.say(head(ECHO, f"Content-Length: {MIB}") + b"x")
    assert ledger.bodies == MIB
    gone.connection.connection_lost(None)
    assert (ledger.bodies, len(gone.table)) == (0, 0)
    refused.say(head(ECHO, "Transfer-Encoding: chunked") + b"5\r\nxxxxx\r\n")
    assert ledger.parts == 5
    refused.say(b"5\r\nxxxxx\r\n")
    assert (refused.statuses, ledger.parts) == ([400], 0)

    over = Bare(ledger=ledger)
    over.say(head(ECHO, f"Content-Length: {MIB + 1}"))
    assert over.statuses == [413]


async def test_a_body_without_a_length_that_is_over_all_room_from_its_first_read_is_refused() -> None:
    """Nothing of it is kept."""
    ledger = ByteLedger(1000)
    bare = Bare(ledger=ledger)

    bare.say(head(ECHO, "Transfer-Encoding: chunked") + b"7d0\r\n" + b"x" * 1500)

    assert bare.statuses == [413]
    assert (ledger.bodies, ledger.parts) == (0, 0)
    assert bare.wire.end == ["half-closed"]


async def test_a_body_that_is_refused_for_room_tells_its_client_when_to_come_again() -> None:
    """And the connection, which reads nothing until then, reads on to let the client finish."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    bare = Bare(ledger=ledger)
    bare.say(head(ECHO, f"Content-Length: {MIB}") + b"x")
    assert not bare.wire.is_open
    wait = ledger.waiting[0]
    assert wait.waits_since is not None

    ledger.turn(wait.waits_since + PATIENCE_S)

    assert bare.statuses == [503]
    assert b"\r\nretry-after: " in bare.wire.written.lower()
    assert bare.wire.is_open
    assert full is not None


async def test_who_keeps_a_body_back_is_told_apart_from_who_is_not_let_send_it() -> None:
    """The ledger refuses slow bodies when others are stuck: not those whose connection rests by the server's choice."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass

    ledger = ByteLedger(4 * MIB)
    sends = Bare(ledger=ledger)
    sends.say(head(ECHO, f"Content-Length: {MIB}") + b"x")
    assert sends.connection.is_reading

    waits = Bare(ledger=ledger)
    full = ledger.take(3 * MIB)
    waits.say(head(ECHO, f"Content-Length: {MIB}") + b"x")
    assert not waits.connection.is_reading, "it has no room"
    del full

    unread = Bare(ledger=ledger, app=app)
    unread.say(head("/other", f"Content-Length: {MIB}") + b"x" * 100_000)
    await turn_loop()
    assert unread.connection.flow.read_paused
    assert not unread.connection.is_reading, "its own application has not asked for more"
    go.set()
    await turn_loop()
    assert unread.connection.is_reading, "its own answer has begun, and it takes nothing of it"
    unread.connection.connection_lost(None)

    behind = Bare(ledger=ledger)
    behind.say(post() * (READ_AHEAD + 1) + head(ECHO, f"Content-Length: {MIB}") + b"x")
    assert behind.connection.flow.read_paused
    assert behind.connection.is_reading, "others would wait for its turn"
    await turn_loop()


@pytest.mark.parametrize(
    ("answered", "read"),
    [(post(), head("/other", f"Content-Length: {MIB}")), (head("/other"), head(ECHO, f"Content-Length: {MIB}"))],
    ids=["an application's body behind ours", "ours behind an application"],
)
async def test_a_body_that_is_not_read_for_another_request_s_answer_is_kept_back_by_its_client(
    answered: bytes, read: bytes
) -> None:
    """Only an application that is being sent the very body can be what keeps the client from sending."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    ledger = ByteLedger(4 * MIB)
    bare = Bare(ledger=ledger, app=app)
    bare.say(answered + post() * READ_AHEAD + read + b"x")
    await turn_loop()

    assert bare.connection.flow.read_paused
    assert bare.connection.is_reading
    bare.connection.connection_lost(None)


async def test_what_waits_for_a_slow_client_counts_and_no_longer_when_it_has_taken_it() -> None:
    """From the moment that the transport is full, as it changes, to the end of the connection."""
    ledger = ByteLedger(MIB)
    bare = Bare(ledger=ledger)
    connection, wire = bare.connection, bare.wire
    bare.say(post())
    job = bare.plane.submitted[0]
    job.piece(b"x" * 1000)
    assert ledger.answers == 0
    wire.unsent = 900
    connection.pause_writing()
    assert ledger.answers == 900
    wire.unsent = 1900
    job.piece(b"x" * 1000)
    assert (ledger.answers, job.is_held) == (1900, True)
    wire.unsent = 500
    connection.check(1.0)
    assert ledger.answers == 500
    connection.resume_writing()
    assert (ledger.answers, job.is_held) == (0, False)
    job.piece(b"x")
    assert not job.is_held
    wire.unsent = 70
    connection.pause_writing()
    connection.connection_lost(None)
    assert ledger.answers == 0
    assert job.is_cancelled


@pytest.mark.parametrize("target", ["/predictions/held", "/other"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_requests_behind_an_answer_that_is_not_taken_give_way_to_others(
    clock: Clock, target: str, is_whole: bool
) -> None:
    """Their bodies have come, or come still: the first is told so in its turn, and none is run."""
    ledger = ByteLedger(MIB)
    bare, other = Bare(ledger=ledger), Bare(ledger=ledger)
    body = b"x" * 600_000
    bare.say(post() + post(body, target)[: None if is_whole else -1])
    bare.plane.submitted[0].piece(b"x" * 5000)
    other.say(head(ECHO, "Content-Length: 600000") + b"y")
    bare.wire.unsent = 5000

    for now in (1000.0, 1001.0, 1001.9):
        bare.connection.check(now)
        ledger.turn(now)
        assert (ledger.bodies, other.wire.is_open) == (600_000, False)
    bare.connection.check(1002.0)
    ledger.turn(1002.0)
    assert other.wire.is_open
    other.say(b"y" * 599_999)
    assert other.statuses == [200]

    bare.wire.unsent = 0
    bare.plane.submitted[0].piece(b"", last=True)
    await turn_loop()

    assert bare.statuses == [200, 503]
    is_slow = target == "/predictions/held" and not is_whole
    words = b"arrives too slowly" if is_slow else b"waits behind an answer that its client does not take"
    assert words in bare.wire.written
    assert b"\r\nretry-after: " in bare.wire.written.lower()
    assert bare.counts.refused == {"bytes_in_flight_slow": 1}
    assert bare.log.lines[-1].split('"')[1] == f"POST {target} HTTP/1.1"
    assert len(bare.plane.submitted) == 1
    assert bare.wire.end == ["half-closed"]
    assert bare.say(post(b"", ECHO)) == b""
    other.plane.submitted.clear()
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}


async def test_small_bodies_behind_answers_that_are_not_taken_leave_their_reserve_to_others(clock: Clock) -> None:
    """Else a few clients that take nothing would have every small request refused, as long as they may stall."""
    ledger = ByteLedger(MIB)
    full = ledger.take(MIB)
    asks = [Bare(ledger=ledger) for _ in range(5)]
    for bare in asks:
        bare.say(post() + post(b"x" * SMALL_BYTES) * READ_AHEAD)
        bare.plane.submitted[0].piece(b"x" * 5000)
        bare.wire.unsent = 5000
        bare.connection.check(1000.0)
    assert not ledger.take_small(SMALL_BYTES)

    for bare in asks:
        bare.connection.check(1002.0)

    assert ledger.small < ledger.half
    assert ledger.take_small(SMALL_BYTES)
    assert full is not None


async def test_requests_wait_for_their_turn_where_nobody_needs_their_room(clock: Clock) -> None:
    """And where it is the model that takes its time, or the client takes its answer, however slowly."""
    for is_pressed, unsent, taken in ((False, 5000, 0), (True, 0, 0), (True, 5000, 1)):
        ledger = ByteLedger(MIB)
        bare, other = Bare(ledger=ledger), Bare(ledger=ledger)
        bare.say(post() + post(b"x" * 600_000))
        bare.plane.submitted[0].piece(b"x" * 5000)
        bare.wire.unsent = unsent
        if is_pressed:
            other.say(head(ECHO, "Content-Length: 600000") + b"y")
        for now in range(1000, 1004):
            bare.connection.check(now)
            bare.wire.unsent -= taken
        assert ledger.bodies == 600_000

        bare.wire.unsent = 0
        bare.plane.submitted[0].piece(b"", last=True)
        bare.plane.submitted[1].answer(b"whole")
        assert bare.statuses == [200, 200]


# ------------------------------------------------------------------------------------------------- the end


async def test_a_server_that_goes_closes_connections_when_nothing_is_under_way_on_them() -> None:
    """A request that is being read, waits or is answered is finished first, with `close`."""
    limits = HttpLimits(drain_idle_s=0.0)
    idle, reading, sending, answered = (Bare(limits) for _ in range(4))
    reading.say(b"POST /pre")
    sending.say(head(ECHO, "Content-Length: 2"))
    answered.say(post())
    every = (idle, reading, sending, answered)
    assert [bare.connection.is_busy for bare in every] == [False, True, True, True]
    for bare in every:
        bare.connection.shutdown()
        bare.connection.close_if_idle()
    await asyncio.sleep(0.01)

    assert [bool(bare.wire.end) for bare in every] == [True, False, False, False]
    sending.say(b"hi")
    answered.plane.submitted[0].answer()
    for bare in (sending, answered):
        assert b"connection: close" in bare.wire.written
        assert bare.wire.end == ["half-closed"]


async def test_an_application_s_answer_says_close_when_the_server_goes() -> None:
    """The request came on a connection that was idle when the server began to go."""
    bare = Bare()
    bare.connection.part_after_next_answer()

    bare.say(head("/other", method="GET"))
    await turn_loop(10)

    assert bare.statuses == [200]
    assert b"\r\nconnection: close\r\n" in bare.wire.written.lower()


async def test_a_connection_with_unread_bytes_is_closed_once_they_are_read_and_were_no_request() -> None:
    """It is looked at again: a few bytes do not keep a server from going."""
    near, far = socket.socketpair()
    bare = Bare(HttpLimits(drain_idle_s=0.0))
    bare.wire._extra["socket"] = near  # type: ignore[attr-defined]
    far.send(b"\r\n")

    bare.connection.close_if_idle()
    assert bare.wire.end == []
    bare.say(near.recv(2))
    async with asyncio.timeout(5):
        while not bare.wire.end:
            await asyncio.sleep(0)
    near.close()
    far.close()

    assert bare.wire.end == ["closed"]


async def test_a_connection_is_answering_until_its_client_has_taken_everything() -> None:
    """What the drain waits for."""
    bare = Bare()
    assert not bare.connection.is_answering
    bare.say(post())
    assert bare.connection.is_answering
    bare.plane.submitted[0].answer()
    bare.wire.unsent = 1
    assert bare.connection.is_answering
    bare.wire.unsent = 0
    assert not bare.connection.is_answering


async def test_a_client_that_goes_takes_all_of_its_requests_with_it() -> None:
    """The one that runs is cancelled, those that wait are never run, and no byte of theirs is held."""
    ledger = ByteLedger(MIB)
    bare = Bare(ledger=ledger)
    bare.say(post(b"12") + post(b"3456") + head(ECHO, "Content-Length: 9") + b"x")
    job = bare.plane.submitted[0]

    bare.connection.connection_lost(ConnectionResetError())

    assert job.is_cancelled
    bare.plane.submitted.clear()
    assert ledger.figures() == {"bodies": 0, "small_bodies": 0, "waiting": 0, "answers": 0}
    assert len(bare.table) == 0
    written = bytes(bare.wire.written)
    job.answer(b"late")
    assert bytes(bare.wire.written) == written


async def test_an_application_hears_that_its_client_has_gone() -> None:
    """At once, wherever it waits."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        heard.append((await receive())["type"])

    bare = Bare(app=app)
    bare.say(head("/other", method="GET"))
    await turn_loop()
    bare.connection.connection_lost(None)
    await turn_loop()

    assert heard == ["http.disconnect"]


async def test_a_connection_over_the_limit_is_told_so_and_counts_for_nobody() -> None:
    """Its end takes no other's place."""
    bare = Bare(HttpLimits(connections=1))
    wire = Wire()

    bare.open(wire).connection_lost(None)

    assert wire.written.startswith(b"HTTP/1.1 503 ")
    assert len(bare.table) == 1
    assert bare.counts.refused == {"connections": 1}


async def test_a_client_on_a_unix_socket_has_no_address_in_the_log() -> None:
    """And none that could have too many connections."""
    bare = Bare(HttpLimits(connections_per_address=1))
    wire = Wire(None)

    connection = bare.open(wire)
    connection.data_received(post(b"", ECHO))

    assert wire.written.startswith(b"HTTP/1.1 200 ")
    assert bare.log.lines[0].startswith('/ "POST ')
    connection.connection_lost(None)
    assert len(bare.table) == 1


async def test_what_a_listener_was_not_told_is_as_documented() -> None:
    """A full server answers 503; large answers wait in the memory that its ledger counts, or where it was told."""
    answers = LargeAnswers()
    bare, other = Bare(ledger=ByteLedger(MIB)), Bare(large_answers=answers)
    bare.plane.errors["full"] = QueueFull("full", retry_after_s=1)
    bare.say(post(b"", "/predictions/full"))

    assert bare.statuses == [503]
    assert other.connection.listener.large_answers is answers
    answers.close()

    bare.say(post())
    bare.connection.pause_writing()
    bare.plane.submitted[-1].answer(b"x" * (2 * MIB))
    assert bare.table.ledger.answers == 2 * MIB
    bare.connection.connection_lost(None)
    assert bare.table.ledger.answers == 0
