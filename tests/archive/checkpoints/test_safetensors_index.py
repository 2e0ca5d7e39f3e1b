"""Tests for what safetensors files and their index say, right, wrong and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.archive.checkpoints import json_entries
from marserve.archive.checkpoints.contents import BadCheckpoint, Saved
from marserve.archive.checkpoints.safetensors_index import parse_header, parse_index, read_safetensors
from support.checkpoints import safetensors_bytes, with_header

A, B = ("F32", [2, 3]), ("F16", [4])
INDEX = "model.safetensors.index.json"


def _write_shards(folder: Path, weight_map: dict[str, str]) -> Path:
    (folder / "one.safetensors").write_bytes(safetensors_bytes({"a": A}))
    (folder / "two.safetensors").write_bytes(safetensors_bytes({"b": B}))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
    return folder


def test_the_files_of_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    """Names, dtypes and shapes come from the headers."""
    _write_shards(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})

    read = read_safetensors(tmp_path)

    assert read.tensors == {"a": Saved("float32", (2, 3)), "b": Saved("float16", (4,))}
    assert read.bytes == 32
    assert set(read.files) == {"one.safetensors", "two.safetensors"}


def test_a_file_alone_needs_no_index(tmp_path: Path) -> None:
    """As `save_file` leaves it, with metadata."""
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": A, "empty": ("I64", [0])}, format="pt"))

    assert set(read_safetensors(tmp_path).tensors) == {"a", "empty"}


def test_every_dtype_of_the_format_that_torch_reads_is_known(tmp_path: Path) -> None:
    """What the format's own library writes is read."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    state = {
        str(dtype).removeprefix("torch."): torch.zeros(3, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.uint32, torch.bfloat16, torch.float64)
    } | {"float8_e4m3fn": torch.zeros(3, dtype=torch.float8_e4m3fn)}
    save_file(state, tmp_path / "model.safetensors")

    assert read_safetensors(tmp_path).tensors == {name: Saved(name, (3,)) for name in state}


