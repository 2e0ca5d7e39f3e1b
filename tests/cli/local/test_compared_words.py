"""What the commands that take an archive apart check of their words."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from marserve.cli.local.compared_words import check_archive, check_export_path
from marserve.cli.output import WrongArguments
from support.command_line import marserve
from support.server import make_archive

PLAIN = "def handle(data, context):\n    return [row['body'] for row in data or []]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an archive, with another folder in it; `in` beside it has a request."""
    made = tmp_path / "m"
    with zipfile.ZipFile(make_archive(tmp_path / "m.mar", PLAIN)) as file:
        file.extractall(made)
    (made / "more").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text("1")
    return made


@pytest.mark.parametrize(("place", "typed"), [(".", "."), (".", "./"), ("more", ".."), ("more", "../../m")])
def test_an_archive_is_named_by_where_one_stands_too(
    place: str, typed: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has no name of its own, and a store looks archives up by theirs."""
    monkeypatch.chdir(folder / place)
    inputs = tmp_path / "in"

    debugged = marserve("debug", typed, inputs / "1.json", "--json")
    compared = marserve("compare", typed, typed, "--inputs", inputs, "--pairs", 0, "--json")
    searched = marserve("optimise", typed, "--inputs", inputs, "-o", tmp_path)
    exported = marserve("export", typed, "--to", "onnx", "--inputs", inputs, "-o", tmp_path)

    assert (debugged.status, debugged.document["answer"]) == (0, "1"), debugged.err
    assert (compared.status, compared.document["passed"]) == (0, True), compared.err
    assert "m 1.0 cannot be built anew: the handler holds no module" in searched.err
    assert "m 1.0 cannot be exported as onnx" in exported.err


def test_only_a_path_without_a_name_is_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link has a name, which is kept: messages say what was typed."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(folder)

    assert check_archive(link) == link
    assert check_archive(Path("../m")) == Path("../m")
    assert check_archive(Path()) == folder.resolve()


@pytest.mark.parametrize("command", [("optimise",), ("export", "--to", "onnx")])
def test_nothing_is_written_into_the_archives_folder(
    command: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one stands is the export path unless another is named: refused before minutes are spent, exit 2."""
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))

    ran = marserve(*command, ".", "--inputs", tmp_path / "in")

    assert ran.status == 2
    assert "The export path . lies in the folder of the archive, which stays as it is." in ran.err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_below_the_archives_is_in_it_and_one_beside_an_archives_file_is_not(
    folder: Path, tmp_path: Path
) -> None:
    """By where they lie, however they are spelled."""
    with pytest.raises(WrongArguments):
        check_export_path(folder / "more" / ".." / "more", folder)
    check_export_path(tmp_path, folder)
    check_export_path(tmp_path, tmp_path / "m.mar")
