"""Tests for regions of shared memory: which may be registered, and what may be named in them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.open_inference.regions import MAX_KEY, MAX_NAME, Regions, Span
from marserve.errors import BadInput


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file of 100 bytes, below another one with a secret."""
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(100))
    (tmp_path / "secret").write_bytes(bytes(100))
    return folder


@pytest.fixture
def regions(folder: Path) -> Regions:
    """Room for two regions of 150 bytes together."""
    return Regions(folder, most_bytes=150, most_regions=2)


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        ".",
        "..",
        "/..",
        "../secret",
        "/../secret",
        "//a",
        "a/b",
        "a/",
        "x\0y",
        "a\n",
        "é" * MAX_KEY,
        None,
        3,
        [],
    ],
)
def test_a_key_is_the_name_of_one_file(regions: Regions, key: Any) -> None:
    """Nothing that leads elsewhere, and nothing that no file is called."""
    with pytest.raises(BadInput, match="Parameter key is"):
        regions.register("r", key, 0, 10)

    assert regions.status() == []


def test_an_absolute_path_leads_nowhere(regions: Regions, folder: Path) -> None:
    """Only the first slash is `shm_open`'s."""
    with pytest.raises(BadInput, match="without another slash"):
        regions.register("r", str(folder / "a"), 0, 10)


def test_anything_but_a_regular_file_is_refused_by_its_kind(regions: Regions, folder: Path) -> None:
    """A link within the folder too; a pipe is not waited for, and no descriptor stays."""
    (folder / "out").symlink_to(folder.parent / "secret")
    (folder / "in").symlink_to(folder / "a")
    (folder / "below").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.close()
    (folder / "hard").hardlink_to(folder.parent / "secret")
    before = open_descriptors()

    for key, words in {
        "out": "which is a symbolic link",
        "in": "which is a symbolic link",
        "zero": "which is a symbolic link",
        "below": "which is a folder",
        "pipe": "which is a named pipe",
        "socket": "which is a socket",
        "hard": "no other name",
        "none": "No such file",
    }.items():
        with pytest.raises(BadInput, match=words) as caught:
            regions.register("r", key, 0, 10)
        assert str(folder) not in str(caught.value)

    assert (regions.status(), open_descriptors()) == ([], before)


@pytest.mark.parametrize(
    ("offset", "byte_size", "words"),
    [
        (0, 101, "end at 101, and the file '/a' has 100 bytes"),
        (1, 100, "end at 101"),
        (101, 1, "end at 102"),
        (-1, 10, "Parameter offset is -1"),
        (0, -1, "Parameter byte_size is -1"),
        (0, 0, "Parameter byte_size is 0"),
        (1 << 63, 10, "Parameter offset is 9223372036854775808"),
        ((1 << 63) - 1, 10, "end at 9223372036854775817"),
        (0, 151, "150 bytes are left of the 150"),
        (0, (1 << 64) - 1, "Parameter byte_size is 18446744073709551615"),
        (0.0, 10, "Parameter offset is 0.0"),
        (True, 10, "Parameter offset is true"),
        ("0", 10, "Parameter offset is '0'"),
        (None, 10, "Parameter offset is missing"),
        (0, None, "Parameter byte_size is missing"),
    ],
)
def test_offset_and_size_lie_in_the_file(regions: Regions, offset: Any, byte_size: Any, words: str) -> None:
    """The value is named; nothing is registered."""
    with pytest.raises(BadInput, match=words):
        regions.register("r", "/a", offset, byte_size)

    assert regions.status() == []


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME + 1), "a\nb", "\ud800", "a\0"])
def test_a_name_is_short_and_printable(regions: Regions, name: str) -> None:
    """It stands in answers and log lines."""
    with pytest.raises(BadInput, match="A region's name is"):
        regions.register(name, "/a", 0, 10)


def test_a_name_is_given_once(regions: Regions) -> None:
    """The first registration stays; with the name free it may be had again."""
    regions.register("r", "/a", 0, 10)
    with pytest.raises(BadInput, match="the name 'r' is registered"):
        regions.register("r", "/a", 5, 20)

    assert [region.document() for region in regions.status("r")] == [
        {"name": "r", "key": "/a", "offset": 0, "byte_size": 10}
    ]
    regions.unregister("r")
    regions.register("r", "/a", 5, 20)


