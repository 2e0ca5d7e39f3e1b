"""What a server's terminal is shown of its logs."""

from __future__ import annotations

import logging
import os

import pytest

from marserve.app.terminal_log import ShownWorkerLog, TerminalLog, failure_line
from marserve.telemetry.logs.output_budget import OutputBudget
from marserve.telemetry.logs.worker_lines import WorkerLines

RAISED = (
    'Request a: Prediction failed\nTraceback (most recent call last):\n  File "h.py", line 1\nValueError: no weights'
)


class Kept:
    """A log of workers."""

    def __init__(self) -> None:
        self.budget = OutputBudget()
        self.texts: list[str] = []

    def write(self, lines: WorkerLines) -> None:
        """Keep what was written."""
        self.texts += lines.texts


class Screen:
    """A terminal log into a pipe."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.log = TerminalLog(str, self.write_end)

    def shown(self) -> list[str]:
        """What was shown, once the log is closed."""
        self.log.close()
        os.close(self.write_end)
        with open(self.read_end) as pipe:
            return pipe.read().splitlines()


@pytest.fixture
def screen() -> Screen:
    """A terminal."""
    return Screen()


def write(log: ShownWorkerLog, text: str, ids: str = "") -> None:
    """A record of a worker."""
    log.write(WorkerLines("digits", "1.0", "9000", "stderr", "ERROR", [text], ids))


def test_a_requests_exception_is_one_line_with_the_command_that_shows_the_whole() -> None:
    """Model, exception, request; of a batch that failed together the first one is named."""
    assert failure_line("digits", RAISED, "a") == "digits: ValueError: no weights (marserve logs digits --request a)"
    assert failure_line("digits", RAISED, "a/mine,b,c") == (
        "digits: ValueError: no weights and 2 more requests (marserve logs digits --request a)"
    )


@pytest.mark.parametrize(("text", "ids"), [("hello", "a"), (RAISED, ""), ("", "")])
def test_other_records_are_no_failures(text: str, ids: str) -> None:
    """What a model prints, and a traceback of no request."""
    assert failure_line("digits", text, ids) is None


def test_the_log_gets_the_whole_and_the_terminal_a_line(screen: Screen) -> None:
    """The traceback is found with the command."""
    kept = Kept()
    log = ShownWorkerLog(kept, screen.log, shows_tracebacks=False)  # type: ignore[arg-type]

    write(log, RAISED, "a")
    write(log, "hello")

    assert kept.texts == [RAISED, "hello"]
    assert screen.shown() == ["digits: ValueError: no weights (marserve logs digits --request a)", "digits: hello"]


def test_a_handler_that_always_raises_does_not_flood_the_terminal(screen: Screen) -> None:
    """The limit of what clients cause in the server log holds here, too."""
    log = ShownWorkerLog(Kept(), screen.log, shows_tracebacks=False)  # type: ignore[arg-type]

    for number in range(1000):
        write(log, RAISED, f"r{number}")

    assert 10 < len(screen.shown()) < 100


def test_a_warning_that_comes_again_is_shown_once(screen: Screen) -> None:
    """As of a load that is tried again and again."""
    for text in ("no weights", "no weights", "other"):
        screen.log.emit(logging.LogRecord("marserve.pool", logging.WARNING, "", 0, text, None, None))

    assert screen.shown() == ["no weights", "other"]
