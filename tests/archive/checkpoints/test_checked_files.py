"""Tests for the pickles of archives with checkpoints in them."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.checkpoints.checked_files import check_archive
from marserve.archive.checkpoints.contents import BadCheckpoint
from marserve.errors import Draining, UnsafeArchive
from support.checkpoints import change_metadata, save_dcp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """With a checkpoint of one tensor in a folder, and a file beside it."""
    folder = tmp_path / "archive"
    (folder / "other").mkdir(parents=True)
    (folder / "other" / "labels.txt").write_text("cat")
    save_dcp(folder / "weights", {"w": torch.ones(3)})
    return folder


def test_an_archive_with_a_checkpoint_of_tensors_passes(archive: Path) -> None:
    """Which no other check of pickles lets through: its classes are not those of tensors."""
    assert check_archive(archive) == []


def _hide_in_piece(archive: Path, canary: Path) -> str:
    raw = io.BytesIO()
    torch.save(_Canary(canary), raw)
    (archive / "weights" / "__0_0.distcp").write_bytes(raw.getvalue())

    def point(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.length = len(raw.getvalue())

    change_metadata(archive / "weights", point)
    return "weights/__0_0.distcp@0"


def test_code_in_a_piece_is_refused_with_its_place(archive: Path, tmp_path: Path) -> None:
    """Though `.metadata` is clean."""
    member = _hide_in_piece(archive, tmp_path / "canary")

    with pytest.raises(UnsafeArchive, match=member) as raised:
        check_archive(archive)
    findings = check_archive(archive, trusted=True)

    assert "mkdir" in raised.value.message
    assert findings == [raised.value.message]
    assert not (tmp_path / "canary").exists()


def test_a_checkpoint_that_cannot_be_read_is_refused(archive: Path) -> None:
    """In a trusted archive it is looked at as any other files."""
    os.truncate(archive / "weights" / "__0_0.distcp", 100)

    with pytest.raises(BadCheckpoint, match="it may be cut off"):
        check_archive(archive)
    assert check_archive(archive, trusted=True)


def test_metadata_of_another_program_is_checked_as_any_pickle(tmp_path: Path) -> None:
    """A `.metadata` need not be torch's."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04}.")

    assert check_archive(tmp_path) == []


def test_a_check_ends_with_the_server(archive: Path) -> None:
    """Also inside of the metadata."""
    change_metadata(
        archive / "weights", lambda metadata: setattr(metadata, "planner_data", {str(n): n for n in range(1000)})
    )

    with pytest.raises(Draining):
        check_archive(archive, is_stopped=lambda: True)
