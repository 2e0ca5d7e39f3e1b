"""Names of members: which become paths, and which clash. What is refused in whole archives is in test_reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.archive.reading.member_names import NameSpace, split_name
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "its name is empty"),
        ("././/", "its name is empty"),
        ("a\x00b", "holds control characters"),
        ("a\x1bb", "holds control characters"),
        ("a\u2028b", "holds control characters"),
        ("a\u2029b", "holds control characters"),
        ("a\\b", "holds a backslash"),
        ("a\uff3cb", "holds a backslash"),
        ("/a", "is an absolute path"),
        ("\uff0fa", "is an absolute path"),
        ("C:a", "begins with a drive letter"),
        ("z:/a", "begins with a drive letter"),
        ("\uff23\uff1aa", "begins with a drive letter"),
        ("..", "leads outside"),
        ("a/../b", "leads outside"),
        ("a/\u2025", "leads outside"),
        ("a\uff0fb", "other systems read as a slash"),
    ],
)
def test_a_name_that_leads_elsewhere_somewhere_is_refused(name: str, words: str) -> None:
    """As it stands, and as a system reads it that turns compatible characters into one another."""
    with pytest.raises(UnsafeArchive, match=words) as refusal:
        split_name(name)

    assert refusal.value.member == name


def test_the_longest_and_deepest_names_pass_and_the_next_are_refused() -> None:
    """1,024 bytes in all, 32 parts, 255 bytes a part, as UTF-8; the caller may set the first two."""
    longest = "/".join(["é" * 127 + "x"] * 4)

    assert len(split_name(longest + "/")) == 4
    assert len(split_name("/".join("a" * 32))) == 32
    assert split_name("ab/c", max_bytes=4, max_depth=2) == ("ab", "c")
    for name, words in [
        (longest + "/x", "has 1025 bytes; at most 1024"),
        ("/".join("a" * 33), "33 folders deep; at most 32"),
        ("a/" + "é" * 128 + "/b", "a part of its name has more than 255 bytes"),
    ]:
        with pytest.raises(UnsafeArchive, match=words) as refusal:
            split_name(name)
        assert refusal.value.member == name[:80] + "…"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a/x", "it is in the archive twice"),
        ("A/x", "its name differs from 'a' only by case"),
        ("a/X", "its name differs from 'a/x' only by case"),
        ("a/B/y", "its name differs from 'a/b' only by case"),
        ("a/\uff42/y", "its name differs from 'a/b' only by case or Unicode form"),
        ("a/b", "it is a file where another member needs a folder"),
        ("a/x/y", "it needs a folder where 'a/x' is a file"),
        ("Straße", "its name differs from 'strasse' only by case"),
    ],
)
def test_a_file_that_could_mean_a_taken_one_is_refused(name: str, words: str) -> None:
    """On systems that fold case or Unicode's forms; the other one is named as it was written."""
    names = NameSpace()
    for taken in ("a/x", "a/b/c", "strasse"):
        names.add_file(taken, split_name(taken))

    with pytest.raises(UnsafeArchive, match=words):
        names.add_file(name, split_name(name))
    names.add_file("a/b/other", ("a", "b", "other"))


def test_a_name_space_takes_what_differs() -> None:
    """Same names in different folders, folders named again."""
    names = NameSpace()

    for name in ("a/x", "b/x", "x", "a/y"):
        names.add_file(name, split_name(name))
    names.add_folder("a/", ("a",))

    with pytest.raises(UnsafeArchive, match="needs a folder where 'x' is a file"):
        names.add_folder("x/", ("x",))
