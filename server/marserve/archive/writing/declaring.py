"""Finds what an archive's handler declares, before the archive is written: by importing it in a process of its own.

Only a handler whose text marks a model is imported. No model is loaded: its declaration follows from the decorator and
the signature of `predict`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import msgspec

from marserve.archive.contents.declaration import parse_declaration
from marserve.archive.writing.python_source import read_python
from marserve.errors import CannotImport, without_stop

# How long the import of a handler may take, and after how much of it the caller hears of the wait.
IMPORT_S = 120.0
WAIT_S = 1.0


class Imported(msgspec.Struct):
    """What the process that imported the handler says: the declaration's JSON, empty for none, or what was wrong.

    `where` is the author's file and line, as in `NAME, line 3`, and `traceback` their part of it; empty where the
    fault is of no line. `is_missing`: an import failed, so that a machine with other packages may say more.
    `advice` is what the author of the declaration may have meant otherwise; empty for nothing.
    """

    declaration: str = ""
    advice: str = ""
    fault: str = ""
    where: str = ""
    traceback: str = ""
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Declaring:
    """The declaration of a handler, None if it has none; `warning` is why it was not found, or advice."""

    text: bytes | None = None
    warning: str = ""


class Importing:
    """The import of a handler, under way from the time that this is made until its context ends."""

    def __init__(self, members: Mapping[str, Path], handler: str, *, always: bool = False) -> None:
        """Begin to import the handler of an archive with these members; `handler` is the manifest's word.

        With `always` also one that marks no model. Raises CannotArchive for a file that is no Python.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        module, _, name = handler.partition(":")
        file = members.get(f"{PurePosixPath(module).name.removesuffix('.py')}.py")
        self._file = "" if file is None else file.name
        if file is None or not (always or _marks_a_model(file)):
            return
        self._folder = tempfile.TemporaryDirectory(prefix="marserve-declare-")
        for member, path in members.items():
            place = Path(self._folder.name, member)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())
        word = f"{file.stem}:{name}" if name else file.stem
        program = "marserve.worker.without_server.declare"
        command = [sys.executable, "-P", "-m", program, self._folder.name, word, str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_under_way(self) -> bool:
        """Whether a process imports the handler; False for a handler that is not imported."""
        return self._process is not None and self._process.returncode is None

    def close(self) -> None:
        """End the process and what it started. May be called twice."""
        if self._process is not None:
            _end(self._process)
        if self._folder is not None:
            self._folder.cleanup()

    def end(self) -> None:
        """End the process, from any thread; a call that waits for its result then gets a fault."""
        if self._process is not None:
            _kill(self._process)

    def declared(self, *, must_import: bool = False, on_wait: Callable[[str], None] | None = None) -> Declaring:
        """Wait for what the handler declares. `on_wait` gets the file's name if that takes longer than a second.

        Raises CannotArchive for a declaration that cannot be served, and CannotImport for a handler that fails; one
        that imports a package that is not here gives a warning, with `must_import` that error.
        """
        if self._process is None:
            return Declaring()
        imported = _result(self._process, lambda: on_wait and on_wait(self._file))
        if imported.is_missing and not must_import:
            return Declaring(
                None,
                f"no declaration is written, since {self._file} cannot be imported here: "
                f"{without_stop(imported.fault)}",
            )
        if imported.fault:
            raise CannotImport(f"{imported.where or self._file}: {without_stop(imported.fault)}.", imported.traceback)
        if not imported.declaration:
            return Declaring()
        text = imported.declaration.encode()
        parse_declaration(text)
        return Declaring(text, imported.advice and f"{self._file}: {imported.advice}")


def _marks_a_model(file: Path) -> bool:
    source = file.read_bytes()
    return b"marserve_handlers" in source and read_python(source, file.name).marks_a_model


def _result(process: subprocess.Popen[bytes], on_wait: Callable[[], object]) -> Imported:
    """Wait until the process has said what it found."""
    try:
        said, printed = process.communicate(timeout=min(WAIT_S, IMPORT_S))
    except subprocess.TimeoutExpired:
        on_wait()
        try:
            said, printed = process.communicate(timeout=max(IMPORT_S - WAIT_S, 0.0))
        except subprocess.TimeoutExpired:
            return Imported(fault=f"its import did not end within {IMPORT_S:g} s")
    try:
        return msgspec.json.decode(said, type=Imported)
    except msgspec.DecodeError:
        last = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Imported(fault=f"its import ended the process with status {process.returncode}{last and f': {last}'}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group, and reap it."""
    _kill(process)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
