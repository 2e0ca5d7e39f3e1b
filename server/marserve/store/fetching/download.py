"""Fetches one object into a file, in parallel ranges, and computes its digest. It is whole, or an error is raised.

The answer to the first request describes the object. If its origin has ranges and an ETag, further connections fetch
the rest in parts, each written at its place; otherwise one stream is read. A broken read goes on where it ended, a
bounded number of times without progress. An object that was replaced meanwhile is fetched anew, once.

The caller's thread reads the first part and computes the digest in order, as bytes arrive: the first part and a single
stream from memory, parts of other threads from the file, which the page cache still holds.
Blocks until all its threads have ended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from marserve.store.fetching.byte_ranges import FIRST_PART_BYTES, MIB, Part, Parts
from marserve.store.sources.source import (
    Broken,
    Cancel,
    Entry,
    Failed,
    Missing,
    OnProgress,
    Reading,
    Replaced,
    Source,
    SourceError,
)

log = logging.getLogger("marserve.store")

MAX_ATTEMPTS = 4
FIRST_PAUSE_S = 0.5
# A connection that is slower on average is given up: an archive of a GB would take weeks.
LEAST_BYTES_PER_S = 1024
PACE_WINDOW_S = 30.0
# An attempt that brought this much does not count as failed: short-lived connections can still end a large download.
PROGRESS_BYTES = 1 * MIB
HASH_BYTES = 1 * MIB
FIRST_LATE_PAUSE_S = 0.25
MOST_LATE_PAUSE_S = 5.0

"""Gets the number of bytes that came, and of all (None: unknown). Called from any thread of the download, one a time.

The first number falls back to 0 when a download begins anew.
"""


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """How objects are fetched. Sizes in bytes, times in seconds."""

    connections: int = 8
    max_bytes: int = 64 * 1024**3
    first_part_bytes: int = FIRST_PART_BYTES
    attempts: int = MAX_ATTEMPTS
    first_pause_s: float = FIRST_PAUSE_S
    pace_window_s: float = PACE_WINDOW_S


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The object in the file: `entry` with its size known, and the SHA-256 digest in 64 hex digits."""

    entry: Entry
    sha256: str


class Pace:
    """Notices a connection that brings too little. Pure: time is passed in."""

    def __init__(self, now: float, window_s: float) -> None:
        self._since, self._bytes, self._window_s = now, 0, window_s

    def check(self, now: float, chunk: int) -> None:
        """Note that `chunk` bytes came. Raises Broken if too few came in the time."""
        self._bytes += chunk
        spent = now - self._since
        if spent >= self._window_s:
            if self._bytes < LEAST_BYTES_PER_S * spent:
                raise Broken(f"it comes slower than {LEAST_BYTES_PER_S} bytes a second")
            self._since, self._bytes = now, 0


class Attempts:
    """Counts attempts in a row without real progress. Pure."""

    def __init__(self, options: DownloadOptions) -> None:
        self._options = options
        self._left = options.attempts
        self.pause_s = options.first_pause_s

    def note(self, brought: int) -> bool:
        """Note an attempt that broke after `brought` bytes; returns whether to try again, after `pause_s`."""
        if brought >= PROGRESS_BYTES:
            self._left, self.pause_s = self._options.attempts, self._options.first_pause_s
        elif self._left < self._options.attempts:
            self.pause_s *= 2
        self._left -= 1
        return self._left > 0


def await_object(source: Source, late_s: float, cancel: Cancel, find: Callable[[], Downloaded]) -> Downloaded:
    """Call `find()` again and again for `late_s` while the object is missing, as some appear late."""
    end, pause_s = time.monotonic() + late_s, FIRST_LATE_PAUSE_S
    while True:
        try:
            return find()
        except Missing:
            left = end - time.monotonic()
            if left <= 0:
                raise
            log.info("%s is not there yet; it is waited for, %.1f s at most", source.shown, left)
            if cancel.wait(min(pause_s, left)):
                raise Failed(cancel.reason) from None
            pause_s = min(pause_s * 2, MOST_LATE_PAUSE_S)


