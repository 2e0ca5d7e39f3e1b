"""An interpreter other than the server's that workers run under: how it is started, and whether it was replaced.

It gets our packages alone, by a folder with links to them: those of the server's environment are for its Python. Its
worker is never forked from a template, which is a process of the server's interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OUR_PACKAGES = ("marserve", "marserve_handlers")

# What `-P -m marserve.worker` does: Python 3.10 has no `-P`. Until `sys.path` is mended nothing is read from files.
_START = """\
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
import runpy
runpy.run_module("marserve.worker", run_name="__main__", alter_sys=True)
"""
# By it a worker knows what to advise when a module is missing (`marserve_handlers.support.distributions`).
INTERPRETER_VARIABLE = "MARSERVE_INTERPRETER"
# They lead an interpreter to packages of another one, or to another one.
_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class Stamp(NamedTuple):
    """What tells a file from one that took its place. A file that is missing has zeros."""

    path: str
    inode: int
    modified_ns: int
    size: int


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter as it was when it was looked at; `name` is the operator's for it, or empty.

    `packages` is the folder with links to our packages, `stamps` are its files.
    """

    path: str
    version: str
    packages: str
    name: str = ""
    stamps: tuple[Stamp, ...] = ()

    @property
    def shown(self) -> str:
        """Its version and path, for sentences."""
        return f"Python {self.version} ({self.path})"


def program_of(interpreter: Interpreter | None, python: str = "") -> list[str]:
    """The words that start a worker; its arguments follow them.

    Without another interpreter `python` runs it, the one of a virtual environment of ours, or if empty the server's.
    """
    if interpreter is not None:
        return [interpreter.path, "-c", _START]
    # -P: nothing is imported from the server's working directory.
    return [python or sys.executable, "-P", "-m", "marserve.worker"]


def environment_of(interpreter: Interpreter | None, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers, for this interpreter: it finds our packages, and no others of the server's."""
    if interpreter is None:
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in _NOT_FOR_OTHERS}
    own = {"PYTHONPATH": interpreter.packages, "PYTHONNOUSERSITE": "1", INTERPRETER_VARIABLE: interpreter.path}
    return {**kept, **own}


def stamp_files(paths: Iterable[str]) -> tuple[Stamp, ...]:
    """The stamps of these files, and of what links among them lead to. Blocks."""
    stamps = []
    for path in dict.fromkeys(paths):
        for stat in (os.lstat, os.stat):
            try:
                found = stat(path)
            except OSError:
                stamps.append(Stamp(path, 0, 0, 0))
            else:
                stamps.append(Stamp(path, found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(dict.fromkeys(stamps))


def find_change(interpreter: Interpreter) -> str:
    """Why workers may not be started under it any more, empty if it is what it was. Blocks."""
    now = stamp_files(stamp.path for stamp in interpreter.stamps)
    if now == interpreter.stamps:
        return ""
    changed = next(stamp.path for stamp in interpreter.stamps if stamp not in now)
    verb = "was replaced" if os.path.exists(changed) else "is gone"
    return (
        f"the interpreter of its workers, {interpreter.shown}, has changed since the version was loaded: {changed} "
        f"{verb}. Load the version anew to use the interpreter as it is now."
    )


def link_packages(folder: Path) -> Path:
    """Make the folder with links to our packages, unless it is there. Blocks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUR_PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        with contextlib.suppress(FileExistsError):  # made by another thread
            (folder / name).symlink_to(os.path.abspath(next(iter(spec.submodule_search_locations))))
    return folder
