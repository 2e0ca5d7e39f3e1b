"""`marserve new`: what it refuses, what it writes, and that each template's test and request work."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from marserve.archive.writing.sources import plan_source
from marserve.cli.local.new import new
from marserve.cli.local.templates import TEMPLATES
from marserve_handlers.testing import serve

app = typer.Typer()
app.command()(new)
runner = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, whose modules are forgotten at the end, as are another test's of these names before."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "test_model"):
        sys.modules.pop(name, None)
    yield tmp_path
    for name in ("model", "test_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["there"], 1, "There is there already, and nothing in it is overwritten."),
        (["no/such/folder"], 1, "no/such/folder cannot be made: there is no folder no/such."),
        (["a b"], 2, "The model name 'a b' cannot be used"),
        (["m", "--template", "video"], 2, "video"),
    ],
)
def test_what_cannot_be_made_is_refused(folder: Path, words: list[str], status: int, sentence: str) -> None:
    """Nothing is overwritten, and nothing is left."""
    (folder / "there").mkdir()
    (folder / "there" / "model.py").write_text("mine")

    result = runner.invoke(app, words)

    assert result.exit_code == status, result.output
    assert sentence in result.stderr
    assert [path.name for path in folder.iterdir()] == ["there"]
    assert (folder / "there" / "model.py").read_text() == "mine"


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    """It says what would be there."""
    result = runner.invoke(app, ["m", "--dry-run"])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("m would be made with model.py, test_model.py, request.json, ")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_has_what_a_beginner_needs(folder: Path, template: str) -> None:
    """A model, a test, a request, a configuration, a README of five lines; it can be run and packed."""
    result = runner.invoke(app, [f"my_{template}", "--template", template])

    assert result.exit_code == 0, result.output
    made = folder / f"my_{template}"
    names = {path.name for path in made.iterdir()}
    model = "model.onnx" if template == "onnx" else "model.py"
    assert {model, "test_model.py", "model-config.yaml", "README.md"} < names
    assert len([name for name in names if name.startswith("request.")]) == 1
    readme = [line for line in (made / "README.md").read_text().splitlines() if line]
    assert len(readme) == 5
    assert f"/predictions/my_{template}" in readme[2]
    assert "pip install pytest" in readme[3]
    assert plan_source(str(made)).plan.spec.model_name == f"my_{template}"


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_test_and_the_request_of_each_template_work(
    folder: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the author runs them; the request of ONNX goes through a server in the end-to-end tests."""
    runner.invoke(app, ["m", "--template", template])
    monkeypatch.syspath_prepend(str(folder / "m"))

    tests = importlib.import_module("test_model")

    claims = [claim for name, claim in vars(tests).items() if name.startswith("test_")]
    assert claims
    for claim in claims:
        claim()
    if template == "onnx":
        return
    handler = next(each for each in vars(sys.modules["model"]).values() if hasattr(each, "predict"))
    request = next((folder / "m").glob("request.*")).read_bytes()
    with serve(handler) as model:
        assert model(request).status == 200
