"""`torch-model-archiver` with TorchServe's flags: what it makes, prints and answers (contract 9.2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from marserve.cli.torchserve.torch_model_archiver import main


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one of each kind of file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    files = ["my_handler.py", "net.py", "weights.pt", "a.json", "b.txt", "more/c.txt", "requirements.txt", "cfg.yaml"]
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    return tmp_path


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest in a zip file."""
    with zipfile.ZipFile(path) as file:
        document: dict[str, Any] = json.loads(file.read("MAR-INF/MANIFEST.json"))
    return document


def test_the_usual_call_is_silent_and_makes_a_mar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 0, a deflated zip file in the working directory."""
    status = main(["--model-name", "m", "--version", "1.0", "--handler", "my_handler.py"])

    assert (status, capsys.readouterr()) == (0, ("", ""))
    with zipfile.ZipFile("m.mar") as file:
        assert file.namelist() == ["MAR-INF/MANIFEST.json", "my_handler.py"]
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_DEFLATED}
    document = manifest_of(Path("m.mar"))
    assert document["model"] == {"modelName": "m", "handler": "my_handler.py", "modelVersion": "1.0"}
    assert document["runtime"] == "python"
    assert document["archiverVersion"]


@pytest.mark.parametrize("handler", ["densenet_handler", "sagemaker_script", "image_classifier"])
def test_a_built_in_handler_needs_no_file(tmp_path: Path, handler: str) -> None:
    """The manifest names it, and the archive holds no module of that name."""
    assert main(["--model-name", "m", "-v", "1", "--handler", handler, "--serialized-file", "weights.pt"]) == 0

    assert manifest_of(Path("m.mar"))["model"]["handler"] == handler
    with zipfile.ZipFile("m.mar") as file:
        assert file.namelist() == ["MAR-INF/MANIFEST.json", "weights.pt"]


def test_every_flag_is_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long and short forms; blanks between extra files do not count."""
    words = (
        "--model-name full -v 2.5 --handler my_handler:run --model-file net.py --serialized-file weights.pt "
        "--runtime python3 --archive-format zip-store --export-path out -r requirements.txt -c cfg.yaml -f"
    )
    Path("out").mkdir()
    status = main([*words.split(), "--extra-files", "*.json, b.txt,more"])

    assert (status, capsys.readouterr()) == (0, ("", ""))
    with zipfile.ZipFile("out/full.mar") as file:
        assert file.namelist() == [
            "MAR-INF/MANIFEST.json",
            "a.json",
            "b.txt",
            "c.txt",
            "cfg.yaml",
            "my_handler.py",
            "net.py",
            "requirements.txt",
            "weights.pt",
        ]
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
    document = manifest_of(Path("out/full.mar"))
    assert document["runtime"] == "python3"
    assert document["model"] == {
        "modelName": "full",
        "serializedFile": "weights.pt",
        "handler": "my_handler:run",
        "modelFile": "net.py",
        "modelVersion": "2.5",
        "requirementsFile": "requirements.txt",
        "configFile": "cfg.yaml",
    }


def test_the_other_formats_go_where_torchserve_puts_them(tmp_path: Path) -> None:
    """A tar file with one folder around all, a plain folder."""
    common = ["--model-name", "z", "--version", "1", "--handler", "image_classifier", "--serialized-file", "weights.pt"]

    assert main([*common, "--archive-format", "tgz"]) == 0
    assert main([*common, "--archive-format", "no-archive"]) == 0

    with tarfile.open("z.tar.gz") as packed:
        assert packed.getnames() == ["z/MAR-INF/MANIFEST.json", "z/weights.pt"]
    assert sorted(path.name for path in Path("z").rglob("*")) == ["MANIFEST.json", "MAR-INF", "weights.pt"]


def test_an_archive_that_exists_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1 and one line; with `--force` a warning and the new archive."""
    arguments = ["--model-name", "m", "--version", "1.0", "--handler", "my_handler.py", "--export-path", "."]
    main(arguments)

    refused = main(arguments)
    words = capsys.readouterr().err
    forced = main([*arguments, "--force"])

    assert refused == 1
    assert words == "ERROR - m.mar already exists. Use --force (-f) to overwrite it.\n"
    assert forced == 0
    assert capsys.readouterr().err == "WARNING - Overwriting m.mar ...\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--handler", "gone.py"], "Handler file does not exist: gone.py"),
        (["--handler", "my_handler.py", "--serialized-file", "gone.pt"], "File does not exist: gone.pt"),
        (["--handler", "my_handler.py", "--extra-files", "a.json,gone"], "File does not exist: gone"),
        (["--handler", "my_handler.py", "--export-path", "a.json"], "The export path a.json is no folder"),
        (["--handler", "my_handler.py", "--export-path", "not/there"], "The export path not/there is no folder"),
        (["--handler", "my_handler.py", "--model-name", "bad name"], "The model name 'bad name' cannot be used"),
    ],
)
def test_an_error_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Where TorchServe's archiver prints a traceback (Q30)."""
    status = main(["--model-name", "w", "--version", "1", *arguments])

    assert status == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"ERROR - {words}")
    assert printed.err.count("\n") == 1
    assert not Path("not").exists()


def test_a_wildcard_without_a_match_only_warns(capsys: pytest.CaptureFixture[str]) -> None:
    """The archive is made."""
    status = main(["--model-name", "w", "--version", "1", "--handler", "my_handler.py", "--extra-files", "*.none"])

    assert status == 0
    assert capsys.readouterr().err == "WARNING - No file matches *.none\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version", "1", "--handler", "my_handler.py"],
        ["--model-name", "m", "--handler", "my_handler.py"],
        ["--model-name", "m", "--version", "1"],
        ["--model-name", "m", "--version", "1", "--handler", "my_handler.py", "--runtime", "ruby"],
        ["--model-name", "m", "--version", "1", "--handler", "my_handler.py", "--archive-format", "rar"],
    ],
)
def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """As argparse has it."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)

    assert exit_.value.code == 2
    assert "usage: torch-model-archiver" in capsys.readouterr().err


def test_a_folder_of_the_models_name_in_the_temporary_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchServe's archiver deletes it first (Q30)."""
    (tmp_path / "tmp" / "m").mkdir(parents=True)
    (tmp_path / "tmp" / "m" / "precious").write_text("x")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    assert main(["--model-name", "m", "--version", "1", "--handler", "my_handler.py"]) == 0

    assert os.listdir(tmp_path / "tmp") == ["m"]
    assert (tmp_path / "tmp" / "m" / "precious").exists()


def test_the_command_of_a_shell_answers_with_the_same_statuses(tmp_path: Path) -> None:
    """The console script exits with what `main` returns, and loads no torch."""
    code = (
        "import sys; from marserve.cli.torchserve.torch_model_archiver import main; status = main(); "
        "assert not {'torch', 'fastapi', 'rich'} & set(sys.modules); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "--model-name", "m", "--version", "1", "--handler", "my_handler.py"]

    first = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    assert second.returncode == 1
    assert second.stderr.startswith("ERROR - ")
    assert "Traceback" not in second.stderr
