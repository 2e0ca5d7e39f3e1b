"""The `curl` line that a start shows: with a file beside the model, or what fits its declaration."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from marserve.cli.server.sample_request import curl_line

BASE, ROUTE = "http://127.0.0.1:8080", "/predictions/m"
URL = BASE + ROUTE


def body_of(declaration: dict[str, Any] | None) -> Any:
    """The JSON of the line."""
    words = shlex.split(curl_line(BASE, ROUTE, declaration, example="{}"))
    assert words[:4] == ["curl", "-H", "Content-Type: application/json", "-d"]
    assert words[-1] == URL
    return json.loads(words[4])


@pytest.mark.parametrize(
    "declaration",
    [
        {"kind": "item", "input": {"type": "image"}},
        {"kind": "item", "input": {"type": "bytes"}},
        {},
    ],
)
def test_where_only_a_file_will_do_one_is_asked_for(declaration: dict[str, Any]) -> None:
    """Nobody types a picture."""
    assert curl_line(BASE, ROUTE, declaration) == f"curl -T FILE {URL}"


def test_a_request_beside_the_model_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of JSON with its content type; the path is that from the working directory."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b" / "request.png").touch()

    assert curl_line(BASE, ROUTE, None, folder=tmp_path / "a b") == f"curl -T 'a b/request.png' {URL}"
    (tmp_path / "a b" / "request.json").touch()
    assert curl_line(BASE, ROUTE, None, folder=tmp_path / "a b") == (
        f"curl -H 'Content-Type: application/json' -T 'a b/request.json' {URL}"
    )


def test_tensors_get_numbers_of_their_shape() -> None:
    """One item, without the batch axis."""
    body = body_of({"kind": "tensors", "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2, 2]}]})

    assert [len(row) for row in body["x"]] == [2, 2]


def test_items_get_what_their_schema_requires() -> None:
    """Defaults, enumerations, references; what is optional is left out."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "home": {"$ref": "#/$defs/Home"},
            "note": {"type": "string"},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 3}, "minItems": 2},
            "word": {"type": "string", "maxLength": 2},
        },
        "required": ["name", "age", "kind", "tags", "home", "ages", "word"],
        "$defs": {"Home": {"type": "object", "properties": {"zip": {"default": "1"}}, "required": ["zip"]}},
    }

    body = body_of({"kind": "item", "input": {"type": "json", "schema": schema}})

    assert body == {
        "name": "hello",
        "age": 1,
        "kind": "a",
        "tags": ["hello"],
        "home": {"zip": "1"},
        "ages": [3, 3],
        "word": "he",
    }


def test_the_pieces_of_a_stream_are_shown_as_they_come() -> None:
    """curl keeps what it gets until a line is full, unless it is asked not to."""
    declaration = {"kind": "item", "input": {"type": "text"}, "output": {"type": "text", "stream": True}}

    assert curl_line(BASE, ROUTE, declaration) == f"curl -N -H 'Content-Type: text/plain' -d hello {URL}"


def test_events_are_asked_for() -> None:
    """Without the header their data comes alone, a line each."""
    declaration = {"kind": "item", "input": {"type": "text"}, "output": {"type": "events", "stream": True}}

    assert curl_line(BASE, ROUTE, declaration) == (
        f"curl -N -H 'Accept: text/event-stream' -H 'Content-Type: text/plain' -d hello {URL}"
    )


def test_text_and_models_that_declare_nothing_have_a_line_too() -> None:
    """It is the shape of a request, at least."""
    assert curl_line(BASE, ROUTE, {"kind": "item", "input": {"type": "text"}}) == (
        f"curl -H 'Content-Type: text/plain' -d hello {URL}"
    )
    assert body_of(None) == {}


def test_a_large_tensor_is_made_by_python_in_the_command() -> None:
    """A line of seven hundred zeros could not be read."""
    tensor = {"name": "pixels", "dtype": "float32", "shape": ["batch", 1, 28, 28]}

    command = curl_line(BASE, ROUTE, {"kind": "tensors", "inputs": [tensor]})
    program, _, asking = command.partition(" | ")

    assert asking == f"curl -H 'Content-Type: application/json' -d @- {URL}"
    assert shlex.split(program)[:2] == ["python3", "-c"]
    printed = subprocess.run(shlex.split(program), check=True, capture_output=True).stdout
    assert json.loads(printed) == {"pixels": [[[0] * 28] * 28]}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("unix:/run/m.sock", "--unix-socket /run/m.sock -T FILE http://localhost/predictions/m"),
        ("http://0.0.0.0:8080", f"-T FILE {URL}"),
        ("https://[::]:8443", "-T FILE 'https://[::1]:8443/predictions/m'"),
    ],
)
def test_the_address_is_one_that_this_machine_reaches(address: str, words: str) -> None:
    """A socket's file stands beside a URL; a server on every address answers on this machine's own."""
    assert curl_line(address, ROUTE, None) == f"curl {words}"
