"""The envelopes `json` and `body`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve_handlers.envelopes.body import BodyEnvelope
from marserve_handlers.envelopes.json import JSONEnvelope
from marserve_handlers.errors import PredictionException
from support.model_context import make_context


def lengths(data: Any, context: Any) -> Any:
    """A handler: how long each value is."""
    return [len(value) for value in data]


def test_instances_of_all_rows_are_one_batch() -> None:
    """And each row gets its own answers back, as JSON text."""
    rows = [{"body": {"instances": ["a", "bb"]}}, {"data": b'{"instances": ["ccc"]}'}]

    answers = JSONEnvelope(lengths).handle(rows, make_context())

    assert answers == ['{"predictions": [1, 2]}', '{"predictions": [3]}']


def test_encoded_bytes_are_decoded() -> None:
    """As an instance, and one level below."""
    encoded = {"b64": "YWJjZA=="}
    seen: list[Any] = []

    def handle(data: Any, context: Any) -> Any:
        seen.extend(data)
        return [1] * len(data)

    JSONEnvelope(handle).handle([{"body": {"instances": [encoded, {"x": encoded, "y": 1}, [encoded, 2]]}}], None)

    assert seen == [b"abcd", {"x": b"abcd", "y": 1}, [b"abcd", 2]]


def test_what_is_no_base64_is_the_clients_fault() -> None:
    """400."""
    with pytest.raises(PredictionException, match="no base64"):
        JSONEnvelope(lengths).handle([{"body": {"instances": [{"b64": "a"}]}}], None)


def test_an_answer_is_missing() -> None:
    """A handler that gives fewer answers than instances fails, and says so."""
    with pytest.raises(ValueError, match="gave 1 answers for 2 instances"):
        JSONEnvelope(lambda data, context: [1]).handle([{"body": {"instances": [1, 2]}}], None)


def test_predictions_are_compact_text() -> None:
    """Not indented: the text is the handler's answer."""
    (answer,) = JSONEnvelope(lengths).handle([{"body": {"instances": ["a"]}}], None)

    assert answer == json.dumps({"predictions": [1]})


def test_the_body_envelope_hands_over_values() -> None:
    """`data` before `body`; answers stay as they are."""
    assert BodyEnvelope(lambda data, context: data).handle([{"data": 1, "body": 2}, {"body": 3}], None) == [1, 3]


def test_a_request_without_an_instance_gets_an_empty_list() -> None:
    """Without the handler, which would fail."""

    def fail(data: Any, context: Any) -> Any:
        raise AssertionError("called with nothing")

    assert JSONEnvelope(fail).handle([{"body": {"instances": []}}], make_context()) == ['{"predictions": []}']
