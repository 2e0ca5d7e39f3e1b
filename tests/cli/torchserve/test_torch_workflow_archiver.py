"""`torch-workflow-archiver` with TorchServe's flags: what it makes, prints and answers (contract 9.3)."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from marserve import __version__
from marserve.archive.contents.workflow_manifest import read_workflow_manifest
from marserve.archive.reading.reader import unpack
from marserve.cli.torchserve import torch_model_archiver
from marserve.cli.torchserve.torch_workflow_archiver import main
from support.inventory import inventory
from support.workflow_archives import FUNCTIONS, THREE_NODES

USUAL = ["--workflow-name", "w", "--spec-file", "wf.yaml", "--handler", "nodes.py"]


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one of each kind of file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    (tmp_path / "wf.yaml").write_text(THREE_NODES)
    (tmp_path / "nodes.py").write_text(FUNCTIONS)
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "c.txt").write_text("c")
    return tmp_path


def test_the_usual_call_is_silent_and_makes_a_war(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, a deflated zip file in the working directory, with TorchServe's manifest."""
    status = main(USUAL)

    assert (status, capsys.readouterr()) == (0, ("", ""))
    with zipfile.ZipFile("w.war") as file:
        assert file.namelist() == ["WAR-INF/MANIFEST.json", "nodes.py", "wf.yaml"]
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_DEFLATED}
        document = json.loads(file.read("WAR-INF/MANIFEST.json"))
    assert document["workflow"] == {"workflowName": "w", "specFile": "wf.yaml", "handler": "nodes.py"}
    assert document["archiverVersion"] == __version__
    assert document["createdOn"]


def test_extra_files_and_folders_go_to_the_top(tmp_path: Path) -> None:
    """Blanks between them do not count; what was made can be read again."""
    out = tmp_path / "out"
    out.mkdir()

    assert main([*USUAL, "--extra-files", "a.json, more", "--export-path", str(out)]) == 0

    unpack(out / "w.war", tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "deep" / "c.txt").read_text() == "c"
    assert (tmp_path / "unpacked" / "a.json").is_file()
    assert read_workflow_manifest(tmp_path / "unpacked").workflow_name == "w"


def test_the_same_files_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever and wherever it is made; SOURCE_DATE_EPOCH sets the date."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert main(USUAL) == 0
    first = Path("w.war").read_bytes()
    for name in ("wf.yaml", "nodes.py"):
        os.utime(name, (1, 1))

    assert main([*USUAL, "--force"]) == 0

    assert Path("w.war").read_bytes() == first
    with zipfile.ZipFile("w.war") as file:
        assert json.loads(file.read("WAR-INF/MANIFEST.json"))["createdOn"] == "14/11/2023 22:13:20"


def test_what_is_there_is_overwritten_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    """With a warning."""
    Path("w.war").write_text("old")

    assert main(USUAL) == 1
    assert "w.war already exists. Use --force (-f) to overwrite it." in capsys.readouterr().err
    assert Path("w.war").read_text() == "old"
    assert main([*USUAL, "-f"]) == 0

    assert capsys.readouterr().err.startswith("WARNING - Overwrote ")
    assert zipfile.is_zipfile("w.war")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--workflow-name", "a b", "--spec-file", "wf.yaml", "--handler", "nodes.py"],
            "workflow name 'a b' cannot be",
        ),
        (["--workflow-name", "w", "--spec-file", "gone.yaml", "--handler", "nodes.py"], "Spec file does not exist"),
        (["--workflow-name", "w", "--spec-file", "wf.yaml", "--handler", "gone.py"], "Handler file does not exist"),
        (["--workflow-name", "w", "--spec-file", "wf.yaml"], "No handler is named"),
        ([*USUAL, "--extra-files", "gone"], "File does not exist: gone"),
        ([*USUAL, "--export-path", "gone"], "The export path gone is no folder"),
        ([*USUAL, "--export-path", "wf.yaml"], "The export path wf.yaml is no folder"),
        ([*USUAL, "--extra-files", "more/../nodes.py,twin/nodes.py"], "File does not exist: twin/nodes.py"),
    ],
)
def test_what_cannot_be_archived_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """And nothing is left behind."""
    assert main(arguments) == 1

    told = capsys.readouterr().err
    assert told.startswith("ERROR - ")
    assert message in told
    assert told.count("\n") == 1
    assert not Path("gone").exists()
    assert not list(Path().glob("*w*.war*"))


@pytest.mark.parametrize(
    "arguments", [[], ["--workflow-name", "w", "--handler", "nodes.py"], [*USUAL, "--version", "1"]]
)
def test_usage_errors_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is missing, one that nobody knows."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert "usage: torch-workflow-archiver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("models: {}\n", "servers will refuse this workflow: wf.yaml has no graph"),
        ("models: [\n", "servers will refuse this workflow: Failed to parse yaml. (wf.yaml is no YAML (line 2))"),
        ("models: {z: {url: z}}\ndag: {f: []}\n", "model z is in no edge of the graph"),
    ],
)
def test_what_servers_would_say_of_the_spec_is_told_and_the_archive_made(
    spec: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """TorchServe's archiver does not look into it."""
    Path("wf.yaml").write_text(spec)

    assert main(USUAL) == 0

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("WARNING - ")
    assert message in told.err
    assert zipfile.is_zipfile("w.war")


@pytest.mark.parametrize("program", ["torch-model-archiver", "torch-workflow-archiver"])
def test_every_flag_of_torchserves_archivers_is_known(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The walk of the inventory's list: long and short form, and whether it must be given."""
    flags = [entry for entry in inventory("cli_flags") if entry["program"] == program]
    run = main if program == "torch-workflow-archiver" else torch_model_archiver.main

    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    usage = " ".join(capsys.readouterr().out.split())

    assert ended.value.code == 0
    assert flags
    for flag in flags:
        forms = [flag["flag"], *([flag["short"]] if "short" in flag else [])]
        assert all(f"{form} " in usage or f"{form}]" in usage or f"{form}," in usage for form in forms), flag
        is_optional = any(f"[{form} " in usage or f"[{form}]" in usage for form in forms)
        assert is_optional != flag.get("required", False), flag


def test_a_function_that_the_handler_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here, and not by a worker that cannot load it; the archive is made all the same, as by TorchServe's."""
    source = (tmp_path / "nodes.py").read_text()
    name = source.partition("def ")[2].partition("(")[0]
    (tmp_path / "nodes.py").write_text(source.replace(f"def {name}(", f"def {name}_("))

    assert main(USUAL) == 0

    said = capsys.readouterr().err
    assert f"refuse this workflow: {name} of wf.yaml is neither a model nor a function of nodes.py" in said
    assert (tmp_path / "w.war").is_file()
