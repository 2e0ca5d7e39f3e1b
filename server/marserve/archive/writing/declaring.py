"""Finds what an archive's handler declares, before the archive is written: by importing it in a process of its own.

Only a handler whose text marks a model is imported. No model is loaded: its declaration follows from the decorator and
the signature of `predict`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from marserve.archive.contents.declaration import parse_declaration
from marserve.errors import CannotArchive, without_stop

# How long the import of a handler may take.
IMPORT_S = 120.0

_MARKS = re.compile(rb"^[ \t]*@[ \t]*(?:\w+[ \t]*\.[ \t]*)*model\b|(?<![.\w])model[ \t]*\(", re.MULTILINE)


class Imported(msgspec.Struct):
    """What the process that imported the handler says: the declaration's JSON, empty for none, or what was wrong.

    `is_missing`: an import failed, so that a machine with other packages may say more.
    """

    declaration: str = ""
    fault: str = ""
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Declaring:
    """The declaration of a handler, None if it has none; `warning` is why it could not be found, or empty."""

    text: bytes | None = None
    warning: str = ""


def find_declaration(members: Mapping[str, Path], handler: str) -> Declaring:
    """What the handler of an archive with these members declares.

    `handler` is the manifest's word. Raises CannotArchive for a declaration that cannot be served, and for a handler
    that fails; one that imports a package that is not here gives a warning.
    """
    module, _, name = handler.partition(":")
    file = members.get(f"{PurePosixPath(module).name.removesuffix('.py')}.py")
    if file is None or not _marks_a_model(file):
        return Declaring()
    with tempfile.TemporaryDirectory(prefix="marserve-declare-") as folder:
        for member, path in members.items():
            place = Path(folder, member)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())
        imported = _import(folder, f"{file.stem}:{name}" if name else file.stem)
    if imported.is_missing:
        return Declaring(
            None,
            f"no declaration is written, since {file.name} cannot be imported here: {without_stop(imported.fault)}",
        )
    if imported.fault:
        raise CannotArchive(f"{file.name} cannot be archived: {without_stop(imported.fault)}.")
    if not imported.declaration:
        return Declaring()
    text = imported.declaration.encode()
    parse_declaration(text)
    return Declaring(text)


def _marks_a_model(file: Path) -> bool:
    source = file.read_bytes()
    return b"marserve_handlers" in source and _MARKS.search(source) is not None


def _import(folder: str, handler: str) -> Imported:
    """Import a handler in a process of its own, and return what that says. Ends the process and what it started."""
    command = [sys.executable, "-P", "-m", "marserve.worker.without_server.declare", folder, handler]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        said, printed = process.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return Imported(fault=f"its import did not end within {IMPORT_S:g} s")
    finally:
        _end(process)
    try:
        return msgspec.json.decode(said, type=Imported)
    except msgspec.DecodeError:
        last = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Imported(fault=f"its import ended the process with status {process.returncode}{last and f': {last}'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
