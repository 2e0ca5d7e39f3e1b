"""Leaving debug records out of TorchScript files: torch still loads them, and no path of the machine stays."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import pytest

from marserve.archive.contents.torchscript import strip_debug_records
from marserve.archive.pickles.pickle_check import check_files
from marserve.archive.reading.zip_records import ZipRecords
from marserve.archive.writing.writer import ArchiveSpec, Packed, write_archive
from support.archives import zip_of


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text",
        zip_of({}),
        zip_of({"a/data.pkl": b"x", "a/code/x.py.debug_pkl": b"x"}),
        zip_of({"a/constants.pkl": b"x", "a/code/x.py": b"x"}),
        zip_of({"a/constants.pkl": b"x"})[:-3],
    ],
    ids=["nothing", "text", "empty zip", "no constants", "no debug records", "cut"],
)
def test_other_files_are_left_as_they_are(data: bytes) -> None:
    """Nothing is written for them."""
    target = io.BytesIO()

    assert strip_debug_records(io.BytesIO(data), target) == []
    assert target.getvalue() == b""


def test_records_keep_order_and_bytes_and_begin_at_multiples_of_64(tmp_path: Path) -> None:
    """torch maps tensors from where they lie; the names of what was left out are told."""
    members = {
        "net/data/0": b"tensor" * 100,
        "net/data/1": b"x",
        "net/code/__torch__.py": b"class Net: pass",
        "net/code/__torch__.py.debug_pkl": b"/home/somebody/net.py",
        "net/constants.pkl": b"\x80\x02).",
        "net/version": b"3\n",
    }
    target = io.BytesIO()

    dropped = strip_debug_records(io.BytesIO(zip_of(members)), target)

    assert dropped == ["net/code/__torch__.py.debug_pkl"]
    records = ZipRecords(target, "it", max_entries=100, max_directory_bytes=10_000)
    del members[dropped[0]]
    assert {entry.name: b"".join(records.read(entry)) for entry in records.entries} == members
    assert [entry.name for entry in records.entries] == list(members)
    assert {records.find_data(entry) % 64 for entry in records.entries} == {0}


@pytest.mark.torch
def test_torch_loads_what_was_rewritten_and_computes_the_same(tmp_path: Path) -> None:
    """Traced, scripted and frozen; the file has no path of this machine, and the checks pass."""
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        """A little of everything: constants, lists, a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)
            self.register_buffer("scale", torch.tensor([2.0]))
            self.numbers = [1, 2]

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            """Two numbers a row."""
            return self.layer(rows) * self.scale + torch.tensor([1.0, 2.0]) + float(self.numbers[0])

    net, rows = Net().eval(), torch.ones(4, 3)
    here = str(Path(__file__).parent).encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = {"traced": torch.jit.trace(net, rows), "scripted": torch.jit.script(torch.nn.Linear(3, 2))}
        programs["frozen"] = torch.jit.freeze(torch.jit.trace(net, rows))
        for name, program in programs.items():
            program.save(tmp_path / f"{name}.pt")
            packed: list[Packed] = []
            folder = write_archive(
                ArchiveSpec(name, "1", "base_handler", serialized_file=tmp_path / f"{name}.pt"),
                tmp_path,
                archive_format="no-archive",
                on_member=packed.append,
            )
            written = folder / f"{name}.pt"

            loaded = torch.jit.load(written)

            assert torch.equal(loaded(rows), program(rows))
            assert [member.name for member in packed if member.left_out] == [f"{name}.pt"]
            assert check_files([(written.name, written)]) == []
            with written.open("rb") as file:
                records = ZipRecords(file, "it", max_entries=100, max_directory_bytes=10_000)
                contents = [b"".join(records.read(entry)) for entry in records.entries]
                assert {records.find_data(entry) % 64 for entry in records.entries} == {0}
            assert not any(here in content or b".py" in content for content in contents)
