"""The first class in a file of `torch.save` that is no part of tensors and containers, found without running it.

A whole module that was saved, `torch.save(net)`, names its class; a state dict names none.
"""

from __future__ import annotations

import os
from pathlib import Path

from marserve.archive.pickles.check_budget import CheckBudget, Overspent
from marserve.archive.pickles.pickle_check import PYTHON_GLOBALS
from marserve.archive.pickles.pickle_program import Refused, Span, run
from marserve.archive.reading import zip_records
from marserve.archive.reading.zip_records import ZipRecords
from marserve.errors import BadArchive, UnsafeArchive
from marserve.files.regular import open_regular

_MAX_ENTRIES = 200_000
_MAX_DIRECTORY_BYTES = 32 << 20
# torch's old form: a number, a version, facts of the machine, then the object.
_MOST_PICKLES = 4
# Numbers and containers beside those that torch allows.
_PLAIN = ("builtins", "collections", "copyreg", "numpy")


def find_foreign_class(path: Path) -> str:
    """The class as `module.name`; empty without one, and for a file that cannot be followed to it."""
    try:
        with open_regular(path) as file:
            if file.read(4) != zip_records.START:
                return _first_of(Span(file, 0, os.fstat(file.fileno()).st_size))
            records = ZipRecords(file, path.name, max_entries=_MAX_ENTRIES, max_directory_bytes=_MAX_DIRECTORY_BYTES)
            for entry in records.entries:
                if entry.name.endswith("/data.pkl") and entry.method == zip_records.STORED:
                    at = records.find_data(entry)
                    return _first_of(Span(file, at, at + entry.size))
    except (OSError, BadArchive, UnsafeArchive, Overspent):
        pass
    return ""


def _first_of(span: Span) -> str:
    found: list[str] = []

    def allows(name: str) -> bool:
        if name in PYTHON_GLOBALS or name.partition(".")[0] in _PLAIN:
            return True
        found.append(name)
        return False

    budget = CheckBudget()
    span.seek(0)
    try:
        for _ in range(_MOST_PICKLES):
            if run(span, allows, budget=budget).failure is not None:
                break
    except Refused:
        pass
    return found[0] if found else ""
