"""How much memory versions were measured to take, kept in a small file, so that a restart need not estimate it again.

An entry holds for weights of one size: an archive that was changed under the same name is estimated anew. The server
works without the file: one that cannot be read counts as empty, one that cannot be written is logged once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from marserve.files.atomic import replacing, sweep
from marserve.files.regular import read_regular
from marserve.memory.needs import Learned
from marserve.pool.options import PoolOptions

log = logging.getLogger("marserve.registry.memory")

FORMAT = 1
# Beyond this the oldest entries are dropped: names may come and go for years.
MOST_ENTRIES = 1000
LARGEST_FILE = 16 << 20
_FIELDS = ("firstBytes", "moreBytes", "peakBytes", "loadSeconds")

Key = tuple[str, str, int]


def key_of(options: PoolOptions) -> Key:
    """The key of a version's entry: its name, its version and the size of its weights."""
    return options.model, options.version, options.weight_bytes


class LearnedMemory:
    """The entries, by model, version and bytes of weights. `read` and `write` block; the rest is a dictionary."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: nothing is kept."""
        self._path = path
        self._entries: dict[Key, Learned] = {}
        self._is_changed = False
        self._has_complained = False

    @property
    def is_changed(self) -> bool:
        """Whether there is something to write."""
        return self._is_changed and self._path is not None

    def get(self, key: Key) -> Learned | None:
        """What was learned of a version; None without an entry."""
        return self._entries.get(key)

    def put(self, key: Key, learned: Learned) -> None:
        """Keep an entry, as the latest."""
        self._entries.pop(key, None)
        self._entries[key] = learned
        while len(self._entries) > MOST_ENTRIES:
            del self._entries[next(iter(self._entries))]
        self._is_changed = True

    def read(self) -> None:
        """Add the file's entries; entries that are there already stay."""
        if self._path is None:
            return
        sweep(self._path.parent)
        try:
            document = json.loads(read_regular(self._path, LARGEST_FILE), parse_constant=_refuse_constant)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.warning("What models were seen to take is not read from %s, it is learned anew: %s", self._path, error)
            return
        self._entries = {**_read(document), **self._entries}

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        if not self.is_changed:
            return
        assert self._path is not None
        self._is_changed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as file:
                file.writelines(line.encode() for line in _lines(list(self._entries.items())))
        except OSError as error:
            if not self._has_complained:
                log.warning("What models were seen to take is not kept: %s cannot be written: %s", self._path, error)
            self._has_complained = True


def _lines(entries: Sequence[tuple[Key, Learned]]) -> Iterator[str]:
    """The file's lines, one for each entry; a generator, since the whole text would take a megabyte."""
    yield f'{{"format": {FORMAT}, "models": [\n'
    for number, ((model, version, weight_bytes), learned) in enumerate(entries, start=1):
        entry = {
            "model": model,
            "version": version,
            "weightBytes": weight_bytes,
            "firstBytes": learned.first_bytes,
            "moreBytes": learned.more_bytes,
            "peakBytes": learned.peak_bytes,
            "loadSeconds": round(learned.load_s, 3),
        }
        yield json.dumps(entry) + (",\n" if number < len(entries) else "\n")
    yield "]}\n"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _read(document: Any) -> dict[Key, Learned]:
    """The valid entries of a file."""
    entries: dict[Key, Learned] = {}
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return entries
    models = document.get("models")
    for entry in models if isinstance(models, list) else []:
        try:
            numbers = [entry[name] for name in _FIELDS]
            key = str(entry["model"]), str(entry["version"]), int(entry["weightBytes"])
            if not all(isinstance(number, int | float) and 0 <= number < 1 << 60 for number in numbers):
                continue
            first, more, peak = (int(number) for number in numbers[:3])
            entries[key] = Learned(first, more, max(first, peak), float(numbers[3]))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return entries
