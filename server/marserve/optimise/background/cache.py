"""What was found for an archive on this machine, in folders of the state folder: whole or missing.

    optimised/KEY/result.json               the report, and the digests of the other files
    optimised/KEY/MAR-INF/optimised.json    the proof, and
    optimised/KEY/optimised/…               the build, where one is better than its parent

The key is made of what a search depends on, so a folder that is there is right. Native code in such a folder was built
here: its SHA-256 stands in the state folder of this server, which nothing in an archive can bring about.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from marserve import __version__
from marserve.archive.contents.weight_size import weigh
from marserve.errors import MarserveError
from marserve.files.atomic import replace_file
from marserve.files.digests import digest_of
from marserve.files.leased_folders import LeasedFolders, bytes_below, find_stranger
from marserve.optimise.background.order import RESULT, Order
from marserve.optimise.candidates import DEFAULT_BOUNDS, PACKAGES, TOOLS
from marserve.registry.catalogue.plan import Plan

FORMAT: Final = 1
# Of folders that no version uses; the longest unused go first.
MOST_BYTES: Final = 8 << 30
_MOST_RESULT: Final = 16 << 20
_NOT_HASHED: Final = ("__pycache__",)


class Found(msgspec.Struct, frozen=True):
    """What a search found: the report as `describe_report` has it, and the SHA-256 of each other file by its path.

    `may_change`: there is no winner, and another search may find one.
    """

    report: dict[str, Any]
    files: dict[str, str]
    may_change: bool = False
    format: int = FORMAT

    @property
    def winner(self) -> dict[str, Any] | None:
        """The row of the build that is better than its parent, None without one."""
        name = self.report["winner"]
        return next((row for row in self.report["builds"] if name and row["name"] == name), None)


class _Output(msgspec.Struct):
    meanError: float | None


class _Agreement(msgspec.Struct):
    shown: float


class _Ratio(msgspec.Struct):
    rows: int
    threads: int
    middle: float
    low: float
    high: float


class _Row(msgspec.Struct):
    name: str
    passed: bool
    whyNot: str | None
    faults: list[str]
    outputs: list[_Output]
    agreement: _Agreement | None
    ratios: list[_Ratio]


class _Report(msgspec.Struct):
    """What of a report is used here; all of it goes to those who ask for it."""

    winner: str | None
    builds: list[_Row]


class NotFit(MarserveError):
    """A folder that must not be used; the message says why."""


class Damaged(NotFit):
    """What is in a folder is not what was written there."""


def folders_in(state_folder: Path) -> LeasedFolders:
    """The folders, as they are shared with other servers of the same state folder. Raises OSError."""
    folder = state_folder / "optimised"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return LeasedFolders(folder, bytes_below, suffix=".making", is_whole=lambda path: (path / RESULT).is_file())


def key_of(order: Order, archive: str, machine: Mapping[str, Any]) -> str:
    """The name of the folder for what the order's search finds in the archive of this SHA-256."""
    taken = order.taken
    parts = {
        "format": FORMAT,
        "machine": machine,
        "archive": archive,
        "handler": taken.load.handler,
        "packages": taken.load.packages,
        "optimise": list(taken.optimise),
        "samples": repr((taken.samples, taken.drawn)),
        "bounds": dataclasses.asdict(DEFAULT_BOUNDS),
        "batch": order.batch_size,
        "threads": order.threads,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


def archive_of(plan: Plan) -> str:
    """The SHA-256 of a version's archive, or of the files of one that is a folder; with that of a checkpoint beside it.

    Blocks for files, except those of a checkpoint that was fetched, whose name says what they are.
    """
    origin, weights = plan.unpacked.origin, plan.unpacked.checkpoint
    own = origin.sha256 if origin is not None and origin.sha256 else digest_below(Path(plan.load.model_dir))
    if weights is None or not weights.is_beside:
        return own
    return hashlib.sha256(f"{own} {weights.content or digest_below(weights.folder)}".encode()).hexdigest()


def machine_of(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """What builds and their speed depend on: the processor with its instructions, the packages, the compiler."""
    text = ""
    with contextlib.suppress(OSError):
        text = cpuinfo.read_text()
    lines = (line.partition(":") for line in text.splitlines())
    processor: dict[str, str] = {}
    for name, _, value in lines:  # of the first one
        if name.strip().lower() in ("model name", "flags", "features"):
            processor.setdefault(name.strip().lower(), " ".join(sorted(value.split())))
    return {
        "processor": processor,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "marserve": __version__,
        "packages": {name: _version_of(name) for name in PACKAGES},
        "tools": [name for name in TOOLS if shutil.which(name)],
    }


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def digest_below(folder: Path) -> str:
    """The digest of all files below a folder, by their paths; what Python compiles by itself is left out."""
    whole = hashlib.sha256()
    for path, digest in sorted(_digests(folder)):
        whole.update(f"{path}\0{digest}\n".encode())
    return whole.hexdigest()


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Each file's path and digest. A link counts as one, with what it leads to; no folder behind one is entered."""
    for parent, names, files in os.walk(folder):
        names[:] = [name for name in names if name not in _NOT_HASHED]
        for path in (Path(parent, name) for name in (*names, *files)):
            said = digest_of(path) if path.is_file() else ""
            if path.is_symlink():
                said = f"link to {os.path.realpath(path)} {said}"
            if said:
                yield path.relative_to(folder).as_posix(), said


def write_found(folder: Path, report: dict[str, Any], *, may_change: bool) -> None:
    """Write what was found beside the build's files in the folder, last of all. Raises OSError."""
    folder.mkdir(exist_ok=True)
    found = Found(report, dict(_digests(folder)), may_change)
    _write(folder, found)


def _write(folder: Path, found: Found) -> None:
    replace_file(folder / RESULT, msgspec.json.encode(found))


def read_found(folder: Path) -> Found:
    """What was found, with each file as it was written then. Blocks. Raises NotFit, Damaged, OSError."""
    if stranger := find_stranger(folder) or find_stranger(folder.parent):
        raise NotFit(f"what is in {folder} is not used: {stranger}")
    found = _read(folder)
    if {path: digest for path, digest in _digests(folder) if path != RESULT} != found.files:
        raise Damaged(f"the files in {folder} are not those that were written there")
    return found


def _read(folder: Path) -> Found:
    """What is said of the files in a folder. Raises Damaged, OSError."""
    file = folder / RESULT
    try:
        with file.open("rb") as opened:
            found = msgspec.json.decode(opened.read(_MOST_RESULT), type=Found)
        if found.format != FORMAT:
            raise Damaged(f"{file} is of format {found.format}; this version of marserve reads {FORMAT}")
        report = msgspec.convert(found.report, _Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"{file} cannot be read: {error}") from None
    if report.winner and not any(row.name == report.winner and row.passed for row in report.builds):
        raise Damaged(f"{file} cannot be read: none of its builds that passed is its winner {report.winner!r}")
    return found


def write_refused(folder: Path, why: str) -> None:
    """Note that the winner did not do in service: the next start leaves the parent, and says why. Blocks.

    Raises Damaged, OSError.
    """
    found = _read(folder)
    winner = found.report["winner"]
    builds = [
        {**row, "passed": False, "whyNot": why} if row["name"] == winner else row for row in found.report["builds"]
    ]
    _write(folder, msgspec.structs.replace(found, report={**found.report, "winner": None, "builds": builds}))


def forget_found(folder: Path) -> None:
    """What is in the folder counts as missing from now on. Blocks. Raises OSError."""
    (folder / RESULT).unlink(missing_ok=True)


def weight_bytes_of(folder: Path, plan: Plan) -> int:
    """What of a version with this build is counted as its weights: the build's own, or its parent's. Blocks."""
    return weigh(folder).weights or plan.facts.options.weight_bytes
