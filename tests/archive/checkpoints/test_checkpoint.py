"""Tests for which of a folder's files are its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.contents import BadCheckpoint
from support.checkpoints import safetensors_bytes


def test_safetensors_files_are_one_kind(tmp_path: Path) -> None:
    """Other files beside them do not count."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": ("F32", [1])}))

    assert read_checkpoint(tmp_path).kind == "safetensors"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """With what one would be."""
    with pytest.raises(BadCheckpoint, match=r"holds neither .metadata"):
        read_checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match=r"missing: there is no such folder"):
        read_checkpoint(tmp_path / "missing")


def test_two_checkpoints_in_one_folder_are_refused(tmp_path: Path) -> None:
    """Nothing says which of them is meant."""
    (tmp_path / ".metadata").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": ("F32", [1])}))

    with pytest.raises(BadCheckpoint, match=r"beside it is model.safetensors, of another checkpoint"):
        read_checkpoint(tmp_path)


def test_two_indexes_are_refused(tmp_path: Path) -> None:
    """As two precisions of one model are often kept."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")

    with pytest.raises(BadCheckpoint, match=r"b.safetensors.index.json: there is another index beside it"):
        read_checkpoint(tmp_path)
