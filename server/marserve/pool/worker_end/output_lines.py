"""The bytes of one pipe as lines, a bounded number at a time. Pure: knows no pipes, no clock and no log.

Lines may carry a mark, which `worker/process/printed_lines.py` writes: their level, `+` if the next line belongs to the
same record, and the requests that they belong to. A line that is longer than `MAX_LINE_BYTES` comes in pieces of that
length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

MAX_LINE_BYTES = 8192
LINES_A_TURN, BYTES_A_TURN = 256, 8192
SLOW_TURN_S, LEAST_BYTES_A_TURN = 0.001, 512
# A turn with more bytes than this that are not UTF-8 is not taken as text.
MANY_NO_TEXT = 128
_MARK = b"\x1e"
_LEVELS = {name.encode(): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
_ERROR_LINE = re.compile(rb"^\x1e(?:ERROR|CRITICAL)[+ \x1e][^\n]*", re.MULTILINE)
_ERROR_MARKS = (b"\x1eERROR", b"\x1eCRITICAL")
_IDS = re.compile("[A-Za-z0-9._:/,+@-]*").fullmatch
# A record that goes on is held until its end, or until it has so many bytes.
MAX_RECORD_BYTES = 64 << 10
_UNDECODED = re.compile("[\udc80-\udcff]+")
_ESCAPES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}


class LineCutter:
    """Cuts bytes into lines. Holds the bytes fed last and at most one incomplete line.

    `records` makes records of the pipe's lines.
    """

    def __init__(self) -> None:
        self.records = RecordReader()
        self._data = b""
        self._at = 0
        self.has_lines = False

    @property
    def held_bytes(self) -> int:
        """How many bytes are not taken yet."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> None:
        """Take bytes of the pipe."""
        self._data = self._data[self._at :] + data
        self._at = 0
        self._look()

    def take(self, most_bytes: int = BYTES_A_TURN) -> list[bytes]:
        """The next lines, without their ends: at most `LINES_A_TURN` of them, and about `most_bytes` in all.

        A line that is longer than `most_bytes` comes in pieces.
        """
        window = self._data[self._at : self._at + most_bytes + 1]
        lines = window.split(b"\n", LINES_A_TURN)
        rest = lines.pop()
        if not lines and self.has_lines and len(rest) > most_bytes:  # the window is a part of one line
            length = _whole_characters(rest, most_bytes)
            lines = [rest[:length]]
            rest = rest[length:]
        self._at += len(window) - len(rest)
        self._look()
        return lines

    def skip(self) -> Skipped:
        """Take all whole lines out, and an incomplete line if it is longer than `MAX_LINE_BYTES`, as bytes to drop."""
        data = self._data[self._at :]
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE_BYTES:
            end = len(data)
        skipped = Skipped(data[:end])
        self._data, self._at = data[end:], 0
        self._look()
        return skipped

    def end(self) -> list[bytes]:
        """The pipe is at its end: the incomplete line, if there is one."""
        rest, self._data, self._at = self._data[self._at :], b"", 0
        return [rest] if rest else []

    def _look(self) -> None:
        self.has_lines = self._data.find(b"\n", self._at) >= 0 or self.held_bytes > MAX_LINE_BYTES


class Skipped:
    """Bytes of whole lines that are not logged."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.lines = data.count(b"\n") or int(bool(data))

    def last(self, count: int) -> list[bytes]:
        """The newest lines, oldest first."""
        lines = self._data.removesuffix(b"\n").rsplit(b"\n", count)
        return [line[-MAX_LINE_BYTES:] for line in lines[-count:]] if self._data else []

    def errors(self, most: int) -> list[bytes]:
        """The first lines that the worker's logging marked as errors."""
        if not any(mark in self._data for mark in _ERROR_MARKS):
            return []
        return [found[0][:MAX_LINE_BYTES] for found in islice(_ERROR_LINE.finditer(self._data), most)]


