"""Sends two running servers the same requests and compares the new one's answers with the old one's.

Requests come from a file of cases (JSON: a list, or an object with `cases`; each has `path` and, if needed, `method`,
`headers` and `body`) or from a folder: `FOLDER/MODEL/anything` is posted to `/predictions/MODEL`.
"""

from __future__ import annotations

import base64
import json
import math
import mimetypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx

from marserve.errors import BadInput

RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-6
_BOUNDARY = "marserve-migrate-0f9d3c5b"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `name` says where it came from."""

    name: str
    path: str
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers to a case differ: `status`, `content-type`, or a place in the body (`$.scores[2]`)."""

    case: str
    where: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of all cases. `refused_alike`: those that both servers answered with the same error, with its status
    after the name. They prove little if a prediction was wanted.
    """

    differences: list[Difference]
    refused_alike: list[str]


def read_cases(source: Path) -> list[Case]:
    """The requests of a file or a folder. Raises BadInput if it has none."""
    try:
        cases = list(_from_folder(source) if source.is_dir() else _from_file(source))
    except OSError as error:
        raise BadInput(f"{source} cannot be read: {error.strerror}") from error
    if not cases:
        raise BadInput(f"{source} holds no requests; give cases as JSON, or a folder with one folder a model")
    return cases


def _from_folder(folder: Path) -> Iterator[Case]:
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        for file in sorted(path for path in model.iterdir() if path.is_file()):
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            yield Case(
                f"{model.name}/{file.name}",
                f"/predictions/{model.name}",
                "POST",
                {"content-type": kind},
                file.read_bytes(),
            )


def _from_file(file: Path) -> Iterator[Case]:
    try:
        document = json.loads(file.read_bytes())
    except ValueError as error:
        raise BadInput(f"{file} is no JSON: {error}") from error
    cases = document.get("cases", []) if isinstance(document, dict) else document
    if not isinstance(cases, list):
        raise BadInput(f"{file} must hold a list of cases, or an object with one under `cases`")
    for number, case in enumerate(cases, 1):
        if not isinstance(case, dict) or "path" not in case or case.get("to", "inference") != "inference":
            continue  # a recording's step that is no inference request
        if case.get("do") is not None or case.get("setup"):
            continue  # a step that is no single request, or that prepares the server
        body, kind = _body_of(case.get("body"), file.parent)
        headers = {str(name): str(value) for name, value in (case.get("headers") or {}).items()}
        if kind and not any(name.lower() == "content-type" for name in headers):
            headers["content-type"] = kind
        name = str(case.get("id") or f"case {number}")
        yield Case(name, str(case["path"]), str(case.get("method", "GET")), headers, body)


def _body_of(body: Any, folder: Path) -> tuple[bytes, str | None]:
    if body is None:
        return b"", None
    if isinstance(body, str):
        return body.encode(), None
    if not isinstance(body, dict):
        raise BadInput(f"a case's body is {body!r}; it must be text, or an object with text, json, base64 or file")
    if "json" in body:
        return json.dumps(body["json"]).encode(), "application/json"
    if "text" in body:
        return str(body["text"]).encode(), body.get("type")
    if "base64" in body:
        return base64.b64decode(body["base64"]), body.get("type")
    if "zeros" in body:
        return b"0" * int(body["zeros"]), body.get("type")
    if "form" in body:
        return urlencode(body["form"]).encode(), "application/x-www-form-urlencoded"
    if "multipart" in body:
        return _multipart(body["multipart"], folder)
    if "file" in body:
        path = folder / str(body["file"])
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"a case's file is {body['file']!r}; it must lie beside the cases")
        return path.read_bytes(), body.get("type")
    known = "text, json, base64, zeros, form, multipart or file"
    raise BadInput(f"a case's body has {', '.join(body)}; it must have {known}")


def _multipart(parts: Any, folder: Path) -> tuple[bytes, str]:
    """Parts have a `name`, a body like a case's, and may have a `filename` and a `type`."""
    if not isinstance(parts, list) or not all(isinstance(part, dict) and "name" in part for part in parts):
        raise BadInput("a case's multipart body must be a list of parts, each with a name and a body")
    pieces: list[bytes] = []
    for part in parts:
        about = {key: part[key] for key in ("text", "json", "base64", "zeros", "file") if key in part}
        data, kind = _body_of(about, folder)
        named = f'form-data; name="{part["name"]}"'
        named += f'; filename="{part["filename"]}"' if part.get("filename") else ""
        kind = part.get("type") or (None if "json" in part else kind)
        typed = f"Content-Type: {kind}\r\n" if kind else ""
        pieces.append(f"--{_BOUNDARY}\r\nContent-Disposition: {named}\r\n{typed}\r\n".encode() + data + b"\r\n")
    return b"".join(pieces) + f"--{_BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={_BOUNDARY}"


def compare(cases: Sequence[Case], old: httpx.Client, new: httpx.Client) -> Comparison:
    """Send every case to both servers, the old one first. Raises httpx.HTTPError if one of them cannot be reached."""
    found = Comparison([], [])
    for case in cases:
        answers = [
            client.request(case.method, case.path, headers=case.headers, content=case.body or None)
            for client in (old, new)
        ]
        differences = list(compare_answers(case.name, *answers))
        found.differences.extend(differences)
        if not differences and answers[0].is_error:
            found.refused_alike.append(f"{case.name} ({answers[0].status_code})")
    return found


def compare_answers(name: str, old: httpx.Response, new: httpx.Response) -> Iterator[Difference]:
    """The differences of two answers: status, content type, and places in the body.

    The content type counts only if the old answer has one (TorchServe gives handlers' answers none). Descriptions of
    the API are not compared further.
    """
    if old.status_code != new.status_code:
        yield Difference(name, "status", str(old.status_code), f"{new.status_code} {_short(new.text)}")
        return
    kinds = [answer.headers.get("content-type", "").partition(";")[0].strip() for answer in (old, new)]
    if kinds[0] and kinds[0] != kinds[1]:
        yield Difference(name, "content-type", kinds[0], kinds[1])
    try:
        documents = [json.loads(answer.content) for answer in (old, new)]
    except ValueError:
        if _masked(old.content) != _masked(new.content):
            yield Difference(name, "body", _short(old.text), _short(new.text))
        return
    if all(isinstance(document, dict) and "openapi" in document for document in documents):
        return
    for where, left, right in _differences("$", documents[0], documents[1]):
        yield Difference(name, where, _short(left), _short(right))


def _differences(where: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if key not in old or key not in new:
                yield f"{where}.{key}", old.get(key, "nothing"), new.get(key, "nothing")
            else:
                yield from _differences(f"{where}.{key}", old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where}.length", len(old), len(new)
            return
        for index, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{where}[{index}]", left, right)
    elif not _is_same(old, new):
        yield where, old, new


def _is_same(old: Any, new: Any) -> bool:
    numbers = [isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new)]
    if all(numbers):
        return math.isclose(old, new, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE) or old == new
    if isinstance(old, str) and isinstance(new, str):
        return _UUID.sub("<id>", old) == _UUID.sub("<id>", new)
    return type(old) is type(new) and bool(old == new)


def _masked(body: bytes) -> bytes:
    return _UUID.sub("<id>", body.decode("latin-1")).encode("latin-1")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
