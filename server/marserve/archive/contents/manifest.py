"""Reads `MAR-INF/MANIFEST.json`, what an archive says of itself (contract 8.2). Knows nothing of registrations.

Present values are typed and judged here. The registration fills in missing values or refuses them, since its parameters
may name them: `read_manifest` of an archive without a manifest gives an empty one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from marserve.archive.contents.json_depth import is_deeper
from marserve.errors import BadArchive
from marserve.files.regular import NotRegular, open_regular

MANIFEST_PATH = "MAR-INF/MANIFEST.json"
RUNTIMES = ("python", "python3", "LSP")

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 64
_UNREADABLE = "Failed to parse signature.json."  # the contract's words, kept for clients that know them


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest's keys, None where absent.

    `document` is the whole parsed file, as handlers see it (`context.manifest`), None if the archive has none.
    `has_model_entry` is False only for an explicit `"model": null`. `runtime` is the word as written; the registration,
    which may name another, checks that it is one of `RUNTIMES`. Names of files (`handler` up to its first `:`) never
    lead outside of the archive.
    """

    created_on: str | None = None
    archiver_version: str | None = None
    description: str | None = None
    runtime: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    handler: str | None = None
    serialized_file: str | None = None
    model_file: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    envelope: str | None = None
    source_vocab: str | None = None
    has_model_entry: bool = True
    document: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)


_TOP_KEYS = {
    "createdOn": "created_on",
    "archiverVersion": "archiver_version",
    "description": "description",
    "runtime": "runtime",
}
_MODEL_KEYS = {
    "modelName": "model_name",
    "modelVersion": "model_version",
    "handler": "handler",
    "serializedFile": "serialized_file",
    "modelFile": "model_file",
    "requirementsFile": "requirements_file",
    "configFile": "config_file",
    "envelope": "envelope",
    "sourceVocab": "source_vocab",
}
_FILE_KEYS = ("handler", "serializedFile", "modelFile", "requirementsFile", "configFile", "sourceVocab")


def read_manifest(source: Path | bytes) -> Manifest:
    """Read the manifest of the unpacked archive at `source`, or the manifest whose bytes `source` are.

    An archive without one gives an empty `Manifest`. Raises BadArchive: over 1 MiB, not JSON, not an object, nested
    too deeply, a value of the wrong type, a file name that leads outside of the archive.
    """
    data = source if isinstance(source, bytes) else _read_file(source / MANIFEST_PATH)
    if data is None:
        return Manifest()
    if len(data) > _MAX_BYTES:
        raise BadArchive(f"{_UNREADABLE} {MANIFEST_PATH} has more than {_MAX_BYTES} bytes.")
    document = _parse(data, exact_numbers=False)
    values: dict[str, Any] = {}
    for key, name in _TOP_KEYS.items():
        values[name] = _text(document, key, key, data)
    model = document.get("model", {})
    if model is not None and not isinstance(model, dict):
        raise BadArchive(f"{_UNREADABLE} model must be an object, not {_kind(model)} ({MANIFEST_PATH}).")
    for key, name in _MODEL_KEYS.items():
        values[name] = _text(model or {}, key, f"model.{key}", data)
    for key in _FILE_KEYS:
        _refuse_outside(key, values[_MODEL_KEYS[key]])
    missing = [key for key in ("createdOn", "archiverVersion") if key not in document]
    warnings = [f"the manifest has no {' and no '.join(missing)}"] if missing else []
    return Manifest(**values, has_model_entry=model is not None, document=document, warnings=warnings)


def _read_file(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except NotRegular as error:
        raise BadArchive(f"{_UNREADABLE} {MANIFEST_PATH}: {error.strerror}.") from None
    except IsADirectoryError:
        raise BadArchive(f"{_UNREADABLE} {MANIFEST_PATH} is a folder.") from None


def _parse(data: bytes, *, exact_numbers: bool) -> dict[str, Any]:
    """The JSON object in `data`; with `exact_numbers` its numbers are kept as they are written, as text."""
    number = str if exact_numbers else None
    try:
        document = json.loads(data.decode("utf-8-sig"), parse_float=number, parse_int=number)
    except (ValueError, RecursionError):
        raise BadArchive(_UNREADABLE) from None
    if not isinstance(document, dict):
        raise BadArchive(f"{_UNREADABLE} {MANIFEST_PATH} must hold an object, not {_kind(document)}.")
    if is_deeper(document, _MAX_DEPTH):
        raise BadArchive(f"{_UNREADABLE} {MANIFEST_PATH} is nested more than {_MAX_DEPTH} deep.")
    return document


def _text(holder: dict[str, Any], key: str, label: str, data: bytes) -> str | None:
    value = holder.get(key)
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int | float) and not isinstance(value, bool):
        # `"modelVersion": 1.10` is read as the text 1.10, as TorchServe reads it.
        exact = _parse(data, exact_numbers=True)
        return str((exact["model"] if label.startswith("model.") else exact)[key])
    raise BadArchive(f"{_UNREADABLE} {label} must be text, not {_kind(value)} ({MANIFEST_PATH}).")


def _kind(value: object) -> str:
    names: list[tuple[type, str]] = [(bool, "true or false"), (dict, "an object"), (list, "a list"), (str, "text")]
    for type_, name in names:
        if isinstance(value, type_):
            return name
    return "null" if value is None else "a number"


def _refuse_outside(key: str, value: str | None) -> None:
    """Refuse a name that is absolute or climbs. Folders in front of a name are fine: the worker drops a handler's."""
    name = (value or "").split(":", 1)[0] if key == "handler" else value or ""
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise BadArchive(f"{key} in {MANIFEST_PATH} is {value!r}; it must name a file inside of the archive.")
