"""The recorder's file: the timelines of the last requests where a crash of the server leaves them.

A ring of slots of one size in a file: what is written there is the system's at once, so it outlives the process however
that ends. It is not mapped, though that costs no call: a file that somebody else cuts short would end a server that has
it mapped (SIGBUS). Writing a slot takes a few microseconds, so it is for who asks for it.

    0      head     magic, version, slots
    4096   words    JSON: names of models, versions, workers and classes of errors, once each, in order
    69632  slots    one request each, by turns; a slot's number says how new it is, 0 that it is empty
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import struct
import time
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from marserve.files.locks import try_lock
from marserve.files.regular import read_regular
from marserve.messages import Work
from marserve.telemetry.timeline import BatchTimes, Timeline
from marserve.telemetry.trace_context import Trace

log = logging.getLogger("marserve.recorder")

_MAGIC: Final = b"marserve requests"
_VERSION: Final = 2
_HEAD: Final = struct.Struct("<32sII")
WORDS_AT: Final = 4096
SLOTS_AT: Final = WORDS_AT + 65536
# Number, begin since 1970; moments after that: header, body, admitted, batch begins, worker began, landed, first
# piece, written; seconds: decode, handler, encode, collected, waited, printed; bytes in and out; serial of the batch;
# its size, runs, status; words: model, version, worker, error, moved from; flags; lengths of both ids, and the ids; the
# trace's id, zeros without one; how long its worker was held for its client. Version 1 had not the last one.
_SLOT_1: Final = "<Qd14fQQIHHHHHHHHBBB128s128s16s"
_SLOT: Final = struct.Struct(f"{_SLOT_1}f")
SLOT_BYTES: Final = 392
_FORMATS: Final = {1: (struct.Struct(_SLOT_1), 384), _VERSION: (_SLOT, SLOT_BYTES)}
# Where a slot's lengths of both ids stand, and the ids.
_LENGTHS: Final = struct.Struct("<BB128s128s16s")
_LENGTHS_AT: Final = struct.calcsize("<Qd14fQQIHHHHHHHHB")
_HAS_BATCH, _HAS_LANDED, _HAS_WORK, _IS_FIRST, _IS_REMOTE = 1, 2, 4, 8, 16
_MOST_ID: Final = 128
_NOTHING: Final = bytes(8)
# A larger file is not read.
MOST_BYTES: Final = 1 << 30
_MOST_WORDS: Final = 65535


class FileUnusable(Exception):
    """The file cannot be a recorder's; the text says why."""


class _Known(NamedTuple):
    """A version in a file; its requests were counted by the server that took them."""

    model: str
    version: str

    def observe_ended(self, ended: Sequence[Timeline]) -> None:
        """They were counted then."""