def download(
    source: Source,
    descriptor: int,
    options: DownloadOptions | None = None,
    *,
    cancel: Cancel | None = None,
    on_progress: OnProgress = lambda have, size: None,
    is_vouched: bool = False,
) -> Downloaded:
    """Fetch the object of `source` into an empty file that is open for reading and writing.

    `is_vouched`: the caller knows the digest and compares it, so ranges are also taken from origins without ETags.
    Raises Missing and Failed (Broken only if trying again later may help), and OSError if the file cannot be written.
    After an error the file's content is undefined. On cancel the source is closed.
    """
    work = _Work(source, descriptor, options or DownloadOptions(), cancel or Cancel(), on_progress, is_vouched)
    with work.cancel.calling(source.close):
        try:
            return work.run()
        except SourceError as error:
            if work.cancel.is_set:
                raise Failed(work.cancel.reason) from error
            raise


class _Work:
    """One download."""

    def __init__(
        self,
        source: Source,
        descriptor: int,
        options: DownloadOptions,
        cancel: Cancel,
        on_progress: OnProgress,
        is_vouched: bool,
    ) -> None:
        self.source = source
        self.descriptor = descriptor
        self.options = options
        self.cancel = cancel
        self.is_vouched = is_vouched
        self._on_progress = on_progress

    def run(self) -> Downloaded:
        """Fetch it; once more if it was replaced meanwhile."""
        try:
            return self._once()
        except Replaced as error:
            log.info("%s: %s; it is fetched anew", self.source.shown, error)
        try:
            return self._once()
        except Replaced as error:
            raise Failed(f"{error}, twice") from error

    def _once(self) -> Downloaded:
        os.ftruncate(self.descriptor, 0)
        self._on_progress(0, None)
        attempts = Attempts(self.options)
        while True:
            try:
                with contextlib.ExitStack() as first:
                    return self._receive(first, attempts)
            except Broken as error:
                self.pause(attempts, 0, error)

    def _receive(self, first: contextlib.ExitStack, attempts: Attempts) -> Downloaded:
        """Ask for the first part, and for the rest as the answer says. Raises Broken without an answer."""
        options = self.options
        reading = first.enter_context(self.source.read(0, options.first_part_bytes))
        entry = reading.entry
        self._check_size(entry.size)
        if entry.has_ranges and entry.size is not None and entry.size > options.first_part_bytes:
            is_sure = entry.etag is not None or self.is_vouched
            if is_sure and options.connections > 1:
                return _Parallel(self, reading, first.close, self._on_progress).run()
            if not is_sure:
                first.close()
                reading = first.enter_context(self.source.read(0, None))
                self._check_size(reading.entry.size)
        stream = _Stream(self, reading.entry, self._on_progress)
        stream.take(reading)
        first.close()
        return stream.rest(attempts)

    def _check_size(self, size: int | None) -> None:
        if size is not None and size > self.options.max_bytes:
            raise Failed(f"it has {size} bytes, more than {self.options.max_bytes}")

    def pause(self, attempts: Attempts, brought: int, error: Broken) -> None:
        """Wait before trying again, or raise the last attempt's error."""
        self.cancel.check()
        if not attempts.note(brought):
            raise Failed(f"{error}, {self.options.attempts} times") from error
        log.info("%s: %s; trying again in %g s", self.source.shown, error, attempts.pause_s)
        if self.cancel.wait(attempts.pause_s):
            raise Failed(self.cancel.reason) from error

    def write(self, chunk: bytes | memoryview, at: int) -> int:
        """Write all of it; returns the place of its end."""
        view = memoryview(chunk)
        while view:
            written = os.pwrite(self.descriptor, view, at)
            at += written
            view = view[written:]
        return at


