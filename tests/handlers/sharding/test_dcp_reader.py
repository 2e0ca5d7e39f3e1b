"""Tests for the worker's reader of checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
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


def _load(folder: Path, layout: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from marserve_handlers.sharding.dcp_reader import TensorReader, fill

    state, reader = {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, TensorReader(folder, json.dumps(layout).encode())
    fill(state, reader)
    return state, reader


def test_tensors_are_read_and_each_byte_once(folder: Path) -> None:
    """torch's own reader reads the ends of files two or three times."""
    state, reader = _load(folder, _layout(folder))

    assert torch.equal(state["w"], torch.arange(12.0).reshape(3, 4))
    assert torch.equal(state["b"], torch.ones(3))
    assert reader.bytes_read == os.path.getsize(folder / "__0_0.distcp")


def test_a_part_is_put_together_of_the_pieces_that_have_some_of_it(tmp_path: Path) -> None:
    """However many ranks have saved it."""
    from marserve_handlers.sharding.dcp_reader import TensorReader

    whole = torch.arange(24.0).reshape(6, 4)
    folder = save_in_pieces(tmp_path / "three", {"w": whole, "n": torch.tensor(3)}, 3)
    reader = TensorReader(folder, json.dumps(_layout(folder)).encode())

    assert torch.equal(reader.read_part("w", (slice(1, 5), slice(1, 3))), whole[1:5, 1:3])
    assert torch.equal(reader.read_part("w", (slice(2, 4), slice(0, 4))), whole[2:4])
    assert reader.read_part("n", ()).item() == 3


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


def test_bytes_are_never_asked_for(folder: Path) -> None:
    """A state that wants something else than a tensor is refused: torch would unpickle it."""
    from marserve_handlers.sharding.dcp_reader import TensorReader, fill

    with pytest.raises((ValueError, RuntimeError)):
        fill({"w": 7}, TensorReader(folder, json.dumps(_layout(folder)).encode()))


def test_a_large_piece_goes_to_its_tensor_without_a_copy_between(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading give the same; one that is cut off is refused in both."""
    from marserve_handlers.sharding import dcp_reader

    layout = _layout(folder)
    monkeypatch.setattr(dcp_reader, "READ_AT_ONCE", 0)
    state, _ = _load(folder, layout)
    assert torch.equal(state["w"], torch.arange(12.0).reshape(3, 4))

    for limit in (0, 1 << 20):
        monkeypatch.setattr(dcp_reader, "READ_AT_ONCE", limit)
        os.truncate(folder / "__0_0.distcp", os.path.getsize(folder / "__0_0.distcp") - 40)
        with pytest.raises(dcp_reader.NotTensors, match="lies beyond the end"):
            _load(folder, layout)
