"""Comparing answers: cases from files and folders, and where two answers differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.errors import BadInput
from marserve.migration.compare import Case, compare, compare_answers, read_cases


def answer(body: Any = b"", status: int = 200, kind: str = "application/json") -> httpx.Response:
    """An answer; what is no bytes goes as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.Response(status, content=content, headers={"content-type": kind})


def places(old: httpx.Response, new: httpx.Response) -> list[str]:
    """Where the two differ."""
    return [each.where for each in compare_answers("c", old, new)]


# ------------------------------------------------------------------------------------------- cases


def test_a_folder_holds_one_folder_a_model(tmp_path: Path) -> None:
    """Each file is a body, its ending its type."""
    for name, data in (("digits/0.png", b"\x89PNG"), ("digits/1.json", b"{}"), ("text/a", b"words")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)

    cases = read_cases(tmp_path)

    assert [(case.name, case.path, case.headers["content-type"]) for case in cases] == [
        ("digits/0.png", "/predictions/digits", "image/png"),
        ("digits/1.json", "/predictions/digits", "application/json"),
        ("text/a", "/predictions/text", "application/octet-stream"),
    ]
    assert cases[0].body == b"\x89PNG"


def test_a_recording_gives_its_inference_requests(tmp_path: Path) -> None:
    """Steps of other kinds are left out; bodies may be text, JSON, base64, or a file beside the cases."""
    (tmp_path / "picture").write_bytes(b"pixels")
    cases = [
        {"id": "a", "path": "/predictions/m", "method": "POST", "body": {"json": {"x": 1}}},
        {"id": "b", "path": "/predictions/m", "method": "PUT", "body": {"base64": "AAE=", "type": "image/png"}},
        {"id": "c", "path": "/predictions/m", "body": {"file": "picture"}, "headers": {"X-A": "1"}},
        {"id": "d", "to": "management", "path": "/models"},
        {"id": "e", "do": "poll"},
        {"path": "/ping"},
        {"id": "g", "do": "raw", "path": "/ping"},
        {"id": "h", "path": "/predictions/m", "setup": True},
        {"id": "i", "path": "/predictions/m", "method": "POST", "body": {"form": {"data": "a b", "n": "1"}}},
        {"id": "j", "path": "/predictions/m", "method": "POST", "body": {"zeros": 3}},
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": cases}))

    found = read_cases(file)

    assert found == [
        Case("a", "/predictions/m", "POST", {"content-type": "application/json"}, b'{"x": 1}'),
        Case("b", "/predictions/m", "PUT", {"content-type": "image/png"}, b"\x00\x01"),
        Case("c", "/predictions/m", "GET", {"X-A": "1"}, b"pixels"),
        Case("case 6", "/ping", "GET", {}, b""),
        Case("i", "/predictions/m", "POST", {"content-type": "application/x-www-form-urlencoded"}, b"data=a+b&n=1"),
        Case("j", "/predictions/m", "POST", {}, b"000"),
    ]


def test_parts_become_a_multipart_body(tmp_path: Path) -> None:
    """Each with its name, its file's name and its type, as browsers send them."""
    parts = [
        {"name": "data", "filename": "f.bin", "type": "application/octet-stream", "base64": "AAE="},
        {"name": "words", "text": "plain"},
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([{"path": "/predictions/m", "method": "POST", "body": {"multipart": parts}}]))

    (case,) = read_cases(file)

    kind, _, boundary = case.headers["content-type"].partition("; boundary=")
    edge = f"--{boundary}".encode()
    assert kind == "multipart/form-data"
    assert case.body == (
        edge + b'\r\nContent-Disposition: form-data; name="data"; filename="f.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n\x00\x01\r\n"
        + edge
        + b'\r\nContent-Disposition: form-data; name="words"\r\n\r\nplain\r\n'
        + edge
        + b"--\r\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{broken", "no JSON"),
        ('{"cases": 3}', "a list of cases"),
        ("[]", "no requests"),
        ('[{"path": "/p", "body": 3}]', "body is 3"),
        ('[{"path": "/p", "body": {"words": 1}}]', "has words"),
        ('[{"path": "/p", "body": {"multipart": [{"text": "x"}]}}]', "a list of parts"),
        ('[{"path": "/p", "body": {"file": "../outside"}}]', "../outside"),
    ],
)
def test_cases_that_are_none_are_refused_by_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """Not half-read."""
    file = tmp_path / "cases.json"
    file.write_text(text)

    with pytest.raises(BadInput, match=said):
        read_cases(file)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(BadInput, match="nowhere"):
        read_cases(tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"cat": 0.5, "dog": 0.25}, {"dog": 0.25001, "cat": 0.5}),
        ([1, 2.0, "x", None, True], [1, 2, "x", None, True]),
        ({"id": "12345678-1234-1234-1234-123456789012"}, {"id": "87654321-1234-1234-1234-123456789012"}),
        (b"raw \xff bytes", b"raw \xff bytes"),
        ({"openapi": "3.0.1", "paths": {}}, {"openapi": "3.1.0", "paths": {"/ping": {}}}),
    ],
)
def test_answers_that_mean_the_same_are_alike(old: Any, new: Any) -> None:
    """Order of members, rounding within a thousandth, and ids that are new each time do not count."""
    assert places(answer(old), answer(new)) == []


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ({"a": [1, 2, 3]}, {"a": [1, 2, 4]}, ["$.a[2]"]),
        ({"a": 1}, {"b": 1}, ["$.a", "$.b"]),
        ([1, 2], [1], ["$.length"]),
        ({"a": True}, {"a": 1}, ["$.a"]),
        ({"a": "1"}, {"a": 1}, ["$.a"]),
        (b"raw", b"row", ["body"]),
    ],
)
def test_a_difference_is_named_by_its_place(old: Any, new: Any, where: list[str]) -> None:
    """Each place in a JSON document; a body that is none as a whole."""
    assert places(answer(old), answer(new)) == where


def test_another_status_or_kind_of_content_is_a_difference() -> None:
    """The body of another status is not compared, but shown."""
    (found,) = compare_answers("c", answer({"a": 1}), answer({"code": 503}, status=503))

    assert (found.where, found.old, found.new) == ("status", "200", '503 {"code": 503}')
    assert places(answer(b"x", kind=""), answer(b"x", kind="text/plain")) == []
    assert places(answer(b"x", kind="text/plain"), answer(b"x", kind="text/html; charset=utf-8")) == ["content-type"]


def test_both_servers_are_asked_the_same() -> None:
    """Method, path, headers and body."""
    asked: list[tuple[str, str, str, str, bytes]] = []

    def serve(name: str) -> httpx.Client:
        def respond(request: httpx.Request) -> httpx.Response:
            asked.append((name, request.method, request.url.path, request.headers["x-a"], request.content))
            return answer({"from": "both"})

        return httpx.Client(base_url="http://server", transport=httpx.MockTransport(respond))

    with serve("old") as old, serve("new") as new:
        found = compare([Case("c", "/predictions/m", "PUT", {"x-a": "1"}, b"body")], old, new).differences

    assert found == []
    assert asked == [(name, "PUT", "/predictions/m", "1", b"body") for name in ("old", "new")]
