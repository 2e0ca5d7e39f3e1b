"""Tests for reading safetensors files, mapped or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.checkpoints.safetensors_index import DTYPES, read_safetensors
from support.checkpoints import with_header

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def _state() -> dict[str, Any]:
    return {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.arange(3, dtype=torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.tensor([True, False]),
        "e": torch.zeros(0, 4),
    }


@pytest.mark.parametrize("how", ["map_tensors", "read_tensors"])
def test_tensors_of_all_files_of_an_index_are_read(tmp_path: Path, how: str) -> None:
    """Numbers, truths, scalars and what is empty."""
    from safetensors.torch import save_file

    from marserve_handlers.sharding import safe_files

    state = _state()
    save_file({"a": state["a"]}, tmp_path / "one.safetensors")
    save_file({name: state[name] for name in "bcde"}, tmp_path / "two.safetensors")
    save_file({"z": state["a"]}, tmp_path / "left.safetensors")
    where = {name: "one.safetensors" if name == "a" else "two.safetensors" for name in state}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    stored = safe_files.find_stored(str(tmp_path))
    read = getattr(safe_files, how)(stored)

    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


@pytest.mark.parametrize("how", ["map_tensors", "read_tensors"])
def test_files_in_folders_below_the_index_are_those_that_the_server_checked(tmp_path: Path, how: str) -> None:
    """Not files of the same name beside it, nor one for two."""
    from safetensors.torch import save_file

    from marserve_handlers.sharding import safe_files

    state = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    for name, folder in (("a", "x"), ("b", "y/z")):
        (tmp_path / folder).mkdir(parents=True)
        save_file({name: state[name]}, tmp_path / folder / "m.safetensors")
    save_file({name: -state[name] for name in state}, tmp_path / "m.safetensors")
    where = {"a": "x/m.safetensors", "b": "y/z/m.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))

    checked = read_safetensors(tmp_path)
    read = getattr(safe_files, how)(safe_files.find_stored(str(tmp_path)))

    assert checked.tensors.keys() == read.keys() == state.keys()
    assert set(checked.files) == set(where.values())
    assert all(torch.equal(read[name], state[name]) for name in state)


@pytest.mark.parametrize(
    "name", ["../o.safetensors", "x/../../o.safetensors", "/{folder}/o.safetensors", "l.safetensors"]
)
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """As the server does; its index may have been changed since."""
    from safetensors.torch import save_file

    from marserve_handlers.sharding.safe_files import find_stored

    (folder := tmp_path / "weights").mkdir()
    (folder / "x").mkdir()
    save_file({"a": torch.tensor([1.0])}, tmp_path / "o.safetensors")
    (folder / "l.safetensors").symlink_to(tmp_path / "o.safetensors")
    name = name.format(folder=tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))

    with pytest.raises(ValueError, match=r"the index names .*, which lies outside of its folder"):
        find_stored(str(folder))


def test_what_lies_as_no_processor_reads_it_is_read_instead_of_mapped(tmp_path: Path) -> None:
    """Headers need not be a multiple of eight bytes long."""
    from marserve_handlers.sharding.safe_files import find_stored, map_tensors

    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    text += b" " * ((3 - len(text)) % 8)
    (tmp_path / "m.safetensors").write_bytes(with_header(text, torch.tensor([1.0, 2.0]).numpy().tobytes()))

    stored = find_stored(str(tmp_path))

    assert not stored["a"].can_be_mapped
    assert map_tensors(stored)["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("how", ["map_tensors", "read_tensors"])
def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path, how: str) -> None:
    """Reading a map beyond its file's end would end the process."""
    from marserve_handlers.sharding import safe_files

    header = {"a": {"dtype": "F32", "shape": [2048], "data_offsets": [0, 8192]}}
    (tmp_path / "m.safetensors").write_bytes(with_header(header, bytes(100)))

    with pytest.raises(EOFError, match=r"m.safetensors ends .*inside of a"):
        getattr(safe_files, how)(safe_files.find_stored(str(tmp_path)))


@pytest.mark.parametrize("places", [[0, 12], [0, 4], [8, 0], [-8, 0]])
def test_places_that_are_not_those_of_the_shape_are_refused(tmp_path: Path, places: list[int]) -> None:
    """Numbers of another tensor would be read."""
    from marserve_handlers.sharding.safe_files import stored_in

    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": places}}
    (tmp_path / "m.safetensors").write_bytes(with_header(header, bytes(12)))

    with pytest.raises(ValueError, match=r"a lies at -?\d+ to \d+ in m.safetensors, and takes 8 bytes"):
        stored_in(str(tmp_path / "m.safetensors"))


def test_it_knows_the_dtypes_that_the_server_knows() -> None:
    """One table, written in two places: handlers know nothing of the server."""
    from marserve_handlers.sharding.safe_files import _NAMES

    assert _NAMES == DTYPES
    assert all(hasattr(torch, name) for name in DTYPES.values())
