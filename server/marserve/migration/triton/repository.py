"""Finds the models of a repository, their versions and their files. Follows no link out of the repository.

The layout is Triton's: `MODEL/config.pbtxt`, and `MODEL/VERSION/…` with a whole number as version, without leading
zeros.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from marserve.archive.writing.writer import check_name
from marserve.errors import CannotArchive
from marserve.migration.triton.notes import Notes, Refused

CONFIG_NAME = "config.pbtxt"
MOST_MODELS = 10_000
MOST_FILES = 10_000
_LONGEST_NUMBER = 18

_OUTSIDE = "copy what it leads to into the repository"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model: its name, its folder, and its versions, the lowest first."""

    name: str
    folder: Path
    versions: tuple[int, ...]


def find_models(root: Path, notes: Notes) -> Iterator[ModelFolder]:
    """The models below `root`, a resolved path, by name. What cannot be one by its name or place is noted."""
    for count, (name, path) in enumerate(_entries(root)):
        if count == MOST_MODELS:
            notes.action(
                0, f"it has more than {MOST_MODELS} entries, and no further one was read", "import it in parts"
            )
            return
        if name.startswith(".") or (not path.is_dir() and not path.is_symlink()):
            continue
        spot = notes.of(name)
        try:
            check_inside(path, root)
            check_name("model", name)
        except Refused as refused:
            spot.refuse(refused)
        except CannotArchive as error:
            spot.action(0, error.message.rstrip("."), "rename the folder, and `name` in its config.pbtxt")
        else:
            if path.is_dir():
                yield ModelFolder(name, path, tuple(_versions(path, spot, root)))


def _versions(folder: Path, notes: Notes, root: Path) -> list[int]:
    found: list[int] = []
    for name, path in _entries(folder):
        if not (name.isascii() and name.isdecimal()):
            continue
        spot = notes.of(f"{notes.file}/{name}")
        if name.startswith("0") or len(name) > _LONGEST_NUMBER:
            spot.differs(0, "is no version, as Triton has it: a number without leading zeros")
            continue
        try:
            check_inside(path, root)
        except Refused as refused:
            spot.refuse(refused)
            continue
        if path.is_dir():
            found.append(int(name))
    return sorted(found)


def files_of(folder: Path, root: Path) -> dict[str, Path]:
    """All files below a folder of the repository, by their names in it, without hidden ones.

    Raises Refused for a link that leads out or to a folder, for what is no regular file, and for too many files.
    """
    found: dict[str, Path] = {}
    folders = [folder]
    while folders:
        for name, path in _entries(folders.pop()):
            if name.startswith("."):
                continue
            shown = path.relative_to(folder).as_posix()
            check_inside(path, root, shown)
            try:
                mode = path.stat().st_mode
            except OSError as error:
                raise Refused(0, f"{shown} cannot be read: {error.strerror}", "let it be read") from None
            if stat.S_ISDIR(mode):
                if path.is_symlink():
                    raise Refused(0, f"{shown} is a link to a folder", "put the folder itself there")
                folders.append(path)
            elif not stat.S_ISREG(mode):
                raise Refused(0, f"{shown} is no regular file", "remove it, or put a file there")
            else:
                found[shown] = path
                if len(found) > MOST_FILES:
                    raise Refused(0, f"it has more than {MOST_FILES} files", "leave in it what the model needs")
    return found


def check_inside(path: Path, root: Path, shown: str = "it") -> None:
    """Raise Refused for a link that leads nowhere, or out of the repository at `root`, a resolved path."""
    if path.is_symlink() and not path.exists():
        raise Refused(0, f"{shown} is a link that leads nowhere", "mend or remove it")
    if not Path(os.path.realpath(path)).is_relative_to(root):
        raise Refused(0, f"{shown} is a link that leads out of the repository", _OUTSIDE)


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """Names and paths in a folder, sorted. Raises Refused if it cannot be read."""
    try:
        return [(name, folder / name) for name in sorted(os.listdir(folder))]
    except OSError as error:
        raise Refused(0, f"it cannot be read: {error.strerror}", "let it be read") from None
