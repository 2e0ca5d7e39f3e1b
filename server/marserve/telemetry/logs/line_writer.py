"""Takes lines from a thread that must not wait, and writes them from a thread that may.

A `LineWriter` is a bounded buffer and a thread. Adding a line costs well under a microsecond and never blocks. While
nothing can be written (a full pipe, a full disk) lines are dropped and counted, and once there is room again a line
says how many are missing. `encode` makes text of records, on the writing thread.

That thread shares the interpreter with the event loop. The loop stands still while the thread runs, and each change of
the interpreter's lock costs time. So under load the thread wakes by the clock and not for each line. Logs with tens of
thousands of lines a second add finished text: the thread that makes the lines joins them in batches, while they are
still in its core's cache, and the writing thread makes one write of many such pieces.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import math
import os
import select
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, Protocol, TypeVar, cast

from marserve.files.atomic import replacing, sweep

log = logging.getLogger("marserve.telemetry.line_writer")

Record = TypeVar("Record")

# Other threads run between two writes, so encoding one batch of records must not hold the GIL for long.
_RECORDS_AT_ONCE = 200
# Finished lines in one piece, and pieces in one write.
_LINES_A_PIECE = 64
_PIECES_AT_ONCE = 64
# Lines of pieces in one write, and bytes of pieces that may wait.
_LINES_AT_ONCE = 4096
_MAX_WAITING_BYTES = 16 << 20
# Seconds between two tries to write after an error.
_REST_S = 1.0
# Seconds between two tries to pack a full file: each reads all of it, and needs disk space for a moment.
_ROLL_REST_S = 60.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Sink(Protocol):
    """The file, pipe or terminal of a writer. `write` may wait, but checks `give_up`; raises OSError for lost bytes."""

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Write all of `data`, which are whole lines."""

    def close(self) -> None:
        """Close what is open. The sink is not used again."""


class _Lines(NamedTuple):
    """Finished lines that were added together."""

    text: str
    lines: int


