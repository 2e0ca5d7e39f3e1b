"""The `curl` line that a start shows: with a file beside the model, or what fits its declaration."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from marserve.cli.server.sample_request import curl_line

URL = "http://127.0.0.1:8080/predictions/m"


def body_of(declaration: dict[str, Any] | None) -> Any:
    """The JSON of the line."""
    words = shlex.split(curl_line(URL, None, declaration))
    assert words[:4] == ["curl", "-H", "Content-Type: application/json", "-d"]
    assert words[-1] == URL
    return json.loads(words[4])


@pytest.mark.parametrize(
    "declaration",
    [
        {"kind": "item", "input": {"type": "image"}},
        {"kind": "item", "input": {"type": "bytes"}},
        {"kind": "tensors", "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 3, 224, 224]}]},
    ],
)
def test_where_only_a_file_will_do_one_is_asked_for(declaration: dict[str, Any]) -> None:
    """Nobody types a picture."""
    assert curl_line(URL, None, declaration) == f"curl -T FILE {URL}"


def test_a_request_beside_the_model_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of JSON with its content type; the path is that from the working directory."""
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b" / "request.png").touch()

    assert curl_line(URL, tmp_path / "a b", None) == f"curl -T 'a b/request.png' {URL}"
    (tmp_path / "a b" / "request.json").touch()
    assert curl_line(URL, tmp_path / "a b", None) == (
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
        },
        "required": ["name", "age", "kind", "tags", "home"],
        "$defs": {"Home": {"type": "object", "properties": {"zip": {"default": "1"}}, "required": ["zip"]}},
    }

    body = body_of({"kind": "item", "input": {"type": "json", "schema": schema}})

    assert body == {"name": "text", "age": 1, "kind": "a", "tags": ["text"], "home": {"zip": "1"}}


def test_text_and_models_that_declare_nothing_have_a_line_too() -> None:
    """It is the shape of a request, at least."""
    assert curl_line(URL, None, {"kind": "item", "input": {"type": "text"}}) == (
        f"curl -H 'Content-Type: text/plain' -d hello {URL}"
    )
    assert body_of(None) == {}
