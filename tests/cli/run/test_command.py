"""`marserve run`: what it refuses, in one sentence and with which status, and the settings that it makes."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from marserve.archive.writing.sources import Wishes
from marserve.archive.writing.staging import Staging
from marserve.cli.output import Output
from marserve.cli.run.command import _settings, _stage, run
from marserve.cli.run.source import LocalModel
from marserve.errors import CannotArchive
from support.command_line import marserve

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
        (
            "from marserve_handlers import model\n@model\nclass M:\n def load(self): ...\n"
            " def predict(self, x: str): ...\n",
            "m.py: M.load needs a parameter for the context: def load(self, context).",
        ),
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


DECLARED = "from marserve_handlers import model\n@model\ndef up(text: str) -> str:\n    return text.upper()\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("1 / 0", "m.py, line 5: ZeroDivisionError: division by zero."),
        ("import sys; sys.exit('no')", "m.py, line 5: it ends the process while it is imported (SystemExit: no)."),
        ("import json.none", "m.py, line 5: ModuleNotFoundError: No module named 'json.none'"),
    ],
)
def test_a_file_that_fails_at_its_import_is_one_sentence_and_status_2(folder: Path, line: str, sentence: str) -> None:
    """With file and line; the traceback is for `--verbose`."""
    (folder / "m.py").write_text(f"{DECLARED}{line}\n")

    result = runner.invoke(app, ["m.py"])

    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"marserve: {sentence}")
    assert "Traceback" not in result.output
    assert not list((folder.parent / "tmp").iterdir())


def test_the_traceback_of_an_import_is_printed_where_it_is_asked_for(folder: Path) -> None:
    """From the author's own file on."""
    (folder / "m.py").write_text(f"{DECLARED}1 / 0\n")

    result = runner.invoke(app, ["m.py", "--verbose"])

    assert result.exit_code == 2, result.output
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "m.py", line 5, in <module>\n')


def test_the_fault_of_a_file_that_declares_nothing_is_found_when_its_load_has_failed(folder: Path) -> None:
    """It is not imported before: only a worker needs it."""
    (folder / "m.py").write_text(f"1 / 0\n{HANDLER}")
    model = LocalModel("m.py", Wishes(), Staging(folder.parent / "tmp" / "models"))
    model.find()

    assert not model.is_importing
    assert model.stage_first(print) == "m-1"
    fault = model.find_fault()
    assert fault is not None
    assert fault.message == "m.py, line 1: ZeroDivisionError: division by zero."
    (folder / "m.py").write_text(HANDLER)
    assert model.find_fault() is None


def test_what_is_run_is_what_archive_packs_byte_for_byte(folder: Path) -> None:
    """Also what the model declares, which the server reads before the model is loaded."""
    (folder / "m.py").write_text("from marserve_handlers import model\nfrom beside import KIND\n" + DECLARED)
    (folder / "beside.py").write_text("KIND = open('words.txt').name\n")
    (folder / "words.txt").write_text("one")
    (folder / "model-config.yaml").write_text("batchSize: 4\n")

    packed = marserve("archive", "m.py:up", "--format", "no-archive", "--export-path", "packed")
    staging = Staging(folder.parent / "tmp" / "models")
    with contextlib.closing(LocalModel("m.py:up", Wishes(), staging)) as model:
        model.find()
        [staged] = (staging.root / model.stage_first(print)).iterdir()

    assert packed.status == 0, packed.err
    assert contents(staged) == contents(folder / "packed" / "up")
    assert {"MAR-INF/declaration.json", "beside.py", "words.txt"} <= contents(staged).keys()


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nets.py"], "There is no file or folder nets.py"),
        (["m.py", "--device", "tpu"], "--device takes cpu, gpu or numbers such as 0,1; it got 'tpu'."),
        (["m.py", "--set", "job_queue_size=many"], "job_queue_size"),
        (["m.py", "--task", "sentiment"], "--task takes text-classification, "),
        (["m.mar", "--task", "fill-mask"], "m.mar is an archive, which says itself how it is served"),
        (["m.mar", "--reload"], "--reload follows files that you edit, and m.mar is not one; leave it out."),
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
    assert "`marserve run m.py --port 0` takes a free one" in result.stderr


def test_settings_come_from_flags_then_variables_and_never_from_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one port for all, one worker, and what the server keeps in the private folder."""
    monkeypatch.setenv("MARSERVE_INFERENCE_ADDRESS", "http://127.0.0.1:7001")
    monkeypatch.setenv("MARSERVE_METRICS_ADDRESS", "http://127.0.0.1:7002")
    monkeypatch.setenv("MARSERVE_DESIRED_STATE", "other.yaml")
    private = folder.parent / "tmp"
    model = LocalModel("m.py", Wishes(), Staging(private / "models"))
    model.find()
    entry = model.stage_first(print)

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
    model.find()
    model.stage_first(print)

    said: list[str] = []
    assert model.stage_again(lambda: said.append("unchanged")) is None
    (folder / "m.py").write_text(HANDLER + "# more\n")
    assert model.stage_again(lambda: said.append("changed")) == "m-2"
    assert said == ["changed"]
    assert model.stage_again() is None
    (folder / "m.py").write_text("def handle(\n")
    with pytest.raises(CannotArchive, match="line 1"):
        model.stage_again()
    assert model.stage_again() is None
    (folder / "m.py").unlink()
    with pytest.raises(CannotArchive, match=r"^m\.py is gone"):
        model.stage_again()
    (folder / "m.py").write_text(HANDLER + "# even more\n")
    assert model.stage_again() == "m-3"


def test_advice_on_a_declaration_is_printed_before_it_is_served(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An item without an annotation is served as `dict`, which its author may not have meant."""
    (folder / "m.py").write_text("from marserve_handlers import model\n@model\ndef m(x):\n    return x\n")
    model = LocalModel("m.py", Wishes(), Staging(folder.parent / "tmp" / "models"))

    _stage(model, Output(False), follows=False, verbose=False)

    assert capsys.readouterr().err.startswith("Warning: m.py: the parameter x of m has no annotation, so a request is")


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

    model.find()
    settings = _settings(model, model.stage_first(print), host, 7003, [], private)

    assert settings.expose_errors == exposed
    assert settings.management_is_kept_here