class RecorderFile:
    """A file that is written. What lies there goes to `previous_of(path)`, in the place of what lies there.

    Raises FileUnusable if it is no regular file, another server has it, or it has no room.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.slots = max(64, (limit_bytes - SLOTS_AT) // SLOT_BYTES)
        self._words: dict[str, int] = {}
        self._word_bytes = 2
        self._number = 0
        self._batch: BatchTimes | None = None
        self._serial = 0
        self._path = path
        self._has_failed = False
        self._descriptor = _open_new(path)
        try:
            size = SLOTS_AT + self.slots * SLOT_BYTES
            os.posix_fallocate(self._descriptor, 0, size)  # a full disk shows now, and not with some request later
            os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, _VERSION, self.slots), 0)
            os.pwrite(self._descriptor, b"[]", WORDS_AT)
            self._word("")
        except OSError as error:
            os.close(self._descriptor)
            raise FileUnusable(f"{path} cannot be given its {size} bytes: {error.strerror}") from error

    def close(self) -> None:
        """End. The file stays."""
        os.close(self._descriptor)

    def write(self, timeline: Timeline) -> None:
        """Put a request into the oldest slot. Where the system refuses that, the log says so once."""
        try:
            self._write(timeline)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "%s cannot be written: %s; requests are missing there until it can be",
                    self._path,
                    error.strerror,
                )
        else:
            self._has_failed = False

    def _write(self, timeline: Timeline) -> None:
        began, first, last = timeline.began, timeline.first, timeline.last
        flags, begins_s, worker_s, landed_s, handler_s = 0, 0.0, 0.0, 0.0, 0.0
        work: Work | None = None
        if first is not None and last is not None:
            work = last.work
            flags = _HAS_BATCH | _HAS_LANDED * bool(last.landed_at) | _IS_FIRST * last.is_first
            begins_s, handler_s = first.begins_at - began, last.handler_s
            landed_s = last.landed_at - began if last.landed_at else 0.0
            if work is not None:
                flags |= _HAS_WORK | _IS_REMOTE * (not work.began)
                worker_s = work.began - began if work.began else 0.0
            if last is not self._batch:
                self._batch, self._serial = last, self._serial + 1 & 0xFFFFFFFF
        self._number += 1
        head_at = timeline.head_at or began
        ids = [each.encode("utf-8", "replace")[:_MOST_ID] for each in (timeline.id, timeline.client_id)]
        slot = _SLOT.pack(
            self._number,
            time.time() - (time.monotonic() - began),
            head_at - began,
            (timeline.body_at or head_at) - began,
            timeline.admitted_at - began if timeline.admitted_at else -1.0,
            begins_s,
            worker_s,
            landed_s,
            timeline.first_piece_at - began if timeline.first_piece_at else -1.0,
            timeline.written_at - began,
            *((0.0, handler_s, 0.0, 0.0, 0.0, 0.0) if work is None else _seconds_of(work, handler_s)),
            timeline.bytes_in,
            timeline.bytes_out,
            self._serial,
            min(last.size, _MOST_WORDS) if last is not None else 0,
            min(timeline.runs, _MOST_WORDS),
            timeline.status,
            self._word(timeline.model),
            self._word(timeline.version),
            self._word(last.worker) if last is not None else 0,
            self._word(timeline.error),
            self._word(timeline.moved_from),
            flags,
            len(ids[0]),
            len(ids[1]),
            *ids,
            b"" if timeline.trace is None else bytes.fromhex(timeline.trace.trace_id),
            timeline.held_s,
        )
        os.pwrite(self._descriptor, slot, SLOTS_AT + self._number % self.slots * SLOT_BYTES)

    def _word(self, word: str) -> int:
        """The number of a word; 0, that of the empty one, where there is no room for another."""
        number = self._words.get(word)
        if number is None:
            added = json.dumps(word).encode()
            size = self._word_bytes + len(added) + 1
            if size > SLOTS_AT - WORDS_AT or len(self._words) >= _MOST_WORDS:
                return 0
            number = len(self._words)
            text = (b"[" if not number else b",") + added + b"]"
            at = WORDS_AT + (0 if not number else self._word_bytes - 1)
            os.pwrite(self._descriptor, text, at)
            self._words[word] = number  # only now: words that could not be written would shift those after them
            self._word_bytes = at + len(text) - WORDS_AT
        return number


def previous_of(path: Path) -> Path:
    """Where the file of the server before lies."""
    return path.with_name(f"{path.name}.previous")


class RecordedIds:
    """Which ids are in the file at `path`, read at the first question: it changes no more. 24 bytes for each request.

    Blocks then for as long as reading it takes; only one thread may ask.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hashes: array[int] | None = None

    def has(self, request_id: str) -> bool:
        """Whether a request there may have this id; one in millions that it has not is said to be there."""
        if self._hashes is None:
            try:
                self._hashes = RecordedFile.at(self._path).hashes()
            except FileUnusable:
                self._hashes = array("q")
        wanted = hash(request_id.encode("utf-8", "replace")[:_MOST_ID])
        place = bisect_left(self._hashes, wanted)
        return place < len(self._hashes) and self._hashes[place] == wanted


