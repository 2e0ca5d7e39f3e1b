"""Takes lines from a thread that must not wait, and writes them from one that may.

A `LineWriter` is a bounded buffer and a thread. Putting something in costs well under a microsecond and never blocks;
when nobody takes the lines away (a full pipe, a full disk) they are dropped and counted, and once there is room again
a line says how many are missing. Knows no formats: `encode` makes text of what was put in, on the writing thread, which
shares the interpreter with the event loop: it is given many records at once, so that it can be quick about them.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import select
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

Record = TypeVar("Record")

# Between two writes the other threads get their turn: what is made at once must not take long under the GIL.
_LINES_AT_ONCE = 200
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Sink(Protocol):
    """Where bytes go. `write` may wait, but looks at `give_up` now and then; it raises OSError for what it lost."""

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Write all of `data`, which is whole lines."""

    def close(self) -> None:
        """Release what is held open. The sink is not used again."""


class LineWriter(Generic[Record]):
    """A bounded buffer of records in front of a sink.

    At most `capacity` records wait. `encode` gives the text of records, a line end between two and none at the end;
    `describe_loss` makes the record that says how many are missing. `dropped` counts records that were lost for good.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        encode: Callable[[Sequence[Record]], str],
        describe_loss: Callable[[int], Record],
        capacity: int = 32_768,
        linger_s: float = 0.02,
    ) -> None:
        self.name = name
        self.dropped = 0
        self._sink = sink
        self._encode = encode
        self._describe_loss = describe_loss
        self._capacity = capacity
        self._linger_s = linger_s
        self._buffer: deque[Record] = deque()
        self._is_awake = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._give_up = threading.Event()
        self._told_dropped = 0
        # A daemon: a reader that never comes back must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"log-{name}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def write(self, record: Record) -> None:
        """Put `record` in line, or drop it when there is no room. Never blocks."""
        if len(self._buffer) >= self._capacity:
            self.dropped += 1
            return
        self._buffer.append(record)
        if not self._is_awake:
            self._is_awake = True
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Write what waits, end the thread, close the sink. What cannot be written in time is counted as dropped."""
        if self._closing.is_set():
            return
        self._capacity = 0
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._give_up.set()
            self._thread.join(1.0)
        self.dropped += len(self._buffer)
        self._buffer.clear()

    def _run(self) -> None:
        while not self._closing.is_set() or self._buffer:
            self._wake.wait()
            self._wake.clear()
            # Waiting a moment turns a thousand lines into one write, and a thousand wake-ups into one.
            self._closing.wait(self._linger_s)
            self._is_awake = False
            while self._buffer and not self._give_up.is_set():
                self._write_some()
            if self._give_up.is_set():
                break
        self._sink.close()

    def _write_some(self) -> None:
        records = []
        if self.dropped > self._told_dropped:
            records.append(self._describe_loss(self.dropped - self._told_dropped))
            self._told_dropped = self.dropped
        taken = [self._buffer.popleft() for _ in range(min(len(self._buffer), _LINES_AT_ONCE))]
        try:
            text = self._encode(records + taken) + "\n"
            self._sink.write(text.encode("utf-8", "backslashreplace"), self._give_up)
        except Exception:
            # Nobody to tell: this is where one would tell it. The count says so as soon as something can be written,
            # and this thread must not die of one batch, or nothing would be logged ever after.
            self.dropped += len(taken)
            # A disk that stays full would otherwise be asked for every batch of lines.
            self._closing.wait(1.0)


class DescriptorSink:
    """A pipe, terminal or file that somebody else opened, and reads at his own pace."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # A file never keeps its writer waiting for a reader.
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Write as room appears. A pipe that is polled as writable takes PIPE_BUF bytes without blocking."""
        rest = memoryview(data)
        while rest:
            if give_up.is_set():
                raise BrokenPipeError("nobody reads")
            if not self._is_file and not self._poll.poll(100):
                continue
            try:
                rest = rest[os.write(self._descriptor, rest if self._is_file else rest[: select.PIPE_BUF]) :]
            except BlockingIOError:
                continue

    def close(self) -> None:
        """Leave the descriptor to its owner."""


class RollingFile:
    """A log file that starts anew each day and at `max_bytes`.

    The old one is kept as `{stem}.{dd-MMM}.log.gz` (a second one of that day as `{stem}.{dd-MMM}.2.log.gz`); of these
    the newest `keep` stay. Opening creates the file and raises OSError where that cannot be done.
    """

    def __init__(self, path: Path, max_bytes: int = 100 * 1024 * 1024, keep: int = 5) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: BinaryIO | None = None
        self._open()

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Append `data`; roll first if the day has changed, and after if the file is full."""
        if self._file is None:
            self._open()
        elif self._day != _today():
            self._roll()
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self.close()
            raise
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
        self.close()
        stem = f"{self._path.stem}.{self._day[2]:02}-{_MONTHS[self._day[1] - 1]}"
        target, number = self._path.with_name(f"{stem}.log.gz"), 1
        while target.exists():
            number += 1
            target = self._path.with_name(f"{stem}.{number}.log.gz")
        with open(self._path, "rb") as full, gzip.open(target, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(full, packed, 1 << 20)
        self._path.unlink()
        rolled = sorted(self._path.parent.glob(f"{self._path.stem}.*.log.gz"), key=lambda p: p.stat().st_mtime_ns)
        for old in rolled[: -self._keep]:
            old.unlink(missing_ok=True)
        self._open()


def _day_of(at: float) -> tuple[int, int, int]:
    return time.localtime(at)[:3]


def _today() -> tuple[int, int, int]:
    return _day_of(time.time())
