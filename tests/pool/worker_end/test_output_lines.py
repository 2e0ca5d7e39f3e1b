"""Bytes of a pipe as lines: a bounded number at a time, none lost, and none that takes long to read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.pool.worker_end.output_lines import (
    BYTES_A_TURN,
    LINES_A_TURN,
    MAX_LINE_BYTES,
    LineCutter,
    RecordReader,
    TurnSize,
    read_lines,
)

MARKS = (
    b"",
    b"\x1e a\x1e",
    b"\x1e b,c\x1e",
    b"\x1eERROR a\x1e",
    b"\x1eERROR\x1e",
    b"\x1e\x1e",
    b"\x1e",
    b"\x1e bad\xff\x1e",
)
TEXTS = (b"", b"x", b"\x1e", b"a\x1e b\x1ec", "ä\r".encode(), b"\xff")


def all_of(cutter: LineCutter) -> list[bytes]:
    """Every line that is held, in turns."""
    lines = []
    while cutter.has_lines:
        turn = cutter.take()
        assert turn
        lines += turn
    return lines


@pytest.mark.parametrize("seed", range(20))
def test_turns_give_the_lines_that_were_fed(seed: int) -> None:
    """However the pipe cuts them, and whatever their lengths."""
    dice = random.Random(seed)
    lengths = [dice.choice([0, 1, 1, 1, 2, 80, 3000, MAX_LINE_BYTES]) for _ in range(400)]
    expected = [bytes([dice.randrange(32, 127)]) * length for length in lengths]
    data = b"\n".join(expected) + b"\n"
    cutter, seen, at = LineCutter(), list[bytes](), 0
    while at < len(data):
        size = dice.choice([1, 7, 300, 5000, 65536])
        cutter.feed(data[at : at + size])
        at += size
        seen += all_of(cutter)

    assert seen == expected
    assert cutter.end() == []


@pytest.mark.parametrize("line", [b"", b"x", b"y" * 100, b"z" * 5000, b"w" * MAX_LINE_BYTES])
def test_a_turn_is_bounded_in_lines_and_bytes(line: bytes) -> None:
    """Whichever comes first; a turn always takes something."""
    cutter = LineCutter()
    cutter.feed((line + b"\n") * (1000 if len(line) < 1000 else 3))

    turn = cutter.take()

    assert 1 <= len(turn) <= LINES_A_TURN
    assert len(b"\n".join(turn)) <= BYTES_A_TURN
    assert cutter.has_lines


def test_a_small_turn_takes_a_long_line_in_pieces() -> None:
    """And leaves an incomplete line alone, whose end may come yet."""
    cutter = LineCutter()
    cutter.feed(b"a" * 1200 + b"\n" + b"b" * 1200)

    assert [cutter.take(512), cutter.take(512), cutter.take(512)] == [[b"a" * 512], [b"a" * 512], [b"a" * 176]]
    assert (cutter.take(512), cutter.has_lines) == ([], False)
    assert cutter.end() == [b"b" * 1200]


def test_turns_get_smaller_while_they_are_slow() -> None:
    """Each is soon about a millisecond, and grows again when what comes is text."""
    size, sizes = TurnSize(), []
    for _ in range(6):
        sizes.append(size.bytes)
        size.note(size.bytes * 1e-6)
    for _ in range(6):
        size.note(0.000_05)

    assert sizes == [8192, 2048, 512, 512, 512, 512]
    assert size.bytes == BYTES_A_TURN


def test_a_line_without_end_comes_in_pieces() -> None:
    """Of whole characters, none of them lost; no more than one piece and what was fed last is ever held."""
    cutter, seen, fed = LineCutter(), list[bytes](), "é€😀".encode() * 9_000
    for at in range(0, len(fed), 50_000):
        cutter.feed(fed[at : at + 50_000])
        assert cutter.held_bytes <= 50_000 + MAX_LINE_BYTES
        seen += all_of(cutter)
    seen += cutter.end()

    assert b"".join(seen) == fed
    assert all(len(piece) <= MAX_LINE_BYTES for piece in seen)
    assert "".join(piece.decode() for piece in seen) == fed.decode()


def test_continuation_bytes_without_end_are_cut_all_the_same() -> None:
    """No character begins in them."""
    cutter = LineCutter()
    cutter.feed(b"\x80" * (3 * MAX_LINE_BYTES))

    assert [len(piece) for piece in all_of(cutter) + cutter.end()] == [MAX_LINE_BYTES] * 3


def test_what_is_skipped_is_counted_and_its_newest_lines_are_known() -> None:
    """The incomplete line stays: its end may be what matters."""
    cutter = LineCutter()
    cutter.feed(b"".join(b"line %d\n" % number for number in range(1000)) + b"half a li")

    skipped = cutter.skip()
    cutter.feed(b"ne\n")

    assert (skipped.lines, skipped.size) == (1000, len(b"".join(b"line %d\n" % n for n in range(1000))))
    assert skipped.last(3) == [b"line 997", b"line 998", b"line 999"]
    assert all_of(cutter) == [b"half a line"]


def test_skipping_megabytes_without_end_holds_nothing() -> None:
    """A line that is too long is given up as far as it has come."""
    cutter, size, part = LineCutter(), 0, b"x" * 65536
    for _ in range(200):
        cutter.feed(part)
        skipped = cutter.skip()
        size += skipped.size
        assert skipped.last(20) == [b"x" * MAX_LINE_BYTES]
        assert cutter.held_bytes == 0

    assert size == 200 * 65536


def test_nothing_skipped_is_nothing() -> None:
    """As when a pipe is read that had no whole line."""
    cutter = LineCutter()
    cutter.feed(b"abc")

    skipped = cutter.skip()

    assert (skipped.lines, skipped.size, skipped.last(20), skipped.errors(5)) == (0, 0, [], [])
    assert cutter.end() == [b"abc"]


def test_errors_are_found_in_what_is_skipped() -> None:
    """Whole lines that begin with the mark of an error; the first of them, up to a bound."""
    cutter = LineCutter()
    noise = b"x\n" * 100
    cutter.feed(
        b"\x1eERROR\x1efirst\n" + noise + b"\x1eINFO\x1eno \x1eERROR\x1e\n" + b"\x1eCRITICAL\x1esecond\n" + noise
        + b"\x1eERROR\x1ethird\n"
    )  # fmt: skip

    skipped = cutter.skip()

    assert skipped.errors(2) == [b"\x1eERROR\x1efirst", b"\x1eCRITICAL\x1esecond"]
    assert skipped.errors(9)[2:] == [b"\x1eERROR\x1ethird"]


def test_lines_of_one_level_are_read_together() -> None:
    """In the order in which they came; a run ends where the level changes."""
    lines = [b"a", b"\x1eINFO\x1eb", b"\x1eERROR\x1ec", b"\x1eERROR\x1ed", b"e\x1e", b"\x1eDEBUG\x1ef"]

    assert list(read_lines(lines, "INFO")) == [
        ("INFO", "", ["a", "b"]),
        ("ERROR", "", ["c", "d"]),
        ("INFO", "", ["e\x1e"]),
        ("DEBUG", "", ["f"]),
    ]


@given(st.lists(st.tuples(st.sampled_from(MARKS), st.sampled_from(TEXTS)), min_size=1, max_size=5))
def test_lines_read_together_are_what_they_are_alone(lines: list[tuple[bytes, bytes]]) -> None:
    """Whatever marks they have, and whatever an author writes into them."""
    whole = [mark + text for mark, text in lines]
    alone = [
        (said.level, said.ids, text) for line in whole for said in read_lines([line], "INFO") for text in said.texts
    ]
    together = [(said.level, said.ids, text) for said in read_lines(whole, "INFO") for text in said.texts]

    assert together == alone


def test_lines_of_other_requests_are_kept_apart() -> None:
    """A mark names the requests; printed lines have no level of their own."""
    lines = [b"\x1eINFO r-1\x1ea", b"\x1e r-1\x1eb", b"\x1e r-1,r-2/c\x1ed", b"\x1eERROR r-1\x1ee", b"f"]

    assert list(read_lines(lines, "INFO")) == [
        ("INFO", "r-1", ["a", "b"]),
        ("INFO", "r-1,r-2/c", ["d"]),
        ("ERROR", "r-1", ["e"]),
        ("INFO", "", ["f"]),
    ]


@pytest.mark.parametrize("ids", ["a b", "a]", "\u00e9", "a\x1b[0m", '"'])
def test_what_is_no_id_is_dropped_from_a_mark(ids: str) -> None:
    """An author's code may write marks, too; a line of the log cannot be forged by them."""
    line = b"\x1eERROR " + ids.encode() + b"\x1etext"

    assert list(read_lines([line], "INFO")) == [("ERROR", "", ["text"])]


