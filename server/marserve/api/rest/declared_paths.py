"""The API description's part about models: a path for each version that declares its input, with its schema. Pure.

Generators of clients make a call of each path, with types of its schema. The paths of any model stay beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

Document = dict[str, Any]

MOST_PATHS: Final = 200
MOST_SCHEMA_BYTES: Final = 1 << 20
# An operation that has this member is one model's; the page at /docs has a form for each model already.
MARK: Final = "x-marserve-model"
_LEFT_OUT: Final = "x-marserve-models-left-out"

_OF_DEFAULT: Final = "/predictions/{model_name}"
_OF_VERSION: Final = "/predictions/{model_name}/{model_version}"
_JSON: Final = "application/json"
_DEFINITIONS: Final = "#/$defs/"
_NOT_OF_A_NAME: Final = re.compile(r"[^A-Za-z0-9_]+")


class DeclaredVersion(NamedTuple):
    """A version that declares its input. `declaration` is the document of the archive, or of the handler."""

    model: str
    version: str
    is_default: bool
    declaration: Mapping[str, Any]


def with_models(whole: Mapping[str, Any], versions: Iterable[DeclaredVersion]) -> Document:
    """The description of a listener with a path for each of these versions, and one for the default of each model.

    At most `MOST_PATHS` of them, with schemas of `MOST_SCHEMA_BYTES` together; `info` names how many are left out. The
    operations are those of `/predictions/{model_name}` and `/predictions/{model_name}/{model_version}` otherwise.
    """
    paths, schemas = dict(whole["paths"]), dict(whole.get("components", {}).get("schemas", {}))
    names: set[str] = set()
    count = spent = left_out = 0
    for each in versions:
        if spent > MOST_SCHEMA_BYTES or count >= MOST_PATHS:
            left_out += 1
            continue
        model = quote(each.model, safe="")
        targets = [(f"/predictions/{model}/{quote(each.version, safe='')}", f"{each.model}_{each.version}")]
        if each.is_default:
            targets.insert(0, (f"/predictions/{model}", each.model))
        name = _unique(targets[0][1], names)
        described = _described(each.declaration, name)
        spent += len(json.dumps(described))
        if spent > MOST_SCHEMA_BYTES or count + len(targets) > MOST_PATHS:
            left_out += 1
            continue
        count += len(targets)
        schemas |= described.definitions
        for number, (path, words) in enumerate(targets):
            names_version = path.count("/") == 3
            operation = dict(paths[_OF_VERSION if names_version else _OF_DEFAULT]["post"])
            operation["operationId"] = f"predict_{_unique(words, names) if number else name}"
            operation["summary"] = f"Predict with {each.model}{f' {each.version}' if names_version else ''}"
            operation["parameters"] = [one for one in operation["parameters"] if one["in"] != "path"]
            operation["requestBody"] = {"required": True, "content": described.content}
            answered = {"description": "What the model answered.", "content": described.answer}
            operation["responses"] = {**operation["responses"], "200": answered}
            operation[MARK] = each.model
            paths[path] = {"post": operation}
    document = {**whole, "paths": paths, "components": {**whole.get("components", {}), "schemas": schemas}}
    if left_out:
        document["info"] = {**whole["info"], _LEFT_OUT: left_out}
    return document


def _unique(words: str, names: set[str]) -> str:
    """A name for operations and schemas that no other has."""
    base = name = _NOT_OF_A_NAME.sub("_", words)
    number = 1
    while name in names:
        number += 1
        name = f"{base}_{number}"
    names.add(name)
    return name


class _Described(NamedTuple):
    """What a body and an answer hold by their content types, and the schemas that they refer to."""

    content: Document
    answer: Document
    definitions: Document


def _described(declaration: Mapping[str, Any], name: str) -> _Described:
    definitions: Document = {}
    if declaration.get("kind") == "tensors":
        has_batch = declaration.get("batch") is not False
        inputs, outputs = (_tensors(declaration.get(key), has_batch=has_batch) for key in ("inputs", "outputs"))
        return _Described({_JSON: {"schema": inputs}}, {_JSON: {"schema": outputs}}, definitions)
    content = _item(declaration.get("input"), f"{name}.input", definitions)
    answer = _item(declaration.get("output"), f"{name}.output", definitions)
    return _Described(content, answer, definitions)


def _tensors(tensors: object, *, has_batch: bool) -> Document:
    """The schema of an object with a nested list for each tensor: of one item, or of several."""
    properties: Document = {}
    required: list[str] = []
    for each in tensors if isinstance(tensors, list) else []:
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
            continue
        shape = each.get("shape")
        sizes = shape if isinstance(shape, list) else []
        item = _nested(str(each.get("dtype")), sizes[1:] if has_batch else sizes)
        batch = {"type": "array", "items": item}
        properties[each["name"]] = {"anyOf": [item, batch]} if has_batch else item
        if not each.get("optional"):
            required.append(each["name"])
    return {"type": "object", "properties": properties, "required": required}


def _nested(dtype: str, sizes: list[Any]) -> Document:
    kind = "boolean" if dtype == "bool" else "integer" if "int" in dtype else "number"
    schema: Document = {"type": kind}
    for size in reversed(sizes):
        schema = {"type": "array", "items": schema}
        if type(size) is int:
            schema |= {"minItems": size, "maxItems": size}
    return schema


def _item(item: object, name: str, definitions: Document) -> Document:
    """What a body is, by its content types. Schemas that it refers to go to `definitions`, which OpenAPI has apart."""
    said = item if isinstance(item, Mapping) else {}
    kind, content_type = said.get("type"), said.get("contentType")
    content: Document = {}
    if kind == "text":
        content["text/plain"] = {"schema": {"type": "string"}}
    elif kind in ("bytes", "image"):
        content[str(content_type or "*/*")] = {"schema": {"type": "string", "format": "binary"}}
    elif kind == "events":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if isinstance(said.get("schema"), Mapping):
        stream = kind == "json" and said.get("stream")
        content["application/x-ndjson" if stream else _JSON] = {"schema": _apart(said["schema"], name, definitions)}
    return content or {"*/*": {"schema": {}}}


def _apart(schema: Mapping[str, Any], name: str, definitions: Document) -> Document:
    """A schema whose definitions stand among those of the whole document, below `name`."""
    own = schema.get("$defs")
    renamed: dict[str, str] = {}
    for key in own if isinstance(own, Mapping) else ():
        target = f"{name}.{_NOT_OF_A_NAME.sub('_', key)}"
        while target in renamed.values():
            target += "_"
        renamed[f"{_DEFINITIONS}{key}"] = target
    for reference, target in renamed.items():
        definitions[target] = _referring(own[reference.removeprefix(_DEFINITIONS)], renamed)  # type: ignore[index]
    found: Document = _referring({key: value for key, value in schema.items() if key != "$defs"}, renamed)
    return found


def _referring(value: Any, renamed: Mapping[str, str]) -> Any:
    """The same value, whose references to definitions name their new places."""
    if isinstance(value, Mapping):
        return {
            key: f"#/components/schemas/{renamed[each]}"
            if isinstance(each, str) and each in renamed
            else _referring(each, renamed)
            for key, each in value.items()
        }
    return [_referring(each, renamed) for each in value] if isinstance(value, list) else value
