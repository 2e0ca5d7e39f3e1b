"""Claims of `marserve.archive.reading.completeness`: a file that is cut anywhere does not look finished."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from marserve.archive.reading.completeness import why_incomplete
from marserve.archive.reading.reader import unpack
from marserve.errors import BadArchive
from support.echo_archives import write_mar


def test_a_whole_zip_lacks_nothing(tmp_path: Path) -> None:
    """An archive as archivers write it."""
    assert why_incomplete(write_mar(tmp_path / "m.mar", weights__bin=bytes(10_000))) is None


def test_a_zip_that_is_cut_anywhere_is_not_finished(tmp_path: Path) -> None:
    """Every length short of the whole."""
    whole = write_mar(tmp_path / "whole.mar", weights__bin=bytes(3000)).read_bytes()
    cut = tmp_path / "cut.mar"

    for length in range(len(whole)):
        cut.write_bytes(whole[:length])

        assert why_incomplete(cut) is not None, length


def test_a_zip_that_grows_over_an_old_one_is_not_finished(tmp_path: Path) -> None:
    """In place, without truncation: the old end is not where the new beginning says, or the reader finds out."""
    old = write_mar(tmp_path / "old.mar", weights__bin=b"a" * 5000).read_bytes()
    new = write_mar(tmp_path / "new.mar", weights__bin=b"b" * 7000).read_bytes()
    file = tmp_path / "m.mar"
    unnoticed = 0
    for length in range(1, len(new), 37):
        mixed = new[:length] + old[length:]
        file.write_bytes(mixed)
        if mixed == old or why_incomplete(file) is not None:
            continue
        unnoticed += 1
        with pytest.raises(BadArchive):
            unpack(file, tmp_path / f"out-{length}")
        assert not (tmp_path / f"out-{length}").exists()

    assert unnoticed, "the reader's part of the claim was not tried"


@pytest.mark.parametrize("content", [b"", b"PK", bytes(4096)])
def test_a_file_without_a_beginning_is_not_finished(tmp_path: Path, content: bytes) -> None:
    """Empty, a few bytes, or space that was only reserved."""
    (tmp_path / "m.mar").write_bytes(content)

    assert why_incomplete(tmp_path / "m.mar") == "m.mar has no beginning yet"


def test_what_is_no_zip_is_left_to_the_reader(tmp_path: Path) -> None:
    """A compressed tar, whole or cut, and what is neither: unpacking says what is wrong, and leaves nothing."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        member = tarfile.TarInfo("m/echo.py")
        member.size = 4000
        tar.addfile(member, io.BytesIO(bytes(range(250)) * 16))
    (tmp_path / "whole.tar.gz").write_bytes(packed.getvalue())
    (tmp_path / "cut.tar.gz").write_bytes(packed.getvalue()[:-9])
    (tmp_path / "text.mar").write_bytes(b"hello")

    for name in ("whole.tar.gz", "cut.tar.gz", "text.mar"):
        assert why_incomplete(tmp_path / name) is None
    for name in ("cut.tar.gz", "text.mar"):
        with pytest.raises(BadArchive):
            unpack(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_file_that_is_gone_is_not_finished(tmp_path: Path) -> None:
    """Deleted between two looks: the sentence has no path."""
    reason = why_incomplete(tmp_path / "m.mar")

    assert reason == "m.mar cannot be read (No such file or directory)"


def test_a_folder_is_not_judged(tmp_path: Path) -> None:
    """What is served in place has no end to look at."""
    assert why_incomplete(tmp_path) is None