class RecordedFile:
    """A file that a server left."""

    @classmethod
    def at(cls, path: Path) -> RecordedFile:
        """The file at a path. Raises FileUnusable if there is none, or no recorder's file."""
        try:
            return cls(read_regular(path, MOST_BYTES))
        except OSError as error:
            raise FileUnusable(f"{path} cannot be read: {error.strerror or error}") from error

    def __init__(self, data: bytes) -> None:
        """`data` is all of it. Raises FileUnusable if it is no recorder's file."""
        try:
            magic, version, self._slots = _HEAD.unpack_from(data)
            self._slot, self._slot_bytes = _FORMATS.get(version, _FORMATS[_VERSION])
            is_whole = len(data) >= SLOTS_AT + self._slots * self._slot_bytes
            if magic.rstrip(b"\0") != _MAGIC or version not in _FORMATS or not is_whole:
                raise FileUnusable("it is no recorder's file, or that of another release")
            words = json.loads(data[WORDS_AT:SLOTS_AT].rstrip(b"\0"))
            self._words = [str(word) for word in words]
        except (struct.error, ValueError, TypeError) as error:
            raise FileUnusable(f"it cannot be read: {error}") from error
        self._data = data

    def __iter__(self) -> Iterator[Timeline]:
        """Its requests, the oldest first, with moments on this machine's clock as if it had not been set since."""
        numbered = sorted(
            (number, at) for at in self._places() if (number := int.from_bytes(self._data[at : at + 8], "little"))
        )
        ahead_s = time.monotonic() - time.time()
        batches: dict[int, BatchTimes] = {}
        for _, at in numbered:
            with contextlib.suppress(IndexError, ValueError):  # a slot that was being written
                yield self._read(at, ahead_s, batches)

    def _places(self) -> range:
        return range(SLOTS_AT, SLOTS_AT + self._slots * self._slot_bytes, self._slot_bytes)

    def hashes(self) -> array[int]:
        """The hashes of all ids in it, in order: of requests, of clients', of traces."""
        found = array("q")
        for at in self._places():
            if self._data[at : at + 8] != _NOTHING:
                id_bytes, client_bytes, own, clients, trace = _LENGTHS.unpack_from(self._data, at + _LENGTHS_AT)
                found.append(hash(own[:id_bytes]))
                if client_bytes:
                    found.append(hash(clients[:client_bytes]))
                if any(trace):
                    found.append(hash(trace.hex().encode()))
        return array("q", sorted(found))

    def _read(self, at: int, ahead_s: float, batches: dict[int, BatchTimes]) -> Timeline:
        slot = self._slot.unpack_from(self._data, at)
        _, since_1970, head_s, body_s, admitted_s, begins_s, worker_s, landed_s, piece_s, written_s = slot[:10]
        decode_s, handler_s, encode_s, *held_s = slot[10:16]
        bytes_in, bytes_out, serial, size, runs, status, *words, flags, id_bytes, client_bytes = slot[16:30]
        model, version, worker, error, moved_from = (self._words[number] for number in words)
        began = since_1970 + ahead_s
        timeline = Timeline(
            slot[30][:id_bytes].decode("utf-8", "replace"),
            began,
            bytes_in,
            slot[31][:client_bytes].decode("utf-8", "replace"),
            began + head_s,
            began + body_s,
            0.0 if admitted_s < 0 else began + admitted_s,
            runs=runs,
            first_piece_at=0.0 if piece_s < 0 else began + piece_s,
            moved_from=moved_from,
            trace=Trace(f"{slot[32].hex():0<64}", 0) if any(slot[32]) else None,
        )
        if len(slot) > 33:
            timeline.held_s = slot[33]
        if model:
            timeline.of = _Known(model, version)
        if flags & _HAS_BATCH:
            batch = batches.get(serial)
            if batch is None:
                batch = batches[serial] = BatchTimes(worker, size, began + begins_s, bool(flags & _IS_FIRST))
                batch.handler_s = handler_s
                if flags & _HAS_LANDED:
                    batch.landed_at = began + landed_s
                if flags & _HAS_WORK:
                    on_clock = 0.0 if flags & _IS_REMOTE else began + worker_s
                    batch.work = Work(on_clock, decode_s, encode_s, *held_s)
            timeline.first = timeline.last = batch
        timeline.end(began + written_s, status, bytes_out, error)
        return timeline


def _seconds_of(work: Work, handler_s: float) -> tuple[float, ...]:
    return work.decode_s, handler_s, work.encode_s, work.collected_s, work.waited_s, work.printed_s


def _open_new(path: Path) -> int:
    """An empty file's descriptor, with a lock on it until it is closed."""
    descriptor = _open(path)
    try:
        if not os.fstat(descriptor).st_size:
            return descriptor
        os.replace(path, previous_of(path))
        fresh = _open(path)
    except OSError as error:
        raise FileUnusable(f"{path} cannot be kept as {previous_of(path).name}: {error.strerror}") from error
    finally:
        if os.fstat(descriptor).st_size:
            os.close(descriptor)
    return fresh


def _open(path: Path) -> int:
    """The file's descriptor, with a lock on it until it is closed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise FileUnusable(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileUnusable(f"{path} is no regular file")
    if not try_lock(descriptor):
        os.close(descriptor)
        raise FileUnusable(f"{path} belongs to another server that runs")
    return descriptor