def _header(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "has 0 bytes"),
        ((1 << 63).to_bytes(8, "little"), "more than any header has"),
        ((99).to_bytes(8, "little") + b"{}", "99 bytes, and the file 10: it may be cut off"),
        (with_header(b"[]", b""), "no JSON object"),
        (with_header(b"{" * 9000, b""), "no JSON"),
        (with_header(b'{"a": 1' + b"0" * 5000 + b"}", b""), "no JSON"),
        (with_header(b"{\xff}", b""), "no JSON"),
        (with_header(b'{"a": 1, "a": 2}', b""), "names 'a' twice"),
        (with_header({"__metadata__": {"a": 1}}, b""), "__metadata__ is no map of texts"),
        (with_header({"a": 1}, b""), "exactly dtype, shape and data_offsets"),
        (with_header(_header(more=1), bytes(8)), "exactly dtype, shape and data_offsets"),
        (with_header(_header(dtype="F31"), bytes(8)), "the dtype 'F31'; known are BOOL"),
        (with_header(_header(dtype=["F32"]), bytes(8)), "the dtype a list"),
        (with_header(_header(shape=[-2]), bytes(8)), "no shape"),
        (with_header(_header(shape=[2.0]), bytes(8)), "no shape"),
        (with_header(_header(shape=[True, 2]), bytes(8)), "no shape"),
        (with_header(_header(shape=[1 << 61, 4]), bytes(8)), "no shape"),
        (with_header(_header(shape=[1] * 65), bytes(8)), "no shape"),
        (with_header(_header(shape="2"), bytes(8)), "no shape"),
        (with_header(_header(data_offsets=[8, 0]), bytes(8)), "no data_offsets"),
        (with_header(_header(data_offsets=[0]), bytes(8)), "no data_offsets"),
        (with_header(_header(data_offsets=[-8, 0]), bytes(8)), "no data_offsets"),
        (with_header(_header(data_offsets=[0, 12]), bytes(12)), "has 12 bytes, and float32 of the shape [2] takes 8"),
        (with_header(_header(), bytes(7)), "and the file has"),
        (with_header(_header(), bytes(9)), "belong to no tensor"),
        (with_header(_header(data_offsets=[4, 12]), bytes(12)), "belong to no tensor"),
        (with_header(_header() | {"b": _header(data_offsets=[4, 12])["a"]}, bytes(12)), "inside of another's"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path: Path, file: bytes, words: str) -> None:
    """By one sentence, which names the file."""
    (tmp_path / "model.safetensors").write_bytes(file)

    with pytest.raises(BadCheckpoint, match=r"^The checkpoint cannot be used: model.safetensors: ") as raised:
        read_safetensors(tmp_path)

    assert words in raised.value.message


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, "has no weight_map"),
        ({}, "has no weight_map"),
        ({"a": 1}, "no .safetensors file"),
        ({"a": "one.bin"}, "no .safetensors file"),
        ({"a": "../one.safetensors"}, "leads outside"),
        ({"a": "/etc/one.safetensors"}, "absolute path"),
        ({"a": "out.safetensors"}, "a link that leads out of the checkpoint"),
        ({"a": "three.safetensors"}, "there is no such file"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "says that 'c' is in one.safetensors, and it is not"),
        ({"b": "two.safetensors", "a": "two.safetensors"}, "says that 'a' is in two.safetensors, and it is not"),
        ({"a": "./one.safetensors", "c": "one.safetensors"}, "names one file as"),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path: Path, weight_map: Any, words: str) -> None:
    """Above all one that names files outside of its folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(safetensors_bytes({"a": A}))
    (folder / "out.safetensors").symlink_to(tmp_path / "secret.safetensors")
    _write_shards(folder, weight_map)

    with pytest.raises(BadCheckpoint, match=r"^The checkpoint cannot be used: ") as raised:
        read_safetensors(folder)

    assert words in raised.value.message


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    """Tensors that were saved in pieces look so."""
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes({"a": A}))
    (tmp_path / "two.safetensors").write_bytes(safetensors_bytes({"a": A}))

    with pytest.raises(BadCheckpoint, match=r"two.safetensors: it holds 'a', which one.safetensors holds, too"):
        read_safetensors(tmp_path)


def test_a_file_whose_names_an_index_leaves_out_is_refused(tmp_path: Path) -> None:
    """The index is of another state then."""
    (tmp_path / "one.safetensors").write_bytes(safetensors_bytes({"a": A, "b": B}))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))

    with pytest.raises(BadCheckpoint, match=r"it does not name 'b', which one.safetensors holds"):
        read_safetensors(tmp_path)


_GOOD = safetensors_bytes({"a": A, "b": B}, format="pt")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(_GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(-3, 3))
def test_a_changed_file_is_read_or_refused(changes: list[tuple[int, int]], longer: int) -> None:
    """With no other error; what is read is within the file."""
    data = bytearray(_GOOD)
    for place, value in changes:
        data[place] = value
    data = data[: len(data) + longer] if longer < 0 else data + bytes(longer)
    length = int.from_bytes(data[:8], "little")

    try:
        tensors, parts = parse_header(bytes(data[8 : 8 + min(length, 10_000)]), len(data), "f")
    except BadCheckpoint:
        return

    assert sum(saved.bytes for saved in tensors.values()) == sum(part.length for part in parts)
    assert all(part.offset >= 0 and part.offset + part.length <= len(data) for part in parts)


_JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=60, deadline=None)
@given(_JSON)
def test_any_json_is_an_index_or_refused(document: object) -> None:
    """With no other error."""
    for data in (document, {"weight_map": document}):
        try:
            where = parse_index(json.dumps(data).encode(), INDEX)
        except BadCheckpoint:
            continue
        assert all(file.endswith(".safetensors") for file in where.values())


def test_names_that_are_not_for_printing_are_shown_escaped(tmp_path: Path) -> None:
    """Those of tensors and of files; a log would take a new line for a line of its own."""
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes({"a\x1b[2J": A}))
    with pytest.raises(BadCheckpoint, match=r"it holds 'a\\x1b\[2J', which one.safetensors holds, too"):
        read_safetensors(tmp_path)

    (tmp_path / "o\nne.safetensors").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"^The checkpoint cannot be used: 'o\\nne.safetensors': it names the file"):
        read_safetensors(tmp_path)


def test_a_header_of_too_many_tensors_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nine hundred thousand took a quarter of a minute."""
    monkeypatch.setattr(json_entries, "MOST_NAMES", 2)
    header = {f"t{number}": {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]} for number in range(3)}
    (tmp_path / "m.safetensors").write_bytes(with_header(header, bytes(3)))

    with pytest.raises(BadCheckpoint, match=r"m.safetensors: it has more than 2 names, the most that are read: save"):
        read_safetensors(tmp_path)
