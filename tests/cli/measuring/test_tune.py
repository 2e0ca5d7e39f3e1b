"""`marserve tune`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis

TOLD = 'Model "digits" Version: 1.0 forms batches of up to 8, delay 20 ms'


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with a model."""
    with fake_apis() as running:
        running.answer("GET /models/digits", [description(batchSize=8, maxBatchDelay=20)])
        running.answer("PUT /models/digits", {"status": TOLD})
        yield running


def test_batch_size_and_delay_are_changed(apis: FakeApis) -> None:
    """Only what was given is sent."""
    both = marserve("tune", "digits", "--batch-size", 8, "--max-batch-delay", 20, "--management", apis.url)
    one = marserve("tune", "digits", "--max-batch-delay", 0, "--management", apis.url)

    assert (both.status, both.out) == (0, TOLD + "\n")
    assert one.status == 0
    assert [asked.parameters for asked in apis.orders("PUT")] == [
        {"batch_size": "8", "max_batch_delay": "20"},
        {"max_batch_delay": "0"},
    ]


def test_a_script_learns_what_is_in_force(apis: FakeApis) -> None:
    """As describe says afterwards."""
    ran = marserve("tune", "digits", "--batch-size", 8, "--json", "--management", apis.url)

    assert ran.document == {
        "model": "digits",
        "version": "1.0",
        "batchSize": 8,
        "maxBatchDelay": 20,
        "status": TOLD,
    }


def test_with_nothing_to_change_nobody_is_asked(apis: FakeApis) -> None:
    """It says what could be changed."""
    ran = marserve("tune", "digits", "--management", apis.url)

    assert ran.status == 2
    assert "--batch-size" in ran.err
    assert apis.asked == []


def test_a_batch_size_below_one_is_a_usage_error(apis: FakeApis) -> None:
    """Status 2; nothing is sent."""
    assert marserve("tune", "digits", "--batch-size", 0, "--management", apis.url).status == 2
    assert apis.asked == []
