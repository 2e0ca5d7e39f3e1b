"""The `curl` line that asks a model: with a request that lies beside it, or one that fits what it declares. Pure but
for a look into the folder.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from marserve.registry.intake.drawn_samples import draw_samples

# The beginning of the name of a file that is a request.
_STEM = "request"
# A longer body cannot be read in a line, in characters; tensors of more numbers are made by Python.
_LONGEST = 400
_MOST_NUMBERS = 64
_JSON = "application/json"
# In the line, a body that is not known.
UNKNOWN_BODY = "BODY"
_MOST_DEPTH = 6
# What stands for a size that varies, in a tensor that Python makes.
_SIZE = 1
_HERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


def curl_line(
    address: str,
    path: str,
    declaration: Mapping[str, Any] | None,
    *,
    folder: Path | None = None,
    example: str | None = None,
) -> str:
    """The line to type, which asks the `path` of the server at `address`.

    `folder` is the model's, None for an archive; `declaration` is what the model declares. `example` is the JSON for a
    model that declares nothing, None where it takes a file.
    """
    curl = f"curl --unix-socket {shlex.quote(address.removeprefix('unix:'))}" if is_socket(address) else "curl"
    output = (declaration or {}).get("output") or {}
    if output.get("stream"):
        curl += " -N"  # each piece is shown as it comes
    if output.get("type") == "events":
        curl += " -H 'Accept: text/event-stream'"  # others get the data alone
    url = shlex.quote(f"{base_of(address)}{path}")
    file = request_beside(folder)
    if file is not None:
        kind = f"-H 'Content-Type: {_JSON}' " if file.suffix == ".json" else ""
        return f"{curl} {kind}-T {shlex.quote(os.path.relpath(file))} {url}"
    said = sample_of(declaration, example)
    if said is None:
        return f"{curl} -T FILE {url}"
    kind, body = f"-H 'Content-Type: {said[0]}'", said[1]
    if body is None:
        assert declaration is not None
        return f"python3 -c {shlex.quote(_program_for(declaration))} | {curl} {kind} -d @- {url}"
    return f"{curl} {kind} -d {shlex.quote(body)} {url}"


def is_socket(address: str) -> bool:
    """Whether an address is the file of a socket."""
    return address.startswith("unix:")


def base_of(address: str) -> str:
    """The beginning of URLs of this machine's clients."""
    if is_socket(address):
        return "http://localhost"
    parts = urlsplit(address)
    host = _HERE.get(parts.hostname or "")
    return address if host is None else f"{parts.scheme}://{host}:{parts.port}"


def request_beside(folder: Path | None) -> Path | None:
    """A file `request.json`, `request.png` or the like."""
    found = sorted(folder.glob(f"{_STEM}.*")) if folder is not None else []
    return found[0] if found and found[0].is_file() else None


def sample_of(declaration: Mapping[str, Any] | None, example: str | None = None) -> tuple[str, str | None] | None:
    """The content type and body of a request that fits; no body where Python makes it, None where a file will do."""
    if not declaration:
        return None if example is None else (_JSON, example)
    if declaration.get("kind") == "tensors":
        numbers = sum(math.prod(_shape(one)) for one in declaration.get("inputs", ()))
        samples = draw_samples(declaration) if numbers <= _MOST_NUMBERS else ()
        body = (samples[0].body or b"").decode() if samples else ""
        return _JSON, body if 0 < len(body) <= _LONGEST else None
    item = declaration.get("input")
    if not isinstance(item, Mapping):
        return None
    if item.get("type") == "text":
        return "text/plain", "hello"
    schema = item.get("schema")
    if not isinstance(schema, Mapping):
        return (_JSON, "{}") if item.get("type") == "json" else None
    body = json.dumps(_fitting(schema, schema.get("$defs") or {}, 0), ensure_ascii=False)
    return (_JSON, body) if len(body) <= _LONGEST else None


def _shape(one: Mapping[str, Any]) -> list[int]:
    """The shape of one item of a tensor."""
    shape = list(one.get("shape", ()))
    return [size if isinstance(size, int) else _SIZE for size in shape if size != "batch"]


def _program_for(declaration: Mapping[str, Any]) -> str:
    """A line of Python that prints zeros of a declaration of tensors."""
    fields = ", ".join(f"{json.dumps(one['name'])}: z({_shape(one)})" for one in declaration.get("inputs", ()))
    return f"import json; z = lambda s: [z(s[1:])] * s[0] if s else 0; print(json.dumps({{{fields}}}))"


def _fitting(schema: Any, named: Mapping[str, Any], depth: int) -> Any:
    """A small value that fits a JSON schema: defaults, and the simplest values of what is required."""
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return None
    if "$ref" in schema:
        return _fitting(named.get(str(schema["$ref"]).rpartition("/")[2]), named, depth + 1)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _fitting(schema[key][0], named, depth + 1)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        fields, required = schema.get("properties") or {}, schema.get("required") or ()
        return {name: _fitting(fields.get(name), named, depth + 1) for name in required}
    if kind == "array":
        return [_fitting(schema.get("items") or {}, named, depth + 1)] * max(1, int(schema.get("minItems", 1)))
    if kind in ("integer", "number"):
        return schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"string": "hello"[: schema.get("maxLength", 5)], "boolean": True}.get(str(kind))
