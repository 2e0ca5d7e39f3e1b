"""Waits for a server and shows what happens there.

The caller passes the work, and a function that describes its progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import TypeVar

from rich.markup import escape
from rich.progress import Progress, TaskID

from marserve.cli.output import CommandFailed, Output, Step

T = TypeVar("T")

LOOK_EVERY_S = 0.2
"""How often the display is refreshed, in seconds."""
NOTE_AFTER_S = 2.0


def while_showing(work: Callable[[], T], look: Callable[[], Sequence[Step]], output: Output, title: str) -> T:
    """Do `work` and return its result or raise its error; meanwhile show the steps that `look` returns.

    The title is shown while `look` fails or returns nothing. Without a terminal only what the work waits for is noted,
    once, after `NOTE_AFTER_S`. Under `--json` `look` is never called.
    """
    if output.as_json:
        return work()
    working: Future[T] = Future()
    # A daemon, so that Ctrl-C ends the command and not just its display.
    threading.Thread(target=_run, args=(work, working), daemon=True).start()
    if not output.shows_progress:
        return _note_waits(working, look, output)
    with output.progress() as progress:
        lines = Lines(progress)
        while not _has_ended(working):
            try:
                lines.show(look() or [Step(title)])
            except CommandFailed:
                lines.show([Step(title)])
    return working.result()


def _note_waits(working: Future[T], look: Callable[[], Sequence[Step]], output: Output) -> T:
    noted: set[str] = set()
    while not _has_ended(working, NOTE_AFTER_S):
        with suppress(CommandFailed):
            for step in look():
                if step.waits_for and step.waits_for not in noted:
                    noted.add(step.waits_for)
                    output.note(step.text)
    return working.result()


class Lines:
    """The lines of a progress display."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: list[TaskID] = []

    def show(self, steps: Sequence[Step]) -> None:
        """Show these lines and no others."""
        while len(self._tasks) > len(steps):
            self._progress.remove_task(self._tasks.pop())
        while len(self._tasks) < len(steps):
            self._tasks.append(self._progress.add_task("", total=None))
        for task, step in zip(self._tasks, steps, strict=True):
            self._progress.update(task, description=escape(step.text), completed=step.done, total=step.total)


def _run(work: Callable[[], T], working: Future[T]) -> None:
    try:
        working.set_result(work())
    except BaseException as error:
        working.set_exception(error)


def _has_ended(working: Future[T], within_s: float = LOOK_EVERY_S) -> bool:
    try:
        working.exception(timeout=within_s)
    except NotYet:
        return False
    return True
