"""Names of members: which become paths, and which clash. What is refused in whole archives is in test_reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.archive.member_names import NameSpace, split_name
from marserve.errors import UnsafeArchive


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("h.py", ("h.py",)),
        ("a/b/c.txt", ("a", "b", "c.txt")),
        ("./a//b/.", ("a", "b")),
        ("folder/", ("folder",)),
        (".env", (".env",)),
        ("...", ("...",)),
        ("a..b", ("a..b",)),
        ("Größe/模型.pt", ("Größe", "模型.pt")),
        ("with blank", ("with blank",)),
        ("step:5", ("step:5",)),
    ],
)
def test_ordinary_names_are_split(name: str, parts: tuple[str, ...]) -> None:
    """Dots, blanks, colons and other scripts are no danger."""
    assert split_name(name) == parts


@given(st.text(max_size=40))
def test_what_is_given_back_stays_below_any_folder(name: str) -> None:
    """Whatever the name: refused, or inside of the folder that it is joined to."""
    try:
        parts = split_name(name)
    except UnsafeArchive:
        return

    root = Path("/srv/target")
    path = root.joinpath(*parts)
    assert path.parts[: len(root.parts)] == root.parts
    assert len(path.parts) == len(root.parts) + len(parts)
    assert not {"..", ".", ""} & set(parts)


def test_a_surrogate_is_no_name() -> None:
    """It could not be written as UTF-8."""
    with pytest.raises(UnsafeArchive, match="not valid Unicode"):
        split_name("a\udcff")


def test_a_name_space_takes_what_differs() -> None:
    """Same names in different folders, folders named again."""
    names = NameSpace()

    for name in ("a/x", "b/x", "x", "a/y"):
        names.add_file(name, split_name(name))
    names.add_folder("a/", ("a",))

    with pytest.raises(UnsafeArchive, match="needs a folder where 'x' is a file"):
        names.add_folder("x/", ("x",))
