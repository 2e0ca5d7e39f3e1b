"""Tests for the paths that the API description has for models that declare their input."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.api.rest import declared_paths
from marserve.api.rest.declared_paths import DeclaredVersion, with_models
from marserve.api.rest.description import _INFERENCE, _inference_paths
from marserve_handlers import Tensor
from marserve_handlers.declared.declaration import Declaration, ItemType

SUMS = Declaration(
    {"pair": Tensor("float32", ["batch", 2]), "name": Tensor("int64", ["batch", "n"], optional=True)},
    {"sum": Tensor("float32", ["batch"])},
).document()


def described(*versions: DeclaredVersion) -> dict[str, Any]:
    """The description of an inference listener with these versions."""
    whole = {"info": {}, "paths": _inference_paths(_INFERENCE), "components": {"schemas": {"ErrorBody": {}}}}
    return with_models(whole, versions)


def operation_of(declaration: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the path of model `m` says, and all schemas."""
    document = described(DeclaredVersion("m", "1.0", True, declaration))
    return document["paths"]["/predictions/m"]["post"], document["components"]["schemas"]


def test_declared_tensors_are_nested_lists_with_or_without_the_batch_axis() -> None:
    """Fixed sizes are bounds; what is optional is not required."""
    operation, _ = operation_of(SUMS)

    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    pair = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    assert schema["properties"]["pair"] == {"anyOf": [pair, {"type": "array", "items": pair}]}
    assert schema["properties"]["name"]["anyOf"][0] == {"type": "array", "items": {"type": "integer"}}
    assert schema["required"] == ["pair"]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["sum"]
    assert answer == {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}
    assert {"400", "404", "503"} <= operation["responses"].keys()
    assert all(parameter["in"] == "header" for parameter in operation["parameters"])


def test_without_a_batch_axis_only_the_shape_itself_is_described() -> None:
    """As the declaration has it."""
    operation, _ = operation_of({**SUMS, "batch": False, "inputs": [{"name": "x", "dtype": "bool", "shape": [1]}]})

    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"] == {"x": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}}


def test_definitions_of_an_item_stand_among_those_of_the_document() -> None:
    """Each reference leads to one, that of a definition to itself, too."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"$ref": "#/$defs/Node", "$defs": {"Node": node}}
    item = ItemType("json", "application/json", schema)

    operation, schemas = operation_of(Declaration(input=item, output=item).document())

    for where, name in (("requestBody", "m.input.Node"), ("answer", "m.output.Node")):
        body = operation[where] if where == "requestBody" else operation["responses"]["200"]
        assert body["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["properties"]["next"] == {"$ref": f"#/components/schemas/{name}"}


@pytest.mark.parametrize(
    ("item", "content_types"),
    [
        (ItemType("text", "text/plain", {"anyOf": []}), ["text/plain", "application/json"]),
        (ItemType("bytes", "application/octet-stream"), ["application/octet-stream"]),
        (ItemType("image", "image/*"), ["image/*"]),
        (ItemType("any", stream=True), ["*/*"]),
        (ItemType("events", "text/event-stream", stream=True), ["text/event-stream"]),
        (ItemType("json", "application/json", {}, stream=True), ["application/x-ndjson"]),
    ],
)
def test_each_sort_of_item_has_its_content_types(item: ItemType, content_types: list[str]) -> None:
    """Of bodies and answers alike."""
    operation, _ = operation_of(Declaration(input=item, output=item).document())

    assert list(operation["requestBody"]["content"]) == content_types
    assert list(operation["responses"]["200"]["content"]) == content_types


def test_each_version_has_a_path_and_the_default_one_a_second() -> None:
    """With names that a path can hold, and operations of which no two have one name."""
    document = described(
        DeclaredVersion("a b", "1.0", False, SUMS),
        DeclaredVersion("a b", "2.0", True, SUMS),
        DeclaredVersion("a_b", "2.0", True, SUMS),
    )

    own = {path: item["post"] for path, item in document["paths"].items() if declared_paths.MARK in item["post"]}
    assert set(own) == {
        "/predictions/a%20b/1.0",
        "/predictions/a%20b",
        "/predictions/a%20b/2.0",
        "/predictions/a_b",
        "/predictions/a_b/2.0",
    }
    assert len({each["operationId"] for each in own.values()}) == 5
    assert own["/predictions/a%20b/2.0"]["summary"] == "Predict with a b 2.0"


@pytest.mark.parametrize("bound", ["MOST_PATHS", "MOST_SCHEMA_BYTES"])
def test_what_is_more_than_a_description_may_have_is_counted(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    """The first ones are there."""
    monkeypatch.setattr(declared_paths, bound, {"MOST_PATHS": 3, "MOST_SCHEMA_BYTES": 1000}[bound])

    document = described(*(DeclaredVersion(f"m{number}", "1", True, SUMS) for number in range(9)))

    assert "/predictions/m0" in document["paths"]
    assert "/predictions/m8" not in document["paths"]
    left = sum(f"/predictions/m{number}" not in document["paths"] for number in range(9))
    assert document["info"] == {"x-marserve-models-left-out": left}


@pytest.mark.parametrize(
    "declaration",
    [
        {"kind": "tensors"},
        {"kind": "tensors", "inputs": [1, {"name": 2}, {"name": "x", "shape": 3}], "outputs": 4},
        {"kind": "item", "input": {"type": [], "schema": {"$defs": 1, "$ref": {}}}, "output": "x"},
    ],
)
def test_a_declaration_that_somebody_wrote_by_hand_is_described_as_far_as_it_goes(declaration: dict[str, Any]) -> None:
    """An archive may hold any JSON there."""
    assert operation_of(declaration)[0]["operationId"] == "predict_m"
