"""Manifests of workflows: every key that TorchServe's archiver writes, and what makes one unusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.contents.workflow_manifest import (
    TOP_KEYS,
    WORKFLOW_KEYS,
    WORKFLOW_MANIFEST_PATH,
    WorkflowManifest,
    read_workflow_manifest,
)
from marserve.errors import BadWorkflow
from support.inventory import inventory
from support.workflow_archives import war_manifest


def put(folder: Path, content: bytes) -> Path:
    """A folder with this manifest."""
    path = folder / WORKFLOW_MANIFEST_PATH
    path.parent.mkdir()
    path.write_bytes(content)
    return folder


def test_every_key_is_read(tmp_path: Path) -> None:
    """A number without quotes is text; keys that nobody knows are ignored."""
    document = {**war_manifest("w"), "description": "says little", "archiverVersion": 0.2, "other": [1]}

    read = read_workflow_manifest(put(tmp_path, json.dumps(document).encode()))

    assert read == WorkflowManifest("31/01/2026 13:44:53", "0.2", "w", "workflow.yaml", "nodes.py", "says little")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workflow": None}, "Missing workflow entry"),
        ({"workflow": []}, "Missing workflow entry"),
        ({"createdOn": None}, "createdOn is missing"),
        ({"archiverVersion": ""}, "archiverVersion is missing"),
        ({"createdOn": True}, "createdOn in WAR-INF/MANIFEST.json must be text"),
        ({"workflow": {"specFile": "s.yaml"}}, "workflow.workflowName is missing"),
        ({"workflow": {"workflowName": "w"}}, "workflow.specFile is missing"),
        ({"workflow": {"workflowName": "w", "specFile": "../s.yaml"}}, "must name a file inside of the archive"),
        (
            {"workflow": {"workflowName": "w", "specFile": "s", "handler": "/h.py"}},
            "handler in WAR-INF/MANIFEST.json is",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """The entries that TorchServe asks for, and names of files that lead nowhere else."""
    content = json.dumps({**war_manifest("w"), **change}).encode()

    with pytest.raises(BadWorkflow, match=message):
        read_workflow_manifest(put(tmp_path, content))


@pytest.mark.parametrize("content", [b"{not json", b"[]", b"\xff", b" " * (1 << 20) + b"{}", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    """Neither half of one nor an endless one is read."""
    with pytest.raises(BadWorkflow, match=r"WAR-INF/MANIFEST\.json"):
        read_workflow_manifest(put(tmp_path, content))


def test_an_archive_without_a_manifest_is_no_workflow(tmp_path: Path) -> None:
    """And the message says how one is made."""
    with pytest.raises(BadWorkflow, match="Make one with torch-workflow-archiver"):
        read_workflow_manifest(tmp_path)


def test_every_key_of_torchserves_manifest_is_known() -> None:
    """The walk of the inventory's list."""
    known = {*TOP_KEYS, *(f"workflow.{key}" for key in WORKFLOW_KEYS)}

    assert set(inventory("workflow_manifest_keys")) <= known
