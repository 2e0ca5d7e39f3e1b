"""Large answers on their way to clients: fed to the connection piece by piece, and put on disk where a client is slow.

An answer waits in one place: in memory, as it came from the worker, or in a file without a name. The transport gets
one piece at a time, so a slow client costs only that piece of memory. An answer moves to a file when its client would
take longer than `PATIENCE_S` for the rest (judged once a second), or when all waiting answers hold more memory than
they may. If the disk has no room either, answers over the bound are cut.

It knows no HTTP and no sockets: a `Way` is the connection's side. Threads write and read the files.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from marserve.api.byte_ledger import UNBOUNDED, ByteLedger
from marserve.machine.threads import DaemonThreads
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

# Longer answers are fed piece by piece. For shorter ones a single write is quickest.
LARGE_ABOVE_BYTES: Final = 1024 * 1024
PIECE_BYTES: Final = 256 * 1024
PATIENCE_S: Final = 5.0
# While the disk is slow, so many times the bound on memory may be on its way there.
MOVING_FACTOR: Final = 3
# This share of a disk stays free for others.
LEAVE_FREE_SHARE: Final = 0.1


class Way(Protocol):
    """Takes the pieces of one answer."""

    @property
    def is_full(self) -> bool:
        """Whether enough waits for the client. When it does not any more, `Feed.go_on` is called."""

    def take(self, piece: bytes) -> None:
        """Take a piece."""

    def fed(self) -> None:
        """The last piece was taken."""

    def cut(self) -> None:
        """The rest cannot be kept and will not come."""


class LargeAnswers:
    """The large answers of a server: how much memory and disk they hold, and the threads for their files.

    Files are made in `folder`, by default the system's temporary folder. Used on one event loop; the owner calls
    `close` once no feed is open.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        memory_bytes: int = 256 * 1024**2,
        disk_bytes: int = 32 * 1024**3,
        ledger: ByteLedger | None = None,
        ready_threads: int = 0,
    ) -> None:
        """`ledger` counts what they hold in memory; while it has no room they go to disk.

        `ready_threads` of the threads are begun at once, the others when an answer needs them.
        """
        self._ledger = ledger or ByteLedger(UNBOUNDED)
        self.folder = folder
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self.in_memory_bytes = 0
        self.on_disk_bytes = 0  # counts what is on its way there, too
        self._moving_bytes = 0
        self._to_close: deque[int] = deque()
        self._staying: dict[Feed, None] = {}  # in memory, and not on the way to disk; the oldest first
        self.threads = DaemonThreads(2, "large-answers", ready=ready_threads)

    def feed(self, body: bytes | bytearray, way: Way) -> Feed:
        """Begin to feed an answer's body to `way`, which may have taken all of it when this returns."""
        feed = Feed(self, body, way)
        self._count(len(body))
        self._staying[feed] = None
        feed.go_on()
        self._make_room()
        return feed

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown(cancel_futures=True)
        while self._to_close:  # its call was cancelled
            self._close_one()

    def close_file(self, descriptor: int) -> None:
        """Close an answer's file in a thread: giving back 100 MB takes a disk tens of milliseconds."""
        self._to_close.append(descriptor)
        try:
            self.threads.submit(self._close_one)
        except RuntimeError:  # the threads have ended, and so does the server
            self._close_one()

    def _close_one(self) -> None:
        with suppress(IndexError):
            os.close(self._to_close.popleft())

    def _count(self, size: int) -> None:
        self.in_memory_bytes += size
        self._ledger.count_answers(size)

    def _make_room(self) -> None:
        """Move answers to disk while they hold more memory than they may. One may always stay, however large it is."""
        while len(self._staying) > 1 and (
            self.in_memory_bytes - self._moving_bytes > self.memory_bytes or self._ledger.room + self._moving_bytes < 0
        ):
            feed = next(iter(self._staying))
            if not self._move(feed):
                log.warning(
                    "An answer of %d bytes is cut: its client is slow, and neither memory (%d bytes) nor disk (%d "
                    "bytes) has room for it",
                    feed.total_bytes,
                    self.in_memory_bytes,
                    self.on_disk_bytes,
                    extra=caused_by(""),
                )
                feed.cut()

    def _move(self, feed: Feed) -> bool:
        """Have a feed's answer written to disk; False if there is no room."""
        size = feed.total_bytes - feed.taken_bytes
        is_disk_behind = (
            self._moving_bytes and self._moving_bytes + feed.total_bytes > MOVING_FACTOR * self.memory_bytes
        )
        if is_disk_behind or self.on_disk_bytes + size > self.disk_bytes or not self._has_disk_for(size):
            return False
        del self._staying[feed]
        self.on_disk_bytes += size
        self._moving_bytes += feed.total_bytes
        feed.move(size)
        return True

    def _has_disk_for(self, size: int) -> bool:
        try:
            disk = shutil.disk_usage(self.folder or tempfile.gettempdir())
        except OSError:
            return False
        # What has been written is not free any more; what is on its way may still be.
        return disk.free - (self._moving_bytes + size) >= LEAVE_FREE_SHARE * disk.total

    # Called by a feed.

    def slow(self, feed: Feed) -> None:
        """A feed's client is slow: move its answer to disk, if there is room."""
        if feed in self._staying:
            self._move(feed)

    def moved(self, feed: Feed) -> None:
        """A feed's answer is on disk now."""
        self._moving_bytes -= feed.total_bytes
        self._count(-feed.total_bytes)

    def not_moved(self, feed: Feed, size: int) -> None:
        """A feed's file could not be written: the answer is still in memory."""
        self._moving_bytes -= feed.total_bytes
        self.on_disk_bytes -= size

    def left_memory(self, feed: Feed) -> None:
        """A feed with its answer in memory has ended."""
        self._staying.pop(feed, None)
        self._count(-feed.total_bytes)

    def left_disk(self, size: int) -> None:
        """A feed with its answer on disk has ended."""
        self.on_disk_bytes -= size


