"""What a declared version will take: looked up where the archive lies, a few reads, and never more than is honest."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.desired_state.document import DesiredVersion
from marserve.desired_state.memory_cost import BLOCK_BYTES, MemoryCost, RangeFile
from marserve.errors import AddressNotAllowed, ArchiveNotFound
from marserve.memory.needs import INTERPRETER_BYTES, RUNTIME_BYTES
from marserve.store.sources.local import LocalStore
from marserve.store.sources.source import Broken, Entry, Source
from support.checkpoints import safetensors_bytes

WEIGHTS = 3_000_000


def archive() -> bytes:
    """A `.mar` with weights."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as mar:
        mar.writestr("w.bin", bytes(WEIGHTS))
        mar.writestr("handler.py", b"#")
    return file.getvalue()


class Reading:
    """One read."""

    def __init__(self, data: bytes, begin: int) -> None:
        self.entry = Entry("k", len(data))
        self.begin = begin
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self._data


class Remote:
    """An archive elsewhere; counts the bytes that are read."""

    def __init__(self, data: bytes, *, has_ranges: bool = True) -> None:
        self.data, self.has_ranges = data, has_ranges
        self.bytes_read = 0
        self.stats = 0
        self.is_broken = False

    def stat(self) -> Entry:
        """Its size."""
        self.stats += 1
        if self.is_broken:
            raise Broken("no answer")
        return Entry("k", len(self.data))

    @contextmanager
    def read(self, begin: int, end: int, of: Entry | None = None) -> Iterator[Reading]:
        """A part of it; the whole where there are no ranges."""
        piece = self.data[begin:end] if self.has_ranges else self.data
        self.bytes_read += len(piece)
        yield Reading(piece, begin if self.has_ranges else 0)

    def close(self) -> None:
        """Nothing."""


def cost_of(remote: Remote, folder: Path) -> MemoryCost:
    """Estimates with this archive behind every address."""
    opened: Source = remote  # type: ignore[assignment]
    return MemoryCost(LocalStore(folder), lambda url: opened if "://" in url else None)


def test_an_archive_of_the_store_is_estimated_by_its_weights_and_workers(tmp_path: Path) -> None:
    """Workers that are forked share them; fresh ones hold their own."""
    (tmp_path / "m.mar").write_bytes(archive())
    cost = cost_of(Remote(b""), tmp_path)
    one = INTERPRETER_BYTES + RUNTIME_BYTES + WEIGHTS

    def of(**config: object) -> int | None:
        return cost(DesiredVersion("m.mar", config=config))

    assert of() == one
    assert of(minWorkers=0, maxWorkers=4) == 0
    assert of(minWorkers=2, maxWorkers=2, workerStart="fresh") == 2 * one
    assert one < (of(minWorkers=2, maxWorkers=2) or 0) < 2 * one


def test_an_archive_elsewhere_is_estimated_by_its_end(tmp_path: Path) -> None:
    """Not by its weights, which are not read; once, however often a plan is asked for."""
    remote = Remote(archive())
    cost = cost_of(remote, tmp_path)

    first = cost(DesiredVersion("https://store/m.mar"))

    assert first == cost(DesiredVersion("https://store/m.mar")) == INTERPRETER_BYTES + RUNTIME_BYTES + WEIGHTS
    assert remote.stats == 1
    assert remote.bytes_read <= 3 * BLOCK_BYTES


def test_what_cannot_be_known_is_not_made_up(tmp_path: Path) -> None:
    """Not there, no answer, no ranges."""
    silent = Remote(archive())
    silent.is_broken = True

    assert cost_of(silent, tmp_path)(DesiredVersion("none.mar")) is None
    assert cost_of(silent, tmp_path)(DesiredVersion("https://store/m.mar")) is None
    assert cost_of(Remote(archive(), has_ranges=False), tmp_path)(DesiredVersion("https://store/m.mar")) is None


def test_a_remote_file_reads_as_a_file(tmp_path: Path) -> None:
    """Across blocks, up to its end and not beyond it."""
    data = bytes(range(256)) * 3000
    source: Source = Remote(data)  # type: ignore[assignment]
    file = RangeFile(source, len(data))

    assert file.seek(-10, io.SEEK_END) == len(data) - 10
    assert file.read(100) == data[-10:]
    assert file.read(1) == b""
    file.seek(BLOCK_BYTES - 3)
    assert file.read(6) == data[BLOCK_BYTES - 3 : BLOCK_BYTES + 3]
    file.seek(0)
    assert file.read() == data
    with pytest.raises(OSError, match="shorter than it says"):
        RangeFile(source, len(data) + BLOCK_BYTES).read()


def test_an_archive_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    """Missing from the store, not allowed, or not there at its address; it is asked anew each time."""
    remote = Remote(archive())
    cost = cost_of(remote, tmp_path)
    refused = MemoryCost(LocalStore(tmp_path), refuse)
    (tmp_path / "there.mar").write_bytes(archive())

    assert cost.trouble(DesiredVersion("there.mar")) is None
    assert "gone.mar" in str(cost.trouble(DesiredVersion("gone.mar")))
    assert cost.trouble(DesiredVersion("https://models.example/m.mar")) is None
    remote.is_broken = True
    assert cost.trouble(DesiredVersion("https://models.example/m.mar")) == "https://models.example/m.mar: no answer"
    remote.is_broken = False
    assert cost.trouble(DesiredVersion("https://models.example/m.mar")) is None
    assert "does not match any allowed" in str(refused.trouble(DesiredVersion("https://models.example/m.mar")))


def test_an_address_with_a_digest_may_be_in_a_cache(tmp_path: Path) -> None:
    """That its origin does not answer says nothing then; that it is not allowed does."""
    remote = Remote(archive())
    remote.is_broken = True
    pinned = DesiredVersion("https://models.example/m.mar", sha256="a" * 64)

    assert cost_of(remote, tmp_path).trouble(pinned) is None
    assert MemoryCost(LocalStore(tmp_path), refuse).trouble(pinned) is not None


def refuse(url: str) -> Source | None:
    """Allows nothing."""
    raise ArchiveNotFound(f"Given URL {url} does not match any allowed URL(s)")


def test_weights_apart_from_the_archive_count_where_they_can_be_seen(tmp_path: Path) -> None:
    """A folder of the store by its headers; of those at an address nothing is known, and so of the whole."""
    (tmp_path / "m.mar").write_bytes(archive())
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "model.safetensors").write_bytes(safetensors_bytes({"a": ("F32", [2, 3])}))
    cost = cost_of(Remote(b""), tmp_path)
    alone = INTERPRETER_BYTES + RUNTIME_BYTES + WEIGHTS

    def of(checkpoint: str) -> int | None:
        return cost(DesiredVersion("m.mar", config={"checkpoint": checkpoint}))

    assert [of("w"), of("in/the/archive"), of("s3://bucket/w/")] == [alone + 24, alone, None]


def test_weights_at_an_address_that_is_not_allowed_are_trouble(tmp_path: Path) -> None:
    """Before anything of them is asked for; the sentence names what was written."""
    (tmp_path / "m.mar").write_bytes(archive())
    asked: list[str] = []

    def refuse(url: str) -> Source | None:
        asked.append(url)
        raise AddressNotAllowed(url)

    cost = MemoryCost(LocalStore(tmp_path), refuse)

    trouble = cost.trouble(DesiredVersion("m.mar", config={"checkpoint": "s3://bucket/w/"}))

    assert trouble == str(AddressNotAllowed("s3://bucket/w/"))
    assert cost.trouble(DesiredVersion("m.mar", config={"checkpoint": "w"})) is None
    assert len(asked) == 1
