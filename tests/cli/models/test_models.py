"""`marserve models`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, description, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with two versions of one model."""
    with fake_apis() as running:
        running.answer("GET /models", {"models": [{"modelName": "digits"}]})
        running.answer("GET /models/digits/all", [description(), description(version="2.0", isDefault=False)])
        running.answer("GET /models/digits/2.0", [description(version="2.0", isDefault=False)])
        yield running


def test_all_versions_of_all_models_are_listed(apis: FakeApis) -> None:
    """One row each below the headline."""
    ran = marserve("models", "--management", apis.url)

    assert ran.status == 0
    assert [line.split()[:2] for line in ran.out.splitlines()] == [
        ["model", "version"],
        ["digits", "1.0"],
        ["digits", "2.0"],
    ]


def test_one_model_is_shown_with_its_workers(apis: FakeApis) -> None:
    """The workers' table stands below the versions'."""
    ran = marserve("models", "digits", "--version", "2.0", "--management", apis.url)

    assert ran.status == 0
    assert "4711" in ran.out
    assert "digits/2.0" in ran.out


def test_a_script_gets_what_describe_says(apis: FakeApis) -> None:
    """All members, of all versions."""
    ran = marserve("models", "--json", "--management", apis.url)

    assert [version["modelVersion"] for version in ran.document] == ["1.0", "2.0"]
    assert ran.document[0]["workers"][0]["pid"] == 4711


def test_a_version_that_must_not_batch_is_shown_with_the_reason() -> None:
    """Whoever wonders about its throughput finds it here."""
    batching = {"certificate": "failed", "policy": "refuse", "largestBatch": 1, "reason": "item 0 was another"}
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": [{"modelName": "digits", "modelUrl": "digits.mar"}]})
        apis.answer("GET /models/digits/all", [description(batching=batching)])

        for arguments in (("models",), ("models", "digits")):
            ran = marserve(*arguments, "--management", apis.url)
            assert "digits/1.0: batches of up to 1: item 0 was another" in ran.out


def test_what_describe_warns_of_is_shown() -> None:
    """A warm-up that failed is seen without reading the log or JSON."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": [{"modelName": "digits", "modelUrl": "digits.mar"}]})
        apis.answer("GET /models/digits/all", [description(warnings=["warm-up with sample 0 failed: KeyError('x')"])])

        for arguments in (("models",), ("models", "digits")):
            ran = marserve(*arguments, "--management", apis.url)
            assert "digits/1.0: warm-up with sample 0 failed: KeyError('x')" in ran.out


def test_a_server_without_models_says_so() -> None:
    """An empty table would look like a fault."""
    with fake_apis() as apis:
        apis.answer("GET /models", {"models": []})

        assert marserve("models", "--management", apis.url).out == "No model is registered.\n"
        assert marserve("models", "--json", "--management", apis.url).document == []


def test_an_unknown_model_is_a_failure(apis: FakeApis) -> None:
    """Status 1 and the server's words."""
    ran = marserve("models", "nothing", "--management", apis.url)

    assert ran.status == 1
    assert "Model not found" in ran.err


def test_a_version_without_a_model_is_a_usage_error(apis: FakeApis) -> None:
    """Versions of all models at once are nothing that anybody asks for."""
    ran = marserve("models", "--version", "3", "--management", apis.url)

    assert ran.status == 2
    assert "needs a model" in ran.err
    assert apis.asked == []


def test_a_model_that_is_being_fetched_is_shown_with_its_progress() -> None:
    """Beside the versions that are there, and where none is there yet."""
    arriving = {"url": "http://a/digits.mar", "state": "downloading", "seconds": 1.0, "bytes": 5_000_000}
    missing = {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: new"}
    with fake_apis() as apis:
        apis.answer("GET /models/digits/all", [description(arriving=[{**arriving, "size": 50_000_000}])])
        apis.answer("GET /models/new/all", {**missing, "arriving": [arriving]}, status=404)

        there = marserve("models", "digits", "--management", apis.url)
        new = marserve("models", "new", "--management", apis.url)

    assert "http://a/digits.mar is downloading: 5.0 of 50.0 MB" in there.out
    assert new.status == 1
    assert "Model not found: new" in new.err
    assert "on its way: http://a/digits.mar is downloading: 5.0 MB" in " ".join(new.err.split())