class _Stream:
    """One connection at a time, from the beginning to the end."""

    def __init__(self, work: _Work, entry: Entry, on_progress: OnProgress) -> None:
        self._work = work
        self._entry = entry
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._at = 0
        self._broken: Broken | None = None

    def take(self, reading: Reading) -> None:
        """Read one answer up to its end."""
        options, size = self._work.options, reading.entry.size
        pace = Pace(time.monotonic(), options.pace_window_s)
        self._broken = None
        try:
            for chunk in reading:
                self._work.cancel.check()
                self._digest.update(chunk)
                self._at = self._work.write(chunk, self._at)
                if self._at > options.max_bytes:
                    raise Failed(f"it has more than {options.max_bytes} bytes")
                self._on_progress(self._at, size)
                pace.check(time.monotonic(), len(chunk))
        except Broken as error:
            self._broken = error

    def rest(self, attempts: Attempts) -> Downloaded:
        """Go on until the object is whole."""
        begun = 0
        while not self._is_whole:
            if self._broken is not None:
                self._work.pause(attempts, self._at - begun, self._broken)
            begun = self._at
            may_go_on = self._entry.etag is not None or (self._work.is_vouched and self._entry.has_ranges)
            try:
                if not may_go_on:
                    self._begin_anew()
                    begun = 0
                with self._work.source.read(self._at, None, self._entry if may_go_on else None) as reading:
                    if reading.begin != self._at:
                        self._begin_anew()
                        begun = 0
                    self._entry = reading.entry
                    self.take(reading)
                if self._at == begun and self._broken is None and not self._is_whole:
                    raise Broken("the answer was empty")
            except Broken as error:
                self._broken = error
        return Downloaded(_with_size(self._entry, self._at), self._digest.hexdigest())

    @property
    def _is_whole(self) -> bool:
        if self._entry.size is None:
            return self._broken is None
        if self._at > self._entry.size:
            raise Failed(f"{self._at} bytes came of {self._entry.size}")
        return self._at == self._entry.size

    def _begin_anew(self) -> None:
        """Start over, as a further answer may be of another object than the bytes in the file."""
        os.ftruncate(self._work.descriptor, 0)
        self._digest = hashlib.sha256()
        self._at = 0


