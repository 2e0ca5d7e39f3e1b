"""The documents that were applied, newest last, in files of a folder: bounded, each written complete or not at all.

One file an entry, `00000042.json`. An entry knows which one undoing it goes back to, so that undoing twice goes
back twice. The newest file is what was in force when the server last ended, however that came: it is written before the
moment in which a change comes into force, and taken back when that fails.
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
# A document, escaped, and what is said of it.
LARGEST_ENTRY = 64 << 20
MOST_NUMBER = 99_999_999
# The last second of the year 9999.
LATEST = 253_402_300_799
_NAME = re.compile(r"([0-9]{8})\.json")


@dataclass(frozen=True, slots=True)
class Applied:
    """One document that came into force.

    `number` counts from 1. `at` is in seconds since the epoch. `by` says what brought it: `start`, `apply`, `undo`,
    `watch` or `adopt`, or `found` for what a server had before a document came; `what` in a few words what it changed.
    `document` is its text, `digest` that of what it means.
    `before` is the number of the entry that undoing goes back to, 0 without one. `is_found`: it says what calls
    had made; true of an undo that goes back to such an entry, too.
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
        """What it says. Raises BadDesiredState for a file that was changed by hand."""
        return read(self.document.encode(), f"entry {self.number} of the history")

    def told(self, *, is_current: bool) -> dict[str, Any]:
        """The entry as clients get it, without its text."""
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
    """The entries of one folder; None keeps them in memory alone. All methods block, and one thread calls at a time.

    With `is_needed` the folder is made at once, and an entry that cannot be written is an error. Without it the first
    entry makes the folder; where that fails the log says so, and entries last as long as the process.
    """

    def __init__(self, folder: Path | None, kept: int = KEPT, *, is_needed: bool = True) -> None:
        """Read what is there. A file that is damaged or not an entry is left alone and logged. Raises OSError."""
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
                path.unlink(missing_ok=True)  # of a server that was killed while it wrote
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
        """What is in force, or was when the server last ended."""
        return self.entries[-1] if self.entries else None

    def find(self, number: int) -> Applied | None:
        """An entry by its number; None for one that is not kept any more."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def add(
        self, state: DesiredState, *, at: float, by: str, what: str, before: int | None = None, is_found: bool = False
    ) -> Applied:
        """Write an entry, after which this document is the one in force. Raises OSError; nothing is changed then.

        `before` is what undoing it goes back to; the newest entry if not given.
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
        """Remove the newest entry: it did not come into force after all."""
        if self.newest is not entry:
            return
        if self._folder is not None:
            self._path(entry.number).unlink(missing_ok=True)
        self.entries.pop()

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{number:08d}.json"
