"""Waits for a server while showing what happens there.

Knows threads and the clock. Knows nothing of what is waited for: the caller passes the work and how to describe it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

from rich.markup import escape
from rich.progress import Progress, TaskID

from marserve.cli.output import CommandFailed, Output, Step

T = TypeVar("T")

LOOK_EVERY_S = 0.2
"""How often the display is brought up to date, in seconds."""


def while_showing(work: Callable[[], T], look: Callable[[], Sequence[Step]], output: Output, title: str) -> T:
    """Do `work` and return its result or raise its error; meanwhile show the steps that `look` gives.

    Without anybody watching `look` is never called. A `look` that fails, or has nothing to say, shows the title.
    """
    if not output.shows_progress:
        return work()
    working: Future[T] = Future()
    # A daemon, so that Ctrl-C ends the command and not only its display.
    threading.Thread(target=_run, args=(work, working), daemon=True).start()
    with output.progress() as progress:
        lines = Lines(progress)
        while not _has_ended(working):
            try:
                lines.show(look() or [Step(title)])
            except CommandFailed:
                lines.show([Step(title)])
    return working.result()


class Lines:
    """The lines of a progress display, as many as there are things to show at the moment."""

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


def _has_ended(working: Future[T]) -> bool:
    try:
        working.exception(timeout=LOOK_EVERY_S)
    except NotYet:
        return False
    return True
