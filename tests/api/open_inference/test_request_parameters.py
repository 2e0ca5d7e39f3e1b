"""Tests for what the parameters of an inference request ask of the server."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.open_inference.request_parameters import (
    MAX_TIMEOUT_US,
    NOTHING,
    SEARCHED_BYTES,
    Asked,
    json_bytes,
    may_ask,
    read_asked,
    read_body,
)
from marserve.errors import BadInput
from marserve.registry.intake.call_modes import PLAIN_NAMES

ID, START, END = PLAIN_NAMES
LONG = "s" * 257


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"priority": -1}, "priority"),
        ({"priority": 11}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": None}, "priority"),
        ({"timeout": -5}, "timeout"),
        ({"timeout": 0.5}, "timeout"),
        ({"timeout": MAX_TIMEOUT_US + 1}, "timeout"),
        ({"timeout": [1] * 1000}, "timeout"),
        ({"sequence_id": -1}, "sequence_id"),
        ({"sequence_id": 1 << 64}, "sequence_id"),
        ({"sequence_id": 10**4000}, "sequence_id"),
        ({"sequence_id": True}, "sequence_id"),
        ({"sequence_id": {"a": 1}}, "sequence_id"),
        ({"sequence_id": LONG}, "sequence_id"),
        ({"sequence_id": "a\r\nb: c"}, "sequence_id"),
        ({"sequence_id": "é"}, "sequence_id"),
        ({"sequence_id": "\ud800"}, "sequence_id"),
        ({"sequence_id": "a", "sequence_start": "true"}, "sequence_start"),
        ({"sequence_id": "a", "sequence_end": 1}, "sequence_end"),
        ({"sequence_start": True}, "sequence_start"),
        ({"sequence_id": 0, "sequence_end": True}, "sequence_end"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_parameters_name(parameters: dict[str, Any], name: str) -> None:
    """In a sentence that is bounded, whatever came."""
    with pytest.raises(BadInput, match=f"^Parameter {name} is ") as caught:
        read_asked(parameters, PLAIN_NAMES)

    assert len(str(caught.value)) < 300
    assert str(caught.value).encode()


@pytest.mark.parametrize(
    ("parameters", "asked"),
    [
        ({}, NOTHING),
        ({"binary_data_output": True, "top": 3}, NOTHING),
        ({"priority": 0, "timeout": 0, "sequence_id": ""}, Asked()),
        ({"priority": 1}, Asked(priority=0)),
        ({"priority": 10, "timeout": 250_000}, Asked(0.25, 9)),
        ({"sequence_id": 42}, Asked(sequence=((ID, "42"),))),
        ({"sequence_id": 0, "sequence_start": False}, Asked()),
        (
            {"sequence_id": "a b", "sequence_start": True, "sequence_end": True},
            Asked(sequence=((ID, "a b"), (START, "true"), (END, "true"))),
        ),
    ],
)
def test_parameters_ask_in_tritons_units(parameters: dict[str, Any], asked: Asked) -> None:
    """Microseconds, 1 for the most urgent, and 0 for what is not asked."""
    assert read_asked(parameters, PLAIN_NAMES) == asked


def test_the_earlier_deadline_holds() -> None:
    """That of a header, or that of the parameter."""
    assert Asked().deadline(10.0, None) is None
    assert Asked().deadline(10.0, 12.0) == 12.0
    assert Asked(1.0).deadline(10.0, None) == 11.0
    assert (Asked(1.0).deadline(10.0, 12.0), Asked(3.0).deadline(10.0, 12.0)) == (11.0, 12.0)


def test_the_parameters_sequence_takes_the_place_of_the_headers() -> None:
    """Whatever case the client's headers are in."""
    given = [(b"TS_Request_Sequence_Id", b"other"), (b"x", b"y")]

    assert Asked().headers(given) is given
    assert Asked(sequence=((ID, "7"),)).headers(given) == [(b"x", b"y"), (ID.encode(), b"7")]


@pytest.mark.parametrize(
    ("value", "end"), [(b"3", 3), (b" 10 ", 10), (b"11", 10), (b"-1", 10), (b"x", 10), (b"9" * 5000, 10)]
)
def test_the_json_of_a_body_ends_where_its_header_says(value: bytes, end: int) -> None:
    """A wrong length is left to the worker, which refuses it."""
    assert json_bytes([(b"Host", b"x"), (b"Inference-Header-Content-Length", value)], 10) == end
    assert json_bytes([], 10) == 10


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"parameters": {"priority": ',
        b'{"parameters": ["priority"]}',
        b'{"parameters": "timeout", "priority": 99}',
        b'{"inputs": [{"name": "timeout", "parameters": {"priority": -1}}]}',
        b'{"x": ' + b"[" * 100_000 + b'"priority"',
        b'\xff{"priority"',
    ],
)
def test_a_body_that_is_no_request_asks_for_nothing(body: bytes) -> None:
    """Its worker says what is wrong with it. A tensor's parameters are none of the request's."""
    assert read_body(body, len(body), PLAIN_NAMES) is NOTHING


def test_a_body_is_read_up_to_its_tensors() -> None:
    """What is behind the JSON is no text; numbers that JSON has no words for are read as Python writes them."""
    head = json.dumps({"parameters": {"priority": 2}, "inputs": []}).encode()
    odd = b'{"parameters": {"priority": 2}, "inputs": [{"data": [NaN, -Infinity]}]}'

    assert read_body(head + b"\xff\x00", len(head), PLAIN_NAMES) == Asked(priority=1)
    assert read_body(bytearray(odd), len(odd), PLAIN_NAMES) == Asked(priority=1)
    assert not may_ask(b'{}"priority"', 2)
    assert may_ask(b"x" * (SEARCHED_BYTES - 5) + b'"priority"', SEARCHED_BYTES + 5)
    with pytest.raises(BadInput, match=r"^Parameter sequence_id has NaN"):
        read_body(odd.replace(b'"priority": 2', b'"sequence_id": "NaN"'), len(odd) + 7, PLAIN_NAMES)


NAMES = ["priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "own"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_parameters_ask_or_are_refused(parameters: dict[str, Any]) -> None:
    """Nothing else is raised, and what is asked for is within bounds."""
    try:
        asked = read_asked(parameters, PLAIN_NAMES)
    except BadInput:
        return

    assert asked.priority in {None, *range(10)}
    assert asked.timeout_s is None or 0 < asked.timeout_s <= MAX_TIMEOUT_US / 1e6
    assert all(value.isascii() and value.isprintable() for _, value in asked.sequence)


def test_the_longest_text_that_is_searched_on_the_loop_is_searched_quickly() -> None:
    """Of what slows the search most: texts without end."""
    body = (b'"p"' * SEARCHED_BYTES)[:SEARCHED_BYTES]

    taken_s = []
    for _ in range(3):
        begin = time.thread_time()
        assert not may_ask(body, len(body))
        taken_s.append(time.thread_time() - begin)
    assert min(taken_s) < 0.006