def test_all_regions_together_are_bounded(regions: Regions) -> None:
    """In bytes and in number; what is unregistered is given back."""
    regions.register("r", "/a", 0, 100)
    with pytest.raises(BadInput, match=r"50 bytes are left of the 150 .*system_shared_memory_size"):
        regions.register("s", "/a", 0, 51)
    regions.register("s", "/a", 0, 50)
    with pytest.raises(BadInput, match=r"2 regions are registered.*system_shared_memory_max_regions"):
        regions.register("t", "/a", 0, 1)

    regions.unregister("r")
    regions.unregister("r")
    regions.register("t", "/a", 0, 100)
    regions.unregister_all()
    regions.register("r", "/a", 0, 100)


def test_a_server_without_a_folder_names_the_setting() -> None:
    """It shows no regions, and has nothing to unregister."""
    regions = Regions(None, most_bytes=1, most_regions=1)
    with pytest.raises(BadInput, match="system_shared_memory_folder"):
        regions.register("r", "/a", 0, 10)

    regions.unregister("r")
    assert (regions.is_on, regions.status()) == (False, [])


# ------------------------------------------------------------------------------------------- what is taken


def test_ten_thousand_registrations_cost_no_descriptor(folder: Path) -> None:
    """They end at the bound, and may begin again."""
    regions = Regions(folder, most_bytes=1 << 20, most_regions=1000)
    before = open_descriptors()

    refused = 0
    for number in range(10_000):
        try:
            regions.register(f"r{number}", "a", 0, 100)
        except BadInput:
            refused += 1

    assert (len(regions.status()), refused, open_descriptors()) == (1000, 9000, before)
    regions.unregister_all()
    regions.register("r", "a", 0, 100)


def test_a_span_is_a_place_in_the_file(regions: Regions, folder: Path) -> None:
    """From the region's own offset on; the file's identity goes along."""
    regions.register("r", "a", 10, 50)
    found = (folder / "a").stat()

    assert regions.span("Input 'x'", "r", 5, 45) == Span(
        os.path.realpath(folder / "a"), found.st_dev, found.st_ino, 15, 45
    )
    assert regions.span("Input 'x'", "r", 50, 0).size == 0


@pytest.mark.parametrize(
    ("region", "offset", "byte_size", "words"),
    [
        ("s", 0, 10, "No region of system shared memory has the name 's'"),
        (3, 0, 10, "Input 'x' has a shared_memory_region of 3"),
        ("r", 5, 46, "end at 51, and the region 'r' has 50 bytes"),
        ("r", -1, 10, "Input 'x': shared_memory_offset is -1"),
        ("r", None, 10, "Input 'x': shared_memory_offset is missing"),
        ("r", 0, -10, "Input 'x': shared_memory_byte_size is -10"),
        ("r", 0, 10.0, r"Input 'x': shared_memory_byte_size is 10\.0"),
        ("r", 0, 1 << 80, "Input 'x': shared_memory_byte_size is 1208925819614629174706176"),
        ("r", 1 << 62, 1 << 62, "and the region 'r' has 50 bytes"),
    ],
)
def test_a_span_lies_in_its_region(regions: Regions, region: Any, offset: Any, byte_size: Any, words: str) -> None:
    """Else the tensor is named, and what it says."""
    regions.register("r", "a", 10, 50)

    with pytest.raises(BadInput, match=words):
        regions.span("Input 'x'", region, offset, byte_size)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.none())
NEAR = st.integers(-2, 102) | ANYTHING


@given(st.text(alphabet="a./\0", max_size=4) | ANYTHING, NEAR, NEAR, NEAR, NEAR)
def test_whatever_is_registered_lies_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, key: Any, offset: Any, size: Any, at: Any, length: Any
) -> None:
    """And whatever is named in it lies in the region."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "a").write_bytes(bytes(100))
    regions = Regions(folder, most_bytes=1000, most_regions=1)
    try:
        regions.register("r", key, offset, size)
        span = regions.span("Input 'x'", "r", at, length)
    except BadInput:
        return

    assert span.path == os.path.realpath(folder / "a")
    assert 0 <= offset <= span.offset <= span.offset + span.size <= offset + size <= 100
