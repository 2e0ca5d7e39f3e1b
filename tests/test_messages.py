"""The ids of requests, as lines of logs have them."""

from __future__ import annotations

import pytest

from marserve.messages import MOST_TRACED, Item, Request, line_ids, pack_head, without_traces
from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import own_trace


def traced(name: str) -> Request:
    """A request with a place in a trace."""
    return Request(name, [], client_id="c", timeline=Timeline(name, 1.0, trace=own_trace("x")))


def test_a_request_has_its_trace_and_its_span_where_traces_are_made() -> None:
    """In the server as in the worker, where the span is that of the author's code."""
    request = traced("a")
    trace = request.timeline.trace
    item = Item("a~2", [], pack_head([], []), None, 0, "c", trace.for_handler)

    assert line_ids([request]) == f"a/c@{trace.trace_id}@{trace.span_id}"
    assert line_ids([item, item]) == f"a/c@{trace.trace_id}@{trace.handle_id}"
    assert line_ids([Request("b", [], timeline=Timeline("b", 1.0)), Item("c", [], b"", None)]) == "b,c"


def test_lines_of_large_batches_have_no_traces() -> None:
    """They would be longer than the line."""
    requests = [traced(f"r-{number}") for number in range(MOST_TRACED + 1)]

    assert "@" not in line_ids(requests)
    assert line_ids(requests[1:]).count("@") == 2 * MOST_TRACED


@pytest.mark.parametrize(
    ("ids", "shown"), [("", ""), ("a/c,b,+7", "a/c,b,+7"), ("a/c@t@s,b@t@s", "a/c,b"), ("a@@@,b", "a,b")]
)
def test_text_lines_have_ids_alone(ids: str, shown: str) -> None:
    """As without traces."""
    assert without_traces(ids) == shown
