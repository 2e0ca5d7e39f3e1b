"""The documents that were applied, newest last, in files of a folder: bounded, each written complete or not at all.

Each entry has a file, `00000042.json`. An entry has the number of the one that undoing it goes back to, so that undoing
twice goes back twice. However the server ended, the newest file is the document that was in force: it is written just
before a change comes into force, and removed if that fails.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from marserve.desired_state.document import DesiredState, read
from marserve.errors import BadDesiredState
from marserve.files.atomic import replace_file
from marserve.files.regular import read_regular

log = logging.getLogger("marserve.rollout")

KEPT = 50
# The bound of a file: an escaped document, and the other members of an entry.
LARGEST_ENTRY = 64 << 20
MOST_NUMBER = 99_999_999
# The last second of the year 9999.
LATEST = 253_402_300_799
_NAME = re.compile(r"([0-9]{8})\.json")


@dataclass(frozen=True, slots=True)
class Applied:
    """One document that came into force.

    `number` counts from 1. `at` is in seconds since the epoch. `by` is its cause: `start`, `apply`, `undo`, `watch` or
    `adopt`, or `found` for the models that a server had before the first document; `what` says in a few words what it
    changed. `document` is its text, `digest` that of its canonical form.
    `before` is the number of the entry that undoing goes back to, 0 without one. `is_found`: its models came by calls,
    or it is an undo that went back to such an entry.
    """

    number: int
    at: float
    by: str
    what: str
    digest: str
    document: str
    before: int = 0
    is_found: bool = False

    def state(self) -> DesiredState:
        """The state in its document. Raises BadDesiredState for a file that was changed by hand."""
        return read(self.document.encode(), f"entry {self.number} of the history")

    def describe(self, *, is_current: bool) -> dict[str, Any]:
        """The entry in the answer to a client, without its text."""
        return {
            "number": self.number,
            "at": self.at,
            "by": self.by,
            "what": self.what,
            "digest": self.digest,
            "undoGoesTo": self.before or None,
            "isCurrent": is_current,
        }


class History:
    """The entries of one folder; with None they are only in memory. All methods block; one thread calls at a time.

    With `is_needed` the folder is made at once, and an entry that cannot be written is an error. Without it the first
    entry makes the folder; if that fails it is logged, and entries last as long as the process.
    """

    def __init__(self, folder: Path | None, kept: int = KEPT, *, is_needed: bool = True) -> None:
        """Read the entries. A file that is damaged or not an entry is left alone and logged. Raises OSError."""
        self._folder = folder
        self._kept = kept
        self._is_needed = is_needed
        self.entries: list[Applied] = []
        if folder is None:
            return
        if is_needed:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._read(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if is_needed:
                raise
            self._give_folder_up(error)

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".part"):
                path.unlink(missing_ok=True)  # left by a server that was killed during a write
            if not _NAME.fullmatch(path.name):
                continue
            try:
                entry = msgspec.json.decode(read_regular(path, LARGEST_ENTRY), type=Applied)
                if not (0 < entry.number <= MOST_NUMBER and 0 <= entry.before <= MOST_NUMBER):
                    raise ValueError(f"it is number {entry.number}, before it is {entry.before}")
                if not 0 <= entry.at <= LATEST:
                    raise ValueError(f"its time is {entry.at}")
                entry.state()
            except (OSError, ValueError, RecursionError, BadDesiredState) as error:
                log.warning("%s of the history of desired states is not used: %s", path.name, error)
                continue
            self.entries.append(entry)
        self.entries.sort(key=lambda entry: entry.number)

    @property
    def newest(self) -> Applied | None:
        """The entry in force, or that was in force when the server last ended."""
        return self.entries[-1] if self.entries else None

    def find(self, number: int) -> Applied | None:
        """An entry by its number; None if it is not kept any more."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def add(
        self, state: DesiredState, *, at: float, by: str, what: str, before: int | None = None, is_found: bool = False
    ) -> Applied:
        """Write an entry, which makes this document the one in force. Raises OSError; nothing is changed then.

        `before` is the entry that undoing goes back to; the newest entry if not given.
        """
        newest = self.newest
        number = newest.number + 1 if newest is not None else 1
        back = before if before is not None else (newest.number if newest is not None else 0)
        entry = Applied(number, at, by, what, state.digest, state.write().decode(), back, is_found)
        if self._folder is not None:
            self._write(self._folder, entry)
        self.entries.append(entry)
        while len(self.entries) > self._kept:
            gone = self.entries.pop(0)
            if self._folder is not None:
                self._path(gone.number).unlink(missing_ok=True)
        return entry

    def _write(self, folder: Path, entry: Applied) -> None:
        try:
            if not self._is_needed:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            data = json.dumps(asdict(entry), ensure_ascii=False).encode()
            replace_file(self._path(entry.number), data, is_durable=True)
        except OSError as error:
            if self._is_needed:
                raise
            self._give_folder_up(error)

    def _give_folder_up(self, error: OSError) -> None:
        log.warning(
            "The history of applied documents cannot be kept in %s (%s): `undo` works until the server ends",
            self._folder,
            error.strerror or error,
        )
        self._folder = None

    def take_back(self, entry: Applied) -> None:
        """Remove the newest entry, which did not come into force."""
        if self.newest is not entry:
            return
        if self._folder is not None:
            self._path(entry.number).unlink(missing_ok=True)
        self.entries.pop()

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:08d}.json"
