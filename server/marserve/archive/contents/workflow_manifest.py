"""Reads `WAR-INF/MANIFEST.json`, what a workflow's archive says of itself (contract 4.1). Knows no spec."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from marserve.errors import BadWorkflow
from marserve.files.regular import open_regular

WORKFLOW_MANIFEST_PATH = "WAR-INF/MANIFEST.json"
TOP_KEYS = ("createdOn", "archiverVersion", "description", "workflow")
WORKFLOW_KEYS = ("workflowName", "specFile", "handler")

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkflowManifest:
    """The manifest's keys. `handler` is None for a workflow without functions; `description` is often missing."""

    created_on: str
    archiver_version: str
    workflow_name: str
    spec_file: str
    handler: str | None = None
    description: str | None = None


def read_workflow_manifest(folder: Path) -> WorkflowManifest:
    """Read the manifest of the workflow's archive that was unpacked to `folder`.

    Raises BadWorkflow: it is missing or not a JSON object, an entry is missing, not text, or names a file outside of
    the archive. Unknown keys are ignored.
    """
    document = _load(folder)
    workflow = document.get("workflow")
    if not isinstance(workflow, dict):
        raise BadWorkflow(f"Missing workflow entry in {WORKFLOW_MANIFEST_PATH}.")
    handler = _text(workflow, "handler", "workflow.handler", is_needed=False)
    manifest = WorkflowManifest(
        workflow_name=_text(workflow, "workflowName", "workflow.workflowName"),
        archiver_version=_text(document, "archiverVersion", "archiverVersion"),
        created_on=_text(document, "createdOn", "createdOn"),
        spec_file=_text(workflow, "specFile", "workflow.specFile"),
        handler=handler or None,
        description=_text(document, "description", "description", is_needed=False) or None,
    )
    _refuse_outside("specFile", manifest.spec_file)
    _refuse_outside("handler", manifest.handler or "")
    return manifest


def _load(folder: Path) -> dict[str, Any]:
    try:
        with open_regular(folder / WORKFLOW_MANIFEST_PATH) as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise BadWorkflow(
            f"The archive has no {WORKFLOW_MANIFEST_PATH}, so it is no workflow. Make one with torch-workflow-archiver."
        ) from None
    if len(data) > _MAX_BYTES:
        raise BadWorkflow(f"{WORKFLOW_MANIFEST_PATH} has more than {_MAX_BYTES} bytes.")
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise BadWorkflow(f"{WORKFLOW_MANIFEST_PATH} is no JSON.") from None
    if not isinstance(document, dict):
        raise BadWorkflow(f"{WORKFLOW_MANIFEST_PATH} must hold an object.")
    return document


def _text(holder: dict[str, Any], key: str, label: str, *, is_needed: bool = True) -> str:
    value = holder.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)  # a version that was written without quotes
    if value is not None and not isinstance(value, str):
        raise BadWorkflow(f"{label} in {WORKFLOW_MANIFEST_PATH} must be text.")
    if is_needed and not value:
        raise BadWorkflow(f"{label} is missing in {WORKFLOW_MANIFEST_PATH}.")
    return value or ""


def _refuse_outside(key: str, name: str) -> None:
    if "\0" in name or "\\" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise BadWorkflow(f"{key} in {WORKFLOW_MANIFEST_PATH} is {name!r}; it must name a file inside of the archive.")
