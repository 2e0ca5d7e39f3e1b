"""The `curl` line that asks a model: with a request that lies beside it, or one that fits what it declares. Pure but
for a look into the folder.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marserve.registry.intake.drawn_samples import draw_samples

# The beginning of the name of a file that is a request.
_STEM = "request"
_LONGEST = 240
_JSON = "application/json"
_MOST_DEPTH = 4


def curl_line(url: str, folder: Path | None, declaration: Mapping[str, Any] | None, example: str | None = "{}") -> str:
    """The line to type. `folder` is the model's, None for an archive; `declaration` is what the model declares.

    `example` is the JSON for a model that declares nothing, None where it takes a file.
    """
    file = _request_beside(folder)
    if file is not None:
        said = f"-H 'Content-Type: {_JSON}' " if file.suffix == ".json" else ""
        return f"curl {said}-T {shlex.quote(os.path.relpath(file))} {url}"
    content_type, body = (_JSON, example) if declaration is None else _fitting(declaration)
    if body is None:
        return f"curl -T FILE {url}"
    return f"curl -H 'Content-Type: {content_type}' -d {shlex.quote(body)} {url}"


def _request_beside(folder: Path | None) -> Path | None:
    """A file `request.json`, `request.png` or the like."""
    found = sorted(folder.glob(f"{_STEM}.*")) if folder is not None else []
    return found[0] if found and found[0].is_file() else None


def _fitting(declaration: Mapping[str, Any]) -> tuple[str, str | None]:
    """The content type and body of a request; no body where only a file will do."""
    samples = draw_samples(declaration)
    if samples:
        body = (samples[0].body or b"").decode()
        return _JSON, body if len(body) <= _LONGEST else None
    item = declaration.get("input")
    kind = item.get("type") if isinstance(item, Mapping) else None
    if kind == "text":
        return "text/plain", "hello"
    if kind in ("image", "bytes") or declaration.get("kind") == "tensors":
        return "", None
    schema = item.get("schema") if isinstance(item, Mapping) else None
    body = json.dumps(_example(schema, schema, 0)) if isinstance(schema, Mapping) else "{}"
    return _JSON, body if len(body) <= _LONGEST else None


def _example(schema: Any, whole: Mapping[str, Any], depth: int) -> Any:
    """A value that the JSON schema may take: the defaults and the simplest values of what is required."""
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return None
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return _example((whole.get("$defs") or {}).get(name), whole, depth + 1)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _example(schema[key][0], whole, depth + 1)
    kind = schema.get("type")
    if kind == "object":
        fields, required = schema.get("properties") or {}, schema.get("required") or ()
        return {name: _example(fields.get(name), whole, depth + 1) for name in required}
    if kind == "array":
        return [_example(schema.get("items"), whole, depth + 1)]
    return {"string": "text", "integer": 1, "number": 1.0, "boolean": True}.get(str(kind))
