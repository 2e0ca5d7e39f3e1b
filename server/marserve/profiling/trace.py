"""A trace in Chrome's format, as torch writes it, to spans. Pure. A worker made it, which may have written anything."""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

# As in `worker.profile`, which names batches so.
BATCH_MARK: Final = "marserve batch"
COLLECTIVES: Final = ("gloo:", "nccl:", "mpi:")
MAX_NAME: Final = 200
MAX_SHAPES: Final = 300
# Microseconds since 1970 are a thousandth of it; beyond it sums and differences of times are no numbers.
MOST_US: Final = 1e18
_KEPT: Final = frozenset(("cpu_op", "user_annotation"))


class BadTrace(ValueError):
    """A trace cannot be read; the message says why."""


_NONE: Final = msgspec.Raw(b"null")


class _Args(msgspec.Struct, gc=False):
    """Of an event's arguments what is shown: decoding the others would take twice as long."""

    shapes: Any = msgspec.field(default=None, name="Input Dims")


_ARGS: Final = msgspec.json.Decoder(_Args)


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: msgspec.Raw = _NONE


class _Document(msgspec.Struct):
    traceEvents: list[_Event]


class _Whole(msgspec.Struct):
    """A document of which nothing but its form matters."""

    traceEvents: list[msgspec.Raw]


@dataclass(slots=True)
class Span:
    """Something that ran on a thread, in microseconds, and what it called there."""

    name: str
    thread: int | str
    begin: float
    end: float
    shapes: str = ""
    calls: list[Span] = field(default_factory=list)

    @property
    def us(self) -> float:
        """How long it took."""
        return self.end - self.begin

    @property
    def own_us(self) -> float:
        """How long it took without what it called."""
        return max(0.0, self.us - sum(called.us for called in self.calls))


@dataclass(slots=True)
class Trace:
    """Operators by thread in order, the outermost ones with what they called; batches; collectives."""

    operators: dict[int | str, list[Span]]
    batches: list[Span]
    collectives: list[Span]

    def within(self, spans: Iterable[Span]) -> list[Span]:
        """The outermost operators that began within these spans, on their threads."""
        found: list[Span] = []
        for outer in spans:
            on_thread = self.operators.get(outer.thread, [])  # in order: a profile may have tens of thousands of both
            first = bisect_left(on_thread, outer.begin, key=_begin_of)
            found += on_thread[first : bisect_left(on_thread, outer.end, lo=first, key=_begin_of)]
        return found


def _begin_of(span: Span) -> float:
    return span.begin


def read_trace(packed: bytes, most_bytes: int) -> Trace:
    """Read a trace that gzip packed. Raises BadTrace, also for one of more than `most_bytes` when unpacked."""
    try:
        events = msgspec.json.decode(_unpack(packed, most_bytes), type=_Document).traceEvents
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTrace(f"the trace is not in Chrome's format: {error}") from None
    operators: dict[int | str, list[Span]] = defaultdict(list)
    batches: list[Span] = []
    collectives: list[Span] = []
    for event in events:
        if event.ph != "X" or event.cat not in _KEPT or not (0 <= event.dur < MOST_US and abs(event.ts) < MOST_US):
            continue
        span = Span(event.name[:MAX_NAME], event.tid, event.ts, event.ts + event.dur)
        if event.cat == "cpu_op":
            span.shapes = _shapes_of(event.args)
            operators[event.tid].append(span)
        elif span.name.startswith(BATCH_MARK):
            batches.append(span)
        elif span.name.startswith(COLLECTIVES):
            collectives.append(span)
    return Trace({thread: nest(spans) for thread, spans in operators.items()}, batches, collectives)


def _unpack(packed: bytes, most_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(packed, most_bytes)
    except zlib.error as error:
        raise BadTrace(f"the trace is not packed by gzip: {error}") from None
    if not unpacker.eof:
        raise BadTrace(f"the trace is cut off, or has more than {most_bytes} bytes")
    return text


def merge(packed: Sequence[bytes], most_bytes: int) -> bytes:
    """These traces as one that a viewer opens, packed by gzip; those that cannot be read are left out.

    A single one stays as it is: to read and pack it takes longer than all else.
    """
    if len(packed) == 1 and _is_packed_json(packed[0], most_bytes):
        return packed[0]
    merged: dict[str, Any] = {}
    for each in packed:
        try:
            document = msgspec.json.decode(_unpack(each, most_bytes))
        except (BadTrace, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
            continue
        if not merged:
            merged = document
        else:
            merged["traceEvents"] += document["traceEvents"]
    return gzip.compress(msgspec.json.encode(merged), 6) if merged else b""


def _is_packed_json(packed: bytes, most_bytes: int) -> bool:
    try:
        return isinstance(msgspec.json.decode(_unpack(packed, most_bytes), type=_Whole), _Whole)
    except (BadTrace, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def nest(spans: list[Span]) -> list[Span]:
    """Put each span into the innermost one around it; returns the outermost ones, in order."""
    spans.sort(key=lambda each: (each.begin, -each.end))
    outermost: list[Span] = []
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.begin:
            around.pop()
        if around:
            span.end = min(span.end, around[-1].end)  # clocks differ by less than a microsecond
            around[-1].calls.append(span)
        else:
            outermost.append(span)
        around.append(span)
    return outermost


def _shapes_of(args: msgspec.Raw) -> str:
    """The shapes of an operator's inputs: `[8, 8] [8, 8]`; empty where none were recorded."""
    try:
        given = _ARGS.decode(args).shapes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(given, list):
        return ""
    return " ".join(str(each) for each in given[:16] if each)[:MAX_SHAPES]


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """These intervals, those that meet made one, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """How long intervals are together that do not meet."""
    return sum(end - begin for begin, end in intervals)


def common(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float:
    """How long two lists of joined intervals run at once."""
    both, at = 0.0, 0
    for begin, end in ours:
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        look = at
        while look < len(theirs) and theirs[look][0] < end:
            both += min(end, theirs[look][1]) - max(begin, theirs[look][0])
            look += 1
    return both
