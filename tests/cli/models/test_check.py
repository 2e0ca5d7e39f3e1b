"""`marserve check`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, fake_apis


def report(**changes: Any) -> dict[str, Any]:
    """What the server says of a check that was passed."""
    return {
        "modelName": "digits",
        "modelVersion": "1.0",
        "certificate": "passed",
        "passed": True,
        "samples": 3,
        "batchSizes": [1, 2, 8],
        "answersCompared": 20,
        "differencesFound": 0,
        "differences": [],
        "notes": [],
        "seconds": 0.1,
        **changes,
    }


FAILED = report(
    certificate="failed",
    passed=False,
    differencesFound=7,
    differences=[
        {"run": "together (3)", "item": 1, "path": "score", "seen": "0.7", "wanted": "0.5"},
        {"run": "shuffled (3)", "item": -1, "path": "", "seen": "2 answers", "wanted": "3, one for each row"},
    ],
    notes=["sample 2 fails alone: 503 ValueError"],
)


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with a model."""
    with fake_apis() as running:
        yield running


def test_a_model_that_batches_rightly_is_said_to(apis: FakeApis) -> None:
    """With its own samples; status 0."""
    apis.answer("POST /models/digits/check", report())

    ran = marserve("check", "digits", "--management", apis.url)

    assert ran.status == 0
    assert ran.out == "digits 1.0: batches are answered as single requests (20 answers, batches of 1, 2, 8).\n"
    assert apis.orders("POST")[0].body == b""


def test_differences_are_a_table_and_the_status_is_1(apis: FakeApis) -> None:
    """With what the check could not see below it."""
    apis.answer("POST /models/digits/check", FAILED)

    ran = marserve("check", "digits", "--management", apis.url)

    assert ran.status == 1
    assert "7 of 20 answers, batches of 1, 2, 8 differ" in ran.out
    assert "together (3)" in ran.out
    assert "2 answers" in ran.out
    assert "note: sample 2 fails alone" in ran.out


def test_a_script_gets_the_report(apis: FakeApis) -> None:
    """And the same status."""
    apis.answer("POST /models/digits/check", FAILED)

    ran = marserve("check", "digits", "--json", "--management", apis.url)

    assert (ran.status, ran.document) == (1, FAILED)


def test_samples_of_ones_own_are_sent_as_a_form(apis: FakeApis, tmp_path: Path) -> None:
    """Each with its type; a version may be named."""
    apis.answer("POST /models/digits/2.0/check", report())
    for name in ("a.png", "b.json"):
        (tmp_path / name).write_bytes(name.encode())

    ran = marserve(
        *("check", "digits", "--version", "2.0", "--management", apis.url),
        *("--sample", tmp_path / "a.png", "--sample", tmp_path / "b.json"),
    )

    assert ran.status == 0
    body = apis.orders("POST")[0].body
    assert b"Content-Type: image/png\r\n\r\na.png" in body
    assert b"Content-Type: application/json\r\n\r\nb.json" in body


def test_what_cannot_be_read_is_said_before_anybody_is_asked(apis: FakeApis, tmp_path: Path) -> None:
    """With the file's name."""
    ran = marserve("check", "digits", "--sample", tmp_path / "none", "--management", apis.url)

    assert ran.status == 2
    assert "Cannot read" in ran.err
    assert apis.asked == []


def test_the_server_s_refusal_is_told_in_its_words(apis: FakeApis) -> None:
    """There was nothing to check with, say."""
    error = {"code": 400, "type": "BadRequestException", "message": "There is nothing to check with."}
    apis.answer("POST /models/digits/check", error, status=400)

    ran = marserve("check", "digits", "--management", apis.url)

    assert ran.status == 1
    assert "There is nothing to check with." in ran.err


def test_nothing_compared_is_no_pass(apis: FakeApis) -> None:
    """Every sample failed."""
    apis.answer("POST /models/digits/check", report(passed=False, certificate="failed", answersCompared=0))

    ran = marserve("check", "digits", "--management", apis.url)

    assert ran.status == 1
    assert "nothing could be compared" in ran.out
