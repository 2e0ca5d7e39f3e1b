"""`marserve logs` and `marserve log-level`."""

from __future__ import annotations

import json

import pytest

from support.command_line import marserve
from support.fake_apis import fake_apis

LINE = {"log": "model", "time": "t", "level": "ERROR", "requestId": "r", "text": "first\n    second"}
LEVELS = {"level": "debug", "workers": "info", "models": {"digits": "error"}}


def test_lines_are_printed_as_the_logs_have_them() -> None:
    """What is asked for goes to the server."""
    with fake_apis() as apis:
        apis.answer("GET /logs", {"lines": [LINE], "complete": True})

        ran = marserve("logs", "digits", "--request", "r", "--level", "error", "--tail", "5", "--management", apis.url)

        assert (ran.status, ran.out) == (0, "first\n    second\n")
        assert apis.asked[0].parameters == {"model": "digits", "request": "r", "level": "error", "tail": "5"}


@pytest.mark.parametrize("follows", [False, True])
def test_a_traceback_has_time_and_request_on_its_first_line_alone(follows: bool) -> None:
    """Which are as wide as a terminal; a record whose lines do not share them is printed as it is."""
    head = "2026-01-31T12:00:00,000 [ERROR] W-9000-m_1.0-stderr MODEL_LOG [r] - "
    records = [f'{head}Prediction failed\n{head}  File "net.py"\n{head}ValueError: x - y', f"{head}one\nother - two"]
    with fake_apis() as apis:
        if follows:
            events = "".join(f"data: {json.dumps({**LINE, 'text': each})}\n\n" for each in records)
            events += "event: end\ndata: {}\n\n"
            apis.answer("GET /logs", events.encode(), content_type="text/event-stream")
        else:
            apis.answer("GET /logs", {"lines": [{**LINE, "text": each} for each in records], "complete": True})

        ran = marserve("logs", *(["--follow"] if follows else []), "--management", apis.url)

    assert ran.out.splitlines() == [
        f"{head}Prediction failed",
        '    File "net.py"',
        "  ValueError: x - y",
        f"{head}one",
        "other - two",
    ]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_a_record_of_any_server_reaches_no_terminal_as_a_command(as_json: bool, follows: bool) -> None:
    """What answers at an address may be no marserve, or an old one."""
    line = {**LINE, "text": "a\tb\n    \x9b31m\u202ec"}
    with fake_apis() as apis:
        if follows:
            events = f"data: {json.dumps(line, ensure_ascii=False)}\n\nevent: end\ndata: {{}}\n\n"
            apis.answer("GET /logs", events.encode(), content_type="text/event-stream")
        else:
            apis.answer("GET /logs", {"lines": [line], "complete": True})

        flags = [*(["--json"] if as_json else []), *(["--follow"] if follows else [])]
        ran = marserve("logs", *flags, "--management", apis.url)

    assert ran.status == 0
    assert not set(ran.out) & {"\x9b", "\u202e"}
    assert r"\x9b31m\u202ec" in ran.out or r"\u009b31m\u202ec" in ran.out


def test_that_nothing_was_found_is_said() -> None:
    """With how far was looked."""
    with fake_apis() as apis:
        apis.answer("GET /logs", {"lines": [], "complete": False, "since": "2026-01-31T12:00:00,000"})

        ran = marserve("logs", "digits", "--request", "r", "--management", apis.url)

    assert (ran.status, ran.out) == (0, "")
    said = " ".join(ran.err.split())
    assert "No line of the logs is about model digits and request r." in said
    assert "is of 2026-01-31T12:00:00,000." in said


def test_scripts_get_the_document() -> None:
    """With `--json`."""
    with fake_apis() as apis:
        apis.answer("GET /logs", {"lines": [LINE], "complete": True})

        ran = marserve("logs", "--json", "--management", apis.url)

    assert ran.document["lines"] == [LINE]


def test_an_unknown_level_is_refused_at_once() -> None:
    """Naming those that there are; no server is asked."""
    for command in (("logs", "--level", "loud"), ("log-level", "loud")):
        ran = marserve(*command, "--management", "http://127.0.0.1:9")

        assert ran.status == 2
        assert "debug, info, warning, error" in ran.err


@pytest.mark.parametrize("as_json", [False, True])
def test_lines_that_come_are_printed_until_the_server_ends(as_json: bool) -> None:
    """With `--json` one document a line."""
    events = f": \n\ndata: {json.dumps(LINE)}\n\nevent: end\ndata: {{}}\n\n"
    with fake_apis() as apis:
        apis.answer("GET /logs", events.encode(), content_type="text/event-stream")

        ran = marserve("logs", "--follow", *(["--json"] if as_json else []), "--management", apis.url)

        assert apis.asked[0].parameters["follow"] == "true"
    assert ran.status == 0
    assert ran.out == (f"{json.dumps(LINE)}\n" if as_json else "first\n    second\n")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ('event: error\ndata: {"message": "too slow"}\n\n', "too slow"),
        ('data: {"text": "x"}\n\n', "broke the connection off"),
    ],
)
def test_a_stream_that_breaks_off_is_a_failure(events: str, words: str) -> None:
    """Nothing passes for the end of the server."""
    with fake_apis() as apis:
        apis.answer("GET /logs", events.encode(), content_type="text/event-stream")

        ran = marserve("logs", "--follow", "--management", apis.url)

    assert ran.status == 1
    assert words in ran.err


@pytest.mark.parametrize("command", [("logs",), ("logs", "--follow"), ("log-level",)])
def test_a_torchserve_is_said_to_show_no_logs(command: tuple[str, ...]) -> None:
    """Its files are named."""
    with fake_apis() as apis:
        error = {"code": 404, "type": "ResourceNotFoundException", "message": "Requested resource is not found"}
        for route in ("GET /logs", "GET /logging"):
            apis.answer(route, error, 404)

        ran = marserve(*command, "--management", apis.url)

    assert ran.status == 1
    assert "model_log.log" in " ".join(ran.err.split())


def test_levels_are_shown_and_changed() -> None:
    """Of all, or of one model's workers."""
    with fake_apis() as apis:
        apis.answer("GET /logging", LEVELS)
        apis.answer("PUT /logging", LEVELS)

        shown = marserve("log-level", "--management", apis.url)
        changed = marserve("log-level", "error", "--model", "digits", "--management", apis.url)

        assert apis.asked[1].parameters == {"level": "error", "model": "digits"}
    assert shown.out == changed.out == "server log: debug\nworkers: info\nworkers of digits: error\n"
