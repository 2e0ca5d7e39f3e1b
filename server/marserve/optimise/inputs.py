"""A folder of request bodies: one file each, in the order of their names, with the content type of the ending."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marserve.errors import MarserveError

MOST_INPUTS: Final = 100_000
# What Python's table leaves to each machine, or does not know.
_TYPES: Final = {".npy": "application/x-npy", ".json": "application/json", ".txt": "text/plain", ".jsonl": "text/plain"}


class BadInputs(MarserveError):
    """The folder has no request bodies that can be read."""


@dataclass(frozen=True, slots=True)
class Input:
    """One request body. `content_type` is empty where the ending says nothing."""

    path: Path
    content_type: str


def find_inputs(folder: Path) -> list[Input]:
    """The request bodies in a folder; hidden files and folders in it are left out. Raises BadInputs."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    except OSError as error:
        raise BadInputs(f"{folder} cannot be read: {error.strerror}.") from error
    if not paths:
        raise BadInputs(f"{folder} holds no files: put one request body a file there.")
    if len(paths) > MOST_INPUTS:
        raise BadInputs(f"{folder} holds {len(paths)} files; at most {MOST_INPUTS} are compared.")
    return [Input(path.absolute(), content_type_of(path)) for path in paths]


def content_type_of(path: Path) -> str:
    """The content type that a file's ending says, empty for none."""
    return _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""
