"""An optimised archive holds its parent as it is, the build, and the proof."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from marserve.errors import BadArchive, CannotArchive
from marserve.optimise.optimised_archive import (
    digests_of_build,
    place_of,
    refuse_changed,
    states_of,
    write_optimised,
)
from optimise.test_proof import PROOF
from support.server import make_archive


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """The files of a build."""
    folder = tmp_path / "build"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"weights")
    return folder


def test_the_parents_members_are_unchanged_but_for_the_version(tmp_path: Path, build: Path) -> None:
    """The build's files and the proof come beside them; the same bytes each time."""
    parent = make_archive(tmp_path / "m.mar", "def handle(data, context): ...", labels=b"cat\n")
    output = place_of("m", tmp_path)

    write_optimised(parent, build, PROOF, output, force=False)
    first = output.read_bytes()
    write_optimised(parent, build, PROOF, output, force=True)

    assert output.name == "m-optimised.mar"
    assert output.read_bytes() == first
    with zipfile.ZipFile(parent) as old, zipfile.ZipFile(output) as new:
        assert set(new.namelist()) == {*old.namelist(), "MAR-INF/optimised.json", "optimised/model.onnx"}
        assert new.read("labels") == old.read("labels")
        assert new.read("handler.py") == old.read("handler.py")
        before, after = (json.loads(each.read("MAR-INF/MANIFEST.json")) for each in (old, new))
        assert new.read("optimised/model.onnx") == b"weights"
    assert after["model"].pop("modelVersion") == "1.0-optimised"
    assert before["model"].pop("modelVersion") == "1.0"
    assert after == before


def test_one_that_is_there_stays_unless_it_may_be_overwritten_and_no_second_build_goes_in(
    tmp_path: Path, build: Path
) -> None:
    """Nothing half-written is left either."""
    parent = make_archive(tmp_path / "m.mar", "def handle(data, context): ...")
    output = place_of("m", tmp_path)
    write_optimised(parent, build, PROOF, output, force=False)
    first = output.read_bytes()

    with pytest.raises(CannotArchive, match="already exists"):
        write_optimised(parent, build, PROOF, output, force=False)
    with pytest.raises(BadArchive, match="holds a build already"):
        write_optimised(output, build, PROOF, tmp_path / "twice.mar", force=False)

    assert output.read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "m-optimised.mar", "m.mar"]


def test_digests_are_of_the_builds_files_by_their_names_in_the_archive(build: Path) -> None:
    """SHA-256."""
    assert digests_of_build(build) == {
        "optimised/model.onnx": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    }


def test_an_archive_that_is_exchanged_written_or_gone_is_told_from_what_it_was(tmp_path: Path) -> None:
    """Also by a file of the same bytes: what was read in between is not known."""
    archive = make_archive(tmp_path / "m.mar", "def handle(data, context): ...")
    before = states_of(archive)
    refuse_changed(archive, before)

    (tmp_path / "new.mar").write_bytes(archive.read_bytes())
    (tmp_path / "new.mar").replace(archive)
    with pytest.raises(BadArchive, match="was changed meanwhile"):
        refuse_changed(archive, before)
    archive.unlink()
    with pytest.raises(BadArchive, match="was changed meanwhile"):
        refuse_changed(archive, before)


def test_so_is_a_folder_by_each_of_its_files(tmp_path: Path) -> None:
    """One that was written, and one that came."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("a")
    before = states_of(tmp_path / "m")
    refuse_changed(tmp_path / "m", before)

    (tmp_path / "m" / "b").write_text("b")
    with pytest.raises(BadArchive):
        refuse_changed(tmp_path / "m", before)
    (tmp_path / "m" / "b").unlink()
    (tmp_path / "m" / "a").write_text("changed")
    with pytest.raises(BadArchive):
        refuse_changed(tmp_path / "m", before)
