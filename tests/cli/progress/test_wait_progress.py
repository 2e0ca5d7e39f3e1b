"""Waiting for a server with something to look at."""

from __future__ import annotations

import threading

import pytest
from rich.progress import Progress

from marserve.cli.output import CommandFailed, Output, Step
from marserve.cli.progress import wait_progress
from marserve.cli.progress.wait_progress import Lines, while_showing


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Output:
    """An output that somebody watches."""
    monkeypatch.setattr(Output, "shows_progress", property(lambda output: True))
    return Output(as_json=False)


def test_without_a_watcher_the_work_is_all_that_happens() -> None:
    """Nobody asks the server how far it is when nobody sees it."""

    def look() -> list[Step]:
        raise AssertionError("looked")

    assert while_showing(lambda: 42, look, Output(as_json=True), "Working") == 42


def test_the_look_is_repeated_while_the_work_lasts(watched: Output) -> None:
    """The work's result is returned in the end."""
    enough = threading.Event()
    looks: list[int] = []

    def work() -> str:
        assert enough.wait(10)
        return "done"

    def look() -> list[Step]:
        looks.append(1)
        if len(looks) == 2:
            enough.set()
        return [Step("one line"), Step("two [lines]", 1, 2)]

    assert while_showing(work, look, watched, "Working") == "done"
    assert len(looks) >= 2


def test_the_works_error_is_the_callers(watched: Output) -> None:
    """It is raised where the work was asked for."""

    def work() -> None:
        raise CommandFailed("refused")

    with pytest.raises(CommandFailed, match="refused"):
        while_showing(work, list, watched, "Working")


def test_a_failing_look_does_not_end_the_wait(watched: Output) -> None:
    """The server may be too busy to tell how far it is."""
    looked = threading.Event()

    def work() -> str:
        assert looked.wait(10)
        return "done"

    def look() -> list[Step]:
        looked.set()
        raise CommandFailed("busy")

    assert while_showing(work, look, watched, "Working") == "done"


def test_lines_come_and_go() -> None:
    """The display has as many lines as there is to say, and takes brackets literally."""
    progress = Progress(disable=True)
    lines = Lines(progress)

    lines.show([Step("a"), Step("b [x]", 1, 2)])
    assert [task.description for task in progress.tasks] == ["a", "b \\[x]"]
    assert [(task.completed, task.total) for task in progress.tasks] == [(0, None), (1, 2)]

    lines.show([Step("c")])
    assert [task.description for task in progress.tasks] == ["c"]

    lines.show([])
    assert progress.tasks == []


def test_without_a_terminal_what_is_waited_for_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script's log says why nothing happens; a server that is too busy to tell does not end the wait."""
    monkeypatch.setattr(wait_progress, "NOTE_AFTER_S", 0.01)
    enough = threading.Event()
    looks: list[int] = []

    def work() -> str:
        assert enough.wait(10)
        return "done"

    def look() -> list[Step]:
        looks.append(1)
        if len(looks) == 2:
            raise CommandFailed("busy")
        if len(looks) == 5:
            enough.set()
        waits_for = "2 CPUs" if len(looks) > 2 else ""
        return [Step(f"m/1.0: 0 of 1 workers ready ({waits_for})", 0, 1, waits_for)]

    assert while_showing(work, look, Output(as_json=False), "Working") == "done"
    assert capsys.readouterr().err == "m/1.0: 0 of 1 workers ready (2 CPUs)\n"
