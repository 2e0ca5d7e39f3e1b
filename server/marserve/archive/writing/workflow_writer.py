"""Makes workflow archives (`.war`, contract 4.1 and 9.3), the same bytes each time, as `writer` makes models'.

Knows no terminal and prints nothing; reads the spec's bytes as they are, without judging them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from marserve import __version__
from marserve.archive.contents.workflow_manifest import WORKFLOW_MANIFEST_PATH
from marserve.archive.writing.writer import Collection, Packing, check_name, created_on, write_packing
from marserve.errors import CannotArchive


@dataclass(frozen=True, slots=True)
class WorkflowArchiveSpec:
    """What the author of a workflow's archive names. Paths are of this machine; only their last parts go into it.

    `handler` is the Python file with the functions. `extra_files` are as for a model's archive.
    """

    workflow_name: str
    spec_file: Path
    handler: Path
    extra_files: tuple[str, ...] = ()


def write_workflow_archive(
    spec: WorkflowArchiveSpec,
    export_path: Path,
    *,
    force: bool = False,
    source_date_epoch: int | None = None,
) -> tuple[Path, list[str]]:
    """Write the archive into the folder `export_path`, which exists. Returns its path and sentences for the author.

    Raises CannotArchive: a wrong name, a file or folder that is missing, names that clash, something at that path
    already (unless `force`).
    """
    check_name("workflow", spec.workflow_name)
    if not export_path.is_dir():
        raise CannotArchive(f"The export path {export_path} is no folder. Create it first, or name another.")
    warnings: list[str] = []
    collected = Collection()
    for what, path in (("Spec", spec.spec_file), ("Handler", spec.handler)):
        if not path.is_file():
            raise CannotArchive(f"{what} file does not exist: {path}")
        collected.add(path.name, path)
    collected.add_extra(spec.extra_files, warnings, leave_out=WORKFLOW_MANIFEST_PATH)
    output = workflow_output_path(spec.workflow_name, export_path)
    packing = Packing(
        collected.members,
        output,
        WORKFLOW_MANIFEST_PATH,
        lambda created: _manifest(spec, created),
        source_date_epoch=source_date_epoch,
    )
    write_packing(packing, output, "default", force=force)
    return output, warnings


def workflow_output_path(workflow_name: str, export_path: Path) -> Path:
    """Where the archive goes."""
    return export_path / f"{workflow_name}.war"


def _manifest(spec: WorkflowArchiveSpec, created: float) -> bytes:
    """The manifest's bytes, keys in the order of TorchServe's archiver; `created` in seconds UTC."""
    document = {
        "createdOn": created_on(created),
        "workflow": {
            "workflowName": spec.workflow_name,
            "specFile": spec.spec_file.name,
            "handler": spec.handler.name,
        },
        "archiverVersion": __version__,
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
