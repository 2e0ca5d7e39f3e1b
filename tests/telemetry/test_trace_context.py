"""Reads and writes W3C's Trace Context and Baggage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.telemetry.trace_context import (
    IDS_BYTES,
    MOST_BAGGAGE,
    MOST_BAGGAGE_BYTES,
    MOST_STATE_CHARACTERS,
    Parent,
    carried,
    draw_ids,
    find_parent,
    headers_within,
    new_trace,
    own_trace,
    part_of,
    read_baggage,
    read_traceparent,
    read_tracestate,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def test_a_traceparent_names_trace_span_and_flags() -> None:
    """As the recommendation's example."""
    assert read_traceparent(GOOD) == Parent(TRACE, SPAN, 1)
    assert read_traceparent(b" " + GOOD + b"\t") == Parent(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + b"0",
        GOOD + b"-more",
        b"ff" + GOOD[2:],
        b"0g" + GOOD[2:],
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        GOOD.replace(b"-", b"_"),
        GOOD + b"," + GOOD,
        b"\xff\xfe" + GOOD,
        GOOD * 1000,
    ],
)
def test_what_is_no_traceparent_is_none(value: bytes) -> None:
    """It is never an error: the request begins a trace of its own."""
    assert read_traceparent(value) is None


def test_a_later_versions_traceparent_is_read_as_far_as_it_is_known() -> None:
    """And only the flags that are known are taken."""
    assert read_traceparent(b"cc" + GOOD[2:-2] + b"ff-what-the-future-will-be-like") == Parent(TRACE, SPAN, 3)
    assert read_traceparent(b"cc" + GOOD[2:] + b".what") is None


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_are_none(value: bytes) -> None:
    """Whatever a client sends."""
    parent = read_traceparent(value)
    assert parent is None or (len(parent.trace_id), len(parent.span_id)) == (32, 16)
    read_tracestate([value])
    assert len(read_baggage([value])) <= len(value)


def test_two_traceparents_are_none() -> None:
    """Nobody could say which of them holds."""
    assert find_parent([(b"traceparent", GOOD), (b"Traceparent", GOOD)]) is None


def test_a_tracestate_in_several_lines_is_passed_on_as_one() -> None:
    """Whatever case the names are in."""
    lines = [(b"TraceState", b"a=1, b=2"), (b"Traceparent", GOOD), (b"tracestate", b",c=3")]
    assert find_parent(lines) == Parent(TRACE, SPAN, 1, "a=1,b=2,c=3")


@pytest.mark.parametrize("value", [b"a", b"A=1", b"a=\x01", b"a=1,=", b"a=" + b"x" * 257, b",".join([b"a=1"] * 33)])
def test_a_tracestate_that_is_none_is_left_out_whole(value: bytes) -> None:
    """As the recommendation says; the parent stays."""
    assert find_parent([(b"traceparent", GOOD), (b"tracestate", value)]) == Parent(TRACE, SPAN, 1)


def test_a_long_tracestate_loses_whole_members_from_its_end() -> None:
    """The first ones are the latest."""
    state = read_tracestate([b",".join(b"k%d=%b" % (number, b"x" * 50) for number in range(20))])
    assert state.startswith("k0=")
    assert state.endswith("x" * 50)
    assert 400 < len(state) <= MOST_STATE_CHARACTERS


def test_baggage_is_bounded_and_loses_what_cannot_be_read() -> None:
    """By whole members."""
    assert read_baggage([b"a=1;p=x , b = 2", b"bad member=1,c=%20,d"]) == b"a=1;p=x,b = 2,c=%20"
    assert read_baggage([b",".join(b"k%d=1" % number for number in range(200))]).count(b"=") == MOST_BAGGAGE
    assert len(read_baggage([b",".join(b"k%d=%b" % (n, b"x" * 1000) for n in range(50))])) <= MOST_BAGGAGE_BYTES


def test_a_request_goes_on_in_its_callers_trace() -> None:
    """With ids of its own for itself and for its handler."""
    trace = new_trace(
        Parent(TRACE, SPAN, 1, "a=1"), "POST /x HTTP/1.1", lambda parent, _: parent.flags if parent else 0
    )

    assert (trace.trace_id, trace.parent_id, trace.state, trace.is_sampled) == (TRACE, SPAN, "a=1", True)
    assert read_traceparent(trace.for_handler) == Parent(TRACE, trace.handle_id, 1)
    assert read_traceparent(trace.for_client.encode()) == Parent(TRACE, trace.span_id, 1)
    assert len({SPAN, trace.span_id, trace.handle_id}) == 3


def test_a_trace_that_begins_here_has_a_random_id_and_says_so() -> None:
    """No two are the same."""
    traces = [own_trace("x") for _ in range(100)]
    assert len({each.trace_id for each in traces}) == 100
    assert all(each.flags == 3 and not each.parent_id for each in traces)


def test_ids_that_are_drawn_together_are_distinct_and_whole() -> None:
    """Leading zeros included."""
    drawn = draw_ids(1000)
    assert {len(each) for each in drawn} == {IDS_BYTES}
    ids = [each.hex() for each in drawn]
    assert len({each[:32] for each in ids} | {each[32:48] for each in ids} | {each[48:] for each in ids}) == 3000
    assert {len(each) for each in ids} == {64}


def test_a_part_of_a_request_stands_below_it() -> None:
    """Or below the span that its handler names."""
    whole = own_trace("x")
    assert part_of(whole, "node a").parent_id == whole.span_id
    assert part_of(whole, "call b", whole.handle_id).parent_id == whole.handle_id
    assert part_of(whole, "node a").trace_id == whole.trace_id


def test_a_handler_sees_the_traceparent_of_its_own_span() -> None:
    """In place of its client's; what else came stays."""
    lines = [(b"Traceparent", GOOD), (b"tracestate", b"a=1"), (b"baggage", b"k=v"), (b"x", b"y")]
    trace = new_trace(find_parent(lines), "x", lambda parent, _: 1)
    assert headers_within(lines, trace) == [*lines[1:], (b"traceparent", trace.for_handler)]
    assert headers_within([(b"tracestate", b"a=1")], own_trace("x"))[0][0] == b"traceparent"


def test_a_call_of_another_model_carries_only_what_can_be_read() -> None:
    """And no other header of the client's."""
    lines = [(b"Traceparent", GOOD), (b"tracestate", b"a=1"), (b"Baggage", b"k=v"), (b"authorization", b"secret")]
    assert carried(lines) == [(b"traceparent", GOOD), (b"tracestate", b"a=1"), (b"baggage", b"k=v")]
    assert carried([(b"traceparent", b"none"), (b"tracestate", b"a=1")]) == []
