"""The context of a trace, as W3C's Trace Context and Baggage write it in headers. Pure, but for new random ids.

What cannot be read is no error: the request then begins a trace of its own, as the recommendation says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Final

import msgspec

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
BAGGAGE: Final = b"baggage"
IDS_BYTES: Final = 32
"""What `Trace.ids` have as bytes."""
NAMES: Final = (TRACEPARENT, TRACESTATE, BAGGAGE)
"""The headers that carry a trace from one service to the next."""

SAMPLED: Final = 1
"""The flag of a trace whose spans are kept."""
RANDOM: Final = 2
"""The flag of a trace whose id is random, so that others may sample by it (level 2)."""

# The recommendations' least: what every service must pass on.
MOST_STATE_CHARACTERS: Final = 512
MOST_STATES: Final = 32
MOST_BAGGAGE_BYTES: Final = 8192
MOST_BAGGAGE: Final = 64

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL).fullmatch
_STATE = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}").fullmatch
_BAGGAGE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+[ \t]*=[\x20\x09\x21\x23-\x2b\x2d-\x7e]*").fullmatch
# Seeded by the system. Ids must be distinct, not secret, and asking the system for each costs ten times as much.
_random: Final = Random()
_draw: Final = _random.getrandbits
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16

Headers = Sequence[tuple[bytes, bytes]]


class Parent(msgspec.Struct, frozen=True, gc=False):
    """The span of another service in which this server was called. `state` is its `tracestate`, as it is passed on."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""


class Trace(msgspec.Struct, frozen=True, gc=False):
    """Where a request stands in a trace: ids in lower hexadecimal digits. It refers to nothing that refers to it.

    `ids` are those of the trace, of the request's span, and of the author's code within it, in one text: thousands are
    kept. `parent_id` is that of the span above, empty where the trace begins. `is_remote`: that one is another
    service's. `what` is the line of the request, or what the server calls a part of one.
    """

    ids: str
    flags: int
    parent_id: str = ""
    is_remote: bool = False
    state: str = ""
    what: str = ""

    @property
    def trace_id(self) -> str:
        """Its trace's, 32 digits."""
        return self.ids[:32]

    @property
    def span_id(self) -> str:
        """The request's span's, 16 digits."""
        return self.ids[32:48]

    @property
    def handle_id(self) -> str:
        """The span's of the author's code."""
        return self.ids[48:]

    @property
    def is_sampled(self) -> bool:
        """Whether its spans are kept however it ends."""
        return bool(self.flags & SAMPLED)

    @property
    def is_shown(self) -> bool:
        """Whether the answer says it: to callers that have traces, and where it is kept; a header costs them all."""
        return self.is_remote or bool(self.flags & SAMPLED)

    @property
    def for_handler(self) -> bytes:
        """The `traceparent` of what the author's code does."""
        ids = self.ids
        return f"00-{ids[:32]}-{ids[48:]}-{self.flags:02x}".encode()

    @property
    def for_lines(self) -> str:
        """What an access line says of it, behind a space."""
        ids = self.ids
        return f" trace_id={ids[:32]} span_id={ids[32:48]}"

    @property
    def for_client(self) -> str:
        """The `traceresponse` that tells the client its trace."""
        ids = self.ids
        return f"00-{ids[:32]}-{ids[32:48]}-{self.flags:02x}"


