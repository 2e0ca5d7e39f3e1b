"""The envelope `kserve`."""

from __future__ import annotations

from typing import Any

import pytest

from marserve_handlers.envelopes.kserve import KServeEnvelope
from marserve_handlers.errors import PredictionException
from support.model_context import FakeItem, make_context


def echo(data: Any, context: Any) -> Any:
    """A handler: what it was given."""
    return data


def test_a_request_gets_its_predictions() -> None:
    """All that the handler gave is the one row's."""
    envelope = KServeEnvelope(lambda data, context: [len(data)] * 3)

    assert envelope.handle([{"body": {"instances": [1, 2]}}], make_context()) == [{"predictions": [2, 2, 2]}]


def test_several_requests_share_a_batch() -> None:
    """Their instances are joined, and the answers cut back; who asked to explain gets explanations."""
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b", server_headers=[("explain", "True")])])
    rows = [{"body": {"instances": [1, 2]}}, {"body": b'{"instances": [3]}'}]

    assert KServeEnvelope(echo).handle(rows, context) == [{"predictions": [1, 2]}, {"explanations": [3]}]


def test_a_request_without_instances_is_refused() -> None:
    """400: it is not the model that failed."""
    with pytest.raises(PredictionException, match='with a list "instances"') as caught:
        KServeEnvelope(echo).handle([{"body": {"inputs": [1]}}], make_context())

    assert caught.value.error_code == 400
