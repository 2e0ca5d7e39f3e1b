"""Workflow archives as bytes: whole or not at all, and readable by our own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.archive.contents.workflow_manifest import read_workflow_manifest
from marserve.archive.reading.reader import unpack
from marserve.archive.writing.workflow_writer import WorkflowArchiveSpec, write_workflow_archive
from marserve.errors import CannotArchive
from support.workflow_archives import FUNCTIONS, THREE_NODES


@pytest.fixture
def spec(tmp_path: Path) -> WorkflowArchiveSpec:
    """What an author names."""
    (tmp_path / "wf.yaml").write_text(THREE_NODES)
    (tmp_path / "nodes.py").write_text(FUNCTIONS)
    return WorkflowArchiveSpec("w", tmp_path / "wf.yaml", tmp_path / "nodes.py")


def test_what_was_written_can_be_read(tmp_path: Path, spec: WorkflowArchiveSpec) -> None:
    """The manifest names the files by their last parts."""
    out = tmp_path / "out"
    out.mkdir()

    path, warnings = write_workflow_archive(spec, out, source_date_epoch=0)

    unpack(path, tmp_path / "unpacked")
    read = read_workflow_manifest(tmp_path / "unpacked")
    assert (path.name, warnings) == ("w.war", [])
    assert (read.workflow_name, read.spec_file, read.handler) == ("w", "wf.yaml", "nodes.py")
    assert read.created_on == "01/01/1970 00:00:00"
    assert (tmp_path / "unpacked" / "nodes.py").read_text() == FUNCTIONS


def test_an_earlier_archive_and_another_manifest_among_the_extra_files_are_left_out(
    tmp_path: Path, spec: WorkflowArchiveSpec
) -> None:
    """An archive that is made in the folder that it packs does not swallow itself."""
    extra = tmp_path / "extra"
    (extra / "WAR-INF").mkdir(parents=True)
    (extra / "WAR-INF" / "MANIFEST.json").write_text("{}")
    again = WorkflowArchiveSpec("w", spec.spec_file, spec.handler, (str(extra),))
    write_workflow_archive(again, extra)

    path, _ = write_workflow_archive(again, extra, force=True)

    unpack(path, tmp_path / "unpacked")
    assert sorted(file.name for file in (tmp_path / "unpacked").iterdir()) == ["WAR-INF", "nodes.py", "wf.yaml"]
    assert read_workflow_manifest(tmp_path / "unpacked").workflow_name == "w"


def test_two_files_of_one_name_are_refused_and_nothing_is_left(tmp_path: Path, spec: WorkflowArchiveSpec) -> None:
    """Neither of them would be the right one."""
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "nodes.py").write_text("other")
    out = tmp_path / "out"
    out.mkdir()

    with pytest.raises(CannotArchive, match=r"would both become nodes\.py"):
        write_workflow_archive(WorkflowArchiveSpec("w", spec.spec_file, spec.handler, (str(twin),)), out)

    assert list(out.iterdir()) == []