class Feed:
    """One large answer on its way. The connection calls `go_on` when its client has taken what was written.

    It calls `look` once a second. While a thread copies the body to disk, pieces are still fed from memory.
    """

    def __init__(self, answers: LargeAnswers, body: bytes | bytearray, way: Way) -> None:
        self.total_bytes = len(body)
        self.taken_bytes = 0  # by the transport
        self._answers = answers
        self._way: Way | None = way
        self._body: bytes | bytearray | None = body
        self._file = -1
        self._file_from = 0  # where in the answer the file begins
        self._file_bytes = 0
        self._is_moving = False
        self._is_reading = False
        self._seen_at = 0.0
        self._seen_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether there is more to feed."""
        return self._way is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether the answer has left memory."""
        return self._file >= 0

    def go_on(self) -> None:
        """Feed while the client takes it."""
        while self._way is not None and not self._way.is_full:
            if self.taken_bytes == self.total_bytes:
                way = self._way
                self.close()
                way.fed()
                return
            if self._body is None:
                self._read_ahead()
                return
            with memoryview(self._body) as view:
                # A copy, so that a piece in the transport does not keep the whole answer in memory.
                piece = bytes(view[self.taken_bytes : self.taken_bytes + PIECE_BYTES])
            self._feed(piece)

    def look(self, now: float, unsent_bytes: int) -> None:
        """Judge how fast the client is. It has not taken `unsent_bytes` of what was written."""
        sent = self.taken_bytes - unsent_bytes
        if self._seen_at and self._body is not None and not self._is_moving:
            pace = max(sent - self._seen_bytes, 0) / max(now - self._seen_at, 1e-3)
            if self.total_bytes - sent > pace * PATIENCE_S:
                self._answers.slow(self)
        self._seen_at, self._seen_bytes = now, sent

    def cut(self) -> None:
        """Drop the answer, which cannot be kept, and tell the connection."""
        way = self._way
        self.close()
        if way is not None:
            way.cut()

    def close(self) -> None:
        """End the feed, and release memory and file."""
        if self._way is None:
            return
        self._way = None
        if not self._is_moving and not self._is_reading:  # else `_moved` or `_read` releases them
            self._let_go()

    def _let_go(self) -> None:
        if self._body is not None:
            self._body = None
            self._answers.left_memory(self)
        if self._file >= 0:
            self._answers.close_file(self._file)
            self._file = -1
            self._answers.left_disk(self._file_bytes)

    def _feed(self, piece: bytes) -> None:
        assert self._way is not None
        self.taken_bytes += len(piece)
        self._way.take(piece)

    # ------------------------------------------------------------------------------------------- to disk and back

    def move(self, size: int) -> None:
        """Have a thread copy the last `size` bytes to a file."""
        assert self._body is not None
        self._is_moving = True
        self._file_bytes, self._file_from = size, self.total_bytes - size
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(
            self._answers.threads, _write_file, self._answers.folder, self._body, self._file_from
        )
        writing.add_done_callback(self._moved)

    def _moved(self, writing: asyncio.Future[int]) -> None:
        self._is_moving = False
        error = None if writing.cancelled() else writing.exception()
        if writing.cancelled() or error is not None:
            log.warning(
                "An answer of %d bytes for a slow client could not be put on disk: %s",
                self.total_bytes,
                error,
                extra=caused_by(""),
            )
            self._answers.not_moved(self, self._file_bytes)
            if self._answers.in_memory_bytes > self._answers.memory_bytes:
                self.cut()
        else:
            self._file = writing.result()
            self._body = None
            self._answers.moved(self)
        if self._way is None:
            self._let_go()
        else:
            self.go_on()

    def _read_ahead(self) -> None:
        """Have a thread read the next piece of the file, to be fed then."""
        if self._is_reading:
            return
        self._is_reading = True
        at = self.taken_bytes - self._file_from
        reading = asyncio.get_running_loop().run_in_executor(
            self._answers.threads, os.pread, self._file, PIECE_BYTES, at
        )
        reading.add_done_callback(self._read)

    def _read(self, reading: asyncio.Future[bytes]) -> None:
        self._is_reading = False
        if self._way is None:
            self._let_go()
            return
        error = None if reading.cancelled() else reading.exception()
        piece = b"" if reading.cancelled() or error is not None else reading.result()
        if not piece:
            log.warning(
                "An answer that waited on disk cannot be read any more: %s",
                error or "it ends too soon",
                extra=caused_by(""),
            )
            self.cut()
            return
        self._feed(piece)
        self.go_on()


def _write_file(folder: Path | None, body: bytes | bytearray, begin: int) -> int:
    """Write `body` from `begin` on to a file without a name; returns its descriptor, which the caller owns."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, memoryview(body) as view:
        at = begin
        while at < len(view):
            at += file.write(view[at : at + 16 * 1024 * 1024])
        return os.dup(file.fileno())
