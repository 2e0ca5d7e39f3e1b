"""The envelope `kserve`."""

from __future__ import annotations

import asyncio
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


def test_bytes_come_as_base64() -> None:
    """As an instance, and one level below; what is no base64 is the client's mistake."""
    rows = [{"body": {"instances": [{"b64": "YWI="}, {"data": {"b64": "Yw=="}, "key": 1}, 5]}}]

    assert KServeEnvelope(echo).handle(rows, make_context()) == [{"predictions": [b"ab", {"data": b"c", "key": 1}, 5]}]
    with pytest.raises(PredictionException, match="no base64") as caught:
        KServeEnvelope(echo).handle([{"body": {"instances": [{"b64": "x"}]}}], make_context())
    assert caught.value.error_code == 400


def test_requests_without_an_instance_are_answered_without_the_handler() -> None:
    """Handlers fail on nothing; beside others such a request gets its empty list."""

    def fail(data: Any, context: Any) -> Any:
        raise AssertionError("called with nothing")

    empty, one = {"body": {"instances": []}}, {"body": {"instances": [1]}}
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b", server_headers=[("explain", "True")])])

    assert KServeEnvelope(fail).handle([empty], make_context()) == [{"predictions": []}]
    assert KServeEnvelope(fail).handle([empty, empty], context) == [{"predictions": []}, {"explanations": []}]
    assert KServeEnvelope(echo).handle([empty, one], context) == [{"predictions": []}, {"explanations": [1]}]


def test_coroutines_are_not_awaited_for_nothing() -> None:
    """As handlers that are functions are not called."""

    async def fail(data: Any, context: Any) -> Any:
        raise AssertionError("called with nothing")

    envelope = KServeEnvelope(fail)
    told = asyncio.run(envelope.handle_async([{"body": {"instances": []}}], make_context()))

    assert told == [{"predictions": []}]
