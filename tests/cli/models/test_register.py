"""`marserve register`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with one version that takes a second."""
    with fake_apis() as running:
        running.answer("GET /models", {"models": [{"modelName": "digits"}]})
        running.answer("GET /models/digits/all", [description()])
        running.answer("GET /models/digits/all", [description(), description(version="2.0", isDefault=False)])
        running.answer("POST /models", {"status": 'Model "digits" Version: 2.0 registered with 1 initial workers'})
        yield running


def test_an_archive_is_registered_with_one_worker(apis: FakeApis) -> None:
    """The command waits for it and repeats the server's words."""
    ran = marserve("register", "second.mar", "--management", apis.url)

    assert (ran.status, ran.out) == (0, 'Model "digits" Version: 2.0 registered with 1 initial workers\n')
    assert apis.orders("POST")[0].parameters == {"url": "second.mar", "initial_workers": "1", "synchronous": "true"}


def test_a_script_learns_what_was_registered(apis: FakeApis) -> None:
    """Only the version that was not there before."""
    ran = marserve("register", "second.mar", "--json", "--management", apis.url)

    assert ran.document["registered"] == [
        {"model": "digits", "version": "2.0", "isDefault": False, "readyWorkers": 1},
    ]


def test_options_reach_the_server_under_its_names(apis: FakeApis) -> None:
    """Delay in milliseconds, time-outs in seconds, as its API has them."""
    options = {
        "--name": ("model_name", "numbers"),
        "--workers": ("initial_workers", "3"),
        "--handler": ("handler", "image_classifier"),
        "--batch-size": ("batch_size", "8"),
        "--max-batch-delay": ("max_batch_delay", "20"),
        "--response-timeout": ("response_timeout", "5"),
        "--startup-timeout": ("startup_timeout", "60"),
    }
    words = [word for flag, (_, value) in options.items() for word in (flag, value)]

    assert marserve("register", "second.mar", *words, "--management", apis.url).status == 0

    assert apis.orders("POST")[0].parameters == {
        "url": "second.mar",
        "synchronous": "true",
        **dict(options.values()),
    }


def test_a_refused_archive_is_a_failure() -> None:
    """Status 1 and the server's words."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": []})
        apis.answer("POST /models", {"code": 404, "message": "Model not found at: gone.mar"}, 404)

        ran = marserve("register", "gone.mar", "--json", "--management", apis.url)

    assert ran.status == 1
    assert ran.document["error"]["message"] == "Model not found at: gone.mar"
    assert ran.document["error"]["code"] == 404


def test_a_model_that_does_not_load_is_told_with_its_reason() -> None:
    """One line of it, for a person and for a script."""
    with fake_apis() as apis:
        apis.headers["x-marserve-reason"] = "SyntaxError: expected ':' (bad.py, line 1)"
        apis.answer("GET /models", {"models": []})
        apis.answer("POST /models", {"code": 500, "message": "Failed to start workers for model bad"}, 500)

        told = marserve("register", "bad.mar", "--management", apis.url)
        document = marserve("register", "bad.mar", "--json", "--management", apis.url)

    assert told.status == document.status == 1
    assert "  Reason: SyntaxError: expected ':' (bad.py, line 1)" in told.err.splitlines()
    assert document.document["error"]["reason"] == "SyntaxError: expected ':' (bad.py, line 1)"


def test_a_registration_that_is_not_waited_for_goes_on(apis: FakeApis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the command, and it says what it does not end."""

    def interrupt(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("marserve.cli.models.register.while_showing", interrupt)

    ran = marserve("register", "second.mar", "--management", apis.url)

    assert ran.status == 130
    assert "second.mar goes on in the server" in ran.err
