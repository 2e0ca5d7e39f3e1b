"""Looks through log files, from the newest line back. Blocking: called in a thread.

What is held is bounded by the records that are asked for, and the time by a deadline. Rolled files are read after the
one that is written. Bytes are looked at before they are made records of: a request's id is mostly in no block at all.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from marserve.telemetry.logs.records import LogName, Record, Wanted, read_records

FILES: Final[dict[LogName, str]] = {"server": "ts_log", "model": "model_log", "access": "access_log"}
BLOCK_BYTES: Final = 1 << 20
# Of one record; a longer one is cut where a block ends.
MAX_CARRY_BYTES: Final = 4 << 20
MAX_FOUND_BYTES: Final = 4 << 20


@dataclass(slots=True)
class Found:
    """Records, the oldest first. `is_complete`: no newer record was left out, as by the time limit.

    `since` is the time of the oldest line that was looked at; empty if all were.
    """

    records: list[Record]
    is_complete: bool
    since: str = ""


def search_files(
    folder: Path, wanted: Wanted, tail: int, end: float, clock: Callable[[], float] = time.monotonic
) -> Found:
    """The newest `tail` wanted records of the logs in `folder`; at `end` on the clock what was found by then."""
    found: list[Record] = []
    is_complete = True
    since = ""
    for log in FILES:
        if log not in wanted.logs:
            continue
        records, is_whole, oldest = _search_log(folder, log, wanted, tail, end, clock)
        found += records
        is_complete = is_complete and is_whole
        since = max(since, oldest)
    found.sort(key=lambda record: record.at)  # stable: lines of one millisecond stay in their log's order
    return bounded(Found(found[-tail:], is_complete, since))


def search_bytes(data: bytes, is_all: bool, wanted: Wanted, tail: int) -> Found:
    """The same of the lines of standard output, which are held in memory."""
    records = wanted_of(data, None, wanted)
    since = "" if is_all else next((record.at for record in _read(data[:BLOCK_BYTES], None)), "")
    return bounded(Found(records[-tail:], is_all or len(records) >= tail, since))


def bounded(found: Found) -> Found:
    """The same without the oldest records, if all together are too long for one answer."""
    size = 0
    for index in range(len(found.records) - 1, -1, -1):
        size += len(found.records[index].text)
        if size > MAX_FOUND_BYTES:
            return Found(found.records[index + 1 :], False, found.since)
    return found


def _search_log(
    folder: Path, log: LogName, wanted: Wanted, tail: int, end: float, clock: Callable[[], float]
) -> tuple[list[Record], bool, str]:
    """The records, whether all of the log was read or enough was found, and the time of the oldest line otherwise."""
    path = folder / f"{FILES[log]}.log"
    found: list[Record] = []
    oldest = ""
    with contextlib.ExitStack() as stack:
        current: BinaryIO | None = None
        with contextlib.suppress(OSError):
            current = stack.enter_context(open(path, "rb"))
        opened_at = time.time_ns()
        # One that is packed from now on holds what the open file has.
        rolled = [each for each in _rolled(path) if each[0] <= opened_at]
        blocks = iter(()) if current is None else _blocks_backwards(current)
        for block in blocks:
            found = wanted_of(block, log, wanted) + found
            oldest = _first_time(block, log) or oldest
            if len(found) >= tail or clock() >= end or _length(found) > MAX_FOUND_BYTES:
                return found[-tail:], len(found) >= tail, oldest
    for _, file in rolled:
        newest: deque[Record] = deque(maxlen=tail - len(found))
        is_cut = False
        try:
            with gzip.open(file, "rb") as packed:
                for index, block in enumerate(_blocks_forwards(packed)):
                    newest += wanted_of(block, log, wanted)
                    length = _length(newest)
                    while length > MAX_FOUND_BYTES and len(newest) > 1:
                        length -= len(newest.popleft().text)
                        is_cut = True
                    oldest = oldest if index else _first_time(block, log) or oldest
                    if clock() >= end:
                        return [*newest, *found], False, oldest
        except (OSError, EOFError, zlib.error):
            continue  # deleted meanwhile, or damaged
        found = [*newest, *found]
        if is_cut or len(found) >= tail or _length(found) > MAX_FOUND_BYTES:
            return found, not is_cut and len(found) >= tail, oldest
    return found, True, ""


def _length(records: Iterable[Record]) -> int:
    return sum(len(record.text) for record in records)


def _rolled(path: Path) -> list[tuple[int, Path]]:
    """When each rolled file was packed, and its path; the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for file in path.parent.glob(f"{path.stem}.*.log.gz"):
            with contextlib.suppress(OSError):
                found.append((file.stat().st_mtime_ns, file))
    return sorted(found, reverse=True)


def _blocks_backwards(file: BinaryIO) -> Iterator[bytes]:
    """The file in pieces of whole records, from its end to its begin."""
    at = file.seek(0, os.SEEK_END)
    carry = b""
    while at:
        begin = max(0, at - BLOCK_BYTES)
        file.seek(begin)
        data = file.read(at - begin) + carry
        at = begin
        cut = _first_head(data) if at else 0
        if cut < 0 and len(data) < MAX_CARRY_BYTES:
            carry = data
            continue
        cut = max(cut, 0)
        carry = data[:cut]
        yield data[cut:]


def _blocks_forwards(file: gzip.GzipFile) -> Iterator[bytes]:
    """The file in pieces of whole records, from its begin to its end."""
    carry = b""
    while piece := file.read(BLOCK_BYTES):
        data = carry + piece
        cut = max(data.rfind(b"\n2"), data.rfind(b"\n{")) + 1
        if not cut and len(data) < MAX_CARRY_BYTES:
            carry = data
            continue
        cut = cut or len(data)
        carry = data[cut:]
        yield data[:cut]
    if carry:
        yield carry


def _first_head(data: bytes) -> int:
    """Where the first record begins after a line end; -1 if none does. Heads begin with a year, or are objects."""
    places = [place for place in (data.find(b"\n2"), data.find(b"\n{")) if place >= 0]
    return min(places) + 1 if places else -1


def _first_time(block: bytes, log: LogName) -> str:
    line = block[: block.find(b"\n")] if b"\n" in block else block
    record = next(_read(line, log), None)
    return "" if record is None else record.at


def wanted_of(data: bytes, log: LogName | None, wanted: Wanted) -> list[Record]:
    """The wanted records of a chunk of whole lines."""
    needles = wanted.needles()
    if needles and not any(needle in data for needle in needles):
        return []
    is_wanted = wanted.filter()
    return [record for record in _read(data, log) if is_wanted(record)]


def _read(data: bytes, log: LogName | None) -> Iterator[Record]:
    return read_records(data.decode("utf-8", "replace").rstrip("\n").split("\n"), log)
