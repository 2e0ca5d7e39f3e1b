"""A folder of request bodies."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.optimise.inputs import BadInputs, content_type_of, find_inputs


def test_files_come_in_the_order_of_their_names_and_hidden_ones_do_not(tmp_path: Path) -> None:
    """Nor do folders."""
    for name in ("b.json", "a.png", ".hidden", "c"):
        (tmp_path / name).write_text("1")
    (tmp_path / "d").mkdir()

    found = find_inputs(tmp_path)

    assert [each.path.name for each in found] == ["a.png", "b.json", "c"]
    assert [each.content_type for each in found] == ["image/png", "application/json", ""]


@pytest.mark.parametrize(
    ("name", "kind"), [("a.npy", "application/x-npy"), ("a.JSON", "application/json"), ("a.txt", "text/plain")]
)
def test_a_content_type_follows_from_the_ending(name: str, kind: str) -> None:
    """Also in capitals."""
    assert content_type_of(Path(name)) == kind


def test_a_folder_that_is_none_or_empty_is_refused(tmp_path: Path) -> None:
    """With its name."""
    with pytest.raises(BadInputs, match="holds no files"):
        find_inputs(tmp_path)
    with pytest.raises(BadInputs, match="cannot be read"):
        find_inputs(tmp_path / "none")