def test_a_record_of_several_lines_is_one_text_over_several_turns() -> None:
    """Its lines say that they go on."""
    reader = RecordReader()

    assert list(reader.read([b"x", b"\x1eERROR+ r\x1efailed", b"\x1eERROR+ r\x1eTraceback"], "INFO")) == [
        ("INFO", "", ["x"])
    ]
    assert list(reader.read([b"\x1eERROR r\x1eValueError", b"\x1eERROR r\x1enext"], "INFO")) == [
        ("ERROR", "r", ["failed\nTraceback\nValueError"]),
        ("ERROR", "r", ["next"]),
    ]


def test_a_record_that_loses_its_end_is_given_as_far_as_it_came() -> None:
    """Where another line stands in its place, where the pipe ends, and where it never ends."""
    reader = RecordReader()

    assert list(reader.read([b"\x1eERROR+\x1ea", b"b"], "INFO")) == [("ERROR", "", ["a"]), ("INFO", "", ["b"])]
    assert list(reader.read([b"\x1eERROR+\x1ec"], "INFO")) == []
    assert list(reader.end()) == [("ERROR", "", ["c"])]
    assert list(reader.end()) == []
    endless = [b"\x1e+\x1e" + b"x" * 8000] * 20
    assert [len(said.texts[0]) for said in reader.read(endless, "INFO")] == [9 * 8000 + 8] * 2


@pytest.mark.parametrize(
    "line",
    [b"", b"plain", "é€😀".encode(), b"\xff\xfe\x00", b"a\xc3", b"\xed\xa0\x80", bytes(range(11, 192)), b"\xff" * 64],
)
def test_text_is_what_backslashreplace_makes_of_it(line: bytes) -> None:
    """The decoder's own way is slow enough to hold up the event loop; the outcome is the same."""
    expected = line.decode("utf-8", "backslashreplace").rstrip("\r")

    assert list(read_lines([line, line], "INFO")) == [("INFO", "", [expected, expected])]


def test_many_bytes_that_are_no_text_are_shown_as_bytes() -> None:
    """Their lines alone; the decoder would take milliseconds for them."""
    lines = ["é\r".encode(), b"a\xff\x00\\" * 200, b"\xc3\r", b"plain"]

    assert list(read_lines(lines, "INFO")) == [("INFO", "", ["é", "a\\xff\\x00\\\\" * 200, "\\xc3", "plain"])]