class LineWriter(Generic[Record]):
    """A bounded buffer of records and finished lines in front of a sink.

    At most `capacity` of them wait, in order, each at least `linger_s`. `encode` makes the text of records and finished
    lines, with a line end between two and none at the end. `describe_loss` makes the record that says how many are
    missing. `dropped` counts lines lost for good. `on_trouble` is called on the writing thread, with the reason when
    writing begins to fail and with None when it works again.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        encode: Callable[[Sequence[Record | str]], str],
        describe_loss: Callable[[int], Record],
        capacity: int = 32_768,
        linger_s: float = 0.02,
        on_trouble: Callable[[str | None], None] | None = None,
    ) -> None:
        self.name = name
        self.dropped = 0
        self._sink = sink
        self._encode = encode
        self._describe_loss = describe_loss
        self._capacity = capacity
        self._linger_s = linger_s
        self._on_trouble = on_trouble
        self._has_trouble = False
        # The oldest lines are in `_pieces` (text, lines), `_joined` lines in all. Any thread appends to `_waiting`;
        # only the holder of `_taking` removes. A thread that must not wait does nothing while another one holds it.
        self._pieces: list[tuple[bytes, int]] = []
        self._joined = 0
        self._waiting: list[Record | str | _Lines] = []
        # For lines that were added together: how many beyond one for each entry of `_waiting`, and how many bytes. One
        # thread adds and one removes, so each has counters of its own.
        self._lines_in = self._lines_out = 0
        self._bytes_in = self._bytes_out = 0
        self._taking = threading.Lock()
        self._is_awake = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._give_up = threading.Event()
        self._told_dropped = 0
        # A daemon, so that a sink which blocks for ever does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def write(self, record: Record | str) -> None:
        """Add a record or a finished line; drop it if there is no room. Never blocks."""
        waiting = self._waiting
        if self._joined + len(waiting) + self._lines_in - self._lines_out >= self._capacity:
            self.dropped += 1
            return
        waiting.append(record)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()
        if len(waiting) == _LINES_A_PIECE:  # if they cannot be joined now, the thread takes them one by one
            self._join_lines()

    def write_lines(self, text: str, count: int) -> None:
        """Add `count` finished lines; drop them all if there is no room. Never blocks; for one thread."""
        waiting = len(self._waiting) + self._joined + self._lines_in - self._lines_out
        bytes_after = self._bytes_in + len(text) - self._bytes_out
        if waiting + count > self._capacity or bytes_after > _MAX_WAITING_BYTES:
            self.dropped += count
            return
        self._lines_in += count - 1
        self._bytes_in += len(text)
        self._waiting.append(_Lines(text, count))
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Write what waits, end the thread, close the sink. Lines that cannot be written in time count as dropped."""
        if self._closing.is_set():
            return
        self._capacity = 0
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up.set()
            self._thread.join(1.0)
        self.dropped += self._joined + len(self._waiting) + self._lines_in - self._lines_out
        self._joined = 0
        self._pieces.clear()
        self._waiting.clear()
        self._lines_out, self._bytes_out = self._lines_in, self._bytes_in

    def _join_lines(self) -> None:
        """Join the waiting lines into one piece, unless the thread is taking them, or there are records to encode."""
        if not self._taking.acquire(blocking=False):
            return
        try:
            lines = self._waiting[:]
            if not lines:
                return  # the thread was quicker
            try:
                text = "\n".join(lines)  # type: ignore[arg-type]  # a record raises TypeError
            except TypeError:
                return
            self._pieces.append((_bytes_of(text), len(lines)))
            self._joined += len(lines)
            del self._waiting[: len(lines)]
        finally:
            self._taking.release()

    def _run(self) -> None:
        while not self._closing.is_set() or self._has_lines:
            self._wake.wait()
            self._wake.clear()
            # After a short wait a thousand lines are one write, and no wake-up is needed as long as more come.
            self._closing.wait(self._linger_s)
            while self._has_lines and not self._give_up.is_set():
                self._write_some()
                if not self._has_many:  # a few new lines can wait for the next round
                    self._closing.wait(self._linger_s)
            if self._give_up.is_set():
                break
            self._is_awake = False
            if self._has_lines:  # they came before the flag was set, so no wake-up was sent
                self._wake.set()
        self._sink.close()

    @property
    def _has_lines(self) -> bool:
        return bool(self._pieces or self._waiting)

    @property
    def _has_many(self) -> bool:
        return len(self._pieces) >= _PIECES_AT_ONCE or len(self._waiting) >= _RECORDS_AT_ONCE

    def _write_some(self) -> None:
        lost = self.dropped - self._told_dropped
        pieces, records, count = self._take()
        try:
            if lost:
                pieces.insert(0, _bytes_of(self._encode([self._describe_loss(lost)])))
            if records:
                pieces.append(_bytes_of(self._encode(records)))
            self._sink.write(b"".join(pieces), self._give_up)
        except Exception as error:
            # One batch must not end this thread, or nothing would be logged any more. The other outlets log the error,
            # and the first batch that can be written begins with the number of missing lines.
            self.dropped += count
            self._tell((error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}")
            # Do not try again for every batch while a disk stays full.
            self._closing.wait(_REST_S)
        else:
            self._told_dropped += lost
            self._tell(None)

    def _tell(self, trouble: str | None) -> None:
        if self._has_trouble != (trouble is not None) and not self._closing.is_set():
            self._has_trouble = trouble is not None
            if self._on_trouble is not None:
                self._on_trouble(trouble)

    def _take(self) -> tuple[list[bytes], list[Record | str], int]:
        """The oldest pieces, the records after them if these are all, and the number of lines."""
        with self._taking:
            pieces = self._pieces[:_PIECES_AT_ONCE]
            del self._pieces[:_PIECES_AT_ONCE]
            joined = sum(lines for _, lines in pieces)
            self._joined -= joined
            records, count = self._unpack([] if self._pieces else self._waiting[:_RECORDS_AT_ONCE])
            del self._waiting[: len(records)]
        return [text for text, _ in pieces], records, joined + count

    def _unpack(self, waiting: list[Record | str | _Lines]) -> tuple[list[Record | str], int]:
        """The next records and lines to write, and their number: of lines that were added together not too many."""
        if self._bytes_in == self._bytes_out:
            return cast("list[Record | str]", waiting), len(waiting)
        unpacked: list[Record | str] = []
        count = 0
        for entry in waiting:
            if isinstance(entry, _Lines):
                if count + entry.lines > _LINES_AT_ONCE and unpacked:
                    break
                self._lines_out += entry.lines - 1
                self._bytes_out += len(entry.text)
                unpacked.append(entry.text)
                count += entry.lines
            else:
                unpacked.append(entry)
                count += 1
        return unpacked, count


def _bytes_of(text: str) -> bytes:
    return (text + "\n").encode("utf-8", "backslashreplace")


class DescriptorSink:
    """A pipe, terminal or file that another process opened and reads at its own pace."""

    def __init__(self, descriptor: int) -> None:
        kind = os.fstat(descriptor).st_mode
        own = _open_without_blocking(descriptor) if stat.S_ISFIFO(kind) else None
        self._is_own = own is not None
        self._descriptor = descriptor if own is None else own
        # A file does not make its writer wait, and a pipe opened anew takes what has room. Anything else that is
        # writable by `poll` is only sure to take this much without blocking.
        self._takes_bytes = sys.maxsize if stat.S_ISREG(kind) or self._is_own else select.PIPE_BUF
        self._poll: select.poll | None = None
        if not stat.S_ISREG(kind):
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLOUT)

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Write whenever there is room."""
        rest = memoryview(data)
        while rest:
            if give_up.is_set():
                raise BrokenPipeError("no reader")
            if self._poll is not None and not self._poll.poll(100):
                continue
            try:
                rest = rest[os.write(self._descriptor, rest[: self._takes_bytes]) :]
            except BlockingIOError:
                continue

    def close(self) -> None:
        """Leave the descriptor to its owner."""
        if self._is_own:
            os.close(self._descriptor)
            self._is_own = False


def _open_without_blocking(descriptor: int) -> int | None:
    """The pipe behind `descriptor`, opened anew: other processes share the old opening and with it its blocking mode.

    None if the system cannot do this, and for a pipe without a reader.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


