"""Tests for the folders of torch.distributed.checkpoint: read without torch, and refused without harm."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.checkpoints.contents import BadCheckpoint, Saved
from marserve.archive.checkpoints.dcp_metadata import parse_metadata, read_dcp
from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped
from support.checkpoints import change_metadata, save_dcp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a layer, a counter and nothing else."""
    state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16), "n": torch.tensor(7)}
    return save_dcp(tmp_path_factory.mktemp("dcp") / "saved", state)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "weights"))


def test_names_dtypes_shapes_and_places_are_read_without_torch(folder: Path) -> None:
    """Each piece with where it lies; the pieces fill the file."""
    read = read_dcp(folder)

    assert read.tensors == {"w": Saved("float32", (3, 4)), "b": Saved("bfloat16", (3,)), "n": Saved("int64", ())}
    assert read.bytes == 48 + 6 + 8
    (parts,) = read.files.values()
    assert sorted(part.name for part in parts) == ["b", "n", "w"]
    assert sum(part.length for part in parts) == os.path.getsize(folder / "__0_0.distcp")


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_code_in_the_metadata_is_refused_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Wherever it hides."""
    canary = tmp_path / "canary"

    def hide(metadata: Any) -> None:
        metadata.planner_data = {"w": _Canary(canary)}

    change_metadata(folder, hide)

    with pytest.raises(BadCheckpoint, match=r"\.metadata: it is no metadata of tensors alone: .*posix\.system"):
        read_dcp(folder)
    assert not canary.exists()


def test_entries_of_bytes_are_refused(tmp_path: Path) -> None:
    """torch unpickles them with any code that is in them."""
    folder = save_dcp(tmp_path / "weights", {"w": torch.ones(2), "extra": _Canary(tmp_path / "canary")})

    with pytest.raises(BadCheckpoint, match=r"'extra': entries of bytes, which torch unpickles"):
        read_dcp(folder)
    assert not (tmp_path / "canary").exists()


def _info(metadata: Any, name: str = "w") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _set_info(**values: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in values.items():
            setattr(_info(metadata), name, value)

    return change


def _chunk(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"].chunks[0]


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        owner: Any = metadata.state_dict_metadata["w"]
        *way, last = path.split(".")
        for name in way:
            owner = owner[int(name)] if name.isdigit() else getattr(owner, name)
        setattr(owner, last, value)

    return change


def _store_more(metadata: Any) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[type(index)("other", [0])] = metadata.storage_data[index]


def _without_place(metadata: Any) -> None:
    del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == "w")]


def _in_halves(overlap: int) -> Callable[[Any], None]:
    """`w` in two chunks, of which the second begins `overlap` rows before the first ends."""

    def change(metadata: Any) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        rows = torch.Size([2 - overlap, 0]), torch.Size([1 + overlap, 4])
        metadata.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 4])),
            ChunkStorageMetadata(*rows),
        ]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set_info(relative_path="../../../../etc/hostname"), "leads outside"),
        (_set_info(relative_path="/etc/hostname"), "absolute path"),
        (_set_info(relative_path="sub\0file"), "control characters"),
        (_set_info(relative_path="out"), "a link that leads out of the checkpoint"),
        (_set_info(relative_path="missing.distcp"), "there is no such file"),
        (_set_info(relative_path="."), "its name is empty"),
        (_set_info(relative_path="./__0_0.distcp"), "it names one file as"),
        (_set_info(relative_path=7), "no path, offset and length"),
        (_set_info(offset=-1), "no path, offset and length"),
        (_set_info(offset=True), "no path, offset and length"),
        (_set_info(offset=1 << 70), "no path, offset and length"),
        (_set_info(length=1 << 40), "it may be cut off"),
        (lambda metadata: setattr(_info(metadata, "b"), "offset", 10), "inside of another's"),
        (_set_info(length=1), "has 48 bytes, and its place in a file 1"),
        (_set_info(length=1000), "belong to no tensor"),
        (_set_info(transform_descriptors=["stream.zstd"]), "extensions"),
        (_set("size", torch.Size([3, 5])), "have 12 elements together, and the tensor 15"),
        (_set("size", torch.Size([4, 3])), "reaches beyond the tensor"),
        (_set("size", (3, 4)), "no size or no chunks"),
        (_set("chunks", ()), "no size or no chunks"),
        (_set("chunks", [1]), "is no ChunkStorageMetadata"),
        (_set("chunks.0.offsets", torch.Size([0])), "does not have the dimensions"),
        (_set("properties", None), "no dtype"),
        (_set("properties.dtype", "float32"), "no dtype"),
        (_set("properties.dtype", torch.quint8), "which is not allowed in it"),
        (_in_halves(1), "have 16 elements together"),
        (_without_place, "of no file where the piece of 'w'"),
        (_store_more, "pieces of 'other' that belong to no tensor"),
        (lambda metadata: setattr(metadata, "storage_data", None), "its storage_data is no map"),
        (lambda metadata: {"a": 1}, "holds no metadata of torch.distributed.checkpoint"),
    ],
)
def test_metadata_that_is_wrong_is_refused_with_what_is_wrong(
    folder: Path, tmp_path: Path, change: Callable[[Any], Any], words: str
) -> None:
    """By one sentence; above all paths that lead out, and places beyond a file's end."""
    (tmp_path / "secret").write_bytes(bytes(4000))
    (folder / "out").symlink_to(tmp_path / "secret")
    change_metadata(folder, change)

    with pytest.raises(BadCheckpoint, match=r"^The checkpoint cannot be used: ") as raised:
        read_dcp(folder)

    assert words in raised.value.message


