"""What a process under comparison recorded of a model: its answers, and what its model gave, run by run.

The answers say where the arrays are: a zip file a run, with numpy's own files `INPUT/OUTPUT` in it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]


class RecordedAnswer(msgspec.Struct, frozen=True):
    """The handler's answer to one input. `message` is empty unless it failed; `call` counts the model's calls, from 0,
    -1 for an input whose call was not kept."""

    status: int
    message: str
    headers: list[tuple[str, str]]
    file: str
    call: int


class RecordedRun(msgspec.Struct, frozen=True):
    """One run of what reached the model. `faults` are sentences about batches that failed."""

    name: str
    file: str
    faults: list[str] = []
    is_cut_short: bool = False


class Recording(msgspec.Struct, frozen=True):
    """All of one model. `why_not` says why its model was not looked into, empty where it was.

    `scores` are outputs that hold class scores, `*` for the only one.
    """

    answers: list[RecordedAnswer]
    kind: str
    why_not: str
    runs: list[RecordedRun]
    scores: list[str] = []
    has_compare: bool = False
    notes: list[str] = []

    def run(self, name: str) -> RecordedRun | None:
        """The run of that name; None where it was not made."""
        return next((run for run in self.runs if run.name == name), None)

    def is_cut_short(self, inputs: int) -> bool:
        """Whether the time was over before so many inputs were tried and all runs were made."""
        return len(self.answers) < inputs or any(run.is_cut_short for run in self.runs)

    def inputs_of_calls(self) -> dict[int, int]:
        """The index of the input behind each call of the model."""
        return {answer.call: at for at, answer in enumerate(self.answers) if answer.call >= 0}


def read_recording(document: Any) -> Recording:
    """What the process said. Raises msgspec.ValidationError."""
    return msgspec.convert(document, Recording)


class RunArrays:
    """The arrays of a run, read one call at a time. Close it after use."""

    def __init__(self, folder: Path, run: RecordedRun) -> None:
        """Open the run's file. Raises OSError and zipfile.BadZipFile."""
        self._file = zipfile.ZipFile(folder / run.file)
        self._names: dict[int, list[str]] = {}
        for name in self._file.namelist():
            call, _, output = name.partition("/")
            self._names.setdefault(int(call), []).append(output)

    def __enter__(self) -> RunArrays:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._names))

    def outputs(self, call: int) -> dict[str, Array]:
        """What the model gave for that call, by the name of the output; empty for a call that is not in the run."""
        found = {}
        for output in self._names.get(call, []):
            with self._file.open(f"{call}/{output}") as member:
                found[output] = np.lib.format.read_array(member, allow_pickle=False)
        return found
