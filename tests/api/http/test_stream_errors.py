"""How a stream says that it breaks off."""

from __future__ import annotations

import pytest

from marserve.api.http.stream_errors import error_frame

ERROR = b'{\n  "code": 503\n}\n'


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream; charset=utf-8"])
def test_events_get_an_event_of_the_kind_error(kind: str) -> None:
    """Each line of the object is a line of its data, so a client's parser has the object back whole."""
    assert error_frame(kind, ERROR) == b'event: error\ndata: {\ndata:   "code": 503\ndata: }\n\n'


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/jsonl"])
def test_lines_get_a_line(kind: str) -> None:
    """One, whatever the object looked like."""
    assert error_frame(kind, ERROR) == b'{ "code": 503 }\n'


@pytest.mark.parametrize("kind", ["", "text/plain", "application/octet-stream", "text/event-streams"])
def test_bytes_get_none(kind: str) -> None:
    """They would be taken for a part of the answer."""
    assert error_frame(kind, ERROR) == b""
