"""The import of one repository: a server's folder with archives in a store and settings that load them.

Everything is planned, and its findings are known, before anything is written; the folder appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from marserve.archive.writing.writer import write_archive
from marserve.errors import BadSettings, CannotArchive
from marserve.files.atomic import placing
from marserve.migration.findings import Finding, Spot, in_order
from marserve.migration.judges.settings_findings import StartTrial
from marserve.migration.triton.model import PlannedVersion, plan_model
from marserve.migration.triton.notes import Notes, Refused
from marserve.migration.triton.repository import CONFIG_NAME, find_models
from marserve.settings import load_settings

STORE: Final = "model_store"
SETTINGS: Final = "config.properties"
_MARK: Final = "# Written by marserve migrate triton."
_SETTINGS_TEXT: Final = f"""{_MARK}
model_store={STORE}
# The first version of a model is its default, as Triton's highest version is.
load_models=%s
# Triton's ports, for clients that stay as they are:
#inference_address=http://127.0.0.1:8000
#grpc_inference_port=8001
#metrics_address=http://127.0.0.1:8002
"""


@dataclass(frozen=True, slots=True)
class Import:
    """What becomes of the repository at `root`: versions in the order in which a server loads them, and findings."""

    root: Path
    versions: list[PlannedVersion]
    findings: list[Finding]

    @property
    def total_bytes(self) -> int:
        """The bytes of all files that go into archives."""
        return sum(each.plan.total_bytes for each in self.versions)


def plan_import(root: Path) -> Import:
    """Read a repository; nothing of it is run. Raises NotADirectoryError."""
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no folder")
    root = root.resolve()
    findings: list[Finding] = []
    notes = Notes(".", findings)
    versions: list[PlannedVersion] = []
    count = 0
    try:
        for model in find_models(root, notes):
            count += 1
            versions += plan_model(model, root, notes.of(model.name))
    except Refused as refused:
        notes.refuse(refused)
    if (root / CONFIG_NAME).is_file():
        notes.action(0, f"it has a {CONFIG_NAME} itself: it is one model's folder", "name the folder above it")
    elif not count and not findings:
        notes.action(
            0, "there is no model: no folder in it", "name the folder that tritonserver has as --model-repository"
        )
    if versions:
        notes.differs(0, "queues have a bound here, job_queue_size (100), where max_queue_size says none")
    return Import(root, versions, in_order(dict.fromkeys(findings)))


def check_output(output: Path, root: Path, *, force: bool) -> None:
    """Raise CannotArchive for a folder that cannot be written, or must not be replaced."""
    place = output.resolve()
    if place.is_relative_to(root) or root.is_relative_to(place):
        raise CannotArchive(f"{output} and the repository {root} lie in each other; name another folder to write to.")
    if not place.parent.is_dir():
        raise CannotArchive(f"{output} cannot be made: there is no folder {output.parent}. Create that first.")
    if not os.path.lexists(output):
        return
    if not force:
        raise CannotArchive(f"{output} already exists. Use --force (-f) to write it anew, or name another folder.")
    other = _other_entry(output)
    if other:
        raise CannotArchive(f"{output} is not replaced: {other}. Name another folder.")


def _other_entry(output: Path) -> str:
    """Why a folder is more than what an import wrote; empty if it is not."""
    try:
        if output.is_symlink() or not output.is_dir():
            return "it is no folder"
        names = {each.name for each in output.iterdir()} - {STORE, SETTINGS}
        if names:
            return f"it has {min(names)}, which marserve migrate triton does not write"
        store = output / STORE
        others = [each.name for each in store.iterdir() if each.suffix != ".mar"] if store.is_dir() else []
        if others:
            return f"its {STORE} has {min(others)}, which marserve migrate triton does not write"
        text = (output / SETTINGS).read_text("utf-8", "replace") if (output / SETTINGS).is_file() else ""
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return "" if text.startswith(_MARK) else f"its {SETTINGS} is not of marserve migrate triton"


def write_import(
    planned: Import,
    output: Path,
    *,
    source_date_epoch: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the folder `output`, in the place of one that an import wrote. Raises CannotArchive; nothing stays then."""
    try:
        with placing(output, replaces_folder=True) as partial:
            store = partial / STORE
            store.mkdir(parents=True)
            for each in planned.versions:
                write_archive(
                    each.plan,
                    store,
                    file_name=each.archive,
                    source_date_epoch=source_date_epoch,
                    on_bytes=on_bytes,
                )
            (partial / SETTINGS).write_text(settings_of(planned), "utf-8")
    except OSError as error:
        raise CannotArchive(f"{output} cannot be written ({error}).") from error


def settings_of(planned: Import) -> str:
    """The settings of a server with these models."""
    return _SETTINGS_TEXT % ",".join(each.archive for each in planned.versions)


def judge_import(output: Path, environment: Mapping[str, str], try_start: StartTrial, shown: str) -> Iterator[Finding]:
    """Findings of a trial of a start with what was written; `shown` names it in the report."""
    spot, output = Spot(f"{shown}/{SETTINGS}"), output.absolute()
    try:
        settings = load_settings("marserve", {"ts_config": str(output / SETTINGS)}, environment, output)
    except BadSettings as error:
        yield spot.action(f"a start was tried and failed: {error.message}", "mend this before the server is started")
        return
    problems = try_start(settings)
    for problem in problems:
        said = f"a start was tried and failed: {problem.message}"
        yield spot.action(said, "mend this before the server is started")
    if not problems:
        yield spot.works("a start was tried with these settings, without workers")