def test_chunks_that_overlap_are_refused_though_their_elements_add_up(folder: Path) -> None:
    """A hole of as many elements would stay what memory held before."""

    def change(metadata: Any) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        metadata.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
            ChunkStorageMetadata(torch.Size([1, 1]), torch.Size([2, 3])),
        ]

    change_metadata(folder, change)

    with pytest.raises(BadCheckpoint, match="overlap"):
        read_dcp(folder)


def _used_often(metadata: Any, tensors: int) -> None:
    """Describe so many empty tensors by one object."""
    metadata.storage_data.clear()
    one = metadata.state_dict_metadata["w"]
    one.size = torch.Size([0])
    metadata.state_dict_metadata = {f"t{number}": one for number in range(tensors)}


def test_an_object_of_many_fields_that_is_used_often_is_refused_at_once(folder: Path) -> None:
    """A file of some MB could hold a server's processor for hours."""

    def change(metadata: Any) -> None:
        _used_often(metadata, 2000)
        one = metadata.state_dict_metadata["t0"]
        one.chunks = []
        vars(one).update((f"k{number}", None) for number in range(1000))

    change_metadata(folder, change)

    with pytest.raises(BadCheckpoint, match=r"'t0' has 1003 fields, and a TensorStorageMetadata at most 64"):
        read_dcp(folder)


def test_empty_pieces_that_many_tensors_share_are_counted_for_each(folder: Path) -> None:
    """They take no place in a file, which bounds others."""

    def change(metadata: Any) -> None:
        _used_often(metadata, 100)
        chunk = metadata.state_dict_metadata["t0"].chunks[0]
        chunk.offsets, chunk.sizes = torch.Size([0]), torch.Size([0])
        metadata.state_dict_metadata["t0"].chunks = [chunk] * 1000

    change_metadata(folder, change)

    with pytest.raises(BadCheckpoint, match="more than 50000 operations"):
        read_dcp(folder, CheckBudget(50_000))


def test_a_file_that_was_cut_off_is_refused(folder: Path) -> None:
    """With the byte at which it should end."""
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(BadCheckpoint, match=r"__0_0.distcp: the bytes of .* it may be cut off"):
        read_dcp(folder)


def test_a_check_ends_when_the_server_does(saved: Path) -> None:
    """Long metadata holds no stop up."""
    budget = CheckBudget(is_stopped=lambda: True)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.planner_data = {str(number): (number,) for number in range(1000)}
    data = pickle.dumps(metadata)

    with pytest.raises(CheckStopped):
        parse_metadata(data, budget)


def _mutations(data: bytes, count: int) -> Iterator[bytes]:
    """Bytes changed, left out, doubled, and operations in another order: the same ones each time."""
    chance = random.Random(7)
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    for _ in range(count):
        begin, end = sorted(chance.sample(places, 2))
        yield chance.choice(
            [
                data[:begin] + bytes([chance.randrange(256)]) + data[begin + 1 :],
                data[:begin] + data[end:],
                data[:end] + data[begin:],
                data[:begin],
            ]
        )


def test_changed_metadata_is_read_or_refused(saved: Path) -> None:
    """With no other error, and nothing runs."""
    data = (saved / ".metadata").read_bytes()
    refused = 0
    for mutant in _mutations(data, 400):
        try:
            parse_metadata(mutant)
        except BadCheckpoint:
            refused += 1

    assert refused > 300


def test_metadata_of_every_protocol_is_read(saved: Path) -> None:
    """Python 3.14 writes another one than 3.11."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for protocol in (2, 3, 4, 5):
        tensors, _ = parse_metadata(pickle.dumps(metadata, protocol))

        assert set(tensors) == {"w", "b", "n"}