def read_traceparent(value: bytes) -> Parent | None:
    """The parent that a `traceparent` names; None for what is none. Versions after 00 are read as 00 is."""
    found = _TRACEPARENT(value.strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id = found[1], found[2].decode(), found[3].decode()
    if version == b"ff" or (version == b"00" and found[5] is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return Parent(trace_id, span_id, int(found[4], 16) & (SAMPLED | RANDOM))


def find_parent(lines: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """The parent that headers name: exactly one `traceparent`, with its `tracestate`."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in lines:
        word = name.lower()
        if word == TRACEPARENT:
            parents.append(value)
        elif word == TRACESTATE:
            states.append(value)
    parent = read_traceparent(parents[0]) if len(parents) == 1 else None
    if parent is None or not states:
        return parent
    return msgspec.structs.replace(parent, state=read_tracestate(states))


def read_tracestate(values: Sequence[bytes]) -> str:
    """The members of a `tracestate`, as they are passed on; empty if one of them is none, or there are too many."""
    members = [each.strip(" \t") for each in b",".join(values).decode("latin-1").split(",")]
    members = [each for each in members if each]
    if len(members) > MOST_STATES or not all(map(_STATE, members)):
        return ""
    while members and len(",".join(members)) > MOST_STATE_CHARACTERS:
        members.pop()
    return ",".join(members)


def read_baggage(values: Iterable[bytes]) -> bytes:
    """The members of a `baggage`, as they are passed on: those that can be read, the first ones within the bounds."""
    kept: list[bytes] = []
    size = 0
    for member in b",".join(values).split(b","):
        one = member.strip(b" \t")
        if not one or not _BAGGAGE(one):
            continue
        size += len(one) + 1
        if size > MOST_BAGGAGE_BYTES or len(kept) >= MOST_BAGGAGE:
            break
        kept.append(one)
    return b",".join(kept)


def carried(lines: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those of a request's headers that carry its trace on to a further service, read and bounded."""
    found = [(name.lower(), value) for name, value in lines if name.lower() in NAMES]
    if not found:
        return []
    headers = []
    parents = [value.strip(b" \t") for name, value in found if name == TRACEPARENT]
    if len(parents) == 1 and read_traceparent(parents[0]) is not None:
        headers.append((TRACEPARENT, parents[0]))
        state = read_tracestate([value for name, value in found if name == TRACESTATE])
        if state:
            headers.append((TRACESTATE, state.encode("latin-1")))
    baggage = read_baggage(value for name, value in found if name == BAGGAGE)
    if baggage:
        headers.append((BAGGAGE, baggage))
    return headers


def headers_within(lines: Headers, trace: Trace) -> list[tuple[bytes, bytes]]:
    """A request's headers as the author's code is to see them: with the `traceparent` of its own span.

    A `tracestate` without a parent that could be read says nothing of this trace, and is left out.
    """
    drops = (TRACEPARENT,) if trace.is_remote or trace.parent_id else (TRACEPARENT, TRACESTATE)
    return [*(line for line in lines if line[0].lower() not in drops), (TRACEPARENT, trace.for_handler)]


def new_trace(parent: Parent | None, what: str, flags: Callable[[Parent | None, str], int]) -> Trace:
    """The place of a request in the trace of its parent, or in a new one; `flags` decides by its id."""
    if parent is None:
        ids = f"{_draw(256):064x}"
        return Trace(ids, flags(None, ids), "", False, "", what)
    trace_id = parent.trace_id
    ids = f"{trace_id}{_draw(128):032x}"
    return Trace(ids, flags(parent, trace_id), parent.span_id, True, parent.state, what)


def draw_ids(count: int) -> list[bytes]:
    """The ids of so many traces that begin here, as bytes: drawn together they cost a fifth of one by one."""
    drawn = _random.randbytes(IDS_BYTES * count)
    return [drawn[at : at + IDS_BYTES] for at in range(0, len(drawn), IDS_BYTES)]


def own_trace(what: str) -> Trace:
    """A trace that is kept in any case: of a batch, or of what the server does by itself."""
    return new_trace(None, what, lambda parent, trace_id: SAMPLED | RANDOM)


def new_span_id() -> str:
    """A random id of a span."""
    return f"{_draw(64):016x}"


def part_of(trace: Trace, what: str, above: str = "") -> Trace:
    """The place of a request that another one makes: below its span, or below the span `above`."""
    ids = f"{trace.trace_id}{_draw(128):032x}"
    return Trace(ids, trace.flags, above or trace.span_id, False, trace.state, what)