class RollingFile:
    """A log file that is rolled each day and at `max_bytes`.

    The old file is kept as `{stem}.{dd-MMM}.log.gz` (a second one of that day as `{stem}.{dd-MMM}.2.log.gz`); the
    newest `keep` of these stay. While there is no room to pack it, the file grows, and the server log says so. Opening
    creates the file; raises OSError if that fails.
    """

    def __init__(self, path: Path, max_bytes: int = 100 * 1024 * 1024, keep: int = 5) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: BinaryIO | None = None
        self._ends_in_half_a_line = False
        self._roll_from = -math.inf
        self._can_roll = True
        self._open()

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Append `data`. Roll before if the day has changed, and afterwards if the file is full."""
        if self._file is not None and self._day != _today():
            self._roll()
        if self._file is None:
            self._open()
        assert self._file is not None
        if self._ends_in_half_a_line:
            data = b"\n" + data
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            written = data[: len(data) - len(rest)]
            if written:
                self._ends_in_half_a_line = not written.endswith(b"\n")
            self.close()
            raise
        self._ends_in_half_a_line = False
        self._size += len(data)
        if self._size >= self._max_bytes:
            self._roll()

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        status = os.fstat(self._file.fileno())
        self._size = status.st_size
        self._day = _day_of(status.st_mtime) if self._size else _today()

    def _roll(self) -> None:
        """Pack the file and begin a new one. If it cannot be packed, go on in it; no line is lost."""
        if time.monotonic() < self._roll_from:
            return
        try:
            self._pack()
        except FileNotFoundError:
            pass  # it was removed from outside
        except OSError as error:
            self._roll_from = time.monotonic() + _ROLL_REST_S
            if self._can_roll:
                log.error("%s cannot be packed (%s): it grows until it can", self._path.name, error.strerror or error)
            self._can_roll = False
            if self._path.exists():
                return
        else:
            if not self._can_roll:
                log.warning("%s is packed again", self._path.name)
            self._can_roll = True
        self.close()
        with contextlib.suppress(OSError):  # the next write tries again and reports the error
            self._open()

    def _pack(self) -> None:
        """Compress the file and remove it. Without room nothing is left behind."""
        stem = f"{self._path.stem}.{self._day[2]:02}-{_MONTHS[self._day[1] - 1]}"
        target, number = self._path.with_name(f"{stem}.log.gz"), 1
        while target.exists():
            number += 1
            target = self._path.with_name(f"{stem}.{number}.log.gz")
        sweep(self._path.parent)
        with (
            open(self._path, "rb") as full,
            replacing(target, mode=0o666) as file,
            gzip.GzipFile(target.name, "wb", compresslevel=1, fileobj=file) as packed,
        ):
            shutil.copyfileobj(full, packed, 1 << 20)
        self._path.unlink()
        rolled = sorted(self._path.parent.glob(f"{self._path.stem}.*.log.gz"), key=lambda p: p.stat().st_mtime_ns)
        for old in rolled[: -self._keep]:
            old.unlink(missing_ok=True)


def _day_of(at: float) -> tuple[int, int, int]:
    return time.localtime(at)[:3]


def _today() -> tuple[int, int, int]:
    return _day_of(time.time())
