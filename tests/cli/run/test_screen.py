"""What `marserve run` shows: the line to type, a traceback's own part, what goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.app.local_run import Failure, Ready
from marserve.cli import INTERRUPTED_STATUS
from marserve.cli.output import Output
from marserve.cli.run.screen import Screen
from marserve.settings import Address


def screen(
    *, as_json: bool = False, is_litserve: bool = False, is_verbose: bool = False, body_words: str = ""
) -> Screen:
    """The screen of `shout.py`, staged in `/srv/staged/models`."""
    return Screen(
        Output(as_json),
        "shout.py",
        "shout",
        "1.0",
        Path("/srv/staged/models"),
        folder=None,
        follows=True,
        is_litserve=is_litserve,
        is_verbose=is_verbose,
        **({"example": "BODY", "body_words": body_words} if body_words else {}),
    )


def test_a_traceback_begins_with_the_authors_own_file() -> None:
    """Frames of the worker are left out, and paths are those of the source."""
    text = (
        "W-9000-shout_1.0 Traceback (most recent call last):\n"
        '  File "/lib/marserve/worker/load.py", line 9, in load_model\n    initialize(context)\n'
        '  File "/srv/staged/models/shout-1/shout/shout.py", line 3, in initialize\n    open("w.bin")\n'
        "FileNotFoundError: w.bin\n"
    )

    assert screen().shorten(text) == (
        'Traceback (most recent call last):\n  File "shout.py", line 3, in initialize\n    open("w.bin")\n'
        "FileNotFoundError: w.bin"
    )


def test_what_is_said_anyway_is_not_said_twice() -> None:
    """The end of a worker and of its load; other lines stay."""
    shown = screen()

    assert shown.shorten("W-9000-shout_1.0 ended (load_failed): no") == ""
    assert shown.shorten("Model shout version 1.0 failed to load: no") == ""
    assert shown.shorten("Model other version 1.0 failed to load: no") != ""
    assert shown.shorten("printed by the author") == "printed by the author"


def test_a_worker_that_dies_while_it_serves_is_shown() -> None:
    """Until it has answered, and for a change that cannot be loaded, `failed` says it."""
    shown = screen()
    text = "W-9000-shout_1.0 ended (killed): killed by SIGKILL"
    before = shown.shorten(text)

    shown.ready(Ready(Address("http", "127.0.0.1", 8080), 1.0, None))

    assert before == ""
    assert shown.shorten(text) == "A worker of shout 1.0 ended (killed): killed by SIGKILL"
    assert shown.shorten("W-9000-shout_1.0 ended (import_error): no") == ""


def test_the_first_failed_request_names_the_command_that_says_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: the second one is looked up alike."""
    shown = screen()
    assert shown.shorten("Request r:1: Prediction failed") == "Request r:1: Prediction failed"
    shown.ready(Ready(Address("http", "127.0.0.1", 8080), 1.0, None))

    assert shown.shorten("Request r:1, r-2: Prediction failed\nmore") == (
        "Request r:1, r-2: Prediction failed\nmore\n  More: marserve explain r:1 --management http://127.0.0.1:8080"
    )
    assert shown.shorten("Request r-3: Prediction failed") == "Request r-3: Prediction failed"
    assert "  Slow?    marserve explain --slowest --management http://127.0.0.1:8080\n" in capsys.readouterr().out


def test_a_failed_change_says_that_the_one_before_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Unlike a first load."""
    shown = screen()

    shown.failed(Failure("shout was not loaded", "KeyError: 'x'"))
    shown.ready(Ready(Address("http", "0.0.0.0", 8080), 1.0, None))
    shown.failed(Failure("shout.py, line 1: invalid syntax."))

    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.endswith("shout.py was not loaded: KeyError: 'x'")
    assert second.endswith("shout.py, line 1: invalid syntax; what was there goes on answering")
    assert "http://127.0.0.1:8080/predictions/shout" in said.out
    assert "http://127.0.0.1:8080/docs" in said.out
    assert "marserve logs --management http://127.0.0.1:8080\n" in said.out


def test_a_source_that_cannot_be_imported_is_one_sentence_without_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--verbose` has it; a script gets one document."""
    text = (
        "W-9000-shout_1.0 Traceback (most recent call last):\n"
        '  File "/srv/staged/models/shout-1/shout/shout.py", line 3, in <module>\n    1 / 0\n'
        "ZeroDivisionError: division by zero\n"
    )
    failure = Failure("shout.py, line 3: ZeroDivisionError: division by zero.", next_step="More.", is_of_source=True)

    assert screen().shorten(text) == ""
    assert "ZeroDivisionError" in screen(is_verbose=True).shorten(text)
    screen().failed(failure)
    assert capsys.readouterr().err == "marserve: shout.py, line 3: ZeroDivisionError: division by zero.\n  More.\n"
    screen(as_json=True).failed(failure)
    said = capsys.readouterr()
    assert json.loads(said.out)["error"] == {"message": failure.sentence, "next_step": "More."}
    assert said.err == ""


def test_scripts_get_one_document_and_files_of_litserve_their_own_path(capsys: pytest.CaptureFixture[str]) -> None:
    """`/predict` is where LitServe's clients ask."""
    ready = Ready(Address("http", "127.0.0.1", 8080), 1.25, None)

    screen(as_json=True).ready(ready)
    screen(is_litserve=True).ready(ready)

    document, _, text = capsys.readouterr().out.partition("\n")
    assert json.loads(document) == {
        "model": "shout",
        "version": "1.0",
        "url": "http://127.0.0.1:8080/predictions/shout",
        "seconds": 1.25,
    }
    assert "-d '{}' http://127.0.0.1:8080/predict\n" in text


def test_where_nothing_is_declared_no_body_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The block says where the body is known; a declaration makes a body that fits."""
    address = Address("http", "127.0.0.1", 8080)
    tensor = {"name": "x", "dtype": "float32", "shape": ["batch", 1]}
    declaration = {"kind": "tensors", "inputs": [tensor], "outputs": [tensor]}

    screen(body_words="is what decode_request reads").ready(Ready(address, 1.0, None))
    unknown = capsys.readouterr().out
    screen(body_words="is what decode_request reads").ready(Ready(address, 1.0, declaration))
    known = capsys.readouterr().out

    assert "-d BODY http://127.0.0.1:8080/predictions/shout\n           BODY is what decode_request reads\n" in unknown
    assert "BODY" not in known


def test_a_change_is_said_when_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    """Loading it may take seconds."""
    screen().changed()

    assert capsys.readouterr().err.endswith("  shout.py has changed: loading it …\n")


def test_a_stop_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    """And how to end at once."""
    screen().finishing(1, 30.0)
    screen().finishing(2, 2.5)

    assert capsys.readouterr().err.splitlines() == [
        "  Finishing 1 request (30 s at most); Ctrl-C again ends at once",
        "  Finishing 2 requests (2.5 s at most); Ctrl-C again ends at once",
    ]


def test_the_table_of_exit_statuses_has_that_of_an_interrupted_run() -> None:
    """130 at any time, unlike a start in front."""
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")

    assert f"| {INTERRUPTED_STATUS} | Ctrl-C" in page
    assert "Of `marserve run` at any time" in page
