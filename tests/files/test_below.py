"""Names lead below their folder, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.files.below import real_below


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "out"])
def test_what_leads_out_of_the_folder_is_nothing(name: str, tmp_path: Path) -> None:
    """By dots, as a whole path, or by a link."""
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)

    assert real_below(folder, name) is None


def test_links_are_followed_and_odd_names_raise_nothing(tmp_path: Path) -> None:
    """A folder that is a link itself, too."""
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "self").symlink_to("self")

    assert real_below(tmp_path / "link", "a/b") == folder / "a" / "b"
    assert real_below(folder, "self") == folder / "self"
    assert real_below(folder, "n" * 300) == folder / ("n" * 300)
