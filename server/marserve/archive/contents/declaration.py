"""Reads `MAR-INF/declaration.json`, what a model takes and gives, as `marserve archive` wrote it.

A worker compares it with what the handler declares. The server shows it, and runs no code of the archive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marserve.archive.contents.json_depth import is_deeper
from marserve.errors import BadArchive
from marserve.files.regular import NotRegular, open_regular
from marserve.messages import MAX_DECLARATION_BYTES

DECLARATION_PATH = "MAR-INF/declaration.json"
VERSION = 1

_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Declared:
    """An archive's declaration: its text, and what it says."""

    text: bytes
    document: Mapping[str, Any]


def read_declaration(folder: Path) -> Declared | None:
    """The declaration of the unpacked archive at `folder`; None if it has none.

    Raises BadArchive for one over 64 KiB, of another version, or that is no JSON object.
    """
    try:
        with open_regular(folder / DECLARATION_PATH) as file:
            text = file.read(MAX_DECLARATION_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotRegular, IsADirectoryError) as error:
        raise BadArchive(f"{DECLARATION_PATH} cannot be read: {error.strerror}.") from None
    return parse_declaration(text)


def parse_declaration(text: bytes) -> Declared:
    """The declaration in this text. Raises BadArchive as `read_declaration`."""
    again = "make the archive anew with marserve archive"
    if len(text) > MAX_DECLARATION_BYTES:
        raise BadArchive(f"{DECLARATION_PATH} has more than {MAX_DECLARATION_BYTES} bytes: {again}.")
    try:
        document = json.loads(text.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        raise BadArchive(f"{DECLARATION_PATH} is not JSON: {again}.") from None
    if not isinstance(document, dict) or document.get("kind") not in ("tensors", "item"):
        raise BadArchive(f"{DECLARATION_PATH} is no declaration: {again}.")
    if document.get("version") != VERSION:
        raise BadArchive(
            f"{DECLARATION_PATH} has the version {document.get('version')!r}, and this server reads version {VERSION}: "
            f"{again}."
        )
    if is_deeper(document, _MAX_DEPTH):
        raise BadArchive(f"{DECLARATION_PATH} is nested more than {_MAX_DEPTH} deep.")
    return Declared(text, document)


def _refuse_constant(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity, which describe could not say again


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(digits)
    return number
