"""`marserve run`: what it refuses, in one sentence and with which status, and the settings that it makes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from marserve.archive.writing.sources import Wishes
from marserve.archive.writing.staging import Staging
from marserve.cli.run.command import _settings, run
from marserve.cli.run.source import LocalModel
from marserve.errors import CannotArchive

app = typer.Typer()
app.command()(run)
runner = CliRunner(env={"COLUMNS": "200"})

HANDLER = "def handle(data, context):\n    return data\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with settings that must not be read, and a temporary folder of its own."""
    folder, temporary = tmp_path / "here", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name in [name for name in os.environ if name.startswith(("MARSERVE_", "TS_"))]:
        monkeypatch.delenv(name)
    (folder / "config.properties").write_text("inference_address=http://127.0.0.1:1\nwrong\n")
    (folder / "m.py").write_text(HANDLER)
    (folder / "m.mar").touch()
    return folder


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import nosuchthing\n" + HANDLER, "m.py, line 1: nosuchthing is imported, and it is neither installed nor "),
        ("x = 1\n", "m.py has no model: "),
        (
            "class A:\n def handle(self, d, c): ...\nclass B:\n def handle(self, d, c): ...\n",
            "m.py has 2 models: A (line 1), B (line 3)",
        ),
        ("def handle(\n", "m.py, line 1: '(' was never closed."),
    ],
)
def test_a_file_that_cannot_be_run_is_one_sentence_and_status_2(folder: Path, text: str, sentence: str) -> None:
    """An import error, no model, two models, no Python: nothing is started, nothing is left."""
    (folder / "m.py").write_text(text)

    result = runner.invoke(app, ["m.py"])

    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert not list((folder.parent / "tmp").iterdir())
    assert sorted(path.name for path in folder.iterdir()) == ["config.properties", "m.mar", "m.py"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nets.py"], "There is no file or folder nets.py"),
        (["m.py", "--device", "tpu"], "--device takes cpu, gpu or numbers such as 0,1; it got 'tpu'."),
        (["m.py", "--set", "job_queue_size=many"], "job_queue_size"),
        (["m.py", "--task", "sentiment"], "--task takes text-classification, "),
        (["m.mar", "--task", "fill-mask"], "m.mar is an archive, which says itself how it is served"),
        (["m.mar", "--reload"], "--reload follows files that you edit, and m.mar is none; leave it out."),
        (["hf://org/name", "--task", "fill-mask"], "hf://org/name names no revision"),
        (["m.py", "--host", "no/host"], "Invalid binding address: http://no/host:8080"),
    ],
)
def test_wrong_arguments_are_status_2(arguments: list[str], sentence: str) -> None:
    """The sentence names what was typed."""
    result = runner.invoke(app, arguments)

    assert result.exit_code == 2, result.output
    assert sentence in result.stderr


def test_a_port_in_use_names_its_holder_and_is_status_1() -> None:
    """With the way out."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

        result = runner.invoke(app, ["m.py", "--port", str(sock.getsockname()[1])])

    assert result.exit_code == 1, result.output
    assert f"is in use by process {os.getpid()} (" in result.stderr
    assert "--port 0 for a free one" in result.stderr


def test_settings_come_from_flags_then_variables_and_never_from_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one port for all, one worker, and what the server keeps in the private folder."""
    monkeypatch.setenv("MARSERVE_INFERENCE_ADDRESS", "http://127.0.0.1:7001")
    monkeypatch.setenv("MARSERVE_METRICS_ADDRESS", "http://127.0.0.1:7002")
    monkeypatch.setenv("MARSERVE_DESIRED_STATE", "other.yaml")
    private = folder.parent / "tmp"
    model = LocalModel("m.py", Wishes(), Staging(private / "models"))
    entry = model.stage_first()

    by_variable = _settings(model, entry, None, None, [], private)
    by_flag = _settings(model, entry, None, 7003, ["default_workers_per_model=4"], private)

    assert str(by_variable.inference_address) == str(by_variable.management_address) == "http://127.0.0.1:7001"
    assert str(by_variable.metrics_address) == str(by_flag.metrics_address) == "http://127.0.0.1:7002"
    assert by_variable.desired_state is None
    assert by_variable.default_workers_per_model == 1
    assert str(by_flag.inference_address) == "http://127.0.0.1:7003"
    assert by_flag.default_workers_per_model == 4
    assert by_flag.source_file is None
    assert by_flag.state_folder is not None
    assert by_flag.state_folder.is_relative_to(private)


def test_a_changed_source_is_staged_once_and_a_broken_one_said_once(folder: Path) -> None:
    """Ten saves of the same state are one change."""
    model = LocalModel("m.py", Wishes(), Staging(folder.parent / "tmp" / "models"))
    model.stage_first()

    assert model.stage_again() is None
    (folder / "m.py").write_text(HANDLER + "# more\n")
    assert model.stage_again() == "m-2"
    assert model.stage_again() is None
    (folder / "m.py").write_text("def handle(\n")
    with pytest.raises(CannotArchive, match="line 1"):
        model.stage_again()
    assert model.stage_again() is None
    (folder / "m.py").unlink()
    with pytest.raises(CannotArchive, match="There is no file"):
        model.stage_again()
    (folder / "m.py").write_text(HANDLER + "# even more\n")
    assert model.stage_again() == "m-3"


@pytest.mark.parametrize(
    ("host", "exposed"),
    [
        *[(None, "traceback"), ("localhost", "traceback"), ("::1", "traceback"), ("0.0.0.0", "off")],
        *[("127.x.example", "off"), ("localhost.example", "off")],
    ],
)
def test_tracebacks_are_for_clients_of_this_machine_alone(folder: Path, host: str | None, exposed: str) -> None:
    """Management on an open address answers callers of this machine alone."""
    private = folder.parent / "tmp"
    model = LocalModel("m.py", Wishes(), Staging(private / "models"))

    settings = _settings(model, model.stage_first(), host, 7003, [], private)

    assert settings.expose_errors == exposed
    assert settings.management_is_kept_here
