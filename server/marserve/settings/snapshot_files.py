"""Snapshots as files of settings: their names, the newest one, and the lines of settings in one.

Reads and writes one folder. `registry/catalogue/snapshot.py` reads and writes the models of a snapshot,
`registry/catalogue/snapshot_writer.py` decides when to write one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

from marserve.files.atomic import Part, sweep
from marserve.files.regular import read_regular
from marserve.settings.shown_address import hide_query
from marserve.settings.table import KEYS, Settings
from marserve.settings.vertex import VARIABLES as VERTEX_VARIABLES

SnapshotKind = Literal["startup", "snapshot", "shutdown"]

FOLDER = "config"
# The keys of a snapshot that are not settings. TorchServe writes the first two. The third lists keys that are in a
# snapshot for information, and are not restored.
VERSION, CONFIG_FILE_BEFORE, FACTS = FACT_NAMES = ("version", "tsConfigFile", "marserveFacts")

_NAME = re.compile(r"(?P<time>\d{14})(?P<milliseconds>\d{3})-(?P<kind>startup|snapshot|shutdown)\.cfg")
# An unlocked file of this age, in seconds, is a leftover: writing a snapshot takes only a moment.
UNLOCKED_AGE_S = 60.0
LARGEST_SNAPSHOT = 64 << 20
_ORDER = ("startup", "snapshot", "shutdown")


class FolderSnapshots:
    """The snapshots of one folder. Files of other names are left alone.

    With `keep` above 0 the oldest beyond that number are deleted.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.where = str(folder)
        self._keep = keep

    def newest(self) -> tuple[str, bytes] | None:
        """The snapshot with the latest time in its name. Raises OSError if it cannot be read."""
        names, _ = self._list()
        return (names[-1], read_regular(self.folder / names[-1], LARGEST_SNAPSHOT)) if names else None

    def strays(self) -> list[str]:
        """Files with other names, with which TorchServe would fail. Raises OSError."""
        return self._list()[1]

    def save(self, name: str, text: bytes) -> None:
        """Write a snapshot, complete or not at all. Blocks.

        Raises FileExistsError for a name that is taken, and OSError if it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep(self.folder, unlocked_s=UNLOCKED_AGE_S)
        # Readable by its owner alone, because it has paths and addresses of everything.
        with Part(self.folder, 0o600) as part:
            with part.open() as file:
                file.write(text)
            part.link(self.folder / name, is_durable=True)
        if self._keep:
            for old in self._list()[0][: -self._keep]:
                with contextlib.suppress(OSError):
                    (self.folder / old).unlink()

    def _list(self) -> tuple[list[str], list[str]]:
        """Names of snapshots, oldest first, and of other files that are not hidden."""
        try:
            found = [entry.name for entry in os.scandir(self.folder) if entry.is_file()]
        except FileNotFoundError:
            return [], []
        names = [name for name in found if _NAME.fullmatch(name)]
        return sorted(names, key=_sort_key), sorted(
            name for name in found if name not in names and not name.startswith(".")
        )


def _sort_key(name: str) -> tuple[str, int]:
    found = _NAME.fullmatch(name)
    assert found is not None
    return found["time"] + found["milliseconds"], _ORDER.index(found["kind"])


def snapshot_folder(log_location: Path | None, working_directory: Path) -> Path:
    """The folder of snapshots for a server with these logs."""
    return (log_location or working_directory / "logs") / FOLDER


def snapshot_name(kind: SnapshotKind, now: datetime, after: str | None = None) -> str:
    """The name of a snapshot of this (local) time, always later than the name `after`.

    Local time goes back once a year, and when a clock is set, but a later snapshot must have a later name.
    """
    stamp = f"{now:%Y%m%d%H%M%S}{now.microsecond // 1000:03d}"
    found = _NAME.fullmatch(after) if after is not None else None
    if found is not None and stamp <= found["time"] + found["milliseconds"]:
        try:
            then = datetime.strptime(found["time"], "%Y%m%d%H%M%S")
        except ValueError:  # seventeen digits that are not a time: an operator's file
            then = now
        then += timedelta(milliseconds=int(found["milliseconds"]) + 1)
        stamp = f"{then:%Y%m%d%H%M%S}{then.microsecond // 1000:03d}"
    return f"{stamp}-{kind}.cfg"


def effective_properties(settings: Settings, facts: Mapping[str, str], version: str) -> dict[str, str]:
    """The lines of a snapshot without its models: the settings given by any source, as they were written.

    `facts` are keys whose value was found and not given. Left out are secrets (read again from the file that
    `tsConfigFile` names), addresses that may carry a key, variables of platforms (set again at the next start), and an
    image's defaults (the next start has its own). `$$NAME$$` stays as it is written.
    """
    lines = {VERSION: version, CONFIG_FILE_BEFORE: str(settings.original_file or "")}
    for name, key in KEYS.items():
        origins = [origin for origin in settings.origins.get(name, ()) if origin.where not in VERTEX_VARIABLES]
        if not origins or key.is_secret or name == "model_snapshot":
            continue
        origin = origins[-1]
        is_told_again = origin.where == key.always_env or (origin.where == key.env and not key.is_torchserves)
        if origin.is_default or is_told_again or _holds_a_key(settings, name):
            continue
        lines[name] = origin.text if origin.raw is None else origin.raw
    found = {name: value for name, value in facts.items() if name not in lines}
    return {**lines, **found, FACTS: ",".join(found)}


def _holds_a_key(settings: Settings, name: str) -> bool:
    """Whether a value may be an address with a key in it."""
    if name == "desired_state":
        return settings.desired_state is not None and hide_query(settings.desired_state) != settings.desired_state
    models = settings.load_models if name == "load_models" else ()
    return models != "all" and any("://" in model.url for model in models if not isinstance(model, str))


def write_properties(lines: Mapping[str, str]) -> bytes:
    """A properties file of these lines."""
    import javaproperties  # late, as in `load.py`

    return javaproperties.dumps(dict(lines), timestamp=False).encode("ascii")
