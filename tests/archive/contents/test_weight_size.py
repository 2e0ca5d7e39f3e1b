"""The size of an archive's weights, without unpacking it."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path

import pytest

from marserve.archive.contents.weight_size import WeightSize, weigh, weigh_file


def safetensors(*sizes: int) -> bytes:
    """A file with tensors of so many bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def torch_file(*sizes: int) -> bytes:
    """A zip as torch.save makes it: pickle, storages, a version."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as inner:
        inner.writestr("model/data.pkl", b"x" * 1000)
        for number, size in enumerate(sizes):
            inner.writestr(f"model/data/{number}", bytes(size))
        inner.writestr("model/version", b"3\n")
    return file.getvalue()


def archive(path: Path, compression: int, **members: bytes) -> Path:
    """A `.mar` with these members and a manifest."""
    with zipfile.ZipFile(path, "w", compression) as mar:
        mar.writestr("MAR-INF/MANIFEST.json", b"{}")
        for name, content in members.items():
            mar.writestr(name, content)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_weights_count_as_they_are_when_unpacked(tmp_path: Path, compression: int) -> None:
    """Packed or not: the directory says it, and code is none of them."""
    path = archive(tmp_path / "m.mar", compression, **{"w.bin": bytes(50_000), "handler.py": b"#" * 999})

    assert weigh(path) == WeightSize(50_000, 50_000 + 999 + 2)


def test_stored_safetensors_and_torch_files_are_looked_into(tmp_path: Path) -> None:
    """Only their tensors count, not pickles and headers."""
    members = {"a.safetensors": safetensors(1000, 24), "b.pt": torch_file(4096, 100)}
    path = archive(tmp_path / "m.mar", zipfile.ZIP_STORED, **members)

    assert weigh(path).weights == 1024 + 4196


def test_a_plain_folder_is_weighed_like_an_archive(tmp_path: Path) -> None:
    """In place; links lead out of it and are left alone."""
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "sub" / "a.safetensors").write_bytes(safetensors(77))
    (tmp_path / "m" / "handler.py").write_bytes(b"#" * 5)
    (tmp_path / "m" / "b.bin").symlink_to("sub/a.safetensors")

    size = weigh(tmp_path / "m")

    assert size.weights == 77
    assert size.total == len(safetensors(77)) + 5


def test_an_archive_without_weights_counts_as_a_whole(tmp_path: Path) -> None:
    """Something is loaded, if only code."""
    size = weigh(archive(tmp_path / "m.mar", zipfile.ZIP_STORED, **{"handler.py": b"#" * 98}))

    assert size == WeightSize(0, 100)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"no zip at all",
        b"PK\x03\x04 and no directory",
        struct.pack("<Q", 1 << 60) + b"{}",
    ],
)
def test_what_cannot_be_read_counts_as_large_as_it_is(tmp_path: Path, broken: bytes) -> None:
    """As an archive, and as a member of one."""
    path = archive(tmp_path / "m.mar", zipfile.ZIP_STORED, **{"w.safetensors": broken, "w.pt": broken})

    assert weigh_file(io.BytesIO(broken), len(broken)) == WeightSize(len(broken), len(broken))
    assert weigh(path).weights == 2 * len(broken)


def test_a_header_that_says_what_cannot_be_counts_as_large_as_it_is(tmp_path: Path) -> None:
    """Whatever JSON stands there."""
    for header in (b"[]", b'{"t": 3}', b'{"t": {"data_offsets": [1]}}', b'{"t": {"data_offsets": ["x", 1]}}', b"{"):
        member = struct.pack("<Q", len(header)) + header
        path = archive(tmp_path / "m.mar", zipfile.ZIP_STORED, **{"w.safetensors": member})

        assert weigh(path).weights == len(member), header


def test_a_huge_archive_is_weighed_by_its_end(tmp_path: Path) -> None:
    """A gigabyte of weights is not read: only directory and heads are."""

    class Counting(io.FileIO):
        """Counts what is read."""

        bytes_read = 0

        def read(self, size: int | None = -1) -> bytes:
            """As a file."""
            data: bytes = super().read(-1 if size is None else size) or b""
            self.bytes_read += len(data)
            return data

    path = archive(
        tmp_path / "m.mar", zipfile.ZIP_STORED, **{"w.bin": bytes(20_000_000), "v.pt": torch_file(9_000_000)}
    )

    with Counting(path) as file:
        size = weigh_file(file, path.stat().st_size)  # type: ignore[arg-type]
        assert size.weights == 29_000_000
        assert file.bytes_read < 400_000


@pytest.mark.parametrize(
    ("build", "weights"),
    [
        ({"optimised/model.onnx": b"o" * 50}, 50),
        ({"optimised/samples.npz": b"s" * 70}, 300),
        ({"optimised/example.npz": b"e" * 60}, 300),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_of_an_archive_with_a_build_what_is_served_counts(
    build: dict[str, bytes], weights: int, is_folder: bool, tmp_path: Path
) -> None:
    """The build's own weights, else the parent's; its samples and its example are no weights."""
    members = {
        "weights.bin": b"w" * 300,
        "optimised/samples.npz": b"s" * 70,
        "MAR-INF/optimised.json": b"{}",
        **build,
    }
    path = archive(tmp_path / "m.mar", zipfile.ZIP_STORED, **members)
    if is_folder:
        path = tmp_path / "m"
        with zipfile.ZipFile(tmp_path / "m.mar") as mar:
            mar.extractall(path)

    assert weigh(path).weights == weights
