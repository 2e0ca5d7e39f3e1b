"""`marserve scale`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis, worker


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with a model that will have two workers."""
    with fake_apis() as running:
        running.answer("GET /models/digits", [description()])
        running.answer("GET /models/digits", [description(minWorkers=2, maxWorkers=2, workers=[worker(), worker()])])
        running.answer("PUT /models/digits", {"status": "Workers scaled to 2 for model: digits"})
        yield running


def test_the_model_gets_its_workers_and_the_command_waits(apis: FakeApis) -> None:
    """Minimum and maximum are the number given; the order is synchronous."""
    ran = marserve("scale", "digits", 2, "--management", apis.url)

    assert (ran.status, ran.out) == (0, "Workers scaled to 2 for model: digits\n")
    assert apis.orders("PUT")[0].parameters == {"min_worker": "2", "max_worker": "2", "synchronous": "true"}


def test_a_script_learns_how_many_workers_are_ready(apis: FakeApis) -> None:
    """As the version is after the order."""
    ran = marserve("scale", "digits", 2, "--json", "--management", apis.url)

    assert ran.document["readyWorkers"] == 2
    assert ran.document["status"] == "Workers scaled to 2 for model: digits"


def test_a_version_and_a_maximum_can_be_named(apis: FakeApis) -> None:
    """They go where the management API wants them."""
    apis.answer("GET /models/digits/2.0", [description(version="2.0")])
    apis.answer("PUT /models/digits/2.0", {"status": "done"})

    assert marserve("scale", "digits", 1, "--version", "2.0", "--max", 4, "--management", apis.url).status == 0

    assert apis.orders("PUT")[0].path == "/models/digits/2.0"
    assert apis.orders("PUT")[0].parameters["max_worker"] == "4"


def test_an_unknown_model_is_never_scaled(apis: FakeApis) -> None:
    """It is asked for first."""
    ran = marserve("scale", "nothing", 2, "--management", apis.url)

    assert ran.status == 1
    assert apis.orders("PUT") == []


def test_a_negative_number_is_a_usage_error(apis: FakeApis) -> None:
    """Nothing is sent; the status is 2."""
    assert marserve("scale", "digits", "--management", apis.url, "--", "-1").status == 2
    assert apis.asked == []


def test_a_scaling_that_is_not_waited_for_goes_on(apis: FakeApis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command, and it says what it does not end."""

    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.cli.models.scale.while_showing", interrupt)

    ran = marserve("scale", "digits", 2, "--management", apis.url)

    assert ran.status == 130
    assert "digits/1.0 goes on in the server" in ran.err
