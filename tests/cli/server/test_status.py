"""`marserve status`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with one model, whose readiness the test sets."""
    with fake_apis() as running:
        running.answer("GET /models", {"models": [{"modelName": "digits"}]})
        running.answer("GET /models/digits/all", [description()])
        yield running


def test_a_ready_server_is_status_0(apis: FakeApis) -> None:
    """With its addresses and models."""
    apis.answer("GET /readyz", {"status": "ready"})

    ran = marserve("status", "--inference", apis.url, "--management", apis.url)

    assert ran.status == 0
    assert "ready" in ran.out
    assert apis.url in ran.out
    assert "digits" in ran.out


def test_a_server_that_is_not_ready_is_status_1_with_its_reasons(apis: FakeApis) -> None:
    """So that a script can wait for it."""
    apis.answer("GET /readyz", {"reasons": ["models of the start are still being read"]}, 503)

    told = marserve("status", "--inference", apis.url, "--management", apis.url)
    document = marserve("status", "--json", "--inference", apis.url, "--management", apis.url)

    assert told.status == document.status == 1
    assert "still being read" in told.out
    assert document.document["ready"] is False
    assert document.document["reasons"] == ["models of the start are still being read"]
    assert document.document["models"][0]["modelName"] == "digits"


def test_a_server_that_answers_probes_alone_tells_its_reason(apis: FakeApis) -> None:
    """It looks for accelerators: everything but `/livez` is 503."""
    reason = {"status": "not ready", "reasons": ["looking for accelerators"]}
    apis.answer("GET /readyz", reason, 503)
    apis.answer("GET /models", reason, 503)

    told = marserve("status", "--management", apis.url)
    document = marserve("status", "--json", "--management", apis.url)

    assert told.status == document.status == 1
    assert "looking for accelerators" in told.out
    assert (document.document["reasons"], document.document["models"]) == (["looking for accelerators"], [])


def test_no_server_is_status_1() -> None:
    """With what was tried."""
    ran = marserve("status", "--inference", "http://127.0.0.1:9", "--management", "http://127.0.0.1:9")

    assert ran.status == 1
    assert "http://127.0.0.1:9" in ran.err


def test_the_management_address_alone_is_enough(apis: FakeApis) -> None:
    """Readiness is asked there too, so that two servers are never mixed."""
    apis.answer("GET /readyz", {"status": "ready"})

    ran = marserve("status", "--json", "--management", apis.url)

    assert ran.status == 0
    assert ran.document["management"] == apis.url
    assert ran.document["inference"] is None


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_inference_address_alone_tells_readiness(apis: FakeApis, status: int, expected: int) -> None:
    """And nothing of another server's models."""
    apis.answer("GET /readyz", {"reasons": []}, status)

    ran = marserve("status", "--inference", apis.url)

    assert ran.status == expected
    assert apis.url in ran.out
    assert [asked.path for asked in apis.asked] == ["/readyz"]
