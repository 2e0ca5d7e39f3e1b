"""`marserve top`, as a table and on a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from support.command_line import marserve
from support.fake_apis import EXPLAINED, FakeApis, fake_apis, server_activity, version_activity
from support.on_terminal import LIMIT_S, OnTerminal, on_terminal

ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"


def wait_until(is_so: Callable[[], object]) -> None:
    """Look until it is so."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("words", [(), ("--once",)])
def test_without_a_terminal_there_is_one_table(words: tuple[str, ...]) -> None:
    """No escape sequences in it, and one request."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity(), version_activity("other")))

        ran = marserve("top", *words, "--management", apis.url)

        assert len(apis.asked) == 1
        assert apis.asked[0].parameters == {"sort": "rate", "limit": "100"}
    assert ran.status == 0
    assert re.search(r"^digits +1\.0 \* +ready +12\.5 ", ran.out, re.MULTILINE)
    assert re.search(r"^other ", ran.out, re.MULTILINE)
    assert "\x1b" not in ran.out


def test_what_the_terminals_encoding_has_not_is_shown_in_escapes() -> None:
    """By the program itself, as the encoding is of its standard output."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity({**version_activity(), "modelName": "模型"}))
        command = [sys.executable, "-m", "marserve.cli", "top", "--management", apis.url]

        ran = subprocess.run(
            command, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, timeout=60, check=False
        )

    assert (ran.returncode, ran.stderr) == (0, b"")
    assert rb"\u6a21\u578b" in ran.stdout


def test_scripts_get_the_document() -> None:
    """In the order that they asked for."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))

        ran = marserve("top", "--json", "--sort", "p99", "--management", apis.url)

        assert apis.asked[0].parameters["sort"] == "p99"
    assert ran.document == server_activity(version_activity())


def test_an_unknown_order_is_refused_with_those_that_there_are() -> None:
    """No server is asked."""
    ran = marserve("top", "--sort", "colour", "--management", "http://127.0.0.1:9")

    assert ran.status == 2
    assert "rate, p99, queue, memory, name" in ran.err


def test_a_server_without_statistics_is_named_as_one() -> None:
    """It was started as torchserve."""
    with fake_apis() as apis:
        ran = marserve("top", "--management", apis.url)

    assert ran.status == 1
    assert "started as torchserve" in ran.err


def test_without_a_server_it_fails_as_other_commands_do() -> None:
    """Nothing is watched that never was there."""
    ran = marserve("top", "--management", "http://127.0.0.1:9")

    assert ran.status == 1
    assert "No server answers" in ran.err


def watched(apis: FakeApis, terminal: OnTerminal) -> None:
    """Wait until the live view is there."""
    terminal.screen.wait_for(ALTERNATE)
    terminal.screen.wait_for("q quit")


def test_the_live_view_gives_the_terminal_back_as_it_was() -> None:
    """With `q`; it asks the server again and again until then."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))
        with on_terminal("top", "--management", apis.url) as terminal:
            before = terminal.attributes
            watched(apis, terminal)
            assert terminal.attributes != before
            wait_until(lambda: len(apis.asked) >= 2)
            terminal.press("q")
            assert terminal.ended() == 0
            assert terminal.attributes == before

    assert terminal.screen.text.rstrip().endswith(("\x1b[?25h", NORMAL))


@pytest.mark.system
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (None, 130)])
def test_every_end_gives_the_terminal_back(number: signal.Signals | None, status: int) -> None:
    """Ctrl-C and signals that end the process."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))
        with on_terminal("top", "--management", apis.url) as terminal:
            before = terminal.attributes
            watched(apis, terminal)
            if number is None:
                terminal.press("\x03")
            else:
                terminal.signal(number)
            assert terminal.ended() == status
            assert terminal.attributes == before

    assert NORMAL in terminal.screen.text


@pytest.mark.system
def test_a_stopped_view_leaves_the_terminal_and_comes_back() -> None:
    """As with Ctrl-Z and `fg`; then it goes on."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))
        with on_terminal("top", "--management", apis.url) as terminal:
            before = terminal.attributes
            watched(apis, terminal)
            terminal.press("\x1a")
            terminal.screen.wait_for(NORMAL)
            # A process that is told to go on before it has stopped would stop then, for good.
            wait_until(lambda: psutil.Process(terminal.pid).status() == psutil.STATUS_STOPPED)
            assert terminal.attributes == before
            terminal.signal(signal.SIGCONT)
            wait_until(lambda: terminal.screen.text.count(ALTERNATE) == 2)
            terminal.press("q")
            assert terminal.ended() == 0
            assert terminal.attributes == before


@pytest.mark.system
def test_keys_explain_and_scale() -> None:
    """Over the public API; scaling asks before."""
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))
        apis.answer("GET /requests", {"requests": [{"id": "r-1"}], "recorded": 1})
        apis.answer("GET /requests/r-1", EXPLAINED)
        apis.answer("PUT /models/digits/1.0", {"status": "Processing worker updates..."}, status=202)
        with on_terminal("top", "--management", apis.url) as terminal:
            watched(apis, terminal)
            terminal.press("e")
            terminal.screen.wait_for("it waited for a worker")
            terminal.press("x+")
            terminal.screen.wait_for("Scale digits/1.0 to 2 workers? [y/n]")
            assert not apis.orders("PUT")
            terminal.press("y")
            terminal.screen.wait_for("Processing worker updates...")
            assert apis.orders("PUT")[0].parameters == {"min_worker": "2", "max_worker": "2"}
            terminal.press("p")
            wait_until(lambda: apis.asked[-1].parameters.get("sort") == "p99")
            terminal.resize(20, 60)
            terminal.press("q")
            assert terminal.ended() == 0


@pytest.mark.system
def test_a_server_that_goes_away_is_tried_again() -> None:
    """What was seen last stays, with words that it is old; any failure may pass."""
    gone = {"code": 503, "type": "ServiceUnavailableException", "message": "The server is stopping."}
    with fake_apis() as apis:
        apis.answer("GET /stats", server_activity(version_activity()))
        apis.answer("GET /stats", gone, status=503)
        with on_terminal("top", "--management", apis.url) as terminal:
            terminal.screen.wait_for("Old figures, trying again: The server is stopping")
            apis.answer("GET /stats", server_activity(version_activity("back")))
            terminal.screen.wait_for("back")
            terminal.press("q")
            assert terminal.ended() == 0
