"""Tests for the weights of an archive without their numbers."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path

import pytest

from marserve.archive.checkpoints.checkpoint import read_checkpoint
from marserve.archive.checkpoints.hollow import hollow_copy
from marserve.errors import BadArchive, UnsafeArchive
from support.archives import ZipMember, raw_zip, tgz_of, zip_of
from support.checkpoints import safetensors_bytes


def test_headers_can_be_read_and_numbers_take_no_room(tmp_path: Path) -> None:
    """Of a file of 64 MiB, packed small, a part of the first piece alone is unpacked."""
    large = safetensors_bytes({"w": ("F32", [4096, 4096])})
    archive, target = tmp_path / "m.mar", tmp_path / "hollow"
    target.mkdir()
    archive.write_bytes(
        zip_of({"weights/m.safetensors": large, "h.py": b"", "w.pt": b"xyz", "MAR-INF/MANIFEST.json": b"{}"})
    )

    hollow_copy(archive, target)

    read = read_checkpoint(target / "weights")
    assert read.bytes == 64 << 20
    assert (target / "weights" / "m.safetensors").stat().st_blocks * 512 < 1 << 20
    assert (target / "w.pt").read_bytes() == b"\0\0\0"
    assert (target / "MAR-INF" / "MANIFEST.json").read_bytes() == b"{}"
    assert not (target / "h.py").exists()


def test_the_longest_header_is_copied_in_the_time_of_its_bytes(tmp_path: Path) -> None:
    """Not in that of all its pieces put together again and again, half a minute."""
    size = 90_000_000
    archive, target = tmp_path / "m.mar", tmp_path / "hollow"
    target.mkdir()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("m.safetensors", size.to_bytes(8, "little") + b" " * size + b"1" * 4096)
    began = time.process_time()

    hollow_copy(archive, target)

    assert time.process_time() - began < 5
    with (target / "m.safetensors").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") == size
        assert file.read(size).strip() == b""


def test_what_is_no_zip_file_is_refused(tmp_path: Path) -> None:
    """A tar can only be read from its beginning to its end."""
    archive = tmp_path / "m.tar.gz"
    archive.write_bytes(tgz_of({"a": b""}))

    with pytest.raises(BadArchive, match=r"m.tar.gz is no zip file"):
        hollow_copy(archive, tmp_path)


@pytest.mark.parametrize(
    "member", [ZipMember("../out.yaml"), ZipMember("/out.yaml"), ZipMember("out.yaml", mode=0o120777)]
)
def test_members_that_lead_out_are_refused(tmp_path: Path, member: ZipMember) -> None:
    """As when an archive is unpacked."""
    archive, target = tmp_path / "m.mar", tmp_path / "hollow"
    target.mkdir()
    archive.write_bytes(raw_zip([member]))

    with pytest.raises(UnsafeArchive):
        hollow_copy(archive, target)
    assert list(target.iterdir()) == []
    assert not (tmp_path / "out.yaml").exists()
