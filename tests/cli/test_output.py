"""What commands say: results on one stream, everything else on the other, and the exit status."""

from __future__ import annotations

import json

import pytest
import typer

from marserve.cli.output import CommandFailed, Output, table
from marserve.errors import BadSettings


def test_a_result_for_a_person_is_its_lines_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The document is for scripts alone; brackets are not taken for colours."""
    with Output(as_json=False) as output:
        output.result({"model": "digits"}, "done [ok]", table(("name", "state"), [("digits", "[red]ready")]))

    told = capsys.readouterr()
    assert told.out.splitlines()[0] == "done [ok]"
    assert "[red]ready" in told.out
    assert "{" not in told.out
    assert told.err == ""


def test_a_result_for_a_script_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, notes and progress are left out."""
    with Output(as_json=True) as output, output.progress() as progress:
        progress.add_task("loading", total=None)
        output.note("by the way")
        output.result({"model": "größe"}, "done")

    told = capsys.readouterr()
    assert json.loads(told.out) == {"model": "größe"}
    assert told.err == ""


def test_a_note_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a pipe carries results alone."""
    Output(as_json=False).note("by the way")

    assert capsys.readouterr() == ("", "by the way\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [(CommandFailed("No server answers.", "Start one.", code=404), 1), (BadSettings("It is 0.", key="workers"), 2)],
)
def test_an_error_becomes_a_sentence_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for what went wrong, 2 for what was configured wrong; no traceback."""
    with pytest.raises(typer.Exit) as ended, Output(as_json=False):
        raise error

    told = capsys.readouterr()
    assert ended.value.exit_code == status
    assert told.out == ""
    assert told.err.startswith(f"marserve: {error}")
    assert "Traceback" not in told.err


def test_a_failure_names_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    """It stands in a line of its own."""
    with pytest.raises(typer.Exit), Output(as_json=False):
        raise CommandFailed("No server answers.", "Start one.")

    assert capsys.readouterr().err == "marserve: No server answers.\n  Start one.\n"


def test_a_failure_for_a_script_is_an_error_object(capsys: pytest.CaptureFixture[str]) -> None:
    """It holds the message, the next step and the facts."""
    with pytest.raises(typer.Exit), Output(as_json=True):
        raise CommandFailed("Model not found: x", "List them.", code=404, type="ModelNotFoundException")

    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "error": {
            "message": "Model not found: x",
            "next_step": "List them.",
            "code": 404,
            "type": "ModelNotFoundException",
        }
    }
    assert told.err == ""


def test_an_error_that_nobody_foresaw_stays_itself() -> None:
    """A mistake of ours shows its traceback."""
    with pytest.raises(ZeroDivisionError), Output(as_json=False):
        raise ZeroDivisionError
