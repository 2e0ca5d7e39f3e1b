"""The archiver's steps one by one."""

from __future__ import annotations

import json
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from marserve.archive.writing.model_export import Manifest, Model, ModelExportUtils
from marserve.errors import CannotArchive


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A handler, weights, a folder with more, and a place for archives."""
    (tmp_path / "h.py").write_text("def handle(data, context): return data")
    (tmp_path / "w.pt").write_bytes(b"weights")
    (tmp_path / "more" / "sub").mkdir(parents=True)
    (tmp_path / "more" / "sub" / "labels.json").write_text("{}")
    (tmp_path / "out").mkdir()
    return tmp_path


def gathered(inputs: Path) -> Path:
    """The inputs in a folder of their own."""
    return Path(
        ModelExportUtils.copy_artifacts(
            "m", handler=f"{inputs}/h.py:entry", serialized_file=inputs / "w.pt", extra_files=f"{inputs}/more, "
        )
    )


@pytest.mark.parametrize(
    ("archive_format", "output"),
    [("default", "m.mar"), ("zip-store", "m.mar"), ("tgz", "m.tar.gz"), ("no-archive", "m")],
)
def test_gathered_files_become_an_archive_with_the_callers_manifest(
    inputs: Path, archive_format: str, output: str
) -> None:
    """Its text as it is; the folder is private, and stays for the caller to delete."""
    folder = gathered(inputs)
    manifest = '{"of": "the caller"}'
    for _ in range(2):  # the second takes the first one's place
        ModelExportUtils.archive(str(inputs / "out"), "m", str(folder), manifest, archive_format)

    path = inputs / "out" / output
    members = {"h.py", "w.pt", "sub/labels.json", "MAR-INF/MANIFEST.json"}
    if archive_format == "no-archive":
        found = {each.relative_to(path).as_posix(): each.read_text() for each in path.rglob("*") if each.is_file()}
    elif archive_format == "tgz":
        with tarfile.open(path) as archive:
            names = [name for name in archive.getnames() if archive.getmember(name).isfile()]
            found = {name.removeprefix("m/"): archive.extractfile(name).read().decode() for name in names}  # type: ignore[union-attr]
    else:
        with zipfile.ZipFile(path) as zipped:
            found = {name: zipped.read(name).decode() for name in zipped.namelist()}
    assert found.keys() == members
    assert (found["MAR-INF/MANIFEST.json"], found["w.pt"]) == (manifest, "weights")
    assert folder.name == "m"
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_a_folder_that_is_the_archive_gets_its_manifest(inputs: Path) -> None:
    """`no-archive` in place: nothing is copied onto itself."""
    folder = inputs / "out" / "m"
    folder.mkdir()
    (folder / "h.py").write_text("")

    ModelExportUtils.archive(inputs / "out", "m", folder, "{}", "no-archive")

    assert sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.*")) == [
        "MAR-INF/MANIFEST.json",
        "h.py",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("serialized_file", "w.bin"),
        ("model_file", "net.py"),
        ("requirements_file", "requirements.txt"),
        ("config_file", "c.yaml"),
        ("handler", "none.py"),
        ("extra_files", "labels.json"),
    ],
)
def test_a_file_that_is_missing_is_an_error_of_its_own_kind(inputs: Path, name: str, value: str) -> None:
    """FileNotFoundError with its path, and no folder is left."""
    with pytest.raises(FileNotFoundError, match=value.removesuffix(".py")):
        ModelExportUtils.copy_artifacts("m", **{name: f"{inputs}/{value}"})


def test_a_built_in_handler_needs_no_file() -> None:
    """The server has it."""
    folder = Path(ModelExportUtils.copy_artifacts("m", handler="image_classifier", extra_files=None))

    assert list(folder.iterdir()) == []
    folder.rmdir()
    folder.parent.rmdir()


def test_an_archive_that_is_there_stays_unless_forced(inputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its folder comes back, the working directory for none."""
    (inputs / "out" / "m.mar").write_bytes(b"")

    with pytest.raises(CannotArchive, match="already exists"):
        ModelExportUtils.check_mar_already_exists("m", str(inputs / "out"), False)
    assert ModelExportUtils.check_mar_already_exists("m", str(inputs / "out"), True) == str(inputs / "out")
    assert "Overwriting" in caplog.text
    assert ModelExportUtils.check_mar_already_exists("m", str(inputs / "out"), False, "tgz") == str(inputs / "out")
    assert ModelExportUtils.check_mar_already_exists("none", None, False) == str(Path.cwd())


@pytest.mark.parametrize("name", ["abc%", "(model", "-.model", "a/b", ""])
def test_a_name_with_other_characters_is_refused(inputs: Path, name: str) -> None:
    """As by the command."""
    with pytest.raises(CannotArchive):
        ModelExportUtils.validate_inputs(name, inputs)


def test_an_export_path_that_is_no_folder_is_refused(inputs: Path) -> None:
    """TorchServe's archiver does not make it here."""
    ModelExportUtils.validate_inputs("m", inputs)
    with pytest.raises(CannotArchive, match="no folder"):
        ModelExportUtils.validate_inputs("m", inputs / "none")


def test_a_manifest_needs_no_more_than_name_and_handler(inputs: Path) -> None:
    """Flags that a tool leaves out are not given; equal files give equal text."""
    args = Namespace(model_name="m", handler=str(inputs / "h.py"))
    first, second = (ModelExportUtils.generate_manifest_json(args) for _ in range(2))

    assert first == second
    assert json.loads(first)["model"] == {"modelName": "m", "handler": "h.py"}
    assert json.loads(first)["runtime"] == "python"
    with pytest.raises(ValueError):
        ModelExportUtils.generate_manifest_json(Namespace(model_name="m", handler="h.py", runtime="java"))


def test_parts_of_a_manifest_are_text_too() -> None:
    """JSON."""
    model = Model("m", None, "h", extensions={"a": 1})

    assert json.loads(str(model)) == model.model_dict == {"modelName": "m", "handler": "h", "extensions": {"a": 1}}
    assert json.loads(repr(Manifest("LSP", model, created=0)))["createdOn"] == "01/01/1970 00:00:00"


def test_what_does_not_belong_into_archives() -> None:
    """Hidden folders, leftovers of systems, what is an archive itself."""
    keep = [
        ModelExportUtils.directory_filter("lib", {"__pycache__"}),
        ModelExportUtils.file_filter("a.pt", {"b.pt"}),
        ModelExportUtils.find_unique(["a.pt", "b.txt"], ".pt") == "a.pt",
        ModelExportUtils.find_unique(["b.txt"], ".pt") is None,
    ]
    leave = [
        ModelExportUtils.directory_filter(".git", set()),
        ModelExportUtils.directory_filter("__pycache__", {"__pycache__"}),
        ModelExportUtils.file_filter("b.pt", {"b.pt"}),
        ModelExportUtils.file_filter("old.mar", set()),
    ]

    assert (keep, leave) == ([True] * 4, [False] * 4)
    with pytest.raises(CannotArchive, match=r"2 \.pt files"):
        ModelExportUtils.find_unique(["a.pt", "b.pt"], ".pt")


def test_files_are_deleted_and_folders_made(tmp_path: Path) -> None:
    """The two smallest steps."""
    (tmp_path / "a").write_text("")
    ModelExportUtils.make_dir(tmp_path / "b" / "c")
    ModelExportUtils.make_dir(tmp_path / "b" / "c")
    ModelExportUtils.clean_temp_files([str(tmp_path / "a")])

    assert [each.name for each in tmp_path.iterdir()] == ["b"]