class TurnSize:
    """How many bytes a pipe's turn takes: fewer if they are slow to read, as bytes are that are not text."""

    def __init__(self) -> None:
        self.bytes = BYTES_A_TURN

    def note(self, spent_s: float) -> None:
        """The last turn took `spent_s` of processor time."""
        if spent_s > SLOW_TURN_S:
            self.bytes = max(LEAST_BYTES_A_TURN, self.bytes // 4)
        elif spent_s < SLOW_TURN_S / 4:
            self.bytes = min(BYTES_A_TURN, self.bytes * 2)


class Said(NamedTuple):
    """Records of one level that belong to the same requests: `ids` as `messages.line_ids` writes them.

    A text of several lines is one record.
    """

    level: str
    ids: str
    texts: list[str]


class RecordReader:
    """Makes records of a pipe's lines. Holds one record whose end has not come."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._held_as = ("", "")

    def read(self, lines: Sequence[bytes], level: str) -> Iterator[Said]:
        """The records that are complete with these lines; consecutive lines of one kind together.

        `level` is that of lines without one.
        """
        joined = b"\n".join(lines)
        if _MARK not in joined and not self._held:
            yield Said(level, "", _texts_of(joined))
            return
        if not self._held and (said := _read_alike(joined, len(lines), level)) is not None:
            yield said
            return
        run: list[bytes] = []
        run_as = ("", "")
        for line in lines:
            own_level, ids, goes_on, text = _read_mark(line, level)
            line_as = (own_level, ids)
            is_alone = not goes_on and (not self._held or line_as != self._held_as)
            if run and (line_as != run_as or not is_alone):
                yield Said(*run_as, _texts_of(b"\n".join(run)))
                run = []
            if self._held and line_as != self._held_as:
                yield from self.end()  # the record has lost its end
            if is_alone:
                run_as = line_as
                run.append(text)
                continue
            self._held_as = line_as
            self._held.append(text)
            self._held_bytes += len(text)
            if not goes_on or self._held_bytes > MAX_RECORD_BYTES:
                yield from self.end()
        if run:
            yield Said(*run_as, _texts_of(b"\n".join(run)))

    def end(self) -> Iterator[Said]:
        """The record that is held, as far as it has come."""
        if self._held:
            yield Said(*self._held_as, ["\n".join(_texts_of(b"\n".join(self._held)))])
            self._held = []
            self._held_bytes = 0


def _read_alike(joined: bytes, count: int, level: str) -> Said | None:
    """The record of lines that all have the first one's mark, as those of a request mostly have; else None.

    A worker may print a million lines: no line is looked at by itself.
    """
    if not joined.startswith(_MARK):
        return None
    mark = joined[: joined.find(_MARK, 1) + 1]
    if joined.count(_MARK) != 2 * count or joined.count(b"\n" + mark) != count - 1:
        return None
    known, ids, goes_on, _ = _read_mark(mark, level)
    return None if goes_on else Said(known, ids, _texts_of(joined[len(mark) :].replace(b"\n" + mark, b"\n")))


def _read_mark(line: bytes, level: str) -> tuple[str, str, bool, bytes]:
    """Level and requests of a line, whether its record goes on, and its text. `level` is that of a line without one."""
    if not line.startswith(_MARK) or line.count(_MARK) < 2:
        return level, "", False, line
    _, marked, text = line.split(_MARK, 2)
    word, _, ids = marked.partition(b" ")
    goes_on = word.endswith(b"+")
    # An author's own level has no name here. Whatever else an author's code writes into a mark is no id.
    known = _LEVELS.get(word.removesuffix(b"+"), level)
    return known, fit_ids(ids.decode("latin-1")), goes_on, text


def fit_ids(text: str) -> str:
    """The text if it may be ids of requests, as a worker or an agent sends them; else empty."""
    return text if _IDS(text) else ""


def read_lines(lines: Sequence[bytes], level: str) -> Iterator[Said]:
    """Lines that nothing follows, as records."""
    reader = RecordReader()
    yield from reader.read(lines, level)
    yield from reader.end()


def _texts_of(joined: bytes) -> list[str]:
    """Decoded as by `backslashreplace`, which takes a microsecond for each byte that is not UTF-8.

    If there are many such bytes, their lines are shown as Python shows bytes, which is a hundred times as fast.
    """
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        if len(joined) - len(joined.decode("utf-8", "ignore").encode()) > MANY_NO_TEXT:
            return [_shown(line) for line in joined.split(b"\n")]
        text = joined.decode("utf-8", "surrogateescape")
        text = _UNDECODED.sub(lambda found: found[0].translate(_ESCAPES), text)
    texts = text.split("\n")
    return [line.rstrip("\r") for line in texts] if "\r" in text else texts


def _shown(line: bytes) -> str:
    try:
        return line.decode().rstrip("\r")
    except UnicodeDecodeError:
        return repr(line.rstrip(b"\r"))[2:-1]


def _whole_characters(data: bytes, length: int) -> int:
    """The begin of a UTF-8 character at `length` or up to three bytes before; `length` if no character begins there."""
    for cut in range(length, length - 4, -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return length