class _Parallel:
    """Several connections, each with a part of its own; the caller's thread hashes."""

    def __init__(self, work: _Work, reading: Reading, end_reading: Callable[[], None], on_progress: OnProgress) -> None:
        """`reading` has the first part; `end_reading` releases its connection."""
        size = reading.entry.size
        assert size is not None
        self._end_reading = end_reading
        self._work = work
        self._reading = reading
        self._entry = reading.entry
        self._on_progress = on_progress
        self._parts = Parts(size, min(work.options.first_part_bytes, size), work.options.connections)
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._is_last_chance = False
        self._have = 0
        self._digest = hashlib.sha256()
        self._hashed = 0

    def run(self) -> Downloaded:
        """Fetch everything; returns or raises after all threads have ended."""
        _reserve(self._work.descriptor, self._parts.size)
        try:
            # All are counted first, this thread too, or a single thread would take itself for the last.
            self._busy = min(self._work.options.connections, len(self._parts.all))
            for _ in range(self._busy - 1):
                self._begin()
            self._first()
            self._follow()
        except BaseException as error:
            with self._change:
                self._error = error  # so that the threads end
            raise
        finally:
            for thread in self._threads:
                thread.join()
        return Downloaded(self._entry, self._digest.hexdigest())

    def _begin(self) -> None:
        """Start one thread, which has been counted already."""
        thread = threading.Thread(target=self._work_off, name="download", daemon=True)
        thread.start()
        self._threads.append(thread)  # one that could not be started is not waited for

    def _first(self) -> None:
        """Read the part whose bytes are coming already, and hash it from memory."""
        part = self._parts.first
        try:
            for chunk in self._taken(self._reading, part):
                self._digest.update(chunk)
                self._hashed += len(chunk)
        except Broken as error:
            log.info("%s: %s at byte %d", self._work.source.shown, error, part.at)
        finally:
            self._end_reading()
            with self._change:
                if not part.is_whole:
                    self._parts.give_back(part)
                is_more = self._parts.is_waiting
                # This thread only hashes from now on. Another takes its connection, and its place in the count.
                if not is_more:
                    self._busy -= 1
        if is_more:
            self._begin()

    def _follow(self) -> None:
        """Hash whole parts in order, until everything is hashed."""
        buffer = bytearray(HASH_BYTES)
        view = memoryview(buffer)
        while self._hashed < self._parts.size:
            with self._change:
                self._change.wait_for(self._is_worth_hashing)
                if self._error is not None:
                    raise self._error
                front = self._parts.front
            if front == self._hashed:  # there is nothing to hash, so it was woken because all threads have ended
                raise Failed("no connection is left to fetch the rest")
            while self._hashed < front:
                wanted = view[: min(HASH_BYTES, front - self._hashed)]
                read = os.preadv(self._work.descriptor, [wanted], self._hashed)
                if read == 0:
                    raise OSError(errno.EIO, "the file became shorter while it was written")
                self._digest.update(wanted[:read])
                self._hashed += read

    def _is_worth_hashing(self) -> bool:
        """Whether much waits to be hashed, or all threads have ended: finished, or because of an error."""
        return not self._busy or self._parts.front - self._hashed >= HASH_BYTES

    def _work_off(self) -> None:
        """Fetch one part after the other, as a thread."""
        error: BaseException | None = None
        try:
            while (part := self._next_part()) is not None:
                try:
                    self._fetch(part)
                except _TooManyFailures as failure:
                    if not self._goes_on_after(failure, part):
                        return
        except BaseException as failure:
            error = failure
        with self._change:
            self._busy -= 1
            self._error = self._error or error
            self._change.notify_all()

    def _next_part(self) -> Part | None:
        with self._change:
            return None if self._error is not None else self._parts.take()

    def _goes_on_after(self, failure: _TooManyFailures, part: Part) -> bool:
        """Whether a thread whose attempts are used up goes on; otherwise it is not counted any more.

        The others go on with fewer connections, as some origins allow only a few. The last thread gets its attempts
        once more, because it competed with the others before. Raises Failed if these fail too.
        """
        with self._change:
            self._parts.give_back(part)
            if self._busy > 1:
                self._busy -= 1
                self._change.notify_all()
                return False
            if self._is_last_chance:
                raise Failed(str(failure)) from failure
            self._is_last_chance = True
            return True

    def _fetch(self, part: Part) -> None:
        attempts = Attempts(self._work.options)
        while not part.is_whole:
            begun = part.at
            try:
                with self._work.source.read(part.at, part.end, self._entry) as reading:
                    if reading.begin != part.at:
                        raise Broken("the answer was not the part that was asked for")
                    for _ in self._taken(reading, part):
                        pass
                if self._error is not None:
                    return
                if part.at == begun:
                    raise Broken("the answer was empty")
            except Broken as error:
                try:
                    self._work.pause(attempts, part.at - begun, error)
                except Failed as failure:
                    if self._work.cancel.is_set:
                        raise
                    raise _TooManyFailures(str(failure)) from failure

    def _taken(self, reading: Reading, part: Part) -> Iterator[bytes | memoryview]:
        """Write the pieces of a part; yields each once it is in the file."""
        pace = Pace(time.monotonic(), self._work.options.pace_window_s)
        for chunk in reading:
            self._work.cancel.check()
            if part.is_whole:
                return  # the origin sends more than was asked for
            chunk = chunk[: part.end - part.at]
            end = self._work.write(chunk, part.at)
            with self._change:
                if self._error is not None:
                    return
                part.at = end
                self._have += len(chunk)
                self._on_progress(self._have, self._parts.size)
                if self._is_worth_hashing():
                    self._change.notify_all()
            yield chunk
            pace.check(time.monotonic(), len(chunk))


class _TooManyFailures(Exception):
    """A connection's attempts are used up."""


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the file's whole size before the first byte, so that a full disk is noticed at once. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.ftruncate(descriptor, size)  # a file system without reservations


def _with_size(entry: Entry, size: int) -> Entry:
    return Entry(entry.key, size, entry.etag, entry.modified, entry.has_ranges)
