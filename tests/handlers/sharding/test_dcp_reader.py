"""Tests for the worker's reader of checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from random import Random
from typing import Any

import pytest

from marserve.archive.checkpoints.checkpoint import read_checkpoint
from support.checkpoints import save_dcp, save_in_pieces

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of two tensors."""
    return save_dcp(tmp_path / "weights", {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)})


def _layout(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder).layout


def _reader(folder: Path, layout: dict[str, Any] | None = None) -> Any:
    from marserve_handlers.sharding.dcp_reader import TensorReader

    return TensorReader(folder, json.dumps(layout or _layout(folder)).encode())


def _load(folder: Path, layout: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    state, reader = {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, _reader(folder, layout)
    reader.fill(state)
    return state, reader


@pytest.fixture
def each_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is read as a whole because it is small."""
    from marserve_handlers.sharding import dcp_reader

    monkeypatch.setattr(dcp_reader, "READ_AT_ONCE", 0)


def test_tensors_are_read_and_each_byte_once(folder: Path) -> None:
    """torch's own reader reads the ends of files two or three times."""
    state, reader = _load(folder, _layout(folder))

    assert torch.equal(state["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(state["b"], torch.ones(3))
    assert reader.bytes_read == os.path.getsize(folder / "__0_0.distcp")


def test_a_part_is_put_together_of_the_pieces_that_have_some_of_it(tmp_path: Path) -> None:
    """However many ranks have saved it."""
    whole = torch.arange(24.0).reshape(6, 4)
    folder = save_in_pieces(tmp_path / "three", {"w": whole, "n": torch.tensor(3)}, 3)
    reader = _reader(folder)

    assert torch.equal(reader.read_part("w", (slice(1, 5), slice(1, 3))), whole[1:5, 1:3])
    assert torch.equal(reader.read_part("w", (slice(2, 4), slice(0, 4))), whole[2:4])
    assert reader.read_part("n", ()).item() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn", "complex64"])
@pytest.mark.usefixtures("each_is_large")
def test_of_a_piece_no_more_is_read_than_the_part(tmp_path: Path, dtype: str) -> None:
    """Rows and columns: the numbers, and of each piece some thousand bytes that say where they are."""
    whole = (torch.arange(40_000.0).reshape(200, 200) % 7).to(getattr(torch, dtype))
    folder = save_in_pieces(tmp_path / "weights", {"w": whole, "n": torch.ones((), dtype=whole.dtype)}, 2)
    for part in ((slice(50, 150), slice(0, 200)), (slice(0, 200), slice(20, 70)), (slice(3, 4), slice(5, 5))):
        reader = _reader(folder)

        read = reader.read_part("w", part)

        assert torch.equal(read.to(torch.complex64), whole[part].to(torch.complex64))
        assert read.nbytes <= reader.bytes_read <= read.nbytes + 2 * 6000
    assert _reader(folder).read_part("n", ()).item() == 1


@pytest.mark.usefixtures("each_is_large")
def test_ranks_together_read_a_checkpoint_once(tmp_path: Path) -> None:
    """Saved by one, loaded by four: 1.05 times its bytes at most, by columns too."""
    state = {name: torch.randn(1024, 512) for name in ("up", "down")}
    folder = save_dcp(tmp_path / "one", state)
    readers = [_reader(folder) for _ in range(4)]

    for rank, reader in enumerate(readers):
        own = slice(256 * rank, 256 * (rank + 1))
        assert torch.equal(reader.read_part("up", (own, slice(0, 512))), state["up"][own])
        own = slice(128 * rank, 128 * (rank + 1))
        assert torch.equal(reader.read_part("down", (slice(0, 1024), own)), state["down"][:, own])

    size = sum(path.stat().st_size for path in folder.iterdir())
    assert sum(reader.bytes_read for reader in readers) <= 1.05 * size


def _as_it_lies(tensor: Any) -> Any:
    return tensor


def _turned(tensor: Any) -> Any:
    return tensor.t().contiguous().t()


def _of_a_larger_one(tensor: Any) -> Any:
    return torch.cat([torch.zeros(3, tensor.shape[1]), tensor, torch.ones(2, tensor.shape[1])])[3:-2]


def _parameter(tensor: Any) -> Any:
    return torch.nn.Parameter(tensor)


def _negated(tensor: Any) -> Any:
    return torch._neg_view(-tensor)  # of which the file says "times -1"


@pytest.mark.parametrize("change", [_as_it_lies, _turned, _of_a_larger_one, _parameter, _negated])
@pytest.mark.parametrize("how", ["zip", "compressed", "big", "legacy"])
@pytest.mark.usefixtures("each_is_large")
def test_a_piece_is_read_however_it_was_saved(tmp_path: Path, change: Any, how: str) -> None:
    """A storage that is larger, turned, lazily negated, compressed, of another byte order, or of before torch 1.6."""
    whole = torch.arange(48.0).reshape(8, 6)
    folder = save_dcp(tmp_path / "weights", {"w": whole})
    raw = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(change(whole), raw, _use_new_zipfile_serialization=how != "legacy")
    piece = raw.getvalue() if how in ("zip", "legacy") else _packed_again(raw, how)
    layout = _layout(folder)
    (folder / "__0_0.distcp").write_bytes(b"before" + piece)
    layout["files"]["__0_0.distcp"][0][1:3] = 6, len(piece)
    reader = _reader(folder, layout)

    part = reader.read_part("w", (slice(2, 7), slice(1, 5)))
    state = {"w": torch.zeros(8, 6, dtype=torch.float64)}
    reader.fill(state)

    assert torch.equal(part, whole[2:7, 1:5])
    assert torch.equal(state["w"], whole.double())


def _packed_again(raw: io.BytesIO, how: str) -> bytes:
    """The same archive with its numbers compressed, or in the other byte order."""
    packed = io.BytesIO()
    with zipfile.ZipFile(raw) as old, zipfile.ZipFile(packed, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if how == "big" and info.filename.endswith("byteorder"):
                data = b"big"
            if how == "big" and info.filename.endswith("data/0"):
                data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
            is_numbers = info.filename.endswith("data/0") and how == "compressed"
            new.writestr(info.filename, data, zipfile.ZIP_DEFLATED if is_numbers else zipfile.ZIP_STORED)
    return packed.getvalue()


@pytest.mark.usefixtures("each_is_large")
@pytest.mark.filterwarnings("ignore")  # torch says of some what it does not know
def test_a_damaged_piece_gives_an_error_or_numbers_of_its_own(folder: Path) -> None:
    """Whatever stands in it, nothing beyond it is read: the file ends with a piece that is as it was."""
    layout, path = _layout(folder), folder / "__0_0.distcp"
    whole, ends = path.read_bytes(), 0
    for seed in range(150):
        random, data = Random(seed), bytearray(whole)
        for _ in range(random.randrange(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data)
        try:
            state, _ = _load(folder, layout)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
            ends += 1
        else:
            assert [tuple(tensor.shape) for tensor in state.values()] == [(3, 4), (3,)]

    assert 0 < ends < 150


@pytest.mark.usefixtures("each_is_large")
def test_numbers_that_are_fewer_than_their_tensor_has_are_refused(tmp_path: Path) -> None:
    """What lies behind them in the file is another's."""
    folder = save_dcp(tmp_path / "weights", {"w": torch.ones(64, 64)})
    raw, short = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(64, 64), raw)
    with zipfile.ZipFile(raw) as old, zipfile.ZipFile(short, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info)[: 4096 if info.filename.endswith("data/0") else None])
        new.writestr("archive/padding", bytes(30_000))
    layout = _layout(folder)
    (folder / "__0_0.distcp").write_bytes(short.getvalue())
    layout["files"]["__0_0.distcp"][0][1:3] = 0, len(short.getvalue())

    with pytest.raises(RuntimeError, match="size"):
        _reader(folder, layout).fill({"w": torch.zeros(64, 64)})


def test_a_piece_of_another_shape_or_of_none_is_refused(folder: Path) -> None:
    """The file was written anew since it was registered."""
    from marserve_handlers.sharding.dcp_reader import NotTensors

    for value, words in ((torch.ones(4, 3), r"w has the shape \[4, 3\]"), ({"a": 1}, "is no tensor in other")):
        raw = io.BytesIO()
        torch.save(value, raw)
        layout = _layout(folder)
        (folder / "other").write_bytes(raw.getvalue())
        (part,) = (part for part in layout["files"]["__0_0.distcp"] if part[0] == "w")
        layout["files"] = {"other": [["w", 0, len(raw.getvalue()), *part[3:]]]}

        with pytest.raises(NotTensors, match=words):
            _reader(folder, layout).fill({"w": torch.zeros(3, 4)})


def test_what_is_unpickled_of_metadata_is_nothing(folder: Path) -> None:
    """The server has read it; a worker needs none."""
    layout = _layout(folder)
    (folder / ".metadata").unlink()

    state, _ = _load(folder, layout)

    assert torch.equal(state["b"], torch.ones(3))


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _lead_out(layout: dict[str, Any], path: Path) -> None:
    path.write_bytes(bytes(10_000))
    layout["files"][f"../{path.name}"] = layout["files"].pop("__0_0.distcp")


def _lengthen(layout: dict[str, Any], path: Path) -> None:
    layout["files"]["__0_0.distcp"][0][2] = 1 << 30


@pytest.mark.parametrize(
    ("change", "words"), [(_lead_out, "leads out of it"), (_lengthen, "lies beyond the end of __0_0.distcp")]
)
def test_what_the_server_would_refuse_is_not_read_either(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    """The folder may have changed since it was registered."""
    from marserve_handlers.sharding.dcp_reader import NotTensors

    layout = _layout(folder)
    change(layout, tmp_path / "other")

    with pytest.raises(NotTensors, match=words):
        _load(folder, layout)


def test_a_piece_that_unpickles_to_code_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Its place holds another file of torch.save by now."""
    raw = io.BytesIO()
    torch.save(_Canary(tmp_path / "canary"), raw)
    layout = _layout(folder)
    (folder / "__0_0.distcp").write_bytes(raw.getvalue())
    for part in layout["files"]["__0_0.distcp"]:
        part[1:3] = 0, len(raw.getvalue())

    with pytest.raises(pickle.UnpicklingError):
        _load(folder, layout)
    assert not (tmp_path / "canary").exists()


def test_a_file_that_was_cut_off_is_refused_however_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large piece and a small one."""
    from marserve_handlers.sharding import dcp_reader

    layout = _layout(folder)
    os.truncate(folder / "__0_0.distcp", os.path.getsize(folder / "__0_0.distcp") - 40)
    for limit in (0, 1 << 20):
        monkeypatch.setattr(dcp_reader, "READ_AT_ONCE", limit)
        with pytest.raises(dcp_reader.NotTensors, match="lies beyond the end"):
            _load(folder, layout)
