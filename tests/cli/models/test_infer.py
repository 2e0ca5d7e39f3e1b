"""`marserve infer`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import marserve
from support.fake_apis import FakeApis, fake_apis


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server whose digits model is sure of a seven."""
    with fake_apis() as running:
        running.answer("POST /predictions/digits", {"7": 0.98})
        yield running


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A file with the name of a picture."""
    file = tmp_path / "seven.png"
    file.write_bytes(b"\x89PNG seven")
    return file


def test_a_json_answer_is_laid_out(apis: FakeApis, picture: Path) -> None:
    """One member a line; the body arrives as it was, with the type that its name tells."""
    ran = marserve("infer", "digits", picture, "--inference", apis.url)

    assert (ran.status, ran.out) == (0, '{\n  "7": 0.98\n}\n')
    assert apis.asked[0].body == b"\x89PNG seven"
    assert apis.asked[0].headers["content-type"] == "image/png"


def test_standard_input_is_sent_without_a_type(apis: FakeApis) -> None:
    """Nothing tells what it is."""
    ran = marserve("infer", "digits", "-", "--inference", apis.url, stdin=b"seven")

    assert ran.status == 0
    assert apis.asked[0].body == b"seven"
    assert "content-type" not in apis.asked[0].headers


def test_the_type_can_be_said(apis: FakeApis) -> None:
    """It wins over what a name tells."""
    marserve("infer", "digits", "-", "--content-type", "text/plain", "--inference", apis.url, stdin=b"seven")

    assert apis.asked[0].headers["content-type"] == "text/plain"


def test_a_version_can_be_asked_for(apis: FakeApis, picture: Path) -> None:
    """It is part of the path."""
    apis.answer("POST /predictions/digits/2.0", [1])

    assert marserve("infer", "digits", picture, "--version", "2.0", "--inference", apis.url).out == "[\n  1\n]\n"


def test_any_other_answer_is_printed_as_it_came(picture: Path) -> None:
    """Byte for byte, so that it can be written to a file."""
    with fake_apis() as apis:
        apis.answer("POST /predictions/painter", b"\x89PNG\xff\n\x00", content_type="image/png")

        ran = marserve("infer", "painter", picture, "--inference", apis.url)

    assert ran.out_bytes == b"\x89PNG\xff\n\x00"


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"[1, 2]", [1, 2]), ("sieben ü".encode(), "sieben ü"), (b"\xff\x00", {"base64": "/wA="})],
)
def test_a_script_gets_any_answer_as_json(body: bytes, expected: object, picture: Path) -> None:
    """JSON as itself, text as text, the rest as base64."""
    with fake_apis() as apis:
        apis.answer("POST /predictions/any", body)

        ran = marserve("infer", "any", picture, "--json", "--inference", apis.url)

    assert ran.document["answer"] == expected
    assert ran.document["status"] == 200
    assert ran.document["request_id"] == "6f1c-42"
    assert ran.document["seconds"] > 0


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (404, "was asked: --inference names another server; `marserve models` lists"),
        (503, "marserve models digits"),
        (500, "marserve logs digits"),
        (400, "Prediction failed"),
    ],
)
def test_a_refused_request_is_a_failure_with_a_next_step(status: int, hint: str, picture: Path) -> None:
    """What helps depends on what was wrong."""
    with fake_apis() as apis:
        apis.answer("POST /predictions/digits", {"message": "Prediction failed"}, status)

        ran = marserve("infer", "digits", picture, "--inference", apis.url)

    assert ran.status == 1
    assert "Prediction failed" in ran.err
    assert hint in ran.err


def test_a_missing_file_is_a_failure(apis: FakeApis) -> None:
    """Nothing is sent."""
    ran = marserve("infer", "digits", "gone.png", "--inference", apis.url)

    assert ran.status == 2
    assert "gone.png" in ran.err
    assert apis.asked == []


def test_what_the_handler_raised_stands_in_the_model_log(picture: Path) -> None:
    """Under the request's id; how a worker ended stands in the server's."""
    with fake_apis() as apis:
        apis.headers["x-marserve-cause"] = "handler"
        apis.answer("POST /predictions/digits", {"message": "Prediction failed"}, 503)

        ran = marserve("infer", "digits", picture, "--inference", apis.url)

    said = " ".join(ran.err.split())
    assert "`marserve logs --request" in said
    assert "6f1c-42" in said
    assert "traceback" not in said, "not every failure has one"
