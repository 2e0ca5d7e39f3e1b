"""What commands say: results on one stream, everything else on the other, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from marserve.cli.output import CommandFailed, Interrupted, Output, table
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


def test_lines_are_printed_without_what_draws_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Its import would be the longest part of what `marserve run` does between the load and the first answer."""
    output = Output(as_json=False)
    output.result({}, "ready\tin 0.5 s :100:", "  Ask it   [curl]")

    assert capsys.readouterr().out == "ready\tin 0.5 s :100:\n  Ask it   [curl]\n"
    assert "_results" not in vars(output)


def test_a_result_for_a_script_is_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, notes and progress are left out."""
    with Output(as_json=True) as output, output.progress() as progress:
        progress.add_task("loading", total=None)
        output.note("by the way")
        output.result({"model": "größe"}, "done")

    told = capsys.readouterr()
    assert json.loads(told.out) == {"model": "größe"}
    assert told.err == ""


def test_a_name_reaches_no_terminal_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Names that a snapshot or a start brought with them are shown escaped, in tables, sentences and documents."""
    odd = "a\x1b[2J\u202eb"
    with Output(as_json=False) as output:
        output.result({}, f"{odd} is ready\nand more", table(("name",), [(f"{odd}\n",)]))
        output.note(odd)
    told = capsys.readouterr()
    shown = r"a\x1b[2J\u202eb"
    assert (told.out, told.err) == (f"{shown} is ready\nand more\nname\n{shown}\\n\n", f"{shown}\n")

    Output(as_json=True).result({"name": odd})
    told = capsys.readouterr()
    assert told.out.rstrip("\n").isprintable()
    assert json.loads(told.out) == {"name": odd}


def test_a_note_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a pipe carries results alone."""
    Output(as_json=False).note("by the way")

    assert capsys.readouterr() == ("", "by the way\n")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CommandFailed("No server answers.", "Start one.", code=404), 1),
        (BadSettings("It is 0.", key="workers"), 2),
        (Interrupted("It goes on as process 7."), 130),
    ],
)
def test_an_error_becomes_a_sentence_and_a_status(
    error: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for what went wrong, 2 for what was configured wrong, 130 after Ctrl-C; no traceback."""
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


def test_a_failure_tells_the_servers_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """In a line of its own, and for scripts as a fact."""
    for as_json in (False, True):
        with pytest.raises(typer.Exit), Output(as_json):
            raise CommandFailed("It did not load.", reason="SyntaxError [x]")

    told = capsys.readouterr()
    assert told.err == "marserve: It did not load.\n  Reason: SyntaxError [x]\n"
    assert json.loads(told.out)["error"]["reason"] == "SyntaxError [x]"


def test_a_table_in_a_pipe_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    """However long the words are: a script cuts lines, and no name is broken in two."""
    long = ["name " * 30 + str(row) for row in range(2)]

    Output(as_json=False).result({}, table(("model", "archive"), [(name, name) for name in long]))

    assert capsys.readouterr().out.splitlines()[1:] == [f"{name}  {name}" for name in long]


def test_a_table_in_a_narrow_terminal_breaks_between_words_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows wider than the terminal where a word needs it."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("TERM", raising=False)

    Output(as_json=False).result(
        {}, table(("model", "archive"), [("a-rather-long-model-name", "first.mar second.mar")])
    )

    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["a-rather-long-model-name", "first.mar"],
        ["second.mar"],
    ]


@pytest.mark.parametrize("arguments", [["version"], ["--help"]])
def test_an_output_that_takes_no_more_is_one_sentence_and_status_1(arguments: list[str]) -> None:
    """A full disk behind `>`, whether lines or tables are written."""
    command = [Path(sys.executable).with_name("marserve"), *arguments]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)

    assert (ran.returncode, ran.stderr) == (1, "marserve: the output could not be written: No space left on device.\n")
